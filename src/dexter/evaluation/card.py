"""The model card: README.md of a published model, as the Hugging Face hub shows it.

Everything in it is read off the run: the labels and how often they occur, the ranking and its probabilities as tuned,
and the result records of `dexter evaluate` that belong to this model. The page stands outside the model's manifest, and
is never read when a model is loaded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dexter import __version__
from dexter.config import Config, load_config
from dexter.encoders.static_arrays import StaticArrays
from dexter.errors import ModelError, UsageError, printable
from dexter.evaluation.runs import TABLE_COLUMNS
from dexter.files import read_object, read_regular, write_text
from dexter.model.published import model_folder
from dexter.predict.predictor import Predictor
from dexter.types import BANDS

CARD_FILE = "README.md"
_LICENSE = re.compile(r"[A-Za-z0-9][\w.-]{0,60}")
_KEPT_LICENSE = re.compile(rb'^license: "([\w.-]+)"$', re.MULTILINE)
_UNKNOWN = "unknown"
_MAX_CARD_BYTES = 2**20
_BAND_METRICS = ("P@1", "P@5", "R@10")


class ResultRecord(NamedTuple):
    """What a card shows of a result record."""

    data: str
    num_queries: int
    metrics: Mapping[str, float]
    intervals: Mapping[str, Mapping[str, float]]
    by_frequency: Mapping[str, Mapping[str, float]]
    calibration_error: Mapping[str, float]


def write_card(run: str | Path, *, predictor: Predictor | None = None, license_id: str | None = None) -> Path:
    """Write the card of a run into its model folder, in place of an older one; return its path.

    Args:
        run: the run folder, or the model folder in it.
        predictor: the run's predictor, as tuned, where there is one already.
        license_id: an identifier such as apache-2.0; if left out that of the present card, else "unknown".
    """
    if license_id is not None and not _LICENSE.fullmatch(license_id):
        raise UsageError(f"licence {license_id!r}: expected an identifier such as apache-2.0 or cc-by-4.0")
    folder = model_folder(run)
    path = folder / CARD_FILE
    predictor = predictor or Predictor.load(folder)
    text = make_card(
        predictor,
        name=folder.resolve().parent.name if folder.name == "model" else folder.resolve().name,
        records=list(_read_records(folder.parent / "results", predictor)),
        settings=_read_settings(folder.parent / "config.toml"),
        license_id=license_id or _present_license(path),
        is_sentence_transformers=(folder / "modules.json").exists(),
    )
    write_text(path, text)
    return path


def make_card(
    predictor: Predictor,
    *,
    name: str,
    records: list[ResultRecord],
    settings: Mapping[str, Any] | None = None,
    license_id: str = _UNKNOWN,
    is_sentence_transformers: bool = False,
) -> str:
    """Return a card in Markdown, with the hub's metadata in front.

    Args:
        predictor: the model and how it ranks.
        name: what the model is called.
        records: results on test queries.
        settings: the run's settings that differ from the defaults, by dotted name, where they are known.
        license_id: the licence's identifier.
        is_sentence_transformers: whether sentence-transformers loads the folder as it is.
    """
    parts = [
        _metadata(name, records, license_id),
        _summary(predictor, name),
        _use(is_sentence_transformers),
        _training_data(predictor),
        _results(predictor, records),
        _ranking(predictor, records),
        _settings(settings),
        _license(license_id),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metadata(name: str, records: list[ResultRecord], license_id: str) -> str:
    """Return the front matter; every value is JSON, which is YAML too and needs no writer of its own."""
    values: dict[str, Any] = {
        "library_name": "dexter",
        "license": license_id,
        "pipeline_tag": "text-classification",
        "tags": ["dexter", "extreme-multi-label-classification", "multi-label", "dual-encoder"],
    }
    results = [
        {
            "task": {"type": "text-classification", "name": "Extreme multi-label classification"},
            "dataset": {"type": _identifier(record.data), "name": record.data, "split": "test"},
            "metrics": [
                {"type": _identifier(metric), "name": metric, "value": round(record.metrics[metric], 2)}
                for metric in TABLE_COLUMNS
                if metric in record.metrics
            ],
        }
        for record in records
    ]
    if results:
        values["model-index"] = [{"name": name, "results": results}]
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in values.items()), "---"])


def _use(is_sentence_transformers: bool) -> str:
    elsewhere = (
        'The encoder alone: `SentenceTransformer("ORGANISATION/NAME")`.'
        if is_sentence_transformers
        else "The encoder alone: `dexter export RUN --to sentence-transformers --out FOLDER`, also for model2vec."
    )
    return f"""## Use
