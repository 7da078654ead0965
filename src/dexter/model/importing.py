"""Make a model of a published encoder and the labels of a data set, without training."""

from __future__ import annotations

import logging
from pathlib import Path

from dexter.config import LossConfig
from dexter.data import Dataset
from dexter.encoders.folder import Pooling, read_settings
from dexter.encoders.head_arrays import DualArrays
from dexter.encoders.pretrained import locate
from dexter.encoders.transformer import MAX_LENGTH_QUERY, TransformerEncoder
from dexter.errors import UsageError
from dexter.model.labels import Labels
from dexter.model.model import Model

log = logging.getLogger("dexter")


def import_encoder(
    source: str | Path,
    dataset: Dataset,
    out: str | Path,
    *,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    max_length_query: int | None = None,
    max_length_label: int | None = None,
) -> Model:
    """Encode the labels of a data set with a published encoder, and write both as `out/model`.

    Args:
        source: a folder with safetensors weights, plain Hugging Face or sentence-transformers, or a name on the hub.
        dataset: gives the labels, and how often each occurs in training.
        out: the run folder to make.
        pooling: "cls" or "mean"; needed where the folder does not say.
        normalize: whether vectors have length 1; as the folder says, or else yes.
        max_length_query: tokens kept of a query; as the folder says, or else 128.
        max_length_label: tokens kept of a label; as the folder says, or else those of a query.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is not an empty folder: choose another --out")
    folder = locate(source)
    stored = read_settings(folder)
    if pooling is None and stored.pooling is None:
        raise UsageError(
            f"{folder} does not say how token vectors become one: give --pooling cls (as DEXML) or --pooling mean"
        )
    length = max_length_query or stored.max_length_query or stored.max_length or MAX_LENGTH_QUERY
    encoder = TransformerEncoder.from_pretrained(
        folder,
        device="cpu",
        pooling=pooling,
        normalize=normalize,
        max_length_query=length,
        max_length_label=max_length_label or stored.max_length_label or stored.max_length or length,
    ).eval()
    used = encoder.settings
    log.info(
        "%s pooling, vectors %s, at most %d tokens of a query and %d of a label",
        used.pooling,
        "of length 1" if used.normalize else "as they are",
        used.max_length_query,
        used.max_length_label,
    )
    model = Model(
        encoder=encoder,
        head=DualArrays(temperature=LossConfig().temperature),
        labels=Labels(dataset.label_ids, dataset.label_texts, dataset.label_counts),
        representations_LD=encoder.embed(encoder.tokenize(dataset.label_texts, side="label")),
        facts={"imported": str(source), "data": dataset.name, "text_fields": dataset.text_fields},
        names=dataset.names,
    )
    model.save(out / "model")
    return model
