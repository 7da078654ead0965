"""The first page: the labels of a text, the explanation of one, all heads side by side, a label that is not there yet.

All of it is of one ranking, that of the chosen head, dial and neighbours.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from fastapi import APIRouter, Request
from starlette.responses import Response

from dexter.predict import MAX_PREVIEW_RANK, LabelChange, LabelPreview, Predictor, new_label_id
from dexter.serving.page.ranking import (
    ComparedLabel,
    ListedLabel,
    ShownExplanation,
    lay_out_explanation,
    list_labels,
    side_by_side,
)
from dexter.serving.page.view import Renderer, page_router
from dexter.serving.problems import Problem
from dexter.serving.protocol import PREDICT_RESPONSE, Band, PredictRequest, PredictResponse, RankedLabel
from dexter.serving.routes import answer_predict, change_labels, cut_texts, read_form
from dexter.serving.runs import PredictOptions, ServedRun, ServedRuns
from dexter.serving.settings import ServeSettings
from dexter.types import BANDS, HeadName

_NUM_SHOWN, _NUM_COMPARED = 10, 50
"""Labels that are shown; ranks in which a label that moved is looked for."""
_MAX_LABEL_CHARACTERS = 1_000
_MAX_FILTER_IDS = 1_000
_DIAL_STEP = 0.05
"""Step of the slider: the position nearest to the tuned dial stands for the tuned dial."""
_NUM_EXAMPLES, _NUM_EXAMPLE_CANDIDATES, _MIN_EXAMPLE_CHARACTERS = 4, 64, 12


@dataclass(frozen=True, kw_only=True)
class PredictForm:
    """The fields of the form."""

    text: str = ""
    model: str | None = None
    """Name of the run."""
    head: str | None = None
    """The head that ranks; None: as tuned."""
    dial: float | None = None
    """Weight of label frequency; None: as tuned."""
    neighbours: bool | None = None
    """Whether training texts vote; None: as tuned."""
    exclude: tuple[str, ...] = ()
    """Ids of labels that are left out."""
    only: tuple[str, ...] = ()
    """Ids of the labels that may be shown; none given: any."""
    band: str = ""
    """Band of label frequency; empty: any."""
    why: str | None = None
    """Id of the label to explain."""
    compare: bool = False
    """Whether all heads are shown side by side."""
    label: str = ""
    """Text of a new label."""
    add: bool = False
    """Whether the new label is added, or only previewed."""

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> PredictForm:
        """Read the fields; unknown ones are ignored."""
        if fields.get("reset"):
            fields = {name: fields[name] for name in fields if name not in ("head", "dial", "neighbours")}
        try:
            dial = float(fields.get("dial", ""))
        except ValueError:
            dial = -1.0
        return cls(
            text=fields.get("text", ""),
            model=fields.get("model") or None,
            head=fields.get("head") or None,
            dial=dial if 0.0 <= dial <= 1.0 else None,
            neighbours={"on": True, "off": False}.get(fields.get("neighbours", "")),
            exclude=_read_lines(fields.get("exclude", "")),
            only=_read_lines(fields.get("only", "")),
            band=fields.get("band", "") if fields.get("band", "") in BANDS else "",
            why=fields.get("why") or None,
            compare=fields.get("compare", "") != "",
            label=fields.get("label", "").strip(),
            add=fields.get("action", "") == "add",
        )


@dataclass(frozen=True, kw_only=True)
class TunedRanking:
    """How the run ranks labels by default, and the heads it has."""

    heads: Sequence[HeadName]
    head: HeadName
    dial: float
    neighbours: bool | None
    """Whether training texts vote; None for a run that has kept none."""


@dataclass(frozen=True, kw_only=True)
class PredictView:
    """What the page shows besides the form."""

    tuned: TunedRanking
    head: HeadName
    dial: float
    neighbours: bool | None
    examples: Sequence[str]
    labels: Sequence[ListedLabel] = ()
    truncated: bool = False
    explanation: ShownExplanation | None = None
    columns: Mapping[str, Sequence[ComparedLabel]] = field(default_factory=dict)
    """Rankings side by side, by title; the chosen one first."""
    preview: LabelPreview | None = None
    added: str | None = None
    """Id of a label that was just added."""
    curl: str = ""
    answer: str = ""
    problem: str = ""

    @property
    def is_tuned(self) -> bool:
        """Whether labels are ranked as the run was tuned; only then are probabilities known."""
        tuned = self.tuned
        return (self.head, self.dial, self.neighbours) == (tuned.head, tuned.dial, tuned.neighbours)

    def request(self, form: PredictForm, k: int) -> PredictRequest:
        """Return the request to /v1/predict for this ranking; what is as tuned is left out."""
        tuned = self.tuned
        return PredictRequest(
            inputs=form.text,
            k=k,
            head=None if self.head == tuned.head else self.head,
            dial=None if self.dial == tuned.dial else self.dial,
            neighbours=None if self.neighbours == tuned.neighbours else self.neighbours,
            exclude=list(form.exclude),
            only=list(form.only) or None,
            bands=[band for band in get_args(Band) if band == form.band],
            model=form.model,
        )


def _read_lines(text: str) -> tuple[str, ...]:
    """Return the lines of a field that are not blank, a bounded number."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())[:_MAX_FILTER_IDS]


