"""A scikit-learn classifier of texts: training, prediction and new labels behind `fit` and `predict`.

It owns a temporary folder with its model, which is removed together with it. A pickle has the bytes of that folder's
files, safetensors and JSON, and loading it makes the checks that loading any run makes.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, issparse

from dexter.data import Dataset, Split
from dexter.data.dataset import csr_of_rows
from dexter.errors import DataError, UsageError, require
from dexter.files import MANIFEST, make_folder, read_manifest
from dexter.model.store import DATABASE
from dexter.predict import Predictor
from dexter.recipes import DEFAULT_RECIPE

require("sklearn", extra="sklearn", purpose="DexterClassifier")

from sklearn.base import BaseEstimator, ClassifierMixin  # noqa: E402
from sklearn.utils import check_random_state  # noqa: E402
from sklearn.utils.multiclass import check_classification_targets  # noqa: E402
from sklearn.utils.validation import assert_all_finite, check_is_fitted, column_or_1d  # noqa: E402

LabelTexts = Mapping[Any, str] | Sequence[str]
"""The texts of labels: by label, or in the order of the columns of an indicator matrix."""
TargetForm = Literal["single", "lists", "dense", "sparse"]
"""What labels were given as: one per text, a list per text, or an indicator matrix."""
_FEWEST_TO_VALIDATE = 200
"""With fewer texts none are held out, unless the settings say so."""
_LARGEST_SEED = 2**31 - 1
_BLOCK_TEXTS = 1_024


class DexterClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Assigns labels to texts by a dual encoder; labels can be added without training.

    Args:
        recipe: name or TOML file of a recipe.
        settings: settings by dotted name, such as {"train.epochs": 5}; see `dexter train --set`.
        label_texts: what labels mean: texts by label, or in the order of the columns of an indicator matrix. Labels
            that `y` does not have can be predicted too. A label without a text is its own text.
        top_k: the number of labels in each row of `predict_proba`.
        threshold: `predict` returns labels that are right with at least this probability; None: the threshold with the
            best F1 on the texts that training held out.
        random_state: the seed of training; None: that of the recipe.

    Attributes:
        classes_: the labels, in the order of the columns of every matrix.
        predictor_: the `dexter.Predictor` that ranks them.
        threshold_: the threshold in use; None where there are no probabilities, because fewer than 200 texts were given
            or too few labels of the held-out texts were found. `predict` then returns as many labels for each text as
            the training texts have on average.
    """

    def __init__(
        self,
        recipe: str | Path = DEFAULT_RECIPE,
        *,
        settings: Mapping[str, Any] | None = None,
        label_texts: LabelTexts | None = None,
        top_k: int = 10,
        threshold: float | None = None,
        random_state: Any = None,
    ) -> None:
        self.recipe = recipe
        self.settings = settings
        self.label_texts = label_texts
        self.top_k = top_k
        self.threshold = threshold
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> DexterClassifier:
        """Train on texts and their labels.

        Args:
            X: the texts.
            y: a label for each text, a list of labels for each, or an indicator matrix of texts x labels, dense or
                sparse. scikit-learn's own splitters and metrics know the first and the last.
        """
        from dexter.training import train

        texts = self._texts(X, reset=True)
        target = _read_target(y, self.label_texts)
        if target.relevance.shape[0] != len(texts):
            raise DataError(f"got {len(texts)} texts and labels of {target.relevance.shape[0]}: one row each is needed")
        dataset = Dataset(
            name="texts",
            label_ids=[str(label) for label in target.classes],
            label_texts=target.label_texts,
            train=Split(texts, [f"row {row}" for row in range(len(texts))], target.relevance),
        )
        folder = _OwnFolder()
        train(dataset, recipe=self.recipe, out=folder.path, overrides=self._overrides(len(texts)))
        self.classes_ = target.classes
        self._form, self._dtype = target.form, target.dtype
        self._labels_per_text = max(1, round(target.relevance.nnz / len(texts)))
        self._open(folder)
        return self

    def predict(self, X: Any) -> Any:
        """Return the labels of each text, in the form in which `fit` was given them."""
        check_is_fitted(self)
        texts = self._texts(X)
        if self._form == "single":
            return self.classes_[self._scores(texts).argmax(axis=1)]
        limits = {"k": self._labels_per_text} if self.threshold_ is None else {"threshold": self.threshold_}
        found = self._top(texts, **limits)
        if self._form == "lists":
            return [self.classes_[row.indices].tolist() for row in found]
        indicator = csr_matrix((np.ones_like(found.data, self._dtype), found.indices, found.indptr), found.shape)
        return indicator if self._form == "sparse" else indicator.toarray()

    def predict_proba(self, X: Any) -> Any:
        """Return how likely labels are right: a CSR matrix of texts x labels with the `top_k` best labels of each.

        Where each text has one label: an array with the softmax of all scores, whose rows sum to one.
        """
        check_is_fitted(self)
        texts = self._texts(X)
        if self._form != "single":
            self.predictor_.find_threshold()  # Raises where there are no probabilities.
            return self._top(texts, k=self.top_k)
        scores_NL = self._scores(texts).astype(np.float64) / self.predictor_.model.head.temperature
        odds_NL = np.exp(scores_NL - scores_NL.max(axis=1, keepdims=True))
        return odds_NL / odds_NL.sum(axis=1, keepdims=True)

    def decision_function(self, X: Any) -> NDArray[np.float32]:
        """Return the score of every label as an array of texts x labels.

        Where each text has one of two labels: the score of the second less that of the first.
        """
        check_is_fitted(self)
        scores_NL = self._scores(self._texts(X))
        is_binary = self._form == "single" and len(self.classes_) == 2
        return scores_NL[:, 1] - scores_NL[:, 0] if is_binary else scores_NL

    def _scores(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the score of every label as an array of texts x labels, whatever the number of labels."""
        columns_L = self._columns(self.predictor_.labels.ids)
        scores_NL = np.full((len(texts), len(columns_L)), -np.inf, dtype=np.float32)
        for start in range(0, len(texts), _BLOCK_TEXTS):
            found = self.predictor_.top(texts[start : start + _BLOCK_TEXTS], k=len(columns_L))
            np.put_along_axis(scores_NL[start : start + _BLOCK_TEXTS], columns_L[found.ids], found.scores, axis=1)
        return scores_NL

    def add_labels(
        self, label_texts: LabelTexts, *, examples: Mapping[Any, Sequence[str]] | None = None
    ) -> DexterClassifier:
        """Add labels without training: they become the last of `classes_`, and columns of every matrix.

        Args:
            label_texts: a text for each new label; after an indicator matrix also a list, for the next columns.
            examples: texts that have a label, by label.
        """
        check_is_fitted(self)
        first = len(self.classes_)
        if not isinstance(label_texts, Mapping):
            if self._form in ("single", "lists"):
                raise UsageError("add_labels got a list of texts: give a text for each label, as {label: text}")
            label_texts = dict(enumerate(label_texts, start=first))
        elif self._form in ("dense", "sparse") and list(label_texts) != list(range(first, first + len(label_texts))):
            raise UsageError(f"new labels are the next columns: give a list of texts, or texts by column from {first}")
        by_id = {str(label): texts for label, texts in (examples or {}).items()}
        self.predictor_.add_labels([(str(label), text) for label, text in label_texts.items()], examples=by_id)
        self.classes_ = np.concatenate([self.classes_, np.array(list(label_texts))])
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = tags.input_tags.one_d_array = True
        tags.input_tags.two_d_array = False
        tags.classifier_tags.multi_label = True
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "predictor_" in state:
            del state["predictor_"]
            state["_files"] = _read_files(state.pop("_folder").model)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        files = state.pop("_files", None)
        super().__setstate__(state)
        if files is not None:
            folder = _OwnFolder()
            _write_files(folder.model, files)
            self._open(folder)

    def _open(self, folder: _OwnFolder) -> None:
        """Load the model of a folder and keep the folder as long as the model."""
        self._folder = folder
        self.predictor_ = Predictor.load(folder.model, persistent=True)
        has_probabilities = self.predictor_.calibration is not None
        self.threshold_ = self.threshold
        if self.threshold is None and has_probabilities:
            self.threshold_ = self.predictor_.find_threshold()

    def _overrides(self, num_texts: int) -> dict[str, Any]:
        overrides: dict[str, Any] = {} if num_texts >= _FEWEST_TO_VALIDATE else {"validation.fraction": 0.0}
        if self.random_state is not None:
            is_seed = isinstance(self.random_state, int | np.integer)
            drawn = self.random_state if is_seed else check_random_state(self.random_state).randint(_LARGEST_SEED)
            overrides["seed"] = int(drawn)
        return overrides | dict(self.settings or {})

    def _texts(self, X: Any, *, reset: bool = False) -> list[str]:
        """Return the texts as a list of strings; `reset` is for classes that read texts off something else."""
        if isinstance(X, str) or np.ndim(X) == 0 or issparse(X):
            raise DataError(f"X is a {type(X).__name__}: expected a list or another one-dimensional array of texts")
        texts = list(X) if np.ndim(X) == 1 else []
        if not texts:
            raise DataError(f"X has the shape {np.shape(X)}: expected one or more texts, in one dimension")
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise DataError(f"row {row} of X is a {type(text).__name__}: expected a text")
        return [str(text) for text in texts]

    def _top(self, texts: list[str], **limits: Any) -> csr_matrix:
        """Return the best labels of each text as a matrix of probabilities, or of ones where there are none."""
        columns, values, ends = [], [], [0]
        for predicted in self.predictor_.predict_stream(texts, **limits):
            columns += [label.id for label in predicted]
            values += [1.0 if label.probability is None else label.probability for label in predicted]
            ends.append(len(columns))
        found = csr_matrix((values, self._columns(columns), ends), shape=(len(texts), len(self.classes_)))
        found.sort_indices()
        return found

    def _columns(self, label_ids: Iterable[str]) -> NDArray[np.int64]:
        """Return the columns of labels given by their ids."""
        column_of = {str(label): column for column, label in enumerate(self.classes_)}
        return np.array([column_of[label_id] for label_id in label_ids], dtype=np.int64)


class _OwnFolder:
    """A temporary folder that is removed with the last reference to it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="dexter-"))
        self.model = self.path / "model"
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


