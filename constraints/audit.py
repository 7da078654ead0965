"""Look the versions of the lock files up in a database of advisories; say so where none is to be had."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def main() -> int:
    """Return 1 if an advisory names a locked version."""
    tool = shutil.which("pip-audit", path=str(Path(sys.executable).parent)) or shutil.which("pip-audit")
    if tool is None:
        print("audit: skipped, pip-audit is not installed")
        return 0
    found = []
    for lock in sorted(FOLDER.glob("*.lock")):
        options = [
            "--disable-pip",
            "--require-hashes",
            "--format",
            "json",
            "--progress-spinner",
            "off",
            "--timeout",
            "10",
        ]
        done = subprocess.run([tool, *options, "-r", lock], capture_output=True, text=True, check=False)
        try:
            packages = json.loads(done.stdout)["dependencies"]
        except (ValueError, KeyError):
            packages = []
        if not any("vulns" in package for package in packages):
            print(f"audit: {lock.name} skipped, no database of advisories is reachable")
            continue
        found += [
            f"{each['name']} {each['version']}: {one['id']}" for each in packages for one in each.get("vulns", ())
        ]
        print(f"audit: {lock.name}, {len(packages)} versions looked up")
    print(*(f"audit: {advisory}" for advisory in found), sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
