"""What requests and answers look like on the wire. Unknown fields are refused, so that a typing error is noticed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.responses import Response

from dexter.types import HeadName


def _whole(text: str) -> str:
    """JSON can spell half a surrogate pair, which no answer could repeat."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair is not text") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]
RunName = Annotated[str | None, Field(max_length=64, description="The run to ask; the first one if left out.")]


class Wire(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class TextInput(Wire):
    """A text with an id that comes back with its labels."""

    id: Text = Field(max_length=1_000)
    text: Text


class PredictRequest(Wire):
    """Texts to label."""

    inputs: Text | list[Text | TextInput] = Field(description="A text, or a list of texts or of {id, text}.")
    k: int | None = Field(
        default=None, ge=1, description="Labels per text at most; 5 if left out, or 100 where a threshold is given."
    )
    threshold: float | None = Field(
        default=None, gt=0.0, le=1.0, description="Only labels that are right with at least this probability."
    )
    head: HeadName | None = Field(default=None, description="What ranks the labels; the run's own choice if left out.")
    neighbours: bool | None = Field(default=None, description="Whether training texts vote; as tuned if left out.")
    dial: float | None = Field(
        default=None, ge=0.0, le=1.0, description="Weight of label frequency, 0: rare labels up; as tuned if left out."
    )
    explain: bool = Field(default=False, description="Say why each label: for up to 4 texts and 20 labels of each.")
    model: RunName = None


class WordWeight(BaseModel):
    """A word of the text, where it stands, and what the score loses without it."""

    text: str
    start: int
    end: int
    weight: float


class NearText(BaseModel):
    """A training text near the text; only its beginning is known."""

    id: str
    text: str
    similarity: float
    labels: list[str]


class Why(BaseModel):
    """Why a text got a label."""

    parts: dict[str, float] = Field(description="What adds up to the score.")
    words: list[WordWeight]
    neighbours: list[NearText] = Field(description="Training texts that have the label, where the run keeps them.")
    count: int = Field(description="Training texts of the label.")
    band: str = Field(description="How frequent the label is: frequent, torso, tail or unseen.")


class RankedLabel(BaseModel):
    """A label for a text."""

    id: str
    text: str
    score: float
    probability: float | None = Field(
        default=None, description="How likely it is right; null where labels are not ranked as the run was tuned."
    )
    rank: int
    why: Why | None = Field(default=None, description="With `explain`; null where the label was removed meanwhile.")


class LabelledText(BaseModel):
    """The labels of a text, best first."""

    id: str | None = None
    labels: list[RankedLabel]
    truncated: bool = Field(description="Whether only the beginning of the text was read.")


class PredictResponse(BaseModel):
    """The labels of each text, in order, all of one version of the labels."""

    model: str
    version: int = Field(description="Which version of the labels these are; every edit makes a new one.")
    results: list[LabelledText]
    inputs_left_out: int = Field(default=0, description="Texts beyond the limit, which have no result.")


class NewLabel(Wire):
    """A label to add."""

    id: Text = Field(min_length=1, max_length=1_000)
    text: Text = Field(min_length=1, max_length=20_000, pattern=r"\S", description="Not only blanks.")


class AddLabelsRequest(Wire):
    """Labels to add; either all of them are added or none."""

    labels: list[NewLabel] = Field(min_length=1, max_length=1_000)
    reuse_ids: bool = Field(default=False, description="Allow ids of labels that were removed.")
    model: RunName = None


class RenameLabelsRequest(Wire):
    """Labels with their new texts; either all of them are renamed or none."""

    labels: list[NewLabel] = Field(min_length=1, max_length=1_000)
    keep_vectors: bool = Field(default=False, description="Change what is shown; find them by their old texts.")
    model: RunName = None


class NearLabel(BaseModel):
    """A label that means nearly the same."""

    id: str
    text: str
    similarity: float


class SimilarLabels(BaseModel):
    """Labels like a text, nearest first."""

    model: str
    version: int
    labels: list[NearLabel]


class Resemblance(BaseModel):
    """A new label that looks like labels there were already."""

    id: str
    resembles: list[NearLabel]


class LabelsChanged(BaseModel):
    """What an edit has made."""

    model: str
    version: int
    duplicates: list[Resemblance]


class KnownLabel(BaseModel):
    """A label that can be predicted."""

    id: str
    text: str
    count: int = Field(description="Training texts that had it; 0 for a label that was added later.")


class LabelsPage(BaseModel):
    """Some of the labels, in the order of the run."""

    model: str
    version: int
    total: int = Field(description="Labels that match.")
    labels: list[KnownLabel]
    next: int | None = Field(description="The `cursor` of the next page; null on the last.")


class EmbeddingsRequest(Wire):
    """Texts to embed, in OpenAI's form."""

    input: Text | list[Text]
    model: RunName = None
    encoding_format: Literal["float", "base64"] = "float"
    side: Literal["query", "label"] = Field(
        default="query", description="Embed as a text to label, or as a label's text."
    )
    user: str | None = Field(default=None, max_length=1_000, description="Accepted and not read.")


class Embedding(BaseModel):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(description="Numbers, or for base64 their little-endian float32 bytes.")


class Usage(BaseModel):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """The vectors, in order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage
    inputs_left_out: int = 0


class ProblemPlace(BaseModel):
    """What is wrong with a field."""

    at: str
    message: str


class ProblemDetails(BaseModel):
    """Why there is no answer."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    request_id: str | None
    errors: list[ProblemPlace] = Field(default=[], description="The fields that are wrong, where that is known.")


def to_json(answer: BaseModel, *, status: int = 200) -> Response:
    """The answer as it is sent; it is of our own making, so nothing is validated again."""
    return Response(answer.model_dump_json(), status, media_type="application/json")
