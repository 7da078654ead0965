"""Every request that the OpenAPI description allows, and many that it does not, get an answer that it describes."""

import json
import random
import re
from collections import Counter
from contextlib import suppress

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dexter import Predictor
from dexter.serving.app import create_app
from dexter.serving.settings import ServeSettings
from tests.conftest import WORDS, scaled

SLOW_TO_GENERATE = {("post", "/v1/labels"), ("patch", "/v1/labels")}
"""A case takes schemathesis up to half a second, the service ten milliseconds: lists of texts with a pattern."""
CHECKS = (not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance)


@pytest.fixture(scope="module")
def described(trained):
    """The description of a service, with the service behind it."""
    app = create_app(Predictor.load(trained), ServeSettings(allowed_hosts=("testserver",)))
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def check_answers(described, mode, max_examples, *, max_slow_examples=None):
    num_cases = 0
    for operation in described.get_all_operations():
        strategy = operation.ok().as_strategy(generation_mode=mode)
        is_slow = (operation.ok().method, operation.ok().path) in SLOW_TO_GENERATE
        num_examples = max_slow_examples if is_slow and max_slow_examples else max_examples

        @given(case=strategy)
        @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def check(case):
            nonlocal num_cases
            num_cases += 1
            case.call_and_validate(checks=CHECKS)

        # An endpoint without parameters cannot be asked wrongly.
        with suppress(Unsatisfiable):
            check()
    return num_cases


@pytest.mark.parametrize("mode", list(GenerationMode), ids=str)
def test_answers_are_as_described(described, mode):
    assert check_answers(described, mode, max_examples=6) > 50


@pytest.mark.slow(minutes=2)
@pytest.mark.timeout(1_800)
def test_five_thousand_right_requests_are_answered_as_described(described, record_property):
    num_cases = check_answers(described, GenerationMode.POSITIVE, scaled(700), max_slow_examples=scaled(70))
    assert num_cases > scaled(5_000)
    record_property("cases", num_cases)


@pytest.mark.slow(minutes=2)
@pytest.mark.timeout(1_800)
def test_five_thousand_wrong_requests_are_answered_as_described(described, record_property):
    """Right requests with one or two places made wrong, by a table: schemathesis takes half a second to find some."""
    statuses = Counter(check_wrong_requests(described, num_wrong=scaled(5_000)))
    assert sum(statuses.values()) >= scaled(5_000) and statuses[422] > scaled(2_000)
    record_property("statuses", dict(statuses))


def test_wrong_requests_are_answered_as_described(described):
    assert set(check_wrong_requests(described, num_wrong=60)) >= {404, 422}


def check_wrong_requests(described, *, num_wrong):
    """Send wrong requests to every operation in turn; yield the status of each that is refused."""
    generator, schemas = random.Random(0), described.raw_schema["components"]["schemas"]
    operations = [operation for found in described.get_all_operations() if asks(operation := found.ok())]
    refused = 0
    while refused < num_wrong:
        for operation in operations:
            request = make_request(operation, schemas, generator)
            for _ in range(generator.choice((1, 1, 2))):
                if places := list(walk(*request, schemas)):
                    make_wrong(*generator.choice(places), generator)
            status = operation.Case(**as_case(operation, request[1])).call_and_validate(checks=CHECKS).status_code
            if status >= 400:
                refused += 1
                yield status


def asks(operation):
    """Whether an operation has anything that can be asked wrongly."""
    return "requestBody" in operation.definition.raw or operation.definition.raw.get("parameters")


def make_request(operation, schemas, generator):
    """The schema of a request as a whole, and a right one."""
    definition, parts = operation.definition.raw, {}
    for parameter in definition.get("parameters", []):
        part = parts.setdefault(parameter["in"], {"type": "object", "properties": {}, "required": []})
        part["properties"][parameter["name"]] = parameter["schema"]
        if parameter.get("required"):
            part["required"].append(parameter["name"])
    for content in definition.get("requestBody", {}).get("content", {}).values():
        parts["body"] = content["schema"]
    schema = {"type": "object", "properties": parts, "required": list(parts)}
    return schema, make_right(schema, schemas, generator)