class _Target(NamedTuple):
    """Labels as training takes them, and how they were given."""

    form: TargetForm
    dtype: Any
    """Of an indicator matrix."""
    classes: NDArray[Any]
    label_texts: list[str]
    relevance: csr_matrix


def _read_target(y: Any, label_texts: LabelTexts | None) -> _Target:
    """Read labels given in any of the forms."""
    if y is None:
        raise DataError("this classifier requires y to be passed, but the target y is None: give the texts' labels")
    if not issparse(y) and hasattr(y, "__array__"):
        y = np.asarray(y)
    form = _form_of(y)
    if form in ("dense", "sparse"):
        indicator = csr_matrix(y, copy=True)
        check_classification_targets(indicator)
        if not np.isin(indicator.data, (0, 1)).all():
            raise DataError("an indicator matrix has the values 0 and 1 only: give it one column for each label")
        indicator.eliminate_zeros()
        texts = _texts_of_columns(label_texts, indicator.shape[1])
        return _Target(form, indicator.dtype, np.arange(len(texts)), texts, indicator)
    if label_texts is not None and not isinstance(label_texts, Mapping):
        raise UsageError("label_texts is a list, y has labels: give texts by label, or y as an indicator matrix")
    texts_of: Mapping[Any, str] = label_texts or {}
    if form == "single":
        rows_of_one = column_or_1d(y, warn=True)
        assert_all_finite(rows_of_one, input_name="y")
        check_classification_targets(rows_of_one)
        rows = [[label] for label in rows_of_one]
    else:
        rows = [list(dict.fromkeys(labels)) for labels in y]
    classes = _sorted_labels({label for row in rows for label in row} | set(texts_of))
    column_of = {label: column for column, label in enumerate(classes.tolist())}
    relevance = csr_of_rows([[column_of[label] for label in row] for row in rows], len(classes))
    return _Target(form, None, classes, [texts_of.get(label, str(label)) for label in classes.tolist()], relevance)


