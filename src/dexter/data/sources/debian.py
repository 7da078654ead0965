"""`debian`: what a Debian package is -> the packages it relates to, from the index that apt keeps on this machine.

Relations are Pre-Depends, Depends, Recommends, Suggests and Enhances: the first alternative of each, without versions,
virtual names replaced where exactly one package provides them. Left out: `libc6`, which a third of all packages need,
and relations inside one source package, which are trivial siblings. The split is by source package for the same reason.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dexter.data.dataset import Dataset
from dexter.data.sources import Item, dataset_from_items
from dexter.errors import ResourceError

LISTS = Path("/var/lib/apt/lists")
"""Where apt keeps the indices it downloaded."""
LONG_WORDS = 80
"""Words of the long description that join the query text."""

_RELATIONS = ("Pre-Depends", "Depends", "Recommends", "Suggests", "Enhances")
_FIELDS = frozenset({"Package", "Source", "Provides", "Description", "Description-en", "Description-md5", *_RELATIONS})
_EXCLUDED = frozenset({"libc6"})
_PACKAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9+.-]*")
_APT_HELPER = Path("/usr/lib/apt/apt-helper")


@dataclass(frozen=True, kw_only=True)
class DebianPackage:
    """The fields of a binary package's index entry that the data set needs."""

    name: str
    source: str
    """The source package it is built from; siblings share it."""
    short: str
    """The one-line description."""
    long: str
    """The long description on one line; empty where the index holds none."""
    related: tuple[str, ...]
    """Names it relates to, as written: real or virtual."""
    provides: tuple[str, ...]
    """Virtual names it provides."""


def build(lists: Path = LISTS) -> Dataset:
    """Read apt's index and make the data set; an index without long descriptions gives shorter queries."""
    if shutil.which("apt-cache") is None:
        raise ResourceError(
            "debian is made from apt's package index, and there is no apt-cache here: "
            "build it on a Debian or Ubuntu machine and copy the folder"
        )
    if not any(lists.glob("*_Packages*")):
        raise ResourceError(f"no package index in {lists}: run `apt-get update` first")
    digest = hashlib.sha256()
    translations = read_translations(sorted(lists.glob("*_i18n_Translation-en*")), digest)
    packages = parse_packages(_output_lines(["apt-cache", "dumpavail"], digest), translations)
    if not packages:
        raise ResourceError("`apt-cache dumpavail` lists no package: run `apt-get update` first")
    return dataset_from_items(
        make_items(packages),
        label_texts={package.name: f"{package.name}: {package.short}" for package in packages.values()},
        name="debian",
        source={"format": "debian", "index sha256": digest.hexdigest()},
    )


def make_items(packages: Mapping[str, DebianPackage]) -> Iterator[Item]:
    """Make one query per package, pointing to the packages of other sources that it relates to."""
    providers: dict[str, set[str]] = defaultdict(set)
    for package in packages.values():
        for virtual in package.provides:
            providers[virtual].add(package.name)
    for package in packages.values():
        targets = {_real_name(name, packages, providers) for name in package.related} - _EXCLUDED - {None}
        others = sorted(name for name in targets if name and packages[name].source != package.source)
        long = " ".join(package.long.split()[:LONG_WORDS])
        text = f"{package.name}: {package.short}" + (f". {long}" if long else "")
        yield Item(uid=package.name, text=text, targets=tuple(others), group=package.source)


def parse_packages(lines: Iterable[str], translations: Mapping[str, str]) -> dict[str, DebianPackage]:
    """Read index entries as a stream; of several versions of a package the first one listed is used."""
    packages: dict[str, DebianPackage] = {}
    for entry in stanzas(lines):
        name = entry.get("Package", "")
        if not name or name in packages:
            continue
        related = [other for field in _RELATIONS for other in relation_names(entry.get(field, ""))]
        short, _, long = entry.get("Description", entry.get("Description-en", "")).partition("\n")
        packages[name] = DebianPackage(
            name=name,
            source=entry.get("Source", name).partition(" ")[0],
            short=short.strip(),
            long=_one_line(long or translations.get(entry.get("Description-md5", ""), "")),
            related=tuple(dict.fromkeys(related)),
            provides=relation_names(entry.get("Provides", "")),
        )
    return packages


def relation_names(field: str) -> tuple[str, ...]:
    """Return the first alternative of each relation of a field, without version, architecture and profile."""
    matches = (_PACKAGE_NAME.match(clause.strip()) for clause in field.split(","))
    return tuple(match[0] for match in matches if match)


def stanzas(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield the entries of a Debian control file, of the fields used here; continued lines keep their line breaks."""
    entry: dict[str, str] = {}
    field = ""
    for line in lines:
        if not line.strip():
            if entry:
                yield entry
            entry, field = {}, ""
        elif line[0] in " \t":
            if field:
                entry[field] += "\n" + line.strip()
        else:
            key, _, value = line.partition(":")
            field = key if key in _FIELDS else ""
            if field:
                entry[field] = value.strip()
    if entry:
        yield entry


def read_translations(paths: Sequence[Path], digest: hashlib._Hash) -> dict[str, str]:
    """Read the long descriptions, by the checksum with which package entries refer to them."""
    translations: dict[str, str] = {}
    for path in paths:
        for entry in stanzas(_output_lines([str(_APT_HELPER), "cat-file", str(path)], digest)):
            long = entry.get("Description-en", "").partition("\n")[2]
            translations.setdefault(entry.get("Description-md5", ""), long)
    return translations


def _real_name(name: str, packages: Mapping[str, DebianPackage], providers: Mapping[str, set[str]]) -> str | None:
    """Return the package of a name: itself, or the only provider of a virtual one."""
    if name in packages:
        return name
    candidates = providers.get(name, set())
    return next(iter(candidates)) if len(candidates) == 1 else None


def _one_line(long: str) -> str:
    """Remove the line breaks of a long description; a lone full stop is Debian's empty line."""
    return " ".join(line for line in long.split("\n") if line not in ("", "."))


def _output_lines(command: Sequence[str], digest: hashlib._Hash) -> Iterator[str]:
    """Yield the lines that a command prints while it runs and add them to a checksum; its failure is an error."""
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                digest.update(line)
                yield line.decode("utf-8", "replace")
        errors.seek(0)
        complaint = " ".join(errors.read().decode("utf-8", "replace").split())
    if process.returncode:
        raise ResourceError(f"`{' '.join(command)}` failed: {complaint or f'exit code {process.returncode}'}")
