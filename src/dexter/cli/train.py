"""The verbs that make a run: recipes, plan, train, import."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dexter.cli.options import AS_GUESSED, Json, ReadOptions, Settings, echo_json, reads_data
from dexter.errors import UsageError
from dexter.processes import read_launch
from dexter.recipes import DEFAULT_RECIPE, describe_sources, method_names, paper_names, read_recipe

log = logging.getLogger("dexter")
recipes_app = typer.Typer(help="List the recipes: methods, and the runs of papers.", rich_markup_mode=None)


@reads_data
def train(
    data: Annotated[str, typer.Argument(help="A data set: folder, file, or the name of a built-in one.")],
    out: Annotated[Path, typer.Option(help="The run folder to make.")],
    recipe: Annotated[str, typer.Option(help="A recipe's name or TOML file.")] = DEFAULT_RECIPE,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard files.")] = False,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Keep the last two checkpoints of the finished run.")
    ] = False,
    reading: ReadOptions = AS_GUESSED,
    as_json: Json = False,
) -> None:
    """Train a dual encoder and publish the best model on validation.

    Example: dexter train data/pydocs --recipe dexml --out runs/pydocs --set train.epochs=5
    """
    from dexter.config import load_config, parse_overrides
    from dexter.planning.plan import describe_needs
    from dexter.training import train as train_run

    overrides = parse_overrides(settings or [])
    load_config(recipe, overrides)  # refuses a wrong setting before the data are read, which may take a while
    dataset = reading.load(data)
    if log.isEnabledFor(logging.INFO) and not resume:
        needs = describe_needs(dataset, recipe=recipe, overrides=overrides, world_size=read_launch().size)
        log.info("%s", needs)
    run = train_run(
        dataset,
        recipe=recipe,
        out=out,
        overrides=overrides,
        resume=resume,
        tensorboard=tensorboard,
        keep_checkpoints=keep_checkpoints,
    )
    if not read_launch().is_first:
        return
    if as_json:
        echo_json({"run": str(run.path), "metrics": run.best, "step": run.step, "seconds": run.seconds})
        return
    shown = ", ".join(f"{name} {value:.2f}" for name, value in run.best.items() if name.startswith(("P@", "PSP@")))
    typer.echo(f"{run.path}: trained in {run.seconds:.0f} s" + (f"; validation {shown}" if shown else ""))


@reads_data
def import_command(
    encoder: Annotated[str, typer.Argument(help="A folder with safetensors weights, or a name on the hub.")],
    data: Annotated[str, typer.Argument(help="The data set whose labels it ranks.")],
    out: Annotated[Path, typer.Option(help="The run folder to make.")],
    pooling: Annotated[
        Literal["cls", "mean"] | None, typer.Option(help="Needed where the folder does not say (DEXML's: cls).")
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Vectors of length 1; else as the folder says.")
    ] = None,
    max_length_query: Annotated[
        int | None, typer.Option(help="Tokens kept of a query; as the folder says, or 128, if left out.")
    ] = None,
    max_length_label: Annotated[
        int | None, typer.Option(help="Tokens kept of a label; as the folder says, or those of a query, if left out.")
    ] = None,
    reading: ReadOptions = AS_GUESSED,
) -> None:
    """Make a run of a published encoder, without training.

    It ranks the labels of a data set, for evaluate, predict and serve.

    Example: dexter import dexml_lf-amazontitles-131k data/LF-AmazonTitles-131K --pooling cls --max-length-query 32
    --out runs/dexml && dexter evaluate runs/dexml data/LF-AmazonTitles-131K
    """
    from dexter.model.importing import import_encoder

    dataset = reading.load(data)
    model = import_encoder(
        encoder,
        dataset,
        out,
        pooling=pooling,
        normalize=normalize,
        max_length_query=max_length_query,
        max_length_label=max_length_label,
    )
    typer.echo(f"{out}: {len(model.labels.ids):,} labels encoded, nothing trained")


@reads_data
def plan(
    data: Annotated[str | None, typer.Argument(help="A data set; leave out to plan from --queries and others.")] = None,
    recipe: Annotated[str, typer.Option(help="A recipe's name or TOML file.")] = DEFAULT_RECIPE,
    settings: Settings = None,
    queries: Annotated[int | None, typer.Option(help="Without data: training queries.")] = None,
    labels: Annotated[int | None, typer.Option(help="Without data: labels.")] = None,
    tokens_per_text: Annotated[float, typer.Option(help="Without data: tokens of a query.")] = 32.0,
    tokens_per_label: Annotated[float | None, typer.Option(help="Without data: tokens of a label.")] = None,
    labels_per_query: Annotated[float, typer.Option(help="Without data: relevant labels of a query.")] = 5.0,
    world_size: Annotated[int, typer.Option(help="Number of processes that share the labels.")] = 1,
    gpu_memory: Annotated[
        float | None, typer.Option(help="GiB of each device: does the run fit, and if not, with which settings?")
    ] = None,
    reading: ReadOptions = AS_GUESSED,
    as_json: Json = False,
) -> None:
    """Predict the memory, disk and time that training needs.

    With several processes also the bytes between them.

    Example: dexter plan data/pydocs --recipe unidec

    Example: dexter plan --queries 2200000 --labels 1300000 --recipe dexml --set encoder.kind=transformer
    --set encoder.pretrained=distilbert-base-uncased --world-size 8 --gpu-memory 40
    """
    from dexter.config import parse_overrides
    from dexter.planning.plan import plan as plan_data
    from dexter.planning.plan import plan_counts

    shared: dict[str, Any] = {
        "recipe": recipe,
        "overrides": parse_overrides(settings or []),
        "world_size": world_size,
        "gpu_memory": gpu_memory,
    }
    if data is not None and queries is None and labels is None:
        found = plan_data(reading.load(data), **shared)
    elif data is None and queries is not None and labels is not None:
        found = plan_counts(
            num_queries=queries,
            num_labels=labels,
            tokens_per_text=tokens_per_text,
            tokens_per_label=tokens_per_label,
            labels_per_query=labels_per_query,
            **shared,
        )
    else:
        raise UsageError("give a data set, or both --queries and --labels")
    echo_json(found.to_json()) if as_json else typer.echo(found.render())


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
