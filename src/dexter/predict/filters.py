"""Which labels a prediction may return: those that a request leaves out, names or puts in bands of frequency."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dexter.errors import UsageError
from dexter.model.labels import Labels
from dexter.predict.calibration import in_band
from dexter.types import BANDS


class UnknownLabel(UsageError):
    """Raised when a filter names a label that the model does not have, or a band that does not exist."""


@dataclass(frozen=True, kw_only=True)
class LabelFilter:
    """The labels that may be returned; without arguments all of them."""

    exclude: tuple[str, ...] = ()
    """Ids of labels that are left out."""
    only: tuple[str, ...] | None = None
    """Ids of the labels that may be returned; None: any."""
    bands: tuple[str, ...] = ()
    """Bands of label frequency (frequent, torso, tail, unseen) of which labels may be returned; none given: any."""

    def __post_init__(self) -> None:
        for band in self.bands:
            if band not in BANDS:
                raise UnknownLabel(f"unknown band {band!r}: expected {', '.join(BANDS)}")

    @classmethod
    def of(
        cls, exclude: Iterable[str] | None = None, only: Iterable[str] | None = None, bands: Iterable[str] | None = None
    ) -> LabelFilter:
        """Make a filter from any lists of ids and bands; None filters nothing."""
        for name, ids in (("exclude", exclude), ("only", only), ("bands", bands)):
            if isinstance(ids, str):
                raise UsageError(f"{name} takes a list: write {name}=[{ids!r}]")
        return cls(exclude=tuple(exclude or ()), only=None if only is None else tuple(only), bands=tuple(bands or ()))

    @property
    def is_empty(self) -> bool:
        """Whether every label may be returned."""
        return not self.exclude and self.only is None and not self.bands

    def allowed_rows(self, labels: Labels) -> NDArray[np.int64] | None:
        """Return the rows of the labels that may be returned, ascending; None: all. Unknown ids are an error."""
        if self.is_empty:
            return None
        try:
            only, excluded = ((None if ids is None else labels.rows(ids)) for ids in (self.only, self.exclude))
        except UsageError as error:
            raise UnknownLabel(str(error)) from None
        allowed_L = np.full(len(labels.ids), self.only is None)
        if only is not None:
            allowed_L[only] = True
        if self.bands:
            allowed_L &= np.any([in_band(labels.counts, band) for band in self.bands], axis=0)
        allowed_L[excluded] = False
        return np.flatnonzero(allowed_L)
