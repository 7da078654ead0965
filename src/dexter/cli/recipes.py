"""The verbs of `dexter recipes`: list the recipes, and show one with the source of every setting."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from dexter.cli.options import Json, echo_json
from dexter.recipes import describe_sources, method_names, paper_names, read_recipe

recipes_app = typer.Typer(help="List the recipes: methods, and the runs of papers.", rich_markup_mode=None)


@recipes_app.callback(invoke_without_command=True)
def list_recipes(context: typer.Context, as_json: Json = False) -> None:
    """List the recipes by name, with a line on each: methods first, then the runs of papers.

    Example: dexter recipes
    """
    if context.invoked_subcommand is not None:
        return
    groups = {"method": method_names(), "paper": paper_names()}
    if as_json:
        echo_json(
            [
                {"name": name, "kind": kind, "summary": read_recipe(name).summary}
                for kind, names in groups.items()
                for name in names
            ]
        )
        return
    titles = {
        "method": "Methods, with the static encoder and a short schedule, for a CPU and any data:",
        "paper": "Runs of papers, with their encoder and schedule (docs/papers.md says what still differs):",
    }
    width = max(len(name) for names in groups.values() for name in names)
    for kind, names in groups.items():
        typer.echo(titles[kind])
        for name in names:
            typer.echo(f"  {name:<{width}}  {read_recipe(name).summary}")


@recipes_app.command("show")
def show(name: Annotated[str, typer.Argument(help="A recipe's name or TOML file.")], as_json: Json = False) -> None:
    """Print every setting of a recipe and its source.

    The output is TOML, itself a recipe. A source is a paper, its public code, the recipe itself, or the default. With
    --json: {section: {key: {"value": ..., "source": ...}}}.

    Example: dexter recipes show dexml-lf-amazontitles-131k
    """
    from dexter.config import load_config

    recipe = read_recipe(name)
    described: dict[str, dict[str, dict[str, Any]]] = describe_sources(dataclasses.asdict(load_config(name)), recipe)
    if as_json:
        echo_json(described)
        return
    typer.echo(f"summary = {json.dumps(recipe.summary)}")
    for section, settings in described.items():
        typer.echo(f"\n[{section}]")
        # A number or string is written in TOML as in JSON.
        lines = {f"{key} = {json.dumps(entry['value'])}": entry["source"] for key, entry in settings.items()}
        width = min(40, max(map(len, lines)))
        for line, source in lines.items():
            typer.echo(f"{line:<{width}}  # {source}")
