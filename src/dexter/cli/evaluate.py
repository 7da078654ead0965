"""The verbs that score runs: evaluate, tune, compare."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from dexter.cli.options import (
    AS_GUESSED,
    Deciles,
    Dial,
    Head,
    Json,
    NeighboursOption,
    Propensity,
    ReadOptions,
    RuntimeOption,
    UseIndex,
    constants_of,
    echo_json,
    reads_data,
)
from dexter.errors import UsageError
from dexter.processes import read_launch

if TYPE_CHECKING:
    from dexter.evaluation.baselines import Baseline
    from dexter.processes import Processes

log = logging.getLogger("dexter")


@reads_data
def evaluate(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    data: Annotated[str, typer.Argument(help="The data set whose test split is scored.")],
    k: Annotated[list[int] | None, typer.Option("--k", "-k", help="A cut-off; repeat for several.")] = None,
    propensity: Propensity = None,
    head: Head = None,
    index: UseIndex = None,
    neighbours: NeighboursOption = None,
    dial: Dial = None,
    runtime: RuntimeOption = "torch",
    curve: Annotated[bool, typer.Option("--dial-curve", help="P@k against PSP@k for values of the dial.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw bands, reliability and dial as a PNG; with --dial-curve the dial.")
    ] = None,
    unseen: Annotated[
        float | None,
        typer.Option(help="Train again without this share of the labels and score them (takes a training run)."),
    ] = None,
    without_reciprocal: Annotated[
        bool,
        typer.Option("--without-reciprocal", help="Leave out test pairs (a, b) whose reverse (b, a) is in training."),
    ] = False,
    deciles: Deciles = False,
    record: Annotated[Path | None, typer.Option(help="Where to write the result record.")] = None,
    reading: ReadOptions = AS_GUESSED,
    as_json: Json = False,
) -> None:
    """Score a run on the test split of a data set.

    P, R, nDCG and PSP, over all labels and by label frequency; a result record is written below the run.

    Example: dexter evaluate runs/pydocs data/pydocs

    Example: dexter evaluate runs/pydocs data/pydocs --plot evaluation.png

    Example: dexter evaluate runs/pydocs data/pydocs --dial-curve --plot dial.png

    Example: dexter evaluate runs/pydocs data/pydocs --unseen 0.1
    """
    from dexter.evaluation.plots import save_dial_plot, save_evaluation_plot
    from dexter.evaluation.runs import TABLE_COLUMNS, dial_curve, evaluate_run
    from dexter.evaluation.tables import describe_calibration, describe_hierarchy, render_deciles, render_table
    from dexter.predict.predictor import Predictor

    dataset = reading.load(data)
    if without_reciprocal:
        from dexter.data.findings import without_reciprocal as drop_reciprocal

        dataset, _ = drop_reciprocal(dataset)
    if unseen is not None:
        if runtime != "torch":
            raise UsageError("--unseen trains again, and what it trains has no export: leave --runtime out")
        from dexter.evaluation.unseen import evaluate_unseen

        held_out = evaluate_unseen(run, dataset, share=unseen)
        echo_json(held_out.to_json()) if as_json else typer.echo(held_out.render())
        return
    if curve:
        predictor = Predictor.load(run, head=head, neighbours=neighbours, runtime=runtime)
        found = dial_curve(predictor, dataset, propensity=constants_of(propensity))
        if plot is not None:
            save_dial_plot(found.points, plot)
        points = {f"{dial:g}": metrics for dial, metrics in found.points.items()}
        echo_json(points) if as_json else typer.echo(found.render())
        return
    with _joined_processes() as processes:
        result = evaluate_run(
            run,
            dataset,
            head=head,
            neighbours=neighbours,
            dial=dial,
            ks=k or None,
            propensity=constants_of(propensity),
            record=record,
            index=index,
            runtime=runtime,
            processes=processes,
        )
    if not read_launch().is_first:
        return
    if plot is not None:
        predictor = Predictor.load(run, head=head, neighbours=neighbours)
        save_evaluation_plot(result.report, dial_curve(predictor, dataset).points, plot)
        log.info("drawn: %s", plot)
    if as_json:
        echo_json(result.record)
        return
    columns = [name for name in TABLE_COLUMNS if name in result.report.metrics] if not k else None
    reports = {run.name or str(run): result.report}
    typer.echo(render_table(reports, columns))
    if deciles:
        typer.echo("\n" + render_deciles(reports, columns))
    for line in (describe_calibration(result.report), describe_hierarchy(result.report)):
        typer.echo(line, nl=bool(line))


@reads_data
def tune(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    data: Annotated[str, typer.Argument(help="The data set it was trained on.")],
    metric: Annotated[
        str | None, typer.Option("--for", help="The metric to maximise, such as PSP@3; the run's own if left out.")
    ] = None,
    reading: ReadOptions = AS_GUESSED,
    as_json: Json = False,
) -> None:
    """Choose dial and neighbours on the validation queries.

    What is chosen is stored with the run's model.

    Example: dexter tune runs/pydocs data/pydocs --for PSP@3
    """
    from dexter.training.tuning import tune as tune_run

    scoring = tune_run(run, reading.load(data), metric=metric)
    echo_json(scoring.to_json()) if as_json else typer.echo(f"{run}: {scoring.describe()}")


@reads_data
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, two or more without a baseline; the first is the reference.")
    ],
    data: Annotated[str, typer.Option("--data", help="The data set whose test split is scored.")],
    k: Annotated[list[int] | None, typer.Option("--k", "-k", help="A cut-off; repeat for several.")] = None,
    propensity: Propensity = None,
    baselines: Annotated[
        list[str] | None,
        typer.Option("--baseline", help="Train and compare popularity, neighbours or omikuji too; repeat for several."),
    ] = None,
    deciles: Deciles = False,
    reading: ReadOptions = AS_GUESSED,
    plot: Annotated[Path | None, typer.Option(help="Also draw the differences and their intervals as a PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Compare runs on the same test queries.

    One table of all runs, and the differences of each from the first with confidence intervals.

    Example: dexter compare runs/a runs/b --data data/pydocs --plot differences.png

    Example: dexter compare runs/a runs/b --data data/pydocs --baseline omikuji
    """
    from dexter.evaluation.runs import compare_runs

    found = compare_runs(
        runs,
        reading.load(data),
        ks=k or None,
        propensity=constants_of(propensity),
        baselines=_parse_baselines(baselines or []),
    )
    if plot is not None:
        from dexter.evaluation.plots import save_intervals_plot

        save_intervals_plot(found.differences, plot, against=str(runs[0]))
    echo_json(found.to_json()) if as_json else typer.echo(found.render(deciles=deciles))


def _parse_baselines(values: list[str]) -> list[Baseline]:
    from dexter.evaluation import baselines

    known: tuple[Baseline, ...] = get_args(baselines.Baseline)
    for value in values:
        if value not in known:
            raise UsageError(f"--baseline {value}: expected one of {', '.join(known)}")
    return [name for name in known if name in values]


def _joined_processes() -> AbstractContextManager[Processes | None]:
    """The processes that torchrun started; None where it started none, which needs no torch."""
    if read_launch().size == 1:
        return nullcontext()
    from dexter.training.distributed import joined

    return joined()
