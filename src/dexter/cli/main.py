"""The verbs, in the order of the flow. Each is a library function; what is heavy is imported where it is used.

Results go to stdout, progress and logs to stderr. An error is one line; `--debug` adds the traceback.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dexter import __version__
from dexter.cli.data import data_app
from dexter.cli.labels import labels_app
from dexter.cli.options import (
    Band,
    Deciles,
    Dial,
    Exclude,
    Head,
    Json,
    LabelColumn,
    NeighboursOption,
    OnError,
    Only,
    Propensity,
    RuntimeOption,
    Separator,
    Settings,
    TextColumn,
    TextFields,
    UseIndex,
    echo_json,
    load,
    parse_filter,
    parse_head,
    parse_index,
    parse_pooling,
    parse_propensity,
    parse_runtime,
)
from dexter.cli.recipes import recipes_app
from dexter.config import DEFAULT_RECIPE
from dexter.errors import DexterError, UsageError, printable
from dexter.processes import read_launch

if TYPE_CHECKING:
    from dexter.predict.predictor import Runtime
    from dexter.processes import Processes
    from dexter.types import HeadName

EXIT_CODES = """Exit codes: 0 ok, 1 bug, 2 usage, 3 data, 4 model or index, 5 resources (disk, memory, permission, a
missing package), 6 diverged, 130 or 143 interrupted (training saves its state first)."""

app = typer.Typer(
    help="Dual encoders for extreme multi-label classification: a few right labels out of thousands to millions.\n\n"
    "Example: dexter train data.csv --out runs/first && dexter predict runs/first 'a text'",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_app, name="data")
app.add_typer(labels_app, name="labels")
app.add_typer(recipes_app, name="recipes")

log = logging.getLogger("dexter")
_INTERRUPTED = 130
_ClickError: type[Any] = typer.BadParameter.__mro__[2]
"""ClickException, from wherever Typer has it: newer versions carry a copy of click of their own."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dexter {__version__}")
        raise typer.Exit


class _PrintableFormatter(logging.Formatter):
    """Escapes what a terminal would obey: names in files of somebody else may hold control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


def main() -> None:
    """Run the command line; turn errors into one line and an exit code."""
    # Threads that wait by spinning make a step up to 40 times slower when another process wants the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = _move_common_options(sys.argv[1:])
    debug = "--debug" in arguments
    try:
        with _termination_as_error():
            code = app(arguments, prog_name="dexter", standalone_mode=False)
        if code == _INTERRUPTED:
            _fail("interrupted", code, debug=False)
        sys.exit(code if isinstance(code, int) else 0)
    except DexterError as error:
        _fail(str(error), error.exit_code, debug=debug)
    except _Terminated:
        _fail("terminated", 128 + signal.SIGTERM, debug=debug)
    except _ClickError as error:
        _fail_usage(error)
    except Exception as error:
        _fail(*_explain(error), debug=debug)


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only warnings and errors on stderr.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    """Options of every verb."""
    # Of several processes that torchrun started, the first speaks for all.
    quiet = quiet or not read_launch().is_first
    level = logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_PrintableFormatter("%(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(level)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to put the data, the run and the page.")] = Path("demo"),
    settings: Settings = None,
) -> None:
    """Everything on built-in data: build, check, baselines, train, evaluate, a plot and a page, a new label.

    Example: dexter demo --out demo
    """
    from dexter.cli.demo import run_demo
    from dexter.config import parse_overrides

    run_demo(out, overrides=parse_overrides(settings or []))


@app.command()
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
    on_error: OnError = "fail",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    label_separator: Separator = None,
    text_fields: TextFields = None,
    as_json: Json = False,
) -> None:
    """Train a dual encoder and publish the best model on validation.

    Example: dexter train data/pydocs --recipe dexml --out runs/pydocs --set train.epochs=5
    """
    from dexter.config import parse_overrides
    from dexter.planning.plan import describe_needs
    from dexter.training import train as train_run

    dataset = load(data, on_error, text_column, label_column, label_separator, text_fields)
    overrides = parse_overrides(settings or [])
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
        echo_json({"run": str(run.path), "best": run.best, "step": run.step, "seconds": run.seconds})
        return
    shown = ", ".join(f"{name} {value:.2f}" for name, value in run.best.items() if name.startswith(("P@", "PSP@")))
    typer.echo(f"{run.path}: trained in {run.seconds:.0f} s" + (f"; validation {shown}" if shown else ""))


@app.command("import")
def import_command(
    encoder: Annotated[str, typer.Argument(help="A folder with safetensors weights, or a name on the hub.")],
    data: Annotated[str, typer.Argument(help="The data set whose labels it ranks.")],
    out: Annotated[Path, typer.Option(help="The run folder to make.")],
    pooling: Annotated[
        str | None, typer.Option(help="cls or mean; needed where the folder does not say (DEXML's: cls).")
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
    on_error: OnError = "fail",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    label_separator: Separator = None,
    text_fields: TextFields = None,
) -> None:
    """Make a run of a published encoder and a data set's labels, without training, for evaluate, predict and serve.

    Example: dexter import dexml_lf-amazontitles-131k data/LF-AmazonTitles-131K --pooling cls --max-length-query 32
    --out runs/dexml && dexter evaluate runs/dexml data/LF-AmazonTitles-131K
    """
    from dexter.model.importing import import_encoder

    dataset = load(data, on_error, text_column, label_column, label_separator, text_fields)
    model = import_encoder(
        encoder,
        dataset,
        out,
        pooling=parse_pooling(pooling),
        normalize=normalize,
        max_length_query=max_length_query,
        max_length_label=max_length_label,
    )
    typer.echo(f"{out}: {len(model.labels.ids):,} labels encoded, nothing trained")


@app.command()
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
    text_fields: TextFields = None,
    as_json: Json = False,
) -> None:
    """Predict what training will need: peak memory, disk, time per epoch, bytes between processes.

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
        found = plan_data(load(data, text_fields=text_fields), **shared)
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
    if as_json:
        echo_json(found.to_json())
    else:
        typer.echo(found.render())


