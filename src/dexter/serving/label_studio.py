"""Label Studio's machine learning backend: connect http://HOST:PORT/label-studio to a project as its model.

The tool posts tasks and its labelling configuration, an XML text; the answer is the first 20 labels of each task's
text in the shape of the configuration's `Choices` or `Taxonomy` tag. An annotation that is created or changed comes
back by its webhook and becomes an example. Requests carry more fields than are read here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from dexter.predict import Prediction
from dexter.serving.problems import json_body, read_json
from dexter.serving.routes import cut_texts, editing
from dexter.serving.runs import PredictOptions, ServedRun, ServedRuns

PREFIX = "/label-studio"
_NUM_SUGGESTIONS = 20
_KINDS = ("choices", "taxonomy")
_MAX_TASKS = 1_000
_ANNOTATED = ("ANNOTATION_CREATED", "ANNOTATION_UPDATED")


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Setup(_Request):
    label_config: str = Field(default="", alias="schema")


class _Task(_Request):
    id: int | str | None = None
    data: dict[str, Any] = {}


class _Predict(_Request):
    tasks: list[_Task] | _Task = Field(default=[])
    label_config: str | None = None


class _Annotation(_Request):
    result: list[dict[str, Any]] = Field(default=[], max_length=10_000)


class _Project(_Request):
    id: int | str | None = None
    label_config: str | None = None


class _Webhook(_Request):
    action: str = ""
    task: _Task = _Task()
    annotation: _Annotation = _Annotation()
    project: _Project = _Project()


class _Suggestions(BaseModel):
    result: list[dict[str, Any]]
    score: float
    model_version: str


class _Predictions(BaseModel):
    results: list[_Suggestions]
    model_version: str


@dataclass
class LabelConfig:
    """What a labelling configuration says: where the text of a task is, and which tag takes labels."""

    kind: str = "choices"
    from_name: str = "labels"
    to_name: str = "text"
    is_multiple: bool = True
    text_field: str = "text"
    """The field of a task that has the text."""
    paths: dict[str, list[str]] = field(default_factory=dict)
    """By value or alias of each choice that is listed: its value, after those that it stands under."""

    @classmethod
    def parse(cls, xml: str | None) -> LabelConfig:
        """Read a configuration; what it does not say is as in Label Studio's template of text classification."""
        parser = _ConfigParser()
        parser.feed(xml or "")
        control = next((tag for tag in parser.tags if tag["tag"] in _KINDS), None)
        if control is None:
            return cls()
        to_name = control.get("toname") or "text"
        shown = next((tag for tag in parser.tags if tag.get("name") == to_name and tag is not control), {})
        return cls(
            kind=control["tag"],
            from_name=control.get("name") or "labels",
            to_name=to_name,
            is_multiple=control["tag"] == "taxonomy" or control.get("choice") == "multiple",
            text_field=shown.get("value", "$text").lstrip("$") or "text",
            paths=parser.paths,
        )

    def text_of(self, task: _Task) -> str:
        """Return the text of a task; empty if it has none."""
        text = task.data.get(self.text_field)
        return text if isinstance(text, str) else ""

    def suggest(self, labels: list[Prediction]) -> list[dict[str, Any]]:
        """Return labels as a result; where choices are listed, only those that are, by their ids or texts."""
        known = [self.paths.get(label.id) or self.paths.get(label.text) for label in labels]
        found = [path for path in known if path] if self.paths else [[label.text] for label in labels]
        if not found:
            return []
        found = found if self.is_multiple else found[:1]
        value = found if self.kind == "taxonomy" else [path[-1] for path in found]
        named = {"from_name": self.from_name, "to_name": self.to_name, "type": self.kind}
        return [{**named, "value": {self.kind: value}}]


def read_labels(result: list[dict[str, Any]]) -> list[str]:
    """Return the labels of an annotation's result: choices, and the last parts of the paths of a taxonomy."""
    labels = []
    for item in result:
        value = item.get("value")
        chosen = [each for kind in _KINDS for each in value.get(kind) or []] if isinstance(value, dict) else []
        labels += [each[-1] if isinstance(each, list) and each else each for each in chosen]
    return [label for label in dict.fromkeys(each for each in labels if isinstance(each, str)) if label]


