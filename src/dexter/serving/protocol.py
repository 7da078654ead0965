"""JSON of requests and answers. Unknown fields of a request are refused, so that a misspelt one is noticed.

A list is refused at its first bad element: an error object for each of a million would take seconds and gigabytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from dexter.predict import Duplicate, LabelEntry, Neighbour, SimilarLabel, Word
from dexter.types import HeadName

RunName = Annotated[str | None, Field(max_length=64, description="Name of the run; the first one if left out.")]


class RequestModel(BaseModel):
    """Base of requests and their parts."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


LabelId = Annotated[str, Field(max_length=1_000)]
LabelIds = Annotated[list[LabelId], Field(max_length=10_000, fail_fast=True)]
Band = Literal["frequent", "torso", "tail", "unseen"]


class TextInput(RequestModel):
    """A text with an id, which is returned with its labels; the label of this id is not, if the run excludes it."""

    id: str = Field(max_length=1_000)
    text: str


class PredictRequest(RequestModel):
    """Texts to label."""

    inputs: str | Annotated[list[str | TextInput], Field(max_length=1_000, fail_fast=True)] = Field(
        description="A text, or a list of texts or of {id, text}."
    )
    id: LabelId | None = Field(
        default=None, description="Id of a single text; its own label is left out if the run leaves own labels out."
    )
    k: int | None = Field(
        default=None, ge=1, description="Most labels per text; if left out 5, or 100 with a threshold."
    )
    threshold: float | None = Field(
        default=None, gt=0.0, le=1.0, description="Only labels with at least this probability."
    )
    exclude: LabelIds = Field(default_factory=list, description="Ids of labels that are not returned.")
    only: LabelIds | None = Field(default=None, description="Ids of the labels that may be returned; if left out, any.")
    bands: Annotated[list[Band], Field(fail_fast=True)] = Field(
        default_factory=list, max_length=4, description="Only labels of these bands of frequency."
    )
    head: HeadName | None = Field(default=None, description="The head that ranks labels; if left out, the run's own.")
    neighbours: bool | None = Field(default=None, description="Whether training texts vote; if left out, as tuned.")
    dial: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Weight of label frequency, 0: more rare labels; if left out, as tuned.",
    )
    language: Annotated[str, Field(max_length=100)] | None = Field(
        default=None, description="Language of the labels' texts, where the run was trained with a vocabulary."
    )
    explain: bool = Field(default=False, description="Explain each label; for up to 4 texts and 20 labels of each.")
    model: RunName = None


class LabelExplanation(BaseModel):
    """Explanation of a label of a text."""

    parts: dict[str, float] = Field(description="Parts that add up to the score.")
    words: list[Word]
    neighbours: list[Neighbour] = Field(description="Nearest training texts with the label, if they are kept.")
    count: int = Field(description="Number of training texts of the label.")
    band: str = Field(description="Frequency band of the label: frequent, torso, tail or unseen.")


@dataclass(slots=True, kw_only=True)
class RankedLabel:
    """A label of a text."""

    id: str
    text: str
    score: float
    probability: Annotated[
        float | None,
        Field(description="Probability that it is right; null unless labels are ranked as the run was tuned."),
    ] = None
    rank: int
    explanation: Annotated[
        LabelExplanation | None, Field(description="Given with `explain`; null if the label was removed meanwhile.")
    ] = None


@dataclass(slots=True, kw_only=True)
class LabelledText:
    """A text's labels, best first."""

    id: str | None = None
    labels: list[RankedLabel]
    truncated: Annotated[bool, Field(description="Whether only the beginning of the text was read.")]


@dataclass(slots=True, kw_only=True)
class PredictResponse:
    """The labels of each text, in order, all of one version of the labels.

    Made for every request, and so of dataclasses, which are not checked.
    """

    model: str
    version: Annotated[int, Field(description="Version of the labels; every change makes a new one.")]
    results: list[LabelledText]
    inputs_left_out: Annotated[int, Field(description="Number of texts beyond the limit, which have no result.")] = 0


PREDICT_RESPONSE = TypeAdapter(PredictResponse)


class NewLabel(RequestModel):
    """The id and text of a label."""

    id: str = Field(min_length=1, max_length=1_000)
    text: str = Field(min_length=1, max_length=20_000, pattern=r"\S", description="Not only blanks.")


class LabelWithExamples(NewLabel):
    """A label to add, and texts that have it."""

    examples: list[Annotated[str, Field(max_length=20_000, pattern=r"\S")]] = Field(
        default=[], max_length=100, description="Texts that have the label; it is made from them too, without training."
    )


