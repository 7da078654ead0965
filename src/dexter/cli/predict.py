"""The verbs that use a run: predict, serve."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from dexter.cli.options import (
    Band,
    Dial,
    Exclude,
    Head,
    NeighboursOption,
    Only,
    RuntimeOption,
    TextColumn,
    UseIndex,
    parse_filter,
)
from dexter.errors import UsageError
from dexter.processes import read_launch

log = logging.getLogger("dexter")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage in a block that makes many objects and none of it: looking takes a tenth of its time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def predict(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    text: Annotated[str | None, typer.Argument(help="A text; leave out to read --input or stdin.")] = None,
    input_path: Annotated[
        Path | None,
        typer.Option("--input", help="Texts: lines, JSONL, or a table as for train; .gz too; 'part-*' for many."),
    ] = None,
    output_path: Annotated[
        Path | None, typer.Option("--output", help="Where to write; stdout if left out; for many files a folder.")
    ] = None,
    text_column: TextColumn = None,
    k: Annotated[
        int | None,
        typer.Option("--k", "-k", help="Labels per text: 5, or as many as reach the threshold, if left out."),
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
    language: Annotated[
        str | None, typer.Option(help="Show labels in this language, where the run was trained with a vocabulary.")
    ] = None,
    form: Annotated[
        Literal["text", "jsonl", "tsv", "csv"] | None,
        typer.Option("--format", help="The form of the output; by the ending of --output if left out."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also why: parts of the score, words that carry it, training queries.")
    ] = False,
) -> None:
    """Predict the labels of a text or of every text of a file.

    Without a text or --input, the lines of stdin. Answers are in the order of the texts, in constant memory.

    Example: dexter predict runs/pydocs "inverse of a matrix" -k 3

    Example: dexter predict runs/pydocs --input queries.jsonl --output predictions.jsonl

    Example: dexter predict runs/pydocs --input articles.csv --text-column title+body --output labels.csv

    Example: dexter predict runs/pydocs "inverse of a matrix" --band tail --exclude numpy.linalg.inv

    Example: torchrun --nproc-per-node 4 -m dexter predict runs/pydocs --input 'part-*.jsonl' --output predictions/
    """
    if text is not None and input_path is not None:
        raise UsageError("give a text or --input, not both")
    if sum((threshold is not None, precision is not None, best_f1)) > 1:
        raise UsageError("give one of --threshold, --precision and --best-f1")
    with _no_collection():
        from dexter.predict.files import Query, form_of, is_pattern, predict_files, predict_texts, write_lines
        from dexter.predict.predictor import Predictor

    launch, many = read_launch(), input_path is not None and is_pattern(str(input_path))
    if many and output_path is None:
        raise UsageError(f"--input {str(input_path)!r} stands for many files: name a folder for theirs with --output")
    if not (many or launch.is_first):
        return
    written = form or ("jsonl" if many else form_of(output_path))
    queries: Iterator[Query] = iter(())
    if text is not None:
        queries = iter([Query("1", text)])
    elif not many:
        from dexter.predict.text_files import read_texts
        from dexter.progress import count_lines, track

        texts = read_texts(input_path, text_column=text_column)
        queries = track(texts, what="predict", total=count_lines(input_path))
    with _no_collection():
        predictor = Predictor.load(run, head=head, neighbours=neighbours, dial=dial, index=index, runtime=runtime)
    if precision is not None or best_f1:
        threshold = predictor.find_threshold(precision=precision)
        aim = "the best F1" if precision is None else f"precision {precision:g}"
        log.info(
            "labels with a probability of %.0f%% or more; together they had %s on validation", 100 * threshold, aim
        )
    filters = parse_filter(exclude, only, band)
    predictor.names(language)  # refuses an unknown language before anything is written
    filters.allowed_rows(predictor.labels)  # refuses unknown ids before anything is written
    if many and output_path is not None:
        predict_files(
            predictor,
            str(input_path),
            output_path,
            k=k,
            threshold=threshold,
            form=written,
            labels=filters,
            text_column=text_column,
            language=language,
            launch=launch,
        )
        return
    lines = predict_texts(
        predictor,
        queries,
        k=k,
        threshold=threshold,
        form=written,
        explain=explain,
        labels=filters,
        language=language,
    )
    write_lines(lines, output_path)


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
        bool, typer.Option("--insecure", help="Listen on a public address without an API key; needs --allow-host.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate (PEM), to answer over HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The private key of the certificate (PEM).")] = None,
    explanations: Annotated[bool, typer.Option(help="Say why a text has its labels, where a request asks.")] = True,
    training_texts: Annotated[bool, typer.Option(help="Show training and test texts.")] = True,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="One line on stderr per request.")] = False,
    log_format: Annotated[Literal["text", "json"], typer.Option(help="The form of a line of the log.")] = "text",
    runtime: RuntimeOption = "torch",
) -> None:
    """Serve runs over HTTP, with a page at /.

    It ends on SIGTERM or Ctrl-C. The environment variable DEXTER_API_KEY or the file of --keys has the keys.

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
        log_format=log_format,
        runtime=runtime,
    )
    serve_runs(name_runs(runs), settings)