@app.command()
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
    plot: Annotated[Path | None, typer.Option(help="With --dial-curve: also draw it as a PNG.")] = None,
    unseen: Annotated[
        float | None,
        typer.Option(help="Train again without this share of the labels and score them (takes a training run)."),
    ] = None,
    deciles: Deciles = False,
    record: Annotated[Path | None, typer.Option(help="Where to write the result record.")] = None,
    on_error: OnError = "fail",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    label_separator: Separator = None,
    text_fields: TextFields = None,
    as_json: Json = False,
) -> None:
    """Score a run on the test split: P, R, nDCG, PSP, by label frequency, with a result record.

    Example: dexter evaluate runs/pydocs data/pydocs

    Example: dexter evaluate runs/pydocs data/pydocs --dial-curve --plot dial.png

    Example: dexter evaluate runs/pydocs data/pydocs --unseen 0.1
    """
    from dexter.evaluation.runs import TABLE_COLUMNS, evaluate_run
    from dexter.evaluation.tables import describe_calibration, render_deciles, render_table

    dataset = load(data, on_error, text_column, label_column, label_separator, text_fields)
    if unseen is not None:
        if runtime != "torch":
            raise UsageError("--unseen trains again, and what it trains has no export: leave --runtime out")
        _evaluate_unseen(run, dataset, unseen, as_json=as_json)
        return
    if curve or plot is not None:
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
    if as_json:
        echo_json(result.record)
        return
    columns = [name for name in TABLE_COLUMNS if name in result.report.metrics] if not k else None
    reports = {run.name or str(run): result.report}
    typer.echo(render_table(reports, columns))
    if deciles:
        typer.echo("\n" + render_deciles(reports, columns))
    typer.echo(describe_calibration(result.report), nl=bool(result.report.calibration))


