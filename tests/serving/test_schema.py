"""Every request that the OpenAPI description allows, and many that it does not, get an answer that it describes."""

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
from tests.conftest import scaled

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
@pytest.mark.parametrize("mode", list(GenerationMode), ids=str)
def test_ten_thousand_answers_are_as_described(described, mode, record_property):
    num_cases = check_answers(described, mode, scaled(700), max_slow_examples=scaled(70))
    assert num_cases > scaled(5_000)
    record_property("cases", num_cases)


def test_the_description_names_every_endpoint(described):
    paths = set(described.raw_schema["paths"])
    assert paths >= {"/v1/predict", "/v1/embeddings", "/v1/labels", "/healthz", "/readyz", "/info", "/metrics"}
    assert paths >= {"/v1/projects", "/v1/projects/{project_id}/suggest", "/v1/projects/{project_id}/suggest-batch"}
