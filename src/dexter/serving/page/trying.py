"""The first page: the labels of a text, why one of them, all heads side by side, a label that is not there yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from fastapi import APIRouter, Request
from starlette.responses import Response

from dexter.encoders.heads import HeadName
from dexter.live.edits import LabelEdit
from dexter.predictor import Predictor
from dexter.serving.labels import change
from dexter.serving.page.asked import Asked, read_asked
from dexter.serving.page.comparing import Column, side_by_side
from dexter.serving.page.examples import example_texts
from dexter.serving.page.proposing import Proposal, free_id, propose
from dexter.serving.page.rendering import Renderer
from dexter.serving.page.sharing import as_curl, as_json
from dexter.serving.page.why import Why, why
from dexter.serving.predicting import answer
from dexter.serving.problems import Problem
from dexter.serving.protocol import PredictRequest, PredictResponse, RankedLabel
from dexter.serving.runs import Run
from dexter.serving.service import Service

_SHOWN, _COMPARED = 10, 50
"""Labels that are shown; places in which a label that moved is looked for."""
_LONGEST_LABEL = 1_000
_DIAL_STEP = 0.05
"""Of the slider: what is nearer to the tuned dial is the tuned dial."""


@dataclass(frozen=True)
class Shown:
    """A label of the list."""

    label: RankedLabel
    bar: float
    """How long its bar is, from 0 to 1."""
    count: int
    """Training queries that had it."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What the first page shows besides what was asked."""

    heads: Sequence[str]
    head: str
    dial: float
    remembers: bool
    """Whether the run has a memory of its training texts."""
    examples: Sequence[str]
    labels: Sequence[Shown] = ()
    truncated: bool = False
    why: Why | None = None
    columns: Sequence[Column] = ()
    proposal: Proposal | None = None
    added: str | None = None
    """The id of a label that was just added."""
    curl: str = ""
    answer: str = ""
    problem: str = ""


def trying_routes(service: Service, render: Renderer) -> APIRouter:
    """GET and POST /."""
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "POST"])
    async def first_page(request: Request) -> Response:
        """What was asked, and the answer; a problem is told on the page."""
        asked = await read_asked(request)
        run = service.run(asked.model)
        if not run.is_ready:
            return render.waiting(run)
        try:
            added = await _add(run, asked) if asked.add and asked.label else None
            view = await _look(
                service, run, asked if added is None else replace(asked, label=""), str(request.base_url)
            )
            status, view = 200, replace(view, added=added)
        except Problem as problem:
            status, view = problem.status, replace(await _outline(run), problem=problem.detail)
        return render("try", status=status, model=run.name, asked=asked, view=view)

    return router


async def _add(run: Run, asked: Asked) -> str:
    if len(asked.label) > _LONGEST_LABEL:
        raise Problem(422, "label", f"a label may have {_LONGEST_LABEL:,} characters")
    label_id = free_id(asked.label, set(run.predictor.labels.ids))
    await change(run, LabelEdit(add=[(label_id, asked.label)], reuse_ids=True), None)
    return label_id


async def _outline(run: Run) -> View:
    """The page without an answer."""
    predictor = run.predictor
    _, examples = await run.look(example_texts)
    model = predictor.model
    return View(
        heads=model.heads,
        head=predictor.head,
        dial=predictor.dial,
        remembers=model.memory is not None,
        examples=examples,
    )


async def _look(service: Service, run: Run, asked: Asked, base_url: str) -> View:
    view = await _outline(run)
    proposal = await _propose(run, asked)
    if not asked.text.strip():
        return replace(view, proposal=proposal)
    head = _head(asked.head)
    dial = None if asked.dial is None or abs(asked.dial - view.dial) < _DIAL_STEP / 2 else asked.dial
    memory = asked.memory if view.remembers else None
    k = min(_SHOWN, service.settings.max_k)
    question = PredictRequest(inputs=asked.text, k=k, head=head, dial=dial, memory=memory, model=asked.model)
    found = await answer(service, question)
    [result] = found.results
    return replace(
        view,
        head=head or view.head,
        dial=view.dial if dial is None else dial,
        labels=_bars(found, run.predictor),
        truncated=result.truncated,
        why=await _why(run, asked),
        columns=await _compare(service, run, question, head or view.head) if asked.compare else (),
        proposal=proposal,
        curl=as_curl(base_url, question),
        answer=as_json(found),
    )


def _head(name: str | None) -> HeadName | None:
    known: tuple[HeadName, ...] = get_args(HeadName)
    if name is not None and name not in known:
        raise Problem(422, "head", f"the heads are {', '.join(known)}")
    return next((head for head in known if head == name), None)


def _bars(found: PredictResponse, predictor: Predictor) -> list[Shown]:
    """Bars are probabilities where they are known, else relative to the best label: scores have no scale."""
    labels = found.results[0].labels
    rows = {label_id: row for row, label_id in enumerate(predictor.labels.ids)}
    best = max((label.score for label in labels), default=0.0)
    return [
        Shown(
            label,
            _bar(label, best),
            int(predictor.labels.counts[rows[label.id]]) if label.id in rows else 0,
        )
        for label in labels
    ]


def _bar(label: RankedLabel, best: float) -> float:
    if label.probability is not None:
        return label.probability
    return label.score / best if best > 0 else 0.0


async def _compare(service: Service, run: Run, asked: PredictRequest, first: str) -> list[Column]:
    """What was asked with every head, the chosen one first, and where there is a memory with the other choice of it."""
    rankings: dict[str, Sequence[RankedLabel]] = {}
    for head in sorted(run.predictor.model.heads, key=lambda head: head != first):
        rankings[head] = await _ranking(service, asked.model_copy(update={"head": head}))
    predictor = run.predictor
    if predictor.model.memory is not None:
        votes = predictor.uses_memory if asked.memory is None else asked.memory
        title = f"{first}, {'without' if votes else 'with'} memory"
        rankings[title] = await _ranking(service, asked.model_copy(update={"memory": not votes}))
    return side_by_side(rankings, shown=_SHOWN)


async def _ranking(service: Service, question: PredictRequest) -> Sequence[RankedLabel]:
    k = min(_COMPARED, service.settings.max_k)
    return (await answer(service, question.model_copy(update={"k": k}))).results[0].labels


async def _why(run: Run, asked: Asked) -> Why | None:
    label_id = asked.why
    return None if label_id is None else (await run.look(lambda each: why(each, asked.text, label_id))).answer


async def _propose(run: Run, asked: Asked) -> Proposal | None:
    label = asked.label[:_LONGEST_LABEL]
    return (await run.look(lambda predictor: propose(predictor, asked.text, label))).answer if label else None
