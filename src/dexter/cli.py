"""The verbs, in the order of the flow. Each is a library function; what is heavy is imported where it is used.

Results go to stdout, progress and logs to stderr. An error is one line; `--debug` adds the traceback.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dexter.errors import DexterError, UsageError

EXIT_CODES = """Exit codes: 0 ok, 1 bug, 2 usage, 3 data, 4 model or index, 5 resources, 6 diverged, 130 or 143
interrupted (after saving)."""

app = typer.Typer(
    help="Dual encoders for extreme multi-label classification: a few right labels out of thousands to millions.\n\n"
    "Example: dexter train data.csv --out runs/first && dexter predict runs/first 'a text'",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Make, check and convert data sets.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="Override a setting: --set train.epochs=5.")]
OnError = Annotated[str, typer.Option("--on-error", help="What to do with bad lines: fail or skip.")]
TextColumn = Annotated[str | None, typer.Option(help="Tables: the text column, or several joined by +.")]
LabelColumn = Annotated[str | None, typer.Option(help="Tables: the column of labels.")]
Separator = Annotated[str | None, typer.Option(help="Tables: what stands between the labels of a cell.")]


def main() -> None:
    """Run the command line; turn errors into one line and an exit code."""
    debug = "--debug" in sys.argv
    try:
        app()
    except DexterError as error:
        _fail(str(error), error.exit_code, debug=debug)
    except KeyboardInterrupt:
        _fail("interrupted", 130, debug=debug)
    except MemoryError:
        _fail("out of memory: use smaller batches or fewer labels, or a machine with more memory", 5, debug=debug)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        _fail(f"{error.filename or 'input or output'}: {error.strerror or error}", 5, debug=debug)


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing on stderr but errors.")] = False,
) -> None:
    """Options of every verb."""
    level = logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("dexter")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to put the data, the run and the page.")] = Path("demo"),
    settings: Settings = None,
) -> None:
    """Everything on built-in data: build, check, baselines, train, evaluate, a plot and a page, a new label.

    Example: dexter demo --out demo
    """
    from dexter.config import parse_overrides
    from dexter.demo import run_demo

    run_demo(out, overrides=parse_overrides(settings or []))


@data_app.command("build")
def data_build(
    name: Annotated[str, typer.Argument(help="pydocs (installed Python packages) or debian (the apt index).")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
) -> None:
    """Make a data set from what is installed on this machine.

    Example: dexter data build pydocs --out data/pydocs
    """
    from dexter.data.formats import save_dataset
    from dexter.data.sources import build

    dataset = build(name)
    save_dataset(dataset, out, replace=force)
    typer.echo(f"{out}: {_size(dataset)}")


@data_app.command("check")
def data_check(
    path: Annotated[str, typer.Argument(help="A data set: folder, file, or the name of a built-in one.")],
    plot: Annotated[Path | None, typer.Option(help="Also write the Zipf plot as a PNG.")] = None,
    on_error: OnError = "fail",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    label_separator: Separator = None,
    as_json: Json = False,
) -> None:
    """Validate and describe: counts, label frequencies, duplicates, leaks, each problem with file and line.

    Example: dexter data check data/pydocs
    """
    from dexter.data.check import check
    from dexter.data.plots import save_zipf_plot

    dataset = _load(path, on_error, text_column, label_column, label_separator)
    report = check(dataset, folder=Path(path) if Path(path).exists() else None)
    if plot is not None:
        save_zipf_plot(dataset, plot)
    typer.echo(json.dumps(report.to_json(), indent=2, ensure_ascii=False) if as_json else report.render())


@data_app.command("convert")
def data_convert(
    source: Annotated[Path, typer.Argument(help="The data set to read.")],
    target: Annotated[Path, typer.Argument(help="The folder to make.")],
    to: Annotated[str, typer.Option(help="The format to write; a wrong name lists them.")] = "jsonl",
    on_error: OnError = "fail",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    label_separator: Separator = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
) -> None:
    """Read one format and write another; nothing is half-written.

    Example: dexter data convert articles.csv data/articles --to jsonl
    """
    from dexter.data.formats import save_dataset

    dataset = _load(str(source), on_error, text_column, label_column, label_separator)
    save_dataset(dataset, target, format=to, replace=force)
    typer.echo(f"{target}: {_size(dataset)}")


@app.command()
def train(
    data: Annotated[str, typer.Argument(help="A data set: folder, file, or the name of a built-in one.")],
    out: Annotated[Path, typer.Option(help="The run folder to make.")],
    recipe: Annotated[str, typer.Option(help="A recipe's name or TOML file.")] = "dexter",
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard files.")] = False,
    on_error: OnError = "fail",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    label_separator: Separator = None,
    as_json: Json = False,
) -> None:
    """Train a dual encoder and publish the best model on validation.

    Example: dexter train data/pydocs --recipe dexml --out runs/pydocs --set train.epochs=5
    """
    from dexter.config import parse_overrides
    from dexter.training import train as train_run

    dataset = _load(data, on_error, text_column, label_column, label_separator)
    run = train_run(
        dataset,
        recipe=recipe,
        out=out,
        overrides=parse_overrides(settings or []),
        resume=resume,
        tensorboard=tensorboard,
    )
    if as_json:
        typer.echo(json.dumps({"run": str(run.path), "best": run.best, "step": run.step, "seconds": run.seconds}))
        return
    shown = ", ".join(f"{name} {value:.2f}" for name, value in run.best.items() if name.startswith(("P@", "PSP@")))
    typer.echo(f"{run.path}: trained in {run.seconds:.0f} s" + (f"; validation {shown}" if shown else ""))


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    data: Annotated[str, typer.Argument(help="The data set whose test split is scored.")],
    k: Annotated[list[int] | None, typer.Option("--k", "-k", help="A cut-off; repeat for several.")] = None,
    propensity: Annotated[str, typer.Option(help="Propensity constants: default, amazon or wikipedia.")] = "default",
    record: Annotated[Path | None, typer.Option(help="Where to write the result record.")] = None,
    as_json: Json = False,
) -> None:
    """Score a run on the test split: P, R, nDCG, PSP, by label frequency, with a result record.

    Example: dexter evaluate runs/pydocs data/pydocs
    """
    from dexter.evaluation.evaluate import DEFAULT_KS, TABLE_COLUMNS, evaluate_run
    from dexter.evaluation.tables import render_table

    result = evaluate_run(
        run, _load(data), ks=tuple(k or DEFAULT_KS), propensity=_propensity(propensity), record=record
    )
    if as_json:
        typer.echo(json.dumps(result.record, indent=2, ensure_ascii=False))
        return
    columns = [name for name in TABLE_COLUMNS if name in result.report.metrics]
    typer.echo(render_table({run.name: result.report}, columns))


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    text: Annotated[str | None, typer.Argument(help="A text; leave out to read --input or stdin.")] = None,
    input_path: Annotated[
        Path | None, typer.Option("--input", help="A file of texts: lines, or JSONL with text and uid.")
    ] = None,
    output_path: Annotated[Path | None, typer.Option("--output", help="Where to write; stdout if left out.")] = None,
    k: Annotated[int, typer.Option("-k", help="Labels per text.")] = 5,
    form: Annotated[str, typer.Option("--format", help="text, jsonl or tsv.")] = "text",
) -> None:
    """The best labels of a text, of every line of a file, or of stdin; in order, in constant memory.

    Example: dexter predict runs/pydocs "inverse of a matrix" -k 3
    """
    from dexter.streams import predict_texts, read_texts, write_lines

    queries = iter([(None, text)]) if text is not None else read_texts(input_path)
    write_lines(predict_texts(run, queries, k=k, form=form), output_path)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run folders; each is held against the first.")],
    data: Annotated[str, typer.Option("--data", help="The data set whose test split is scored.")],
    propensity: Annotated[str, typer.Option(help="Propensity constants: default, amazon or wikipedia.")] = "default",
) -> None:
    """Hold runs against each other on the same queries: one table, differences with confidence intervals.

    Example: dexter compare runs/a runs/b --data data/pydocs
    """
    from dexter.evaluation.evaluate import compare_runs

    typer.echo(compare_runs(runs, _load(data), propensity=_propensity(propensity)))


def _load(
    path: str,
    on_error: str = "fail",
    text_column: str | None = None,
    label_column: str | None = None,
    label_separator: str | None = None,
) -> Any:
    from dexter.data.formats import load_dataset

    policy: Literal["fail", "skip"]
    if on_error == "fail":
        policy = "fail"
    elif on_error == "skip":
        policy = "skip"
    else:
        raise UsageError(f"--on-error {on_error!r}: expected fail or skip")
    return load_dataset(
        path, on_error=policy, text_column=text_column, label_column=label_column, label_separator=label_separator
    )


def _propensity(name: str) -> tuple[float, float]:
    from dexter.metrics import PROPENSITY

    if name not in PROPENSITY:
        raise UsageError(f"--propensity {name!r}: expected one of {', '.join(PROPENSITY)}")
    return PROPENSITY[name]


def _size(dataset: Any) -> str:
    splits = ", ".join(f"{len(split):,} {name} queries" for name, split in dataset.splits.items())
    return f"{splits}, {dataset.num_labels:,} labels"


def _fail(message: str, code: int, *, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"dexter: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