def predict_page_routes(runs: ServedRuns, render: Renderer) -> APIRouter:
    """Make the routes GET and POST /."""
    router = page_router(render)

    @router.api_route("/", methods=["GET", "POST"])
    async def first_page(request: Request) -> Response:
        """Answer the form; a problem is shown on the page."""
        form = await _read_predict_form(request)
        run = runs.get(form.model)
        if not run.is_ready:
            return render.waiting(run)
        status, view = 200, await _empty_view(run, runs.settings)
        try:
            view = _choose_ranking(view, form)
            if form.add and form.label:
                view, form = replace(view, added=await _add_label(run, form.label, request)), replace(form, label="")
            view = await _fill_view(runs, run, form, view, request)
        except Problem as problem:
            status, view = problem.status, replace(view, problem=problem.detail)
        return render("predict", status=status, model=run.name, form=form, view=view, num_compared=_NUM_COMPARED)

    return router


async def _read_predict_form(request: Request) -> PredictForm:
    """Read the form from the address or the body; only one in the body may add a label."""
    if request.method != "POST":
        return PredictForm.parse({**request.query_params, "action": ""})
    return PredictForm.parse(await read_form(request))


async def _empty_view(run: ServedRun, settings: ServeSettings) -> PredictView:
    predictor = run.predictor
    _, examples = await run.read_labels(lambda predictor: _example_texts(predictor, settings))
    neighbours = predictor.choice.uses_neighbours if predictor.has_training_queries else None
    head, dial = predictor.choice.head, predictor.choice.dial
    tuned = TunedRanking(heads=predictor.heads, head=head, dial=dial, neighbours=neighbours)
    return PredictView(tuned=tuned, head=head, dial=dial, neighbours=neighbours, examples=examples)


