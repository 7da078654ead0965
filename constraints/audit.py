"""Look the versions of the lock files up in a database of advisories; say so where none is to be had."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
OPTIONS = ["--disable-pip", "--require-hashes", "--format=json", "--progress-spinner=off", "--timeout=10"]
UNREACHABLE = re.compile(r"connection|timed out|timeout|max retries|name resolution", re.IGNORECASE)


def main() -> int:
    """Return 1 if an advisory names a locked version, or if a lock file cannot be read."""
    tool = shutil.which("pip-audit", path=str(Path(sys.executable).parent)) or shutil.which("pip-audit")
    if tool is None:
        print("audit: skipped, pip-audit is not installed")
        return 0
    found = []
    for lock in sorted(FOLDER.glob("*.lock")):
        done = subprocess.run([tool, *OPTIONS, "-r", lock], capture_output=True, text=True, check=False)
        try:
            packages = json.loads(done.stdout)["dependencies"]
        except (ValueError, KeyError):
            packages = []
            if not UNREACHABLE.search(done.stderr):
                print(f"audit: {lock.name}: pip-audit failed: {done.stderr.strip()[-300:]}")
                return 1
        if not any("vulns" in package for package in packages):
            print("audit: skipped, no database of advisories is reachable")
            return 0
        found += [
            f"{each['name']} {each['version']}: {one['id']}" for each in packages for one in each.get("vulns", ())
        ]
        print(f"audit: {lock.name}, {len(packages)} versions looked up")
    print(*(f"audit: {advisory}" for advisory in found), sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