@app.command()
def tune(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    data: Annotated[str, typer.Argument(help="The data set it was trained on.")],
    metric: Annotated[
        str | None, typer.Option("--for", help="What to have most of, such as PSP@3; the run's own metric if left out.")
    ] = None,
    text_fields: TextFields = None,
    as_json: Json = False,
) -> None:
    """Choose the dial and the votes of neighbours on the run's validation queries, and store them with its model.

    Example: dexter tune runs/pydocs data/pydocs --for PSP@3
    """
    from dexter.training.tuning import tune as tune_run

    scoring = tune_run(run, load(data, text_fields=text_fields), metric=metric)
    if as_json:
        echo_json(scoring.to_json())
    else:
        typer.echo(f"{run}: {scoring.describe()}")


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    text: Annotated[str | None, typer.Argument(help="A text; leave out to read --input or stdin.")] = None,
    input_path: Annotated[
        Path | None,
        typer.Option("--input", help="Texts: lines, JSONL or CSV with text and uid; .gz too; 'part-*' for many."),
    ] = None,
    output_path: Annotated[
        Path | None, typer.Option("--output", help="Where to write; stdout if left out; for many files a folder.")
    ] = None,
    k: Annotated[
        int | None, typer.Option("-k", help="Labels per text: 5, or as many as reach the threshold, if left out.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Only labels that are right with at least this probability.")
    ] = None,
    precision: Annotated[
        float | None, typer.Option(help="Only labels above the threshold that had this precision on validation.")
    ] = None,
    best_f1: Annotated[
        bool, typer.Option("--best-f1", help="Only labels above the threshold that had the best F1 on validation.")
    ] = False,
    exclude: Exclude = None,
    only: Only = None,
    band: Band = None,
    head: Head = None,
    index: UseIndex = None,
    neighbours: NeighboursOption = None,
    dial: Dial = None,
    runtime: RuntimeOption = "torch",
    form: Annotated[
        str | None, typer.Option("--format", help="text, jsonl or tsv; by the ending of --output if left out.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also why: parts of the score, words that carry it, training queries.")
    ] = False,
) -> None:
    """The best labels of a text, of every line of a file, or of stdin; in order, in constant memory.

    Example: dexter predict runs/pydocs "inverse of a matrix" -k 3

    Example: dexter predict runs/pydocs --input queries.jsonl --output predictions.jsonl

    Example: dexter predict runs/pydocs "inverse of a matrix" --band tail --exclude numpy.linalg.inv

    Example: torchrun --nproc-per-node 4 -m dexter predict runs/pydocs --input 'part-*.jsonl' --output predictions/
    """
    if text is not None and input_path is not None:
        raise UsageError("give a text or --input, not both")
    if sum((threshold is not None, precision is not None, best_f1)) > 1:
        raise UsageError("give one of --threshold, --precision and --best-f1")
    from dexter.predict.files import Query, form_of, is_pattern, predict_files, predict_texts, write_lines
    from dexter.predict.predictor import Predictor

    launch, many = read_launch(), input_path is not None and is_pattern(str(input_path))
    if many and output_path is None:
        raise UsageError(f"--input {str(input_path)!r} stands for many files: name a folder for theirs with --output")
    if not (many or launch.is_first):
        return
    queries: Iterator[Query] = iter(())
    if text is not None:
        queries = iter([Query("1", text)])
    elif not many:
        from dexter.predict.text_files import read_texts

        queries = read_texts(input_path)
    predictor = Predictor.load(
        run,
        head=parse_head(head),
        neighbours=neighbours,
        dial=dial,
        index=parse_index(index),
        runtime=parse_runtime(runtime),
    )
    if precision is not None or best_f1:
        threshold = predictor.find_threshold(precision=precision)
    filters = parse_filter(exclude, only, band)
    filters.allowed_rows(predictor.labels)  # refuses unknown ids before anything is written
    if many and output_path is not None:
        predict_files(
            predictor,
            str(input_path),
            output_path,
            k=k,
            threshold=threshold,
            form=form or "jsonl",
            labels=filters,
            launch=launch,
        )
        return
    form = form or form_of(output_path)
    lines = predict_texts(predictor, queries, k=k, threshold=threshold, form=form, explain=explain, labels=filters)
    write_lines(lines, output_path)


@app.command("index")
def index_command(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    backend: Annotated[
        str | None,
        typer.Option(help="exact, pq, hnsw, pgvector or qdrant; the number of labels decides if left out."),
    ] = None,
    queries: Annotated[
        Path | None, typer.Option(help="Texts to measure recall on, as for predict --input; label texts if left out.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Address of the database; DEXTER_INDEX_URL if left out. It is not stored.")
    ] = None,
    head: Head = None,
    as_json: Json = False,
) -> None:
    """Make the index that predict and evaluate search: approximate ones are measured, and refused below 0.98.

    Example: dexter index runs/pydocs --backend pq
    """
    from dataclasses import asdict
    from itertools import islice

    from dexter.model.store import model_folder
    from dexter.predict.predictor import Predictor
    from dexter.predict.run_index import build_run_index, describe
    from dexter.predict.text_files import read_texts

    texts = None if queries is None else [query.text for query in islice(read_texts(queries), 512)]
    predictor = Predictor.load(run, head=parse_head(head), index="exact")
    report = build_run_index(
        predictor.model, model_folder(run), head=predictor.choice.head, backend=backend, queries=texts, url=url
    )
    if as_json:
        echo_json(asdict(report))
    else:
        typer.echo(describe(report))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    int8: Annotated[
        bool, typer.Option("--int8", help="Weights in 8 bits: faster, not equal; needs --data to measure the loss.")
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="A data set whose test queries it is checked on; the model's own if left out.")
    ] = None,
    text_fields: TextFields = None,
    as_json: Json = False,
) -> None:
    """Write a transformer's query encoder as an ONNX file beside the model, checked against torch, for --runtime onnx.

    Example: dexter export runs/pydocs

    Example: dexter export runs/pydocs --int8 --data data/pydocs
    """
    from dataclasses import asdict

    from dexter.evaluation.export import export_run

    report = export_run(run, int8=int8, data=None if data is None else load(data, text_fields=text_fields))
    echo_json(asdict(report)) if as_json else typer.echo(report.render())


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run folders; each is held against the first.")],
    data: Annotated[str, typer.Option("--data", help="The data set whose test split is scored.")],
    k: Annotated[list[int] | None, typer.Option("--k", "-k", help="A cut-off; repeat for several.")] = None,
    propensity: Propensity = None,
    deciles: Deciles = False,
    text_fields: TextFields = None,
    as_json: Json = False,
) -> None:
    """Hold runs against each other on the same queries: one table, differences with confidence intervals.

    Example: dexter compare runs/a runs/b --data data/pydocs
    """
    from dexter.evaluation.runs import compare_runs

    found = compare_runs(
        runs, load(data, text_fields=text_fields), ks=k or None, propensity=parse_propensity(propensity)
    )
    if as_json:
        echo_json(found.to_json())
    else:
        typer.echo(found.render(deciles=deciles))