def _example_texts(predictor: Predictor, settings: ServeSettings) -> list[str]:
    """Return a few training texts if the run has kept them, otherwise texts of labels from common to rare."""
    candidates = predictor.sample_training_texts(_NUM_EXAMPLE_CANDIDATES) if settings.training_texts else []
    if not candidates:
        order = (-predictor.labels.counts).argsort(kind="stable")
        texts = [str(predictor.labels.texts[row]) for row in order[:: max(1, len(order) // _NUM_EXAMPLE_CANDIDATES)]]
        candidates = [text for text in texts if len(text) >= _MIN_EXAMPLE_CHARACTERS] or texts
    step = max(1, len(candidates) // _NUM_EXAMPLES)
    return candidates[step // 2 :: step][:_NUM_EXAMPLES]


def _choose_ranking(view: PredictView, form: PredictForm) -> PredictView:
    """Set the head, dial and neighbours that the form asks for."""
    tuned = view.tuned
    head = next((head for head in tuned.heads if head == (form.head or tuned.head)), None)
    if head is None:
        raise Problem(422, "head", f"this run has the heads {', '.join(tuned.heads)}")
    dial = tuned.dial if form.dial is None else form.dial
    return replace(
        view,
        head=head,
        dial=dial if abs(dial - tuned.dial) >= _DIAL_STEP / 2 else tuned.dial,
        neighbours=tuned.neighbours if None in (tuned.neighbours, form.neighbours) else form.neighbours,
    )


async def _add_label(run: ServedRun, text: str, request: Request) -> str:
    """Add a label and return its id."""
    if len(text) > _MAX_LABEL_CHARACTERS:
        raise Problem(422, "label", f"a label may have {_MAX_LABEL_CHARACTERS:,} characters")
    label_id = new_label_id(text, set(run.predictor.labels.ids))
    await change_labels(run, LabelChange(add=[(label_id, text)], reuse_ids=True), request)
    return label_id


async def _fill_view(
    runs: ServedRuns, run: ServedRun, form: PredictForm, view: PredictView, request: Request
) -> PredictView:
    """Add the labels of the text, and what else the form asks for."""
    asked = view.request(form, _NUM_SHOWN)
    if form.label:
        view = replace(view, preview=await _preview(runs, run, form, asked))
    if not form.text.strip():
        return view
    # One answer for the list and for the explanation: what is explained is the score that is shown.
    explained = asked.model_copy(update={"explain": form.why is not None and runs.settings.explanations})
    answer = await answer_predict(runs, explained, is_disconnected=request.state.is_disconnected)
    [result] = answer.results
    opened = next((label for label in result.labels if label.id == form.why), None)
    return replace(
        view,
        labels=list_labels(result.labels, run.predictor),
        truncated=result.truncated,
        explanation=None if opened is None else lay_out_explanation(opened, form.text),
        columns=await _compare(runs, view, asked) if form.compare else {},
        curl=_as_curl(str(request.base_url), asked),
        answer=_as_json(answer),
    )


async def _preview(runs: ServedRuns, run: ServedRun, form: PredictForm, asked: PredictRequest) -> LabelPreview:
    """Preview a label in the ranking that is shown."""
    predictor, text = run.predictor, ""
    if form.text.strip():
        [text] = cut_texts([form.text], runs.settings)
        options = PredictOptions(MAX_PREVIEW_RANK, None, asked.head, asked.neighbours, asked.dial)
        [answer] = await run.predict([text], options)
        predictor = answer.predictor
    return await asyncio.to_thread(predictor.preview_label, text, form.label[:_MAX_LABEL_CHARACTERS])


async def _compare(runs: ServedRuns, view: PredictView, asked: PredictRequest) -> dict[str, list[ComparedLabel]]:
    """Rank with every head, the chosen one first, and with the votes of training texts switched."""
    choices: dict[str, dict[str, object]] = {
        head: {"head": head} for head in sorted(view.tuned.heads, key=lambda head: head != view.head)
    }
    if view.neighbours is not None:
        title = f"{view.head} {'without' if view.neighbours else 'with'} neighbours"
        choices[title] = {"neighbours": not view.neighbours}
    rankings: dict[str, Sequence[RankedLabel]] = {}
    for title, choice in choices.items():
        answer = await answer_predict(runs, asked.model_copy(update={"k": _NUM_COMPARED, **choice}))
        rankings[title] = answer.results[0].labels
    return side_by_side(rankings, num_shown=_NUM_SHOWN)


def _as_curl(base_url: str, request: PredictRequest) -> str:
    """Return a shell command that sends the request."""
    body = json.dumps(request.model_dump(exclude_defaults=True), ensure_ascii=False)
    address = shlex.quote(base_url.rstrip("/") + "/v1/predict")
    return f"curl -s {address} -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def _as_json(answer: PredictResponse) -> str:
    """Return the answer as indented JSON, without explanations, which only the page asks for."""
    explanations = {"results": {"__all__": {"labels": {"__all__": {"explanation"}}}}}
    return json.dumps(
        PREDICT_RESPONSE.dump_python(answer, exclude_none=True, exclude=explanations), ensure_ascii=False, indent=2
    )
