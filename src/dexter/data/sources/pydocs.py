"""`pydocs`: what a Python object does -> the objects its documentation points to.

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
from dexter.data.sources import Item, dataset_from_items
from dexter.errors import ResourceError
from dexter.progress import track

logger = logging.getLogger(__name__)

PACKAGES: Mapping[str, tuple[str, ...] | None] = {
    "numpy": None,
    "scipy": None,
    "sklearn": None,
    "networkx": None,
    "torch": (
        "accelerator", "amp", "autograd", "cuda", "distributions", "fft", "func", "hub", "library", "linalg", "masked",
        "nested", "nn", "optim", "signal", "sparse", "special", "utils.data",
    ),
}  # fmt: skip
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
_ROLES = frozenset({"func", "class", "meth", "obj", "ufunc", "exc"})
_NAME = re.compile(r"\.?[A-Za-z_]\w*(?:\.\w+)*")
_SIGNATURE = re.compile(r"[\w.]+\s*\(.*\)\s*(?:->.*)?", re.DOTALL)
_UNDERLINE = re.compile(r"\s*([-=~^])\1{2,}\s*")
_SEE_ALSO = re.compile(
    r"^See Also[ \t]*\n[-=]{3,}[ \t]*\n(.*?)(?=^\S[^\n]*\n[-=]{3,}[ \t]*$|\Z)", re.MULTILINE | re.DOTALL
)
_LITERAL = re.compile(r"``.*?``", re.DOTALL)
_QUOTED = re.compile(r"(?::(?:\w+:)?(?P<role>\w+):)?`(?P<content>[^`]+)`")
_DOCUMENTED = re.compile(
    r"^[ \t]*((?:\*{0,2}\w+[ \t]*,[ \t]*)*\*{0,2}\w+)[ \t]*(?:\([^\n]*\))?[ \t]*:(?![:\w])", re.MULTILINE
)
_BLOCK_START = re.compile(r"(\.\. |>>> |[-*+] |\d+\. |\||:\w+:? |\w+:$)")


@dataclass(frozen=True, kw_only=True)
class Docstring:
    """The prose of a docstring and the names it refers to."""

    summary: str
    """The first sentence or paragraph, on one line, without markup."""
    text: str
    """The summary and the first paragraph of prose after it; never a later section."""
    explicit: tuple[str, ...]
    """Names given as references: entries of See Also and Sphinx roles."""
    quoted: tuple[str, ...]
    """Names in plain backticks that are not documented as parameters: references only if they resolve nearby."""


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
    return dataset_from_items(
        make_items(objects),
        label_texts={found.name: f"{found.name}: {found.docstring.summary}" for found in objects},
        name="pydocs",
        source={"format": "pydocs"} | {f"package {name}": version for name, version in versions.items()},
    )


def make_items(objects: Sequence[DocumentedObject]) -> list[Item]:
    """Make one query per distinct text, with the labels of every object with this text (numpy and scipy share some)."""
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
    """Resolves the names in a docstring to objects, nearest namespace first."""

    def __init__(self, objects: Iterable[DocumentedObject]) -> None:
        self._by_path: dict[str, str] = {}
        by_last_part: dict[tuple[str, str], set[str]] = defaultdict(set)
        for found in objects:
            for alias in found.aliases:
                self._by_path[alias] = found.name
                by_last_part[_package(alias), alias.rpartition(".")[2]].add(found.name)
        self._unambiguous = {key: next(iter(names)) for key, names in by_last_part.items() if len(names) == 1}

    def targets(self, found: DocumentedObject) -> set[str]:
        """Return the canonical names of the objects that an object's docstring points to, without itself."""
        explicit = {self.resolve(name, found, anywhere=True) for name in found.docstring.explicit}
        quoted = {self.resolve(name, found, anywhere=False) for name in found.docstring.quoted}
        return {name for name in explicit | quoted if name is not None and name != found.name}

    def resolve(self, name: str, found: DocumentedObject, *, anywhere: bool) -> str | None:
        """Return the canonical name of a written one; `anywhere` also accepts a name that is unique in the package."""
        name = name.lstrip(".")
        head, dot, rest = name.partition(".")
        absolute = _ABBREVIATIONS.get(head, head) + dot + rest
        scopes = [scope for alias in found.aliases for scope in _scopes(alias)]
        for path in (*(f"{scope}.{name}" for scope in scopes), absolute):
            if path in self._by_path:
                return self._by_path[path]
        return self._unambiguous.get((_package(found.name), name)) if anywhere else None


