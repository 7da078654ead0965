"""The built-in data set: what a Python object does -> the objects its documentation points to.

Query: summary and first paragraph of an object's docstring. Labels: the objects that its See Also section and cross
references name. Label text: "qualified name: summary line". Objects are found by importing the public modules of the
packages below and reading their namespaces; nothing of theirs is called.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import pkgutil
import re
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dexter.data.dataset import Dataset
from dexter.data.sources.docstrings import Docstring, parse
from dexter.data.sources.items import Item, assemble
from dexter.errors import ResourceError

logger = logging.getLogger(__name__)

PACKAGES: Mapping[str, tuple[str, ...] | None] = {
    "numpy": None,
    "scipy": None,
    "sklearn": None,
    "networkx": None,
    "torch": (
        "accelerator",
        "amp",
        "autograd",
        "cuda",
        "distributions",
        "fft",
        "func",
        "hub",
        "library",
        "linalg",
        "masked",
        "nested",
        "nn",
        "optim",
        "signal",
        "sparse",
        "special",
        "utils.data",
    ),
}
"""Packages to read, and the subpackages to walk (None: all public ones; torch's other ones are slow, noisy tools)."""

_TEST_MODULES = frozenset({"conftest", "estimator_checks", "setup", "test", "testing", "tests"})
_DEPRECATED_MODULES = frozenset({"core", "intrinsic", "matlib", "profiler_legacy", "qat", "quantizable", "quantized"})
# `experimental` is walked although it only switches things on: what others switched on before must not matter.
_TOOL_MODULES = frozenset({"compat", "distutils", "externals", "f2py", "plugins", "typing"})
_SKIPPED_MODULES = _TEST_MODULES | _DEPRECATED_MODULES | _TOOL_MODULES
_ABBREVIATIONS = {"np": "numpy", "sp": "scipy", "nx": "networkx"}
_MINIMUM_WORDS = 3
# Texts that say nothing of their own: "Alias for torch.lt.", "In-place version of relu."
_POINTER = re.compile(r"(alias (for|of|to)|see|in-place version of|scalar method identical to)\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class DocumentedObject:
    """A function, class or method with a docstring, under all the public names it has."""

    name: str
    """The canonical name: the public path with the fewest parts, and of those the one the object itself states."""
    aliases: tuple[str, ...]
    """Every public path, the canonical one first."""
    docstring: Docstring


def build(packages: Mapping[str, Sequence[str] | None] = PACKAGES) -> Dataset:
    """Read the packages that are installed and make the data set; the same versions give the same result."""
    present = {name: parts for name, parts in packages.items() if importlib.util.find_spec(name) is not None}
    missing = [name for name in packages if name not in present]
    if not present:
        raise ResourceError(
            f"pydocs is made from installed packages, and none of {', '.join(packages)} is here: "
            "pip install 'dexter-xmc[data]'"
        )
    if missing:
        logger.warning("pydocs: made without %s (not installed: pip install 'dexter-xmc[data]')", ", ".join(missing))
    objects = find_objects(present)
    versions = {name: str(getattr(importlib.import_module(name), "__version__", "unknown")) for name in present}
    return assemble(
        make_items(objects),
        label_texts={found.name: f"{found.name}: {found.docstring.summary}" for found in objects},
        name="pydocs",
        source={"format": "pydocs"} | {f"package {name}": version for name, version in versions.items()},
    )


def make_items(objects: Sequence[DocumentedObject]) -> list[Item]:
    """One query per distinct text, with the labels of every object that has this text (numpy and scipy share some)."""
    resolver = Resolver(objects)
    by_text: dict[str, list[DocumentedObject]] = defaultdict(list)
    for found in sorted(objects, key=lambda found: found.name):
        if len(found.docstring.text.split()) >= _MINIMUM_WORDS and not _POINTER.match(found.docstring.text):
            by_text[found.docstring.text].append(found)
    items = []
    for text, sharers in by_text.items():
        names = {found.name for found in sharers}
        targets = {target for found in sharers for target in resolver.targets(found)} - names
        uid = sharers[0].name
        items.append(Item(uid=uid, text=text, targets=tuple(sorted(targets)), group=uid))
    return items


class Resolver:
    """Finds the objects that names in a docstring refer to, the way a reader would: nearest namespace first."""

    def __init__(self, objects: Iterable[DocumentedObject]) -> None:
        self._by_path: dict[str, str] = {}
        by_last_part: dict[tuple[str, str], set[str]] = defaultdict(set)
        for found in objects:
            for alias in found.aliases:
                self._by_path[alias] = found.name
                by_last_part[_package(alias), alias.rpartition(".")[2]].add(found.name)
        self._unambiguous = {key: next(iter(names)) for key, names in by_last_part.items() if len(names) == 1}

    def targets(self, found: DocumentedObject) -> set[str]:
        """Canonical names of the objects that an object's docstring points to, without itself."""
        explicit = {self.resolve(name, found, anywhere=True) for name in found.docstring.explicit}
        quoted = {self.resolve(name, found, anywhere=False) for name in found.docstring.quoted}
        return {name for name in explicit | quoted if name is not None and name != found.name}

    def resolve(self, name: str, found: DocumentedObject, *, anywhere: bool) -> str | None:
        """The canonical name behind a written one; `anywhere` also accepts the only such name of the package."""
        name = name.lstrip(".")
        head, dot, rest = name.partition(".")
        absolute = _ABBREVIATIONS.get(head, head) + dot + rest
        scopes = [scope for alias in found.aliases for scope in _scopes(alias)]
        for path in (*(f"{scope}.{name}" for scope in scopes), absolute):
            if path in self._by_path:
                return self._by_path[path]
        return self._unambiguous.get((_package(found.name), name)) if anywhere else None


def find_objects(packages: Mapping[str, Sequence[str] | None]) -> list[DocumentedObject]:
    """Every documented public function, class and method of the packages, each once, in the order of their names."""
    values: dict[Hashable, Any] = {}
    paths: dict[Hashable, list[str]] = defaultdict(list)
    for package, parts in packages.items():
        for module in public_modules(package, parts):
            for path, value in _members(module, package):
                key = _identity(value, package)
                # `values` keeps each object alive, so that its id stays its own. The first package to show it owns it.
                values.setdefault(key, value)
                if not paths[key] or _package(paths[key][0]) == package:
                    paths[key].append(path)
    found = []
    for key, value in values.items():
        docstring = parse(value.__doc__)
        if docstring.summary:
            aliases = sorted(set(paths[key]), key=lambda path: _preference(path, value))
            found.append(DocumentedObject(name=aliases[0], aliases=tuple(aliases), docstring=docstring))
    return sorted(found, key=lambda found: found.name)


def public_modules(package: str, parts: Sequence[str] | None) -> Iterator[ModuleType]:
    """Import a package and its public modules, in the order of their names; those that fail to import are left out."""
    root = _import_quietly(package)
    if root is None:
        return
    if parts is None:
        yield from _walk(root)
        return
    yield root
    for part in parts:
        module = _import_quietly(f"{package}.{part}")
        if module is not None:
            yield from _walk(module)


def _walk(module: ModuleType) -> Iterator[ModuleType]:
    yield module
    for name in sorted(found.name for found in pkgutil.iter_modules(getattr(module, "__path__", []))):
        if not name.startswith("_") and name not in _SKIPPED_MODULES:
            child = _import_quietly(f"{module.__name__}.{name}")
            if child is not None:
                yield from _walk(child)


def _import_quietly(name: str) -> ModuleType | None:
    """Import a module without its warnings; None if it needs something that is not here."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
    return None


def _members(module: ModuleType, package: str) -> Iterator[tuple[str, Any]]:
    """Public documented objects of a module and the methods of its classes, with the path each is reached by."""
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or not _is_documented(value) or _home(value, package) != package:
            continue
        path = f"{module.__name__}.{name}"
        yield path, value
        if inspect.isclass(value):
            for member_name, member in sorted(vars(value).items()):
                member = getattr(member, "__func__", member)  # what a classmethod or staticmethod wraps
                if not member_name.startswith("_") and not inspect.isclass(member) and _is_documented(member):
                    yield f"{path}.{member_name}", member


def _is_documented(value: Any) -> bool:
    """Whether a value is a callable with a docstring of its own: not its type's, not an unfilled template."""
    if inspect.ismodule(value) or not callable(value):
        return False
    docstring = value.__doc__
    return isinstance(docstring, str) and "%(" not in docstring and docstring != type(value).__doc__


def _identity(value: Any, package: str) -> Hashable:
    """What makes two names the same object: one id, or for functions of a package one docstring (wrapped copies)."""
    is_method = inspect.isclass(value) or "." in getattr(value, "__qualname__", "")
    return id(value) if is_method else (package, value.__doc__)


def _preference(path: str, value: Any) -> tuple[int, bool, int, str]:
    """Order of an object's public paths: the fewest parts first, then its own `__name__`."""
    return path.count("."), path.rpartition(".")[2] != getattr(value, "__name__", None), len(path), path


def _home(value: Any, package: str) -> str:
    """The package that defines a value; C functions without a module belong to where they are found."""
    module = getattr(value, "__module__", None)
    return _package(module) if isinstance(module, str) else package


def _package(path: str) -> str:
    return path.partition(".")[0]


def _scopes(path: str) -> list[str]:
    """The namespaces around a name, and its own (the methods of a class)."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
