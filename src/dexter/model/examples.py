"""Examples: texts that people labelled after training, which vote at once (`dexter.predict.neighbours`).

They are stored with the label changes (`dexter.model.label_file`), by the ids of their labels. A label that takes the
id of a removed one starts anew: examples that are older do not vote for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dexter.encoders.head_arrays import unit_rows
from dexter.errors import UsageError
from dexter.index import ExactIndex
from dexter.model.label_file import Example
from dexter.model.labels import Labels
from dexter.model.model import Model
from dexter.model.training_queries import PackedTexts, TrainingQueries

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

    from dexter.data import Dataset, Split


def make_example(text: str, labels: Sequence[str], *, example_id: str | None = None) -> Example:
    """Return an example of labels given by id; without an id of its own, the same text always has the same one."""
    if isinstance(labels, str) or not all(isinstance(label, str) for label in (text, *labels)):
        raise UsageError("an example is a text and a list of label ids: write (text, [label id, ...])")
    if not text.strip() or not labels:
        raise UsageError(f"example {text[:60]!r}: a text that is not empty, and at least one label, are needed")
    known = example_id or hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    if any("\ud800" <= character <= "\udfff" for character in known + text):
        raise UsageError(f"example {known!a}: neither id nor text may hold half a surrogate pair")
    return Example(known, text, tuple(dict.fromkeys(labels)))


def find_labels(examples: Iterable[Example], labels: Labels) -> list[Example]:
    """Return the examples with ids in place of label texts, where a name is no id but the text of just one label."""
    ids, id_by_text = set(labels.ids), dict[str, str | None]()
    examples = list(examples)
    if any(label not in ids for example in examples for label in example.labels):
        for label_id, text in zip(labels.ids, labels.texts, strict=True):
            id_by_text[text] = None if text in id_by_text else label_id
    return [
        example._replace(
            labels=tuple(
                dict.fromkeys(each if each in ids else id_by_text.get(each) or each for each in example.labels)
            )
        )
        for example in examples
    ]


def lacking_labels(examples: Iterable[Example], labels: Labels) -> list[str]:
    """Return the labels of examples that are not among the labels, each once."""
    known = set(labels.ids)
    return list(dict.fromkeys(label for example in examples for label in example.labels if label not in known))


def encode_examples(model: Model, examples: Sequence[Example], *, version: int) -> list[Example]:
    """Return examples with the encoder's output for their texts; `version` is the version that they come with."""
    if not examples:
        return []
    vectors_ND = model.encode_queries([example.text or "" for example in examples])
    return [
        example._replace(representation_D=vector_D, version=version)
        for example, vector_D in zip(examples, vectors_ND, strict=True)
    ]


def with_examples(model: Model, examples: Sequence[Example], added_in: Mapping[str, int]) -> Model:
    """Return the model with these examples in place of others; `added_in` has the versions of added labels by id."""
    vectors = [example.representation_D for example in examples if example.representation_D is not None]
    if not vectors:
        return model if model.examples is None else replace(model, examples=None)
    row_by_id = {label_id: row for row, label_id in enumerate(model.labels.ids)}
    rows = [
        [
            row_by_id[label]
            for label in example.labels
            if added_in.get(label, 0) <= example.version and label in row_by_id
        ]
        for example in examples
    ]
    kept = TrainingQueries(
        index=ExactIndex(unit_rows(np.stack(vectors)), model.device),
        label_starts=np.cumsum([0, *map(len, rows)]),
        label_rows=np.array([label for labels in rows for label in labels], dtype=np.int32),
        num_labels=len(row_by_id),
        uids=PackedTexts.of(example.id for example in examples),
        texts=PackedTexts.of(example.text or "" for example in examples),
    )
    return replace(model, examples=kept)


def join_examples(examples: Sequence[Example], labels: Labels, data: Dataset | None = None) -> Dataset:
    """Return examples as a data set with these labels; or `data` with the examples in its training split.

    An example replaces training queries with the same text. Labels of `data` come first.
    """
    from dexter.data.dataset import Dataset, Split, csr_of_rows

    if not examples:
        raise UsageError("the run has no examples: add some with `dexter examples add`, or on the page")
    texts = dict(zip(labels.ids, labels.texts, strict=True))
    if data is not None:
        used = {label: texts[label] for example in examples for label in example.labels if label in texts}
        texts = used | dict(zip(data.label_ids, data.label_texts, strict=True))
        texts = {label: texts[label] for label in (*data.label_ids, *(each for each in used if each in texts))}
    columns = {label: column for column, label in enumerate(texts)}
    rows = [[columns[label] for label in example.labels if label in columns] for example in examples]
    texts_of_examples, ids_of_examples = [each.text or "" for each in examples], [each.id for each in examples]
    train = Split(texts_of_examples, ids_of_examples, csr_of_rows(rows, len(columns)))
    ids, shown = list(texts), list(texts.values())
    if data is None:
        return Dataset(name="examples", label_texts=shown, label_ids=ids, train=train)
    replaced = set(train.texts)
    kept = data.train.select([row for row, text in enumerate(data.train.texts) if text not in replaced])
    joined = _join(_widen(kept, len(ids)), train)
    test = None if data.test is None else _widen(data.test, len(ids))
    return replace(data, label_texts=shown, label_ids=ids, train=joined, test=test)


def _widen(split: Split, num_labels: int) -> Split:
    """Return a split with columns for more labels, which no query has."""

    def widen(matrix: csr_matrix) -> csr_matrix:
        return type(matrix)((matrix.data, matrix.indices, matrix.indptr), shape=(len(split), num_labels))

    filtered = None if split.filtered is None else widen(split.filtered)
    return replace(split, relevance=widen(split.relevance), filtered=filtered)


def _join(first: Split, second: Split) -> Split:
    from scipy.sparse import vstack

    from dexter.data.dataset import csr_of_rows

    filtered = first.filtered
    if filtered is not None:
        filtered = vstack([filtered, csr_of_rows([[]] * len(second), second.relevance.shape[1])]).tocsr()
    relevance = vstack([first.relevance, second.relevance]).tocsr()
    return replace(
        first,
        texts=[*first.texts, *second.texts],
        uids=[*first.uids, *second.uids],
        relevance=relevance,
        filtered=filtered,
    )
