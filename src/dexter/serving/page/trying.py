"""The first page: the labels of a text, why one of them, all heads side by side, a label that is not there yet.

All of it is of one ranking, that of the chosen head, dial and neighbours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from dexter.model.edits import LabelChange
from dexter.predict.predictor import Predictor
from dexter.serving.labels import change
from dexter.serving.page.asked import Asked, read_asked
from dexter.serving.page.comparing import Column, side_by_side
from dexter.serving.page.examples import example_texts
from dexter.serving.page.proposing import PLACES, Proposal, free_id, propose
from dexter.serving.page.rendering import Renderer
from dexter.serving.page.sharing import as_curl, as_json
from dexter.serving.page.shown import Shown, show
from dexter.serving.page.telling import page_router
from dexter.serving.page.why import Why, why
from dexter.serving.predicting import answer
from dexter.serving.problems import Problem
from dexter.serving.protocol import PredictRequest, RankedLabel
from dexter.serving.runs import Run, Variant
from dexter.serving.service import Service
from dexter.types import HeadName

_SHOWN, _COMPARED = 10, 50
"""Labels that are shown; places in which a label that moved is looked for."""
_LONGEST_LABEL = 1_000
_DIAL_STEP = 0.05
"""Of the slider: what is nearer to the tuned dial is the tuned dial."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """How the run ranks labels if nobody says otherwise, and what else it could do."""

    heads: Sequence[HeadName]
    head: HeadName
    dial: float
    neighbours: bool | None
    """Whether training texts vote; None for a run that keeps none."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What the first page shows besides what was asked."""

    tuned: Tuned
    chosen: Variant
    """What is not as tuned."""
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

    @property
    def dial(self) -> float:
        """Where the slider stands."""
        return self.tuned.dial if self.chosen.dial is None else self.chosen.dial

    @property
    def head(self) -> str:
        """The head that ranks."""
        return self.chosen.head or self.tuned.head


def trying_routes(service: Service, render: Renderer) -> APIRouter:
    """GET and POST /."""
    router = page_router(render)

    @router.api_route("/", methods=["GET", "POST"])
    async def first_page(request: Request) -> Response:
        """What was asked, and the answer; a problem is told on the page."""
        asked = await read_asked(request)
        run = service.run(asked.model)
        if not run.is_ready:
            return render.waiting(run)
        view = await _outline(run)
        try:
            view = replace(view, chosen=_choose(asked, view.tuned))
            if asked.add and asked.label:
                view, asked = replace(view, added=await _add(run, asked)), replace(asked, label="")
            status, view = 200, await _look(service, run, asked, view, request)
        except Problem as problem:
            status, view = problem.status, replace(view, problem=problem.detail)
        return render("try", status=status, model=run.name, asked=asked, view=view, compared=_COMPARED)

    return router


async def _outline(run: Run) -> View:
    """The page without an answer."""
    predictor = run.predictor
    _, examples = await run.look(example_texts)
    neighbours = predictor.uses_neighbours if predictor.model.training_queries is not None else None
    tuned = Tuned(heads=predictor.model.heads, head=predictor.head, dial=predictor.dial, neighbours=neighbours)
    return View(tuned=tuned, chosen=Variant(), examples=examples)


def _choose(asked: Asked, tuned: Tuned) -> Variant:
    """What was asked for and is not as tuned anyway: probabilities are known for what is."""
    head = next((head for head in tuned.heads if head == asked.head), None)
    if head != asked.head:
        raise Problem(422, "head", f"this run has the heads {', '.join(tuned.heads)}")
    is_turned = asked.dial is not None and abs(asked.dial - tuned.dial) >= _DIAL_STEP / 2
    return Variant(
        head=None if head == tuned.head else head,
        neighbours=None if tuned.neighbours in (None, asked.neighbours) else asked.neighbours,
        dial=asked.dial if is_turned else None,
    )


async def _add(run: Run, asked: Asked) -> str:
    if len(asked.label) > _LONGEST_LABEL:
        raise Problem(422, "label", f"a label may have {_LONGEST_LABEL:,} characters")
    label_id = free_id(asked.label, set(run.predictor.labels.ids))
    await change(run, LabelChange(add=[(label_id, asked.label)], reuse_ids=True), None)
    return label_id


async def _look(service: Service, run: Run, asked: Asked, view: View, request: Request) -> View:
    view = replace(view, proposal=await _propose(service, run, asked, view.chosen))
    if not asked.text.strip():
        return view
    head, neighbours, dial = view.chosen
    k = min(_SHOWN, service.settings.max_k)
    question = PredictRequest(inputs=asked.text, k=k, head=head, dial=dial, neighbours=neighbours, model=asked.model)
    # One answer for the list and for the reasons: what is explained is the score that is shown.
    explained = question.model_copy(update={"explain": asked.why is not None})
    found = await answer(service, explained, gone=request.is_disconnected)
    [result] = found.results
    opened = next((label for label in result.labels if label.id == asked.why), None)
    return replace(
        view,
        labels=show(result.labels, run.predictor.labels),
        truncated=result.truncated,
        why=None if opened is None else why(opened, asked.text),
        columns=await _compare(service, run, question, view.head) if asked.compare else (),
        curl=as_curl(str(request.base_url), question),
        answer=as_json(found),
    )


async def _compare(service: Service, run: Run, asked: PredictRequest, first: str) -> list[Column]:
    """What was asked with every head, the chosen one first, then with the votes switched."""
    rankings: dict[str, Sequence[RankedLabel]] = {}
    predictor = run.predictor
    for head in sorted(predictor.model.heads, key=lambda head: head != first):
        rankings[head] = await _ranking(service, asked.model_copy(update={"head": head}))
    if predictor.model.training_queries is not None:
        votes = predictor.uses_neighbours if asked.neighbours is None else asked.neighbours
        title = f"{first} {'without' if votes else 'with'} neighbours"
        rankings[title] = await _ranking(service, asked.model_copy(update={"neighbours": not votes}))
    return side_by_side(rankings, shown=_SHOWN)


async def _ranking(service: Service, question: PredictRequest) -> Sequence[RankedLabel]:
    k = min(_COMPARED, service.settings.max_k)
    return (await answer(service, question.model_copy(update={"k": k}))).results[0].labels


async def _propose(service: Service, run: Run, asked: Asked, chosen: Variant) -> Proposal | None:
    """Where a label would stand in the ranking that is shown."""
    label = asked.label[:_LONGEST_LABEL]
    if not label:
        return None
    predictor: Predictor = run.predictor
    text = asked.text if not asked.text.strip() else service.read_texts([asked.text]).texts[0]
    if text.strip():
        [found] = await service.ask(run.predict([text], PLACES, variant=chosen))
        predictor = found.predictor
    return await asyncio.to_thread(propose, predictor, text, label)