```python
import dexter

model = dexter.Predictor.load("ORGANISATION/NAME")  # or the path of this folder
for label in model.predict(["a text"], k=5)[0]:
    print(label.id, label.text, label.probability)
model.add_labels([("new", "the text of a label that did not exist before")])  # without training
```
`dexter serve FOLDER` answers over HTTP. {elsewhere}"""


def _training_data(predictor: Predictor) -> str:
    counts, facts = np.asarray(predictor.labels.counts), predictor.facts
    kept = predictor.model.training_queries
    rows = [
        f"| {band} | {_range(least, most)} | {int(((counts >= least) & (counts <= most)).sum()):,} |"
        for band, (least, most) in BANDS.items()
    ]
    trained = facts.get("train_queries")
    number = f"{trained:,} queries" if isinstance(trained, int) else "an unknown number of queries"
    texts = (
        "No training texts are in this folder."
        if kept is None or not len(kept)
        else f"**The first 300 characters of {len(kept):,} training texts are in this folder** "
        "(`dexter/training_queries.safetensors`), to explain predictions and to vote."
    )
    if kept is not None and kept.index is not None and kept.index.recall != 1.0:
        texts += f" Of the 20 nearest to a text, {kept.index.recall:.0%} are found (by a sample of them)."
    table = "\n".join(["| band | training queries of a label | labels |", "|---|---|---|", *rows])
    return f"## Training data\n`{_plain(facts.get('data'))}`: {number}. {texts}\n\n{table}"


def _results(predictor: Predictor, records: list[ResultRecord]) -> str:
    parts = [_result_table(record) for record in records]
    validation = {
        str(name): value
        for name, value in dict(predictor.facts.get("validation") or {}).items()
        if name in TABLE_COLUMNS
    }
    if not records and validation:
        figures = ", ".join(f"{name} {float(value):.2f}" for name, value in validation.items())
        parts = [f"On the validation queries, which chose the model: {figures}. No test queries were scored."]
    return "\n\n".join(["## Results", *parts]) if parts else ""


def _result_table(record: ResultRecord) -> str:
    lines = [
        f"`{_plain(record.data)}`, {record.num_queries:,} test queries, in percent, with 95% bootstrap intervals:",
        "",
        "| metric | value | interval |",
        "|---|---|---|",
    ]
    for metric in TABLE_COLUMNS:
        if metric in record.metrics:
            found = record.intervals.get(metric)
            interval = "" if found is None else f"{found['low']:.2f} to {found['high']:.2f}"
            lines.append(f"| {metric} | {record.metrics[metric]:.2f} | {interval} |")
    columns = [metric for metric in _BAND_METRICS if metric in record.metrics]
    lines += ["", f"| band | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for band in BANDS:
        found = record.by_frequency.get(band, {})
        if columns and all(math.isfinite(found.get(metric, math.nan)) for metric in columns):
            lines.append(f"| {band} | {' | '.join(f'{found[metric]:.2f}' for metric in columns)} |")
    return "\n".join(lines)


def _ranking(predictor: Predictor, records: list[ResultRecord]) -> str:
    calibration = predictor.calibration
    probabilities = "There are none: validation had too few correct labels to fit them."
    if calibration is not None:
        probabilities = (
            "Learned on the validation queries, for texts like these; the best F1 there is that of labels with "
            f"{calibration.threshold_for(None):.0%} or more."
        )
    errors = [
        f"Expected calibration error of the first places on `{_plain(record.data)}`: "
        f"{record.calibration_error['calibrated']:.2f} (softmax: {record.calibration_error['softmax']:.2f})."
        for record in records
        if {"calibrated", "softmax"} <= record.calibration_error.keys()
    ]
    chosen = predictor.scoring.describe()
    sentence = f"{chosen[:1].upper()}{chosen[1:]}."
    return "\n".join(["## Ranking and probabilities", sentence, probabilities, *errors])


def _settings(settings: Mapping[str, Any] | None) -> str:
    if not settings:
        return ""
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join(["## Settings", "Those that differ from the defaults, as resolved:", "```", *lines, "```"])


def _license(license_id: str) -> str:
    if license_id == _UNKNOWN:
        return (
            "## Licence\nNone was stated. The licence of the training data and of a pretrained encoder may bind this "
            "model: state one with `dexter card RUN --license ID`."
        )
    return f"## Licence\n{license_id}"


def _summary(predictor: Predictor, name: str) -> str:
    is_static = isinstance(predictor.model.encoder, StaticArrays)
    return (
        f"# {_plain(name)}\n\nRanks {len(predictor.labels.ids):,} labels for a text: a dual encoder with "
        f"{'a static encoder' if is_static else 'a transformer'} of {predictor.dimension} dimensions, made with dexter "
        f"{__version__}, recipe `{_plain(predictor.facts.get('recipe'))}`."
    )


def _read_records(folder: Path, predictor: Predictor) -> Iterator[ResultRecord]:
    """Yield the newest result on each data set of this model, ranked as it is tuned."""
    choice = json.loads(json.dumps(asdict(predictor.choice)))
    newest: dict[str, tuple[str, ResultRecord]] = {}
    for path in sorted(folder.glob("*.json")):
        # A record of another version, or one that was not written by dexter, is left out.
        with suppress(ModelError, KeyError, TypeError, ValueError, AttributeError):
            values = read_object(path)
            if values["model"]["sha256"] == predictor.fingerprint and values["scoring"] == choice:
                record, created = _to_record(values), str(values["created"])
                newest[record.data] = max(newest.get(record.data, ("", record)), (created, record), key=lambda e: e[0])
    yield from (record for _, record in newest.values())


def _to_record(values: Mapping[str, Any]) -> ResultRecord:
    return ResultRecord(
        data=str(values["data"]["name"]),
        num_queries=int(values["num_queries"]),
        metrics=_numbers(values["metrics"]),
        intervals={str(name): _numbers(each) for name, each in values["intervals"].items()},
        by_frequency={str(name): _numbers(each) for name, each in values["by_frequency"].items()},
        calibration_error=_numbers(values["calibration_error"]),
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items() if value is not None}


def _read_settings(path: Path) -> dict[str, Any] | None:
    """Return the settings of a run that differ from the defaults; None where the model has no run folder."""
    if not path.is_file():
        return None
    used, default = asdict(load_config(path)), asdict(Config())
    return {
        f"{section}.{name}": value
        for section, values in used.items()
        if isinstance(values, dict)
        for name, value in values.items()
        if value != default[section][name]
    }


def _present_license(path: Path) -> str:
    """Return the licence that the present card states, so that a new one keeps it."""
    with suppress(OSError):
        if found := _KEPT_LICENSE.search(read_regular(path, limit=_MAX_CARD_BYTES)):
            return found[1].decode()
    return _UNKNOWN


def _range(least: int, most: float) -> str:
    return f"{least} or more" if math.isinf(most) else str(least) if least == most else f"{least} to {int(most)}"


def _identifier(text: str) -> str:
    """Return a text as an identifier of lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower().replace("@", " at ")).strip("-") or _UNKNOWN


def _plain(value: object) -> str:
    """Return a name without the characters that mean something in Markdown or HTML."""
    return re.sub(r"[`|<>\[\]\\]", "", printable(str(value)))[:100]
