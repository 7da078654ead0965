"""A service over the small data set, called without a network, or over sockets of this machine."""

import socket
import threading

import pytest
from starlette.testclient import TestClient

from dexter import Predictor
from dexter.serving.app import create_app
from dexter.serving.server import make_server
from dexter.serving.settings import ServeSettings
from tests.conftest import eventually

BASE = "http://localhost"
"""Base address of the requests."""


@pytest.fixture(autouse=True)
def patient_readiness(monkeypatch):
    """A search of a service in this process may take longer than two seconds where the machine is busy."""
    monkeypatch.setattr("dexter.serving.runs._SEARCH_SECONDS", 60.0)


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


@pytest.fixture
def listening(trained):
    """Start a service with these settings in a thread of this process: its port and its application."""
    started = []

    def start(predictors=None, **settings):
        app = create_app(predictors or Predictor.load(trained), ServeSettings(**settings))
        listener = socket.create_server(("127.0.0.1", 0))
        server = make_server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        started.append((server, thread))
        eventually(lambda: server.started)
        return listener.getsockname()[1], app

    yield start
    for server, thread in started:
        server.should_exit = server.force_exit = True
        thread.join(60)