class AddLabelsRequest(RequestModel):
    """Labels to add: all of them or none."""

    labels: list[LabelWithExamples] = Field(min_length=1, max_length=1_000, fail_fast=True)
    reuse_ids: bool = Field(default=False, description="Allow ids of removed labels.")
    model: RunName = None


class NewExample(RequestModel):
    """A text with its labels."""

    id: str | None = Field(
        default=None, min_length=1, max_length=1_000, description="If left out, the same text has the same id."
    )
    text: str = Field(min_length=1, max_length=1_000_000, pattern=r"\S")
    labels: list[LabelId] = Field(
        min_length=1, max_length=1_000, fail_fast=True, description="Ids of labels, or texts that one label has."
    )


class AddExamplesRequest(RequestModel):
    """Texts with their labels to add: all of them or none. One with a known id replaces that."""

    examples: list[NewExample] = Field(min_length=1, max_length=1_000, fail_fast=True)
    add_labels: bool = Field(default=False, description="Add labels that the run lacks.")
    model: RunName = None


class ExamplesChanged(BaseModel):
    """Result of a change of examples."""

    model: str
    version: int
    total: int = Field(description="Number of examples now.")


class ListedExample(BaseModel):
    """An example."""

    id: str
    text: str
    labels: list[str]


class ExamplesPage(BaseModel):
    """A page of examples, oldest first."""

    model: str
    version: int
    total: int
    examples: list[ListedExample]
    next: int | None = Field(description="Cursor of the next page; null on the last.")


class RenameLabelsRequest(RequestModel):
    """Labels with new texts: all of them are renamed or none."""

    labels: list[NewLabel] = Field(min_length=1, max_length=1_000, fail_fast=True)
    keep_vectors: bool = Field(default=False, description="Change only the texts that are shown.")
    model: RunName = None


class SimilarLabels(BaseModel):
    """The labels most similar to a text, nearest first."""

    model: str
    version: int
    labels: list[SimilarLabel]


class LabelsChanged(BaseModel):
    """Result of a change of labels."""

    model: str
    version: int
    duplicates: list[Duplicate]


class UndoRequest(RequestModel):
    """An edit of the labels to undo."""

    edit: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        le=2**31,
        description="Its version; if left out, the last one that was not undone.",
    )
    model: RunName = None


class PastEdit(BaseModel):
    """An edit of the labels."""

    version: int = Field(description="Version of the labels that it led to.")
    time: str = Field(description="When, in UTC.")
    author: str | None = Field(description="Name of the API key, or of whoever else made it.")
    added: int
    renamed: int
    removed: int
    undoes: int | None = Field(description="The edit that it undid; 0 if it restored a backup.")
    is_undone: bool
    examples_added: int
    examples_removed: int


class LabelsHistory(BaseModel):
    """Edits of the labels, newest first."""

    model: str
    version: int
    edits: list[PastEdit]


class LabelsPage(BaseModel):
    """A page of labels, in the order of the run."""

    model: str
    version: int
    total: int = Field(description="Number of labels that match.")
    labels: list[LabelEntry]
    next: int | None = Field(description="Cursor of the next page; null on the last.")


class EmbeddingsRequest(RequestModel):
    """Texts to embed; the fields are those of OpenAI's API."""

    input: str | Annotated[list[str], Field(max_length=1_000, fail_fast=True)]
    model: RunName = None
    encoding_format: Literal["float", "base64"] = "float"
    side: Literal["query", "label"] = Field(
        default="query", description="Embed as a text to label, or as a label's text."
    )
    user: str | None = Field(default=None, max_length=1_000, description="Accepted and ignored.")


class Embedding(BaseModel):
    """The embedding of one text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(description="Numbers; with base64, their little-endian float32 bytes.")


class Usage(BaseModel):
    """Number of tokens read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """The embeddings of the texts, in order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage
    inputs_left_out: int = 0


class Readiness(BaseModel):
    """Whether requests are answered."""

    status: Literal["ready", "degraded"]
    problems: list[str] = Field(description="What does not work; texts are answered nevertheless.")


class FieldError(BaseModel):
    """An error in a field of the request."""

    at: str
    message: str


class ProblemDetails(BaseModel):
    """Problem details (RFC 9457): why a request has no answer."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    request_id: str | None
    errors: list[FieldError] = Field(default=[], description="Errors of single fields.")
