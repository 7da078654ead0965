"""A service over the small data set, called without a network."""

import pytest
from starlette.testclient import TestClient

from dexter import Predictor
from dexter.serving.app import create_app
from dexter.serving.settings import ServeSettings

BASE = "http://localhost"
"""Base address of the requests."""


@pytest.fixture
def connect(trained):
    """Make a client of a service with these settings; each has a predictor of its own."""
    clients = []

    def make(predictors=None, **settings):
        app = create_app(predictors or Predictor.load(trained), ServeSettings(**settings))
        client = TestClient(app, base_url=BASE, raise_server_exceptions=False)
        clients.append(client.__enter__())
        return clients[-1]

    yield make
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture
def client(connect):
    return connect()
