"""The verb that uses a run: predict."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

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
    parse_head,
    parse_index,
    parse_runtime,
)
from dexter.errors import UsageError
from dexter.processes import read_launch

log = logging.getLogger("dexter")


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
    language: Annotated[
        str | None, typer.Option(help="Show labels in this language, where the run was trained with a vocabulary.")
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", help="text, jsonl, tsv or csv; by the ending of --output if left out.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also why: parts of the score, words that carry it, training queries.")
    ] = False,
) -> None:
    """The best labels of a text, of every line of a file, or of stdin; in order, in constant memory.

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
    from dexter.predict.files import Query, form_of, is_pattern, predict_files, predict_texts, write_lines
    from dexter.predict.predictor import Predictor

    launch, many = read_launch(), input_path is not None and is_pattern(str(input_path))
    if many and output_path is None:
        raise UsageError(f"--input {str(input_path)!r} stands for many files: name a folder for theirs with --output")
    if not (many or launch.is_first):
        return
    if not many:
        form = form or form_of(output_path)
    queries: Iterator[Query] = iter(())
    if text is not None:
        queries = iter([Query("1", text)])
    elif not many:
        from dexter.predict.text_files import read_texts
        from dexter.progress import count_lines, track

        texts = read_texts(input_path, text_column=text_column)
        queries = track(texts, what="predict", total=count_lines(input_path))
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
        aim = "the best F1" if precision is None else f"precision {precision:g} taken together"
        log.info("labels of at least %.0f%% are shown: on validation these had %s", 100 * threshold, aim)
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
            form=form or "jsonl",
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
        form=form or "text",
        explain=explain,
        labels=filters,
        language=language,
    )
    write_lines(lines, output_path)
