"""The verbs that prepare a run for use elsewhere: index, export, card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dexter.cli.options import AS_GUESSED, Head, Json, ReadOptions, TextColumn, echo_json, reads_data
from dexter.errors import UsageError

if TYPE_CHECKING:
    from dexter.evaluation.export import ExportReport
    from dexter.evaluation.export_mean import MeanExport


def index_command(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    backend: Annotated[
        str | None, typer.Option(help="exact, pq, hnsw, pgvector or qdrant; the number of labels decides if left out.")
    ] = None,
    queries: Annotated[
        Path | None, typer.Option(help="Texts to measure recall on, as for predict --input; label texts if left out.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Address of the database; DEXTER_INDEX_URL if left out. It is not stored.")
    ] = None,
    text_column: TextColumn = None,
    head: Head = None,
    as_json: Json = False,
) -> None:
    """Make the index that predict and evaluate search.

    The recall of an approximate one is measured, and the index refused below 0.98.

    Example: dexter index runs/pydocs --backend pq
    """
    from dataclasses import asdict
    from itertools import islice

    from dexter.model.published import model_folder
    from dexter.predict.predictor import Predictor
    from dexter.predict.run_index import build_run_index, describe
    from dexter.predict.text_files import read_texts

    texts = (
        None if queries is None else [query.text for query in islice(read_texts(queries, text_column=text_column), 512)]
    )
    predictor = Predictor.load(run, head=head, index="exact")
    report = build_run_index(
        predictor.model, model_folder(run), head=predictor.choice.head, backend=backend, queries=texts, url=url
    )
    echo_json(asdict(report)) if as_json else typer.echo(describe(report))


@reads_data
def export(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    to: Annotated[
        Literal["onnx", "sentence-transformers"], typer.Option(help="model2vec reads sentence-transformers too.")
    ] = "onnx",
    out: Annotated[Path | None, typer.Option(help="With --to sentence-transformers: the folder to make.")] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Weights in 8 bits: faster, not equal; needs --data to measure the loss.")
    ] = False,
    data: Annotated[
        str | None, typer.Option(help="A data set whose test queries it is checked on; the model's own if left out.")
    ] = None,
    reading: ReadOptions = AS_GUESSED,
    as_json: Json = False,
) -> None:
    """Write a run's encoder for other programs.

    ONNX: a transformer's query encoder, checked against torch, for --runtime onnx. sentence-transformers: a static
    encoder as a mean of token vectors, with the measured distance to the run's own.

    Example: dexter export runs/pydocs

    Example: dexter export runs/pydocs --int8 --data data/pydocs

    Example: dexter export runs/pydocs --to sentence-transformers --out encoder --data data/pydocs
    """
    from dataclasses import asdict

    if (to == "onnx") != (out is None) or (int8 and out is not None):
        raise UsageError("--out belongs to --to sentence-transformers, --int8 to --to onnx")
    dataset = None if data is None else reading.load(data)
    report: ExportReport | MeanExport
    if out is None:
        from dexter.evaluation.export import export_run

        report = export_run(run, int8=int8, data=dataset)
    else:
        from dexter.evaluation.export_mean import export_mean

        report = export_mean(run, out, data=dataset)
    echo_json(asdict(report)) if as_json else typer.echo(report.render())


def card(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    license_id: Annotated[
        str | None, typer.Option("--license", help="Its identifier, such as cc-by-4.0; kept by later cards.")
    ] = None,
) -> None:
    """Write the model card of a run.

    README.md of the model folder: data, figures, probabilities, use. `dexter evaluate` writes it too.

    Example: dexter card runs/pydocs --license apache-2.0
    """
    from dexter.evaluation.card import write_card

    typer.echo(write_card(run, license_id=license_id))