def _form_of(y: Any) -> TargetForm:
    if issparse(y):
        return "sparse"
    first: Any = next(iter(y), None)
    if isinstance(first, str) or (np.ndim(first) == 0 and not isinstance(first, set | frozenset)):
        return "single"
    if isinstance(y, np.ndarray) and y.ndim == 2:
        return "dense" if y.shape[1] > 1 else "single"
    lengths = {len(row) for row in y}
    is_indicator = len(lengths) == 1 and max(lengths) > 1 and {each for row in y for each in row} <= {0, 1}
    return "dense" if is_indicator else "lists"


def _texts_of_columns(label_texts: LabelTexts | None, num_columns: int) -> list[str]:
    """Return a text for each column; a mapping may lack some, a list may not."""
    if label_texts is None or isinstance(label_texts, Mapping):
        texts_of = label_texts or {}
        return [texts_of.get(column, str(column)) for column in range(num_columns)]
    if len(label_texts) != num_columns:
        raise DataError(f"got {len(label_texts)} label texts for {num_columns} columns of y: one each is needed")
    return list(label_texts)


def _sorted_labels(labels: set[Any]) -> NDArray[Any]:
    try:
        return np.array(sorted(labels))
    except TypeError:
        raise DataError("labels of several types cannot be sorted: give all of them as texts, or as numbers") from None


def _read_files(model: Path) -> dict[str, bytes]:
    """Return the files of a model by name: those of its manifest, and its changed labels."""
    names = [MANIFEST, *read_manifest(model), DATABASE]
    return {name: (model / name).read_bytes() for name in names if (model / name).exists()}


def _write_files(model: Path, files: Mapping[str, bytes]) -> None:
    """Write what `_read_files` returned; only names that a manifest may list are written."""
    make_folder(model)
    (model / MANIFEST).write_bytes(files[MANIFEST])
    for name in [*read_manifest(model), DATABASE]:
        if name in files:
            make_folder((model / name).parent)
            (model / name).write_bytes(files[name])