@app.command()
def serve(
    runs: Annotated[list[str], typer.Argument(help="Run folders, or NAME=FOLDER; the first is the default.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    workers: Annotated[int, typer.Option(help="Processes that answer; they share the files in memory.")] = 1,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A host name that requests may address; repeat for several.")
    ] = None,
    keep_edits: Annotated[
        bool, typer.Option(help="Write edits of labels to the run folders, or forget them at the end.")
    ] = True,
    keys: Annotated[
        Path | None, typer.Option(help="A file of API keys, one NAME:ROLE:SHA256 per line; SIGHUP reads it again.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="A public address without an API key; needs --allow-host.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate (PEM), to answer over HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The private key of the certificate (PEM).")] = None,
    explanations: Annotated[bool, typer.Option(help="Say why a text has its labels, where a request asks.")] = True,
    training_texts: Annotated[bool, typer.Option(help="Show training and test texts.")] = True,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="One line on stderr per request.")] = False,
    log_format: Annotated[str, typer.Option(help="Lines of the log: text or json.")] = "text",
    runtime: RuntimeOption = "torch",
) -> None:
    """Serve runs over HTTP, with a page at /, until SIGTERM or Ctrl-C; DEXTER_API_KEY or the file of --keys has keys.

    Example: dexter serve runs/pydocs --port 8000
    """
    from dexter.errors import require

    for module in ("fastapi", "uvicorn", "jinja2", "prometheus_client"):
        require(module, extra="serve", purpose="dexter serve")
    from dexter.serving.keys import find_keys
    from dexter.serving.server import name_runs
    from dexter.serving.server import serve as serve_runs
    from dexter.serving.settings import ServeSettings

    if (tls_cert is None) != (tls_key is None):
        raise UsageError("--tls-cert and --tls-key belong together: give both or none")
    if log_format not in ("text", "json"):
        raise UsageError(f"--log-format {log_format}: expected text or json")
    settings = ServeSettings(
        host=host,
        port=port,
        workers=workers,
        tls=None if tls_cert is None or tls_key is None else (tls_cert, tls_key),
        keys=find_keys(keys, os.environ),
        keys_file=keys,
        allowed_hosts=tuple(allow_host or ()),
        keep_edits=keep_edits,
        insecure=insecure,
        explanations=explanations,
        training_texts=training_texts,
        log_requests=log_requests,
        log_format="json" if log_format == "json" else "text",
        runtime=parse_runtime(runtime),
    )
    serve_runs(name_runs(runs), settings)


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


def _move_common_options(arguments: list[str]) -> list[str]:
    """Move --debug and --quiet before the verb, so that they may be given after it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    general = [name for name in ("--debug", "--quiet") if name in arguments[:end]]
    return [*general, *(name for name in arguments[:end] if name not in general), *arguments[end:]]


class _Terminated(BaseException):
    """Raised on SIGTERM; no `Exception`, like KeyboardInterrupt, so that no handler of failures catches it."""


@contextmanager
def _termination_as_error() -> Iterator[None]:
    """Raise an exception on SIGTERM, so that temporary files are removed on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _explain(error: Exception) -> tuple[str, int]:
    """The message and exit code of an error that is not one of ours."""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error).lower():
        return "out of memory: use smaller batches or fewer labels, or a machine with more memory", 5
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "transformers"):
        return f"this needs the package {error.name!r}, which is not installed: pip install 'dexter-xmc[train]'", 5
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}", 5
    return f"{type(error).__name__}: {error} (a bug in dexter: --debug shows where)", 1


def _fail(message: str, code: int, *, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    lines = [printable(" ".join(line.split())) for line in message.splitlines()]
    launch = read_launch()
    rank = f"rank {launch.rank}: " if launch.size > 1 else ""
    print(f"dexter: error: {rank}{lines[0] if lines else 'unknown'}", *lines[1:], sep="\n", file=sys.stderr)
    sys.exit(code)


def _fail_usage(error: Any) -> NoReturn:
    """Report a wrong option or argument in one line; show the help where no verb was given."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(error.exit_code)
    command = context.command_path if context is not None else "dexter"
    _fail(f"{error.format_message()} (see {command} --help)", error.exit_code, debug=False)
