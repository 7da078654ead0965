"""Data sets made on this machine from what is installed on it: no download, the same result for the same input.

The task is "related items": queries and labels are the same kind of item, and a query's labels are the items it points
to. An item must not recommend itself, so each query's own label, if it has one, becomes a filter pair.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dexter.data.dataset import Dataset, Split, csr_of_rows
from dexter.errors import DataError, UsageError

NAMES = ("pydocs", "debian")
"""What `build` can make."""
TRAIN_FRACTION = 0.8


def build(name: str) -> Dataset:
    """Make the data set of that name.

    - `pydocs`: what an object of a scientific Python package does -> the objects its documentation points to.
    - `debian`: what a Debian package is -> the packages it relates to.
    """
    if name == "pydocs":
        from dexter.data.sources import pydocs

        return pydocs.build()
    if name == "debian":
        from dexter.data.sources import debian

        return debian.build()
    raise UsageError(f"no built-in data set is called {name!r}: choose one of {', '.join(NAMES)}")


@dataclass(frozen=True, kw_only=True)
class Item:
    """One query and the items it points to, some of which may be no labels."""

    uid: str
    """The item's identifier; as a label it has the same one."""
    text: str
    """The query text."""
    targets: tuple[str, ...]
    """Identifiers of the items it points to."""
    group: str
    """Items of one group are all in train or all in test."""


def dataset_from_items(
    items: Iterable[Item], *, label_texts: Mapping[str, str], name: str, source: Mapping[str, str]
) -> Dataset:
    """Split items by their groups, keep the labels that training queries have, drop the queries left without any."""
    ordered = sorted((item for item in items if item.targets), key=lambda item: item.uid)
    train_items = [item for item in ordered if in_train(item.group)]
    label_ids = sorted({target for item in train_items for target in item.targets})
    columns = {label_id: column for column, label_id in enumerate(label_ids)}
    test_items = [item for item in ordered if not in_train(item.group) and any(t in columns for t in item.targets)]
    if not train_items or not test_items:
        raise DataError(f"{name}: {len(ordered)} items with relations are too few to make a train and a test split")
    return Dataset(
        name=name,
        label_ids=label_ids,
        label_texts=[label_texts[label_id] for label_id in label_ids],
        train=_split(train_items, columns),
        test=_split(test_items, columns),
        source=source,
    )


def in_train(group: str) -> bool:
    """Whether a group is in the training split; its name alone decides, so that other items cannot change it."""
    digest = hashlib.sha1(group.encode("utf-8"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") < TRAIN_FRACTION * 2**64


def _split(items: Sequence[Item], columns: Mapping[str, int]) -> Split:
    targets = [sorted({columns[target] for target in item.targets if target in columns}) for item in items]
    own = [[columns[item.uid]] if item.uid in columns else [] for item in items]
    return Split(
        texts=[item.text for item in items],
        uids=[item.uid for item in items],
        relevance=csr_of_rows(targets, len(columns)),
        filtered=csr_of_rows(own, len(columns)),
    )