def find_objects(packages: Mapping[str, Sequence[str] | None]) -> list[DocumentedObject]:
    """Find every documented public function, class and method of the packages, each once, sorted by name."""
    values: dict[Hashable, Any] = {}
    paths: dict[Hashable, list[str]] = defaultdict(list)
    for package, parts in track(packages.items(), what="read documentation", total=len(packages), unit="package"):
        for module in public_modules(package, parts):
            for path, value in _members(module, package):
                key = _identity(value, package)
                # `values` keeps each object alive, so that its id stays its own. The first package to show it owns it.
                values.setdefault(key, value)
                if not paths[key] or _package(paths[key][0]) == package:
                    paths[key].append(path)
    found = []
    for key, value in values.items():
        docstring = parse_docstring(value.__doc__)
        if docstring.summary:
            aliases = sorted(set(paths[key]), key=lambda path: _preference(path, value))
            found.append(DocumentedObject(name=aliases[0], aliases=tuple(aliases), docstring=docstring))
    return sorted(found, key=lambda found: found.name)


def public_modules(package: str, parts: Sequence[str] | None) -> Iterator[ModuleType]:
    """Import a package and its public modules, sorted by name; those that fail to import are left out."""
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
    """Import a module without its warnings; returns None if it fails."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
    return None


def _members(module: ModuleType, package: str) -> Iterator[tuple[str, Any]]:
    """Yield the public documented objects of a module and the methods of its classes, each with its path."""
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
    """Return a key that is equal for names of one object: its id, or for functions their docstring (wrapped copies)."""
    is_method = inspect.isclass(value) or "." in getattr(value, "__qualname__", "")
    return id(value) if is_method else (package, value.__doc__)


def _preference(path: str, value: Any) -> tuple[int, bool, int, str]:
    """Return the sort key of an object's public paths: the fewest parts first, then its own `__name__`."""
    return path.count("."), path.rpartition(".")[2] != getattr(value, "__name__", None), len(path), path


def _home(value: Any, package: str) -> str:
    """Return the package that defines a value; C functions without a module belong to where they are found."""
    module = getattr(value, "__module__", None)
    return _package(module) if isinstance(module, str) else package


def _package(path: str) -> str:
    return path.partition(".")[0]


def _scopes(path: str) -> list[str]:
    """Return the namespaces around a name, innermost first, starting with its own (for the methods of a class)."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def parse_docstring(docstring: str) -> Docstring:
    """Parse numpydoc sections, Sphinx roles and directives; names stay as written, in order, each once."""
    clean = inspect.cleandoc(docstring)
    paragraphs = _prose(clean)
    see_also = "\n".join(_SEE_ALSO.findall(clean))
    prose = _LITERAL.sub(" ", _SEE_ALSO.sub("", clean))
    explicit, quoted = _see_also_names(see_also), []
    for match in _QUOTED.finditer(prose + "\n" + see_also):
        name = reference_name(match["content"])
        if name and match["role"] in _ROLES:
            explicit.append(name)
        elif name and match["role"] is None:
            quoted.append(name)
    documented = {name.strip(" \t*") for names in _DOCUMENTED.findall(prose) for name in names.split(",")}
    return Docstring(
        summary=paragraphs[0] if paragraphs else "",
        text=" ".join(paragraphs),
        explicit=tuple(dict.fromkeys(explicit)),
        quoted=tuple(name for name in dict.fromkeys(quoted) if name not in documented),
    )


def reference_name(content: str) -> str | None:
    """Return the dotted name that the inside of a role or of backticks refers to, or None if it is something else."""
    target = re.search(r"<([^<>]+)>\s*$", content)
    name = (target[1] if target else content).strip().lstrip("~!").removesuffix("()")
    return name if _NAME.fullmatch(name) else None


def _plain(text: str) -> str:
    """Return prose on one line, without roles, backticks, footnotes and line breaks."""
    text = re.sub(r"\s*\[\w+\]_", "", text)
    text = text.replace("``", "`")
    text = _QUOTED.sub(lambda match: _rendered(match["content"]), text)
    return " ".join(text.split())


def _rendered(content: str) -> str:
    """Return what Sphinx renders of a role: its title if there is one, the last part of a name after a tilde."""
    titled = re.fullmatch(r"\s*(.+?)\s*<[^<>]+>\s*", content, re.DOTALL)
    if titled:
        return titled[1]
    return content[1:].rpartition(".")[2] if content.startswith("~") else content.lstrip("!.")


def _prose(clean: str) -> list[str]:
    """Return the summary and, if prose follows it directly, one more paragraph."""
    blocks = re.split(r"\n[ \t]*\n", clean.strip())
    while blocks and _SIGNATURE.fullmatch(blocks[0].strip()):
        blocks.pop(0)
    paragraphs = []
    for block in blocks[:2]:
        lines = block.strip("\n").splitlines()
        if not lines or any(_UNDERLINE.fullmatch(line) for line in lines) or _BLOCK_START.match(lines[0].lstrip()):
            break
        paragraphs.append(_plain(block).removesuffix("::"))
    return [paragraph for paragraph in paragraphs if paragraph]


def _see_also_names(section: str) -> list[str]:
    """Return the names of a numpydoc See Also section; descriptions are indented or follow a colon."""
    names = []
    for line in section.splitlines():
        if line and not line[0].isspace():
            entry = re.split(r"\s:\s|:\s|\s:$", _QUOTED.sub(lambda match: match["content"], line))[0]
            names += [name for part in entry.split(",") if (name := reference_name(part))]
    return names
