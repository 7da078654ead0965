"""Routes for examples: texts that people have labelled, which vote for their labels without training."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from dexter.predict import Example, LabelChange
from dexter.serving.problems import AnswerTooLarge, Problem, json_body, read_json
from dexter.serving.protocol import AddExamplesRequest, ExamplesChanged, ExamplesPage, ListedExample, RunName
from dexter.serving.routes import editing
from dexter.serving.runs import ServedRun, ServedRuns
from dexter.serving.settings import ServeSettings

_MAX_PER_PAGE = 1_000


def example_routes(runs: ServedRuns) -> APIRouter:
    """Make the routes /v1/examples and below."""
    router = APIRouter(tags=["examples"])

    @router.post("/v1/examples", openapi_extra=json_body(AddExamplesRequest))
    async def add_examples(request: Request) -> ExamplesChanged:
        """Add texts with their labels, all or none. Texts like them get these labels from now on, without training."""
        body = await read_json(request, AddExamplesRequest)
        run = runs.get(body.model)
        examples = [(each.text[: runs.settings.max_characters], each.labels) for each in body.examples]
        ids = [each.id for each in body.examples]
        with editing(request) as author:
            result = await run.add_examples(examples, ids=ids, add_labels=body.add_labels, by=author)
        return ExamplesChanged(model=run.name, version=result.version, total=len(run.predictor.examples))

    @router.get("/v1/examples")
    async def list_examples(
        cursor: Annotated[int, Query(ge=0, le=2**31, description="`next` of the page before.")] = 0,
        limit: Annotated[int, Query(ge=1, le=_MAX_PER_PAGE)] = 50,
        model: RunName = None,
    ) -> ExamplesPage:
        """List the examples, oldest first."""
        run = runs.get(model)
        version, examples = await _read_examples(run, runs.settings)
        listed = [_listed(each) for each in examples[cursor : cursor + limit]]
        if sum(len(each.text) for each in listed) > runs.settings.max_answer_bytes:
            raise AnswerTooLarge(runs.settings.max_answer_bytes)
        following = cursor + limit if cursor + limit < len(examples) else None
        return ExamplesPage(model=run.name, version=version, total=len(examples), examples=listed, next=following)

    @router.get("/v1/examples.jsonl", response_class=Response, responses={200: {"content": {"application/jsonl": {}}}})
    async def download_examples(model: RunName = None) -> Response:
        """Download all examples as lines of JSON, which `dexter train` and `dexter examples add` read."""
        _, examples = await _read_examples(runs.get(model), runs.settings)
        lines = [json.dumps({"uid": each.id, "text": each.text, "labels": each.labels}) for each in examples]
        headers = {"Content-Disposition": 'attachment; filename="examples.jsonl"'}
        return Response("".join(f"{line}\n" for line in lines), media_type="application/jsonl", headers=headers)

    @router.delete("/v1/examples")
    async def remove_examples(
        request: Request,
        id: Annotated[list[str], Query(min_length=1, max_length=1_000, description="Repeat for several.")],  # noqa: A002
        model: RunName = None,
    ) -> ExamplesChanged:
        """Remove examples, all or none. They do not vote any more."""
        run = runs.get(model)
        with editing(request) as author:
            result = await run.change_labels(LabelChange(remove_examples=id), by=author)
        return ExamplesChanged(model=run.name, version=result.version, total=len(run.predictor.examples))

    return router


async def _read_examples(run: ServedRun, settings: ServeSettings) -> tuple[int, list[Example]]:
    if not settings.training_texts:
        raise Problem(403, "texts", "this service does not show the texts that its runs have kept")
    return await run.read_labels(lambda predictor: predictor.examples)


def _listed(example: Example) -> ListedExample:
    return ListedExample(id=example.id, text=example.text or "", labels=list(example.labels))
