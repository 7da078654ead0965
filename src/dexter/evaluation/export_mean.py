"""Export the static encoder of a run for sentence-transformers and model2vec, and measure how near it is.

Both average the fixed vectors of a text's tokens. Token weights are multiplied into the vectors; weights by position,
n-grams and the rows of whole label texts cannot be expressed and are left out. Without these the vectors are the run's
own. A transformer's model folder is a sentence-transformers folder already. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dexter.data import Dataset
from dexter.encoders.head_arrays import unit_rows
from dexter.encoders.static_arrays import StaticArrays
from dexter.errors import UsageError
from dexter.evaluation.intervals import Interval
from dexter.evaluation.report import compare, test_split
from dexter.evaluation.runs import predict_columns
from dexter.files import atomic_folder
from dexter.metrics import overfetch
from dexter.model.published import model_folder
from dexter.predict.predictor import Predictor

_NUM_TEXTS = 512
_RECALL_KS = (10, 100)


class RecallChange(NamedTuple):
    """Recall in percent before and after, and the interval of the difference."""

    before: float
    after: float
    difference: Interval


@dataclass(frozen=True, kw_only=True)
class MeanExport:
    """Result of `export_mean`: how near the exported vectors are to those of the run."""

    folder: str
    left_out: tuple[str, ...]
    """What the exported encoder does not have; empty if its vectors are those of the run."""
    num_texts: int
    mean_cosine: float
    lowest_cosine: float
    """Between the run's vector of a query and the exported one."""
    recall: dict[str, RecallChange]
    """Recall of test queries by cosines of encoder vectors alone; `after`: queries and labels encoded as exported."""
    data: str | None = None

    def render(self) -> str:
        """Format the result for a reader."""
        nearness = (
            f"cosine to the run's own vectors {self.mean_cosine:.4f} on average, {self.lowest_cosine:.4f} at least"
        )
        lines = [
            f"{self.folder}: loads in sentence-transformers and model2vec",
            f"without {', '.join(self.left_out)}: {nearness} ({self.num_texts:,} queries)"
            if self.left_out
            else f"the run's own vectors: {nearness} ({self.num_texts:,} queries)",
        ]
        lines += [
            f"{self.data}: {name} by the encoder alone {change.before:.2f}, as exported {change.after:.2f} "
            f"(difference {change.difference.low:+.2f} to {change.difference.high:+.2f})"
            for name, change in self.recall.items()
        ]
        return "\n".join(lines)


def export_mean(run: str | Path, out: str | Path, *, data: Dataset | None = None) -> MeanExport:
    """Write the static encoder of a run as a folder that sentence-transformers and model2vec load.

    Args:
        run: the run folder, or the model folder in it.
        out: the folder to make.
        data: its test queries measure how near the export is; without it, texts stored with the model.
    """
    folder = model_folder(run)
    predictor = Predictor.load(folder, index="exact")
    model, encoder = predictor.model, predictor.model.encoder
    if not isinstance(encoder, StaticArrays):
        raise UsageError(f"{folder} is a sentence-transformers folder already: SentenceTransformer({str(folder)!r})")
    if model.head.projection is not None:
        raise UsageError(f"{folder}: its head projects the mean of token vectors (head.projection): train without one")
    plain = encoder.plain()
    with atomic_folder(out) as temporary:
        plain.write_mean(temporary)
    texts = _sample_texts(predictor, data)
    own_ND = unit_rows(model.encode_queries(texts))
    cosines_N = (own_ND * plain.embed(plain.tokenize(texts, side="query"))).sum(axis=1)
    cosines_N = cosines_N[np.abs(own_ND).max(axis=1) > 0]
    return MeanExport(
        folder=str(out),
        left_out=_left_out(encoder),
        num_texts=len(cosines_N),
        mean_cosine=float(cosines_N.mean()) if len(cosines_N) else 1.0,
        lowest_cosine=float(cosines_N.min()) if len(cosines_N) else 1.0,
        recall={} if data is None else _compare_recall(predictor, plain, data),
        data=None if data is None else data.name,
    )


def _left_out(encoder: StaticArrays) -> tuple[str, ...]:
    settings = encoder.tokens.settings
    parts = {
        "weights by position": settings.positions,
        "n-grams": bool(settings.ngram_buckets),
        "vectors of whole label texts": bool(len(encoder.tokens.known_labels)),
    }
    return tuple(name for name, is_there in parts.items() if is_there)


def _compare_recall(predictor: Predictor, plain: StaticArrays, data: Dataset) -> dict[str, RecallChange]:
    """Compare recall with the run's encoder vectors alone, without priors and votes, and with the exported ones."""
    data = predictor.own_labels.filter_test(data)
    split, model = test_split(data), predictor.model
    ours = predictor.variant(predictor.choose(head="encoder", neighbours=False, dial=0.0))
    labels_LD = plain.embed(plain.tokenize(model.labels.texts, side="label"))
    theirs = ours.variant(model=replace(model, encoder=plain, representations_LD=labels_LD))
    ks = [k for k in _RECALL_KS if k <= data.num_labels] or [1]
    places = max(ks) + overfetch(split.filtered)
    before, after = (predict_columns(each, data, split, places) for each in (ours, theirs))
    found = compare(before, after, split, data.train.relevance, ks=ks, propensity=data.propensity)
    return {
        name: RecallChange(before=found.before[name], after=found.after[name], difference=found.differences[name])
        for name in (f"R@{k}" for k in ks)
    }


def _sample_texts(predictor: Predictor, data: Dataset | None) -> Sequence[str]:
    """Return test queries, else training queries that the model keeps, else label texts; at most 512."""
    texts = predictor.labels.texts if data is None else test_split(data).texts
    if data is None and predictor.has_training_queries:
        texts = predictor.sample_training_texts(_NUM_TEXTS)
    return texts[:: max(1, len(texts) // _NUM_TEXTS)][:_NUM_TEXTS]
