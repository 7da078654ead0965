"""Reading one docstring: its summary, its first paragraph, and the names it refers to.

Understands the numpydoc sections, Sphinx roles and directives that scientific packages write. It knows no modules:
the names come back as written, and whoever holds the objects resolves them.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

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
    """What a docstring says in prose, and whom it names."""

    summary: str
    """The first sentence or paragraph, on one line, without markup."""
    text: str
    """The summary and the first paragraph of prose after it; never a later section."""
    explicit: tuple[str, ...]
    """Names given as references: entries of See Also and Sphinx roles."""
    quoted: tuple[str, ...]
    """Names in plain backticks that are not documented as parameters: references only if they resolve nearby."""


def parse(docstring: str) -> Docstring:
    """Read a docstring. Names keep their order and are listed once."""
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
    """The dotted name that the inside of a role or a pair of backticks refers to, or None if it is something else."""
    target = re.search(r"<([^<>]+)>\s*$", content)
    name = (target[1] if target else content).strip().lstrip("~!").removesuffix("()")
    return name if _NAME.fullmatch(name) else None


def plain(text: str) -> str:
    """A piece of prose on one line, with roles, backticks, footnotes and line breaks taken out."""
    text = re.sub(r"\s*\[\w+\]_", "", text)
    text = text.replace("``", "`")
    text = _QUOTED.sub(lambda match: _shown(match["content"]), text)
    return " ".join(text.split())


def _shown(content: str) -> str:
    """What a reader sees of a role: the title if there is one, the last part of a name behind a tilde."""
    titled = re.fullmatch(r"\s*(.+?)\s*<[^<>]+>\s*", content, re.DOTALL)
    if titled:
        return titled[1]
    return content[1:].rpartition(".")[2] if content.startswith("~") else content.lstrip("!.")


def _prose(clean: str) -> list[str]:
    """The summary and, if prose follows it directly, one paragraph more."""
    blocks = re.split(r"\n[ \t]*\n", clean.strip())
    while blocks and _SIGNATURE.fullmatch(blocks[0].strip()):
        blocks.pop(0)
    paragraphs = []
    for block in blocks[:2]:
        lines = block.strip("\n").splitlines()
        if not lines or any(_UNDERLINE.fullmatch(line) for line in lines) or _BLOCK_START.match(lines[0].lstrip()):
            break
        paragraphs.append(plain(block).removesuffix("::"))
    return [paragraph for paragraph in paragraphs if paragraph]


def _see_also_names(section: str) -> list[str]:
    """The names before the colons of a numpydoc See Also section; descriptions are indented or follow the colon."""
    names = []
    for line in section.splitlines():
        if line and not line[0].isspace():
            entry = re.split(r"\s:\s|:\s|\s:$", _QUOTED.sub(lambda match: match["content"], line))[0]
            names += [name for part in entry.split(",") if (name := reference_name(part))]
    return names
