"""Several processes on one port: edits reach all of them, and the service outlives any of them."""

import os
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from dexter.errors import UsageError
from dexter.serving import workers
from dexter.serving.settings import ServeSettings
from tests.conftest import eventually
from tests.serving.sockets import PATIENCE, call, start_process, start_service, wait_ready

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")


def children(process):
    return {int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()}


def is_running(pid):
    """Whether a process exists and is no zombie."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def ask_all(port, ask, *, num_workers=2, headers=None):
    """Ask each worker over a connection of its own: the answers by number of the worker."""
    answers = {}

    def have_all_answered():
        options = {"base_url": f"http://127.0.0.1:{port}", "headers": headers, "timeout": PATIENCE}
        # A worker may just have been killed, or not know the key yet.
        with httpx.Client(**options) as client, suppress(httpx.TransportError):
            if worker := re.search(r'worker="(\d+)"', client.get("/metrics").text):
                answers[int(worker[1])] = ask(client)
        return len(answers) == num_workers

    eventually(have_all_answered)
    return answers


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def service(run):
    process, port = start_process(run, "--workers", "2")
    wait_ready(port)
    yield process, port
    process.kill()


def test_an_edit_in_one_worker_reaches_all(service):
    process, port = service
    change = {"labels": [{"id": "new", "text": "river of stone"}]}
    assert call(port, "/v1/labels", "POST", json=change).json()["version"] == 1

    def ask(client):
        answer = client.post("/v1/predict", json={"inputs": "river of stone", "k": 100}).json()
        return answer["version"], "new" in {label["id"] for label in answer["results"][0]["labels"]}

    eventually(lambda: ask_all(port, ask) == {1: (1, True), 2: (1, True)})
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_killed_worker_is_replaced_and_the_others_go_on(service):
    process, port = service
    ask_all(port, lambda client: client.get("/healthz").status_code)
    before = children(process)
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: killed not in children(process))
    for _ in range(20):
        assert call(port, "/v1/predict", "POST", json={"inputs": "river"}).status_code == 200
    assert set(ask_all(port, lambda client: client.get("/readyz").status_code).values()) == {200}
    after = children(process)
    assert len(before) == len(after) == 2 and killed not in after and len(before & after) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert f"(process {killed}) ended with -9" in process.stderr.read()


SOON = "import dexter.serving.workers\ndexter.serving.workers._HUNG_SECONDS = 3.0\n"
DEADLOCK = """
import signal, threading
def deadlock(*_):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
signal.signal(signal.SIGUSR1, deadlock)  # in the thread of the event loop
"""


@pytest.mark.parametrize("hang", [signal.SIGSTOP, signal.SIGUSR1], ids=["stopped", "deadlock"])
def test_a_worker_that_hangs_is_killed_and_replaced(run, hang):
    process, port = start_service(run, before=SOON + DEADLOCK, workers=2, keep_edits=True)
    try:
        ask_all(port, lambda client: client.get("/healthz").status_code)
        before = children(process)
        hung = min(before)
        os.kill(hung, hang)
        eventually(lambda: len(children(process) - {hung}) == 2)
        assert set(ask_all(port, lambda client: client.get("/readyz").status_code).values()) == {200}
        assert len(children(process) & before) == 1, "the other one went on"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert f"(process {hung}) gave no sign of life" in process.stderr.read()
    finally:
        process.kill()


def test_sigterm_ends_all_also_if_one_hangs(run):
    process, port = start_service(run, before=DEADLOCK, workers=2, keep_edits=True, drain_seconds=1.0)
    try:
        ask_all(port, lambda client: client.get("/healthz").status_code)
        workers = children(process)
        os.kill(min(workers), signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 5
        assert not any(map(is_running, workers))
        assert f"(process {min(workers)}) hangs: ending without it" in process.stderr.read()
    finally:
        process.kill()


def test_a_worker_that_cannot_start_again_is_tried_less_and_less_often(monkeypatch):
    """Processes that end at once, except for the first of each worker: the waits between starts double."""
    now = 0.0
    monkeypatch.setattr(workers.time, "monotonic", lambda: now)
    parent = workers._Parent(1, lambda number, beat: None, end_seconds=1.0)
    [worker] = parent._workers
    parent._was_ready = True
    waits = []
    for _ in range(9):
        worker.process, worker.started = 1, now
        parent._note_end(worker, 1)
        waits.append(worker.start_at - now)
        now = worker.start_at
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    worker.process, worker.started, now = 1, now, now + 61
    parent._note_end(worker, 1)
    assert worker.start_at == now and worker.wait == 1


def test_workers_end_with_a_parent_that_is_killed(service):
    process, port = service
    ask_all(port, lambda client: client.get("/healthz").status_code)
    workers = children(process)
    process.kill()
    process.wait()
    eventually(lambda: not any(is_running(pid) for pid in workers))


def test_sighup_reloads_the_keys_of_all(trained, tmp_path):
    import hashlib

    def write(key):
        file = tmp_path / "keys"
        file.write_text(f"ann:read:{hashlib.sha256(key.encode()).hexdigest()}\n")
        file.chmod(0o600)
        return {"X-API-Key": key}

    shutil.copytree(trained, tmp_path / "run")
    old = write("the-old-key-of-enough-letters")
    process, port = start_process(tmp_path / "run", "--workers", "2", "--keys", tmp_path / "keys")
    try:
        wait_ready(port)
        assert ask_all(port, lambda client: client.get("/info").status_code, headers=old) == {1: 200, 2: 200}
        new = write("the-new-key-of-enough-letters")
        process.send_signal(signal.SIGHUP)
        refused = ask_all(port, lambda client: client.get("/info", headers=old).status_code, headers=new)
        assert refused == {1: 401, 2: 401}
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_run_that_cannot_be_loaded_ends_all_with_its_exit_code(tmp_path):
    process, _ = start_process(tmp_path / "nowhere", "--workers", "2")
    assert process.wait(60) == 4
    assert "no such run folder" in process.stderr.read()


def test_workers_need_edits_on_disk():
    with pytest.raises(UsageError, match="keep-edits"):
        ServeSettings(workers=2, keep_edits=False)
