"""The verbs that score runs: evaluate, tune, compare."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    echo_json,
    parse_baselines,
    parse_head,
    parse_index,
    parse_propensity,
    parse_runtime,
    reads_data,
)
from dexter.errors import UsageError
from dexter.processes import read_launch

if TYPE_CHECKING:
    from dexter.evaluation.report import Report
    from dexter.predict.predictor import Runtime
    from dexter.processes import Processes
    from dexter.types import HeadName

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
        Path | None,
        typer.Option(help="Also draw bands, reliability and dial as a PNG; with --dial-curve the dial."),
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
    """Score a run on the test split: P, R, nDCG, PSP, by label frequency, with a result record.

    Example: dexter evaluate runs/pydocs data/pydocs

    Example: dexter evaluate runs/pydocs data/pydocs --plot evaluation.png

    Example: dexter evaluate runs/pydocs data/pydocs --dial-curve --plot dial.png

    Example: dexter evaluate runs/pydocs data/pydocs --unseen 0.1
    """
    from dexter.evaluation.runs import TABLE_COLUMNS, evaluate_run
    from dexter.evaluation.tables import describe_calibration, describe_hierarchy, render_deciles, render_table

    dataset = reading.load(data)
    if without_reciprocal:
        from dexter.data.findings import without_reciprocal as drop_reciprocal

        dataset, _ = drop_reciprocal(dataset)
    if unseen is not None:
        if runtime != "torch":
            raise UsageError("--unseen trains again, and what it trains has no export: leave --runtime out")
        _evaluate_unseen(run, dataset, unseen, as_json=as_json)
        return
    if curve:
        _evaluate_dial(
            run,
            dataset,
            parse_head(head),
            neighbours,
            parse_propensity(propensity),
            plot,
            parse_runtime(runtime),
            as_json=as_json,
        )
        return
    with _joined_processes() as processes:
        result = evaluate_run(
            run,
            dataset,
            head=parse_head(head),
            neighbours=neighbours,
            dial=dial,
            ks=k or None,
            propensity=parse_propensity(propensity),
            record=record,
            index=parse_index(index),
            runtime=parse_runtime(runtime),
            processes=processes,
        )
    if not read_launch().is_first:
        return
    if plot is not None:
        _draw_evaluation(run, dataset, result.report, plot, head=parse_head(head), neighbours=neighbours)
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
        str | None, typer.Option("--for", help="What to have most of, such as PSP@3; the run's own metric if left out.")
    ] = None,
    reading: ReadOptions = AS_GUESSED,
    as_json: Json = False,
) -> None:
    """Choose the dial and the votes of neighbours on the run's validation queries, and store them with its model.

    Example: dexter tune runs/pydocs data/pydocs --for PSP@3
    """
    from dexter.training.tuning import tune as tune_run

    scoring = tune_run(run, reading.load(data), metric=metric)
    if as_json:
        echo_json(scoring.to_json())
    else:
        typer.echo(f"{run}: {scoring.describe()}")


@reads_data
def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, two or more without a baseline; each is held against the first.")
    ],
    data: Annotated[str, typer.Option("--data", help="The data set whose test split is scored.")],
    k: Annotated[list[int] | None, typer.Option("--k", "-k", help="A cut-off; repeat for several.")] = None,
    propensity: Propensity = None,
    baselines: Annotated[
        list[str] | None,
        typer.Option("--baseline", help="Train and compare popularity, neighbours or omikuji too; repeatable."),
    ] = None,
    deciles: Deciles = False,
    reading: ReadOptions = AS_GUESSED,
    plot: Annotated[Path | None, typer.Option(help="Also draw the differences and their intervals as a PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Hold runs against each other on the same queries: one table, differences with confidence intervals.

    Example: dexter compare runs/a runs/b --data data/pydocs --plot differences.png

    Example: dexter compare runs/a runs/b --data data/pydocs --baseline omikuji
    """
    from dexter.evaluation.runs import compare_runs

    found = compare_runs(
        runs,
        reading.load(data),
        ks=k or None,
        propensity=parse_propensity(propensity),
        baselines=parse_baselines(baselines),
    )
    if plot is not None:
        from dexter.evaluation.plots import save_intervals_plot

        save_intervals_plot(found.differences, plot, against=str(runs[0]))
    if as_json:
        echo_json(found.to_json())
    else:
        typer.echo(found.render(deciles=deciles))


def _joined_processes() -> AbstractContextManager[Processes | None]:
    """The processes that torchrun started; None where it started none, which needs no torch."""
    if read_launch().size == 1:
        return nullcontext()
    from dexter.training.distributed import joined

    return joined()


def _evaluate_unseen(run: Path, dataset: Any, share: float, *, as_json: bool) -> None:
    from dexter.evaluation.unseen import evaluate_unseen

    found = evaluate_unseen(run, dataset, share=share)
    echo_json(found.to_json()) if as_json else typer.echo(found.render())


def _draw_evaluation(
    run: Path, dataset: Any, report: Report, plot: Path, *, head: HeadName | None, neighbours: bool | None
) -> None:
    from dexter.evaluation.plots import save_evaluation_plot
    from dexter.evaluation.runs import dial_curve
    from dexter.predict.predictor import Predictor

    predictor = Predictor.load(run, head=head, neighbours=neighbours)
    save_evaluation_plot(report, dial_curve(predictor, dataset).points, plot)
    log.info("drawn: %s", plot)


def _evaluate_dial(
    run: Path,
    dataset: Any,
    head: HeadName | None,
    neighbours: bool | None,
    propensity: tuple[float, float] | None,
    plot: Path | None,
    runtime: Runtime,
    *,
    as_json: bool,
) -> None:
    from dexter.evaluation.plots import save_dial_plot
    from dexter.evaluation.runs import dial_curve
    from dexter.predict.predictor import Predictor

    predictor = Predictor.load(run, head=head, neighbours=neighbours, runtime=runtime)
    curve = dial_curve(predictor, dataset, propensity=propensity)
    if plot is not None:
        save_dial_plot(curve.points, plot)
    if as_json:
        echo_json({f"{dial:g}": metrics for dial, metrics in curve.points.items()})
    else:
        typer.echo(curve.render())