def label_studio_routes(runs: ServedRuns) -> APIRouter:
    """Make the routes below /label-studio, and below /label-studio/RUN for a run by name."""
    router = APIRouter(tags=["label studio"])

    @router.get(f"{PREFIX}/health")
    @router.get(f"{PREFIX}/{{model}}/health", include_in_schema=False)
    async def health(model: str | None = None) -> dict[str, str]:
        """Say that the backend is there."""
        return {"status": "UP", "model_class": "dexter", "model_version": _version(runs.get(model))}

    @router.post(f"{PREFIX}/setup", openapi_extra=json_body(_Setup))
    @router.post(f"{PREFIX}/{{model}}/setup", include_in_schema=False)
    async def setup(request: Request, model: str | None = None) -> dict[str, str]:
        """Answer when a project is connected: which model it will ask."""
        await read_json(request, _Setup)
        return {"model_version": _version(runs.get(model))}

    @router.post(f"{PREFIX}/predict", openapi_extra=json_body(_Predict))
    @router.post(f"{PREFIX}/{{model}}/predict", include_in_schema=False)
    async def predict(request: Request, model: str | None = None) -> _Predictions:
        """Suggest labels for tasks."""
        run, body = runs.get(model), await read_json(request, _Predict)
        tasks = body.tasks if isinstance(body.tasks, list) else [body.tasks]
        config, version = LabelConfig.parse(body.label_config), _version(run)
        results = [_Suggestions(result=[], score=0.0, model_version=version) for _ in tasks[:_MAX_TASKS]]
        rows = [row for row, task in enumerate(tasks[:_MAX_TASKS]) if config.text_of(task).strip()]
        for start in range(0, len(rows), runs.settings.max_inputs):
            part = rows[start : start + runs.settings.max_inputs]
            texts = cut_texts([config.text_of(tasks[row]) for row in part], runs.settings)
            options = PredictOptions(_NUM_SUGGESTIONS)
            answers = await run.predict(texts, options, is_disconnected=request.state.is_disconnected)
            for row, answer in zip(part, answers, strict=True):
                results[row].result = config.suggest(answer.labels)
                results[row].score = (answer.labels[0].probability or 0.0) if answer.labels else 0.0
        return _Predictions(results=results, model_version=version)

    @router.post(f"{PREFIX}/webhook", status_code=201, openapi_extra=json_body(_Webhook))
    @router.post(f"{PREFIX}/{{model}}/webhook", status_code=201, include_in_schema=False)
    async def webhook(request: Request, model: str | None = None) -> dict[str, Any]:
        """Make an example of an annotation that was created or changed; other events are left alone."""
        run, body = runs.get(model), await read_json(request, _Webhook)
        text = LabelConfig.parse(body.project.label_config).text_of(body.task)
        labels = read_labels(body.annotation.result)
        if body.action not in _ANNOTATED or not text.strip() or not labels:
            return {"status": "ignored"}
        with editing(request) as author:
            example_id = f"label-studio-{body.project.id or 0}-{body.task.id or 0}"
            cut = text[: runs.settings.max_characters]
            result = await run.add_examples([(cut, labels)], ids=[example_id], by=author or "label studio")
        return {"status": "added", "version": result.version}

    return router


def _version(run: ServedRun) -> str:
    """Name the model and its labels; Label Studio asks again when that changes."""
    return f"{run.name}-{run.predictor.fingerprint or 'memory'}-{run.predictor.version}"


class _ConfigParser(HTMLParser):
    """Collects the tags of a configuration. An HTML parser has no entities to define and no files to include."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[dict[str, str]] = []
        self.paths: dict[str, list[str]] = {}
        self._open: list[str] = []
        """Values of the choices that are open."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if tag != "choice":
            self.tags.append({**attributes, "tag": tag})
            return
        self._open.append(attributes.get("value", ""))
        for name in (attributes.get("value", ""), attributes.get("alias", "")):
            if name:
                self.paths.setdefault(name, list(self._open))

    def handle_endtag(self, tag: str) -> None:
        if tag == "choice" and self._open:
            self._open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)
