"""Recipes: the settings of a method or of a paper's run, as differences from the defaults of `dexter.config`.

A method is one TOML file of this folder: a `summary` and sections of settings. The runs of a paper are one file of
`papers/`: what all its runs share, what each data set adds, and what each variant (another loss, hard negatives) adds.
`NAME-DATASET` and `NAME-DATASET-VARIANT` name them. Every value of a paper's file carries its source.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from dexter.errors import UsageError

DEFAULT_RECIPE = "dexter"
"""The recipe of `dexter.train`, `dexter.plan` and the command line where none is named."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings by section, and where they come from."""

    name: str
    summary: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    """Sections and settings, as in a TOML file."""
    sources: dict[str, str] = field(default_factory=dict)
    """By dotted name of a setting, the publication or code that it was taken from; empty for a method."""


def recipe_names() -> list[str]:
    """List the recipes that ship with the package: methods first, then the papers' runs."""
    return [*method_names(), *paper_names()]


@cache
def method_names() -> list[str]:
    """List the methods."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


@cache
def paper_names() -> list[str]:
    """List the runs of papers, by method, data set and variant."""
    return [name for name, *_ in _paper_runs()]


def read_recipe(recipe: str | Path) -> Recipe:
    """Read a recipe by its name or from a TOML file."""
    path = Path(recipe)
    if path.suffix == ".toml" or path.exists():
        return _method(path.stem, _read_file(path), origin=str(path))
    if str(recipe) in method_names():
        return _method(str(recipe), (_folder() / f"{recipe}.toml").read_text(encoding="utf-8"), origin=str(recipe))
    for name, method, dataset, variant in _paper_runs():
        if name == str(recipe):
            return _paper_run(name, method, dataset, variant)
    known = recipe_names()
    nearest = difflib.get_close_matches(str(recipe), known, 1, 0.5)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise UsageError(
        f"unknown recipe {str(recipe)!r}{hint}: choose one of {', '.join(method_names())}, a paper's run that "
        "`dexter recipes` lists, or a TOML file"
    )


def _folder() -> Any:
    return resources.files("dexter.recipes")


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--recipe {path}: cannot be read ({error.__class__.__name__}): give a TOML file") from None


def _method(name: str, text: str, *, origin: str) -> Recipe:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin}: not valid TOML: {error}") from None
    summary = values.pop("summary", "")
    return Recipe(name=values.pop("recipe", name), summary=summary, values=values)


@cache
def _papers() -> dict[str, dict[str, Any]]:
    """The files of `papers/`, by method."""
    return {
        entry.name.removesuffix(".toml"): tomllib.loads(entry.read_text(encoding="utf-8"))
        for entry in sorted((_folder() / "papers").iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    }


def _paper_runs() -> Iterator[tuple[str, str, str, str]]:
    """Yield the name, method, data set and variant ("" for the paper's main run) of every run."""
    for method, paper in _papers().items():
        for dataset, entry in paper["datasets"].items():
            yield f"{method}-{dataset}", method, dataset, ""
            for variant in entry["variants"]:
                yield f"{method}-{dataset}-{variant}", method, dataset, variant


def _paper_run(name: str, method: str, dataset: str, variant: str) -> Recipe:
    """Join what all runs of a paper share, its data set and its variant; the later wins."""
    paper = _papers()[method]
    entry = paper["datasets"][dataset]
    variants = {"": {}} | paper["variants"]
    own = {section: values for section, values in entry.items() if section not in ("name", "variants", *variants)}
    values: dict[str, dict[str, Any]] = {}
    sources: dict[str, str] = {}
    for part in (paper["common"], own, variants[variant], entry.get(variant, {}) if variant else {}):
        for section, settings in part.items():
            for key, sourced in settings.items():
                values.setdefault(section, {})[key] = sourced["value"]
                sources[f"{section}.{key}"] = sourced["source"]
    summary = f"{paper['title']}, {entry['name']}" + (f", {variant}" if variant else "")
    return Recipe(name=name, summary=summary, values=values, sources=sources)


def describe_sources(values: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Put {"value", "source"} in the place of every setting of a resolved configuration.

    Args:
        values: the configuration as sections of plain values.
        recipe: what it was resolved from.
    """

    def source(section: str, key: str) -> str:
        dotted = f"{section}.{key}"
        if dotted in recipe.sources:
            return recipe.sources[dotted]
        return f"recipe {recipe.name}" if key in recipe.values.get(section, {}) else "default"

    return {
        section: {key: {"value": value, "source": source(section, key)} for key, value in settings.items()}
        for section, settings in values.items()
        if isinstance(settings, Mapping)
    }
