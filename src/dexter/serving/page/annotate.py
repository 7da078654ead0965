"""The page /annotate: suggestions for a few texts, which a person accepts, rejects and adds to; saved as examples.

It works without scripts: every step is a form. What was not ticked is rejected, and a text without a label is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from dexter.predict import Prediction
from dexter.serving.page.view import Renderer, page_router
from dexter.serving.problems import Problem
from dexter.serving.routes import cut_texts, editing, read_form
from dexter.serving.runs import PredictOptions, ServedRun, ServedRuns

_MAX_TEXTS, _NUM_SUGGESTED = 20, 10
_LIKELY = 0.5
"""Labels with at least this probability are ticked at first."""


@dataclass(frozen=True)
class AnnotatedText:
    """A text of the form, and the labels that were chosen for it."""

    text: str
    kept: frozenset[str] = frozenset()
    """Ids of suggestions that are ticked."""
    more: str = ""
    """Ids or texts of other labels, one per line."""
    suggested: Sequence[Prediction] = ()

    @property
    def labels(self) -> list[str]:
        """All labels of the text."""
        return [*sorted(self.kept), *(line.strip() for line in self.more.splitlines() if line.strip())]


def annotate_routes(runs: ServedRuns, render: Renderer) -> APIRouter:
    """Make the routes GET and POST /annotate."""
    router = page_router(render)

    @router.api_route("/annotate", methods=["GET", "POST"])
    async def annotate(request: Request) -> Response:
        """Show suggestions for texts, or save what was chosen; a problem is shown on the page with what was chosen."""
        fields = await read_form(request) if request.method == "POST" else dict(request.query_params)
        run = runs.get(fields.get("model") or None)
        if not run.is_ready:
            return render.waiting(run)
        items, status, problem, num_saved = _read_items(fields), 200, "", 0
        try:
            if fields.get("action") == "save" and request.method == "POST":
                num_saved, items = await _save(run, items, runs, request), []
            elif items:
                items = await _suggest(run, items, runs, request, fresh="texts" in fields)
        except Problem as error:
            status, problem = error.status, error.detail
            items = await _suggest(run, items, runs, request, fresh=False) if items else []
        return render(
            "annotate",
            status=status,
            model=run.name,
            items=items,
            problem=problem,
            num_saved=num_saved,
            max_texts=_MAX_TEXTS,
            total=len(run.predictor.examples),
        )

    return router


def _read_items(fields: Mapping[str, str]) -> list[AnnotatedText]:
    """Read the texts of the first form, one per line, or those of the second with what was chosen."""
    if "texts" in fields:
        lines = [line.strip() for line in fields["texts"].splitlines() if line.strip()]
        return [AnnotatedText(line) for line in lines[:_MAX_TEXTS]]
    return [
        AnnotatedText(
            fields[f"text-{row}"],
            frozenset(value for name, value in fields.items() if name.startswith(f"keep-{row}-")),
            fields.get(f"more-{row}", ""),
        )
        for row in range(_MAX_TEXTS)
        if fields.get(f"text-{row}", "").strip()
    ]


async def _suggest(
    run: ServedRun, items: list[AnnotatedText], runs: ServedRuns, request: Request, *, fresh: bool
) -> list[AnnotatedText]:
    """Add suggestions; those that are likely are ticked if the texts are fresh."""
    found: list[AnnotatedText] = []
    for start in range(0, len(items), runs.settings.max_inputs):
        part = items[start : start + runs.settings.max_inputs]
        texts = cut_texts([item.text for item in part], runs.settings)
        answers = await run.predict(
            texts, PredictOptions(_NUM_SUGGESTED), is_disconnected=request.state.is_disconnected
        )
        for item, answer in zip(part, answers, strict=True):
            likely = frozenset(label.id for label in answer.labels if (label.probability or 0.0) >= _LIKELY)
            found.append(replace(item, suggested=answer.labels, kept=likely if fresh else item.kept))
    return found


async def _save(run: ServedRun, items: list[AnnotatedText], runs: ServedRuns, request: Request) -> int:
    """Save the texts that have labels as examples; return their number."""
    chosen = [(item.text[: runs.settings.max_characters], item.labels) for item in items if item.labels]
    if not chosen:
        raise Problem(422, "empty", "no text has a label: tick or add one")
    with editing(request) as author:
        await run.add_examples(chosen, by=author)
    return len(chosen)