def as_case(operation, request):
    """The arguments of a case; all but the body is text, a path has all of its parts, headers what clients can send."""
    case = {"path_parameters": dict.fromkeys(re.findall(r"{(\w+)}", operation.path), "x")}
    for place, name in (("path", "path_parameters"), ("query", "query"), ("header", "headers")):
        content = request.get(place) if isinstance(request.get(place), dict) else {}
        texts = {str(key): value if isinstance(value, str) else json.dumps(value) for key, value in content.items()}
        if place == "header":
            texts = {key: value for key, value in texts.items() if re.fullmatch(r"[!-~]+", value)}
        case[name] = case.get(name, {}) | {key: value for key, value in texts.items() if value or place == "query"}
    return case | ({"body": request["body"]} if "body" in request else {})


def make_right(schema, schemas, generator):
    """A value that a schema allows."""
    schema = resolve(schema, schemas)
    if "anyOf" in schema:
        return make_right(generator.choice(schema["anyOf"]), schemas, generator)
    if "enum" in schema or "const" in schema:
        return generator.choice(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "object":
            required = schema.get("required", [])
            names = [name for name in schema.get("properties", {}) if name in required or generator.random() < 0.5]
            return {name: make_right(schema["properties"][name], schemas, generator) for name in names}
        case "array":
            return [make_right(schema["items"], schemas, generator) for _ in range(generator.randint(1, 3))]
        case "integer":
            return generator.randint(schema.get("minimum", 0), min(schema.get("maximum", 9), 9))
        case "number":
            return generator.uniform(schema.get("minimum", 0.0), schema.get("maximum", 1.0))
        case "boolean":
            return generator.random() < 0.5
        case "null":
            return None
    return generator.choice(["river", "L1", "default", generator.choice(WORDS)])


def resolve(schema, schemas):
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def walk(schema, value, schemas):
    """Every place below a value: its schema, and what holds it under which key."""
    schema = resolve(schema, schemas)
    for choice in schema.get("anyOf", [schema]):
        choice = resolve(choice, schemas)
        if choice.get("type") == "object" and isinstance(value, dict):
            inner = choice.get("properties", {})
            parts = [(inner.get(key, {}), key) for key in value]
        elif choice.get("type") == "array" and isinstance(value, list):
            parts = [(choice["items"], place) for place in range(len(value))]
        else:
            continue
        for part, key in parts:
            yield resolve(part, schemas), value, key
            yield from walk(part, value[key], schemas)


def make_wrong(schema, container, key, generator):
    """Replace a value by one of another kind or beyond a limit, double it, remove it, or add a field beside it."""
    wrong = [
        None,
        True,
        -1,
        0,
        10**30,
        0.5,
        -1e308,
        "",
        " ",
        "\x00",
        "x",
        [],
        [[]],
        {},
        {"a": {}},
        [None],
        "🙂" * 9,
    ]
    wrong += [schema["maxLength"] * "x" + "x"] if "maxLength" in schema else []
    wrong += [schema["maximum"] + 1] if "maximum" in schema else []
    wrong += [schema["minimum"] - 1] if "minimum" in schema else []
    wrong += [[container[key]] * 2, {"value": container[key]}, str(container[key])]
    if isinstance(container[key], list) and schema.get("maxItems", 2_000) < 2_000:
        wrong.append((container[key] or [""]) * (schema["maxItems"] + 1))
    kind = generator.randrange(10)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container["unknown"] = container[key]
    else:
        container[key] = generator.choice(wrong)


def test_the_description_names_every_endpoint(described):
    paths = set(described.raw_schema["paths"])
    assert paths >= {"/v1/predict", "/v1/embeddings", "/v1/labels", "/healthz", "/readyz", "/info", "/metrics"}
    assert paths >= {"/v1/projects", "/v1/projects/{project_id}/suggest", "/v1/projects/{project_id}/suggest-batch"}
