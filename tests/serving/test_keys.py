"""API keys: a file of them, what each may do, how often, and a file that changes while the service runs."""

import hashlib
import json
import logging
import shutil
import signal
import ssl
import subprocess

import httpx
import pytest

from dexter import Predictor
from dexter.errors import ResourceError, UsageError
from dexter.serving.keys import KeyRing, find_keys, make_key, read_keys
from tests.conftest import eventually
from tests.serving.sockets import call, start_process, wait_ready

READ, EDIT = "a-key-that-may-only-read", "a-key-that-may-also-edit"
NEW = {"labels": [{"id": "new", "text": "river lantern"}]}


def line(name, role, key, *more):
    return ":".join([name, role, hashlib.sha256(key.encode()).hexdigest(), *more]) + "\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# keys of the service\n\n{line('ann', 'read', READ)}{line('bob', 'edit', EDIT, '600')}")
    path.chmod(0o600)
    return path


def test_a_file_of_keys(file):
    ann, bob = read_keys(file)
    assert (ann.name, ann.role, ann.per_minute) == ("ann", "read", None)
    assert (bob.name, bob.role, bob.per_minute) == ("bob", "edit", 600)
    ring = KeyRing([ann, bob])
    assert ring.find(READ) is ann and ring.find(EDIT) is bob
    assert ring.find("") is ring.find(READ + "x") is ring.find(ann.digest.hex()) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_file_that_others_can_read_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(ResourceError, match="chmod 600"):
        read_keys(file)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "a-key-in-plain-text-of-some-length\n",
        line("ann", "admin", READ),
        line("", "read", READ),
        line("a b", "read", READ),
        line("ann", "read", READ, "0"),
        line("ann", "read", READ, "-5"),
        line("ann", "read", READ, "5", "x"),
        line("ann", "read", READ)[:-2] + "\n",
        line("ann", "read", READ) + line("ann", "edit", EDIT),
        line("ann", "read", READ) + line("bob", "edit", READ),
    ],
)
def test_a_file_that_is_not_as_expected_is_refused_without_repeating_it(file, text):
    file.write_text(text)
    with pytest.raises(ResourceError) as refused:
        read_keys(file)
    assert "plain-text" not in str(refused.value)


def test_keys_come_from_a_file_or_the_environment(file, tmp_path):
    assert find_keys(None, {}) == ()
    assert [key.name for key in find_keys(file, {})] == ["ann", "bob"]
    assert find_keys(None, {"DEXTER_API_KEY": f" {READ}\n"}) == (make_key("default", READ, "edit"),)
    with pytest.raises(UsageError, match="not from both"):
        find_keys(file, {"DEXTER_API_KEY": READ})
    with pytest.raises(UsageError, match="16 characters"):
        find_keys(None, {"DEXTER_API_KEY": "short"})
    with pytest.raises(ResourceError, match="cannot be read"):
        find_keys(tmp_path / "nowhere", {})


def test_a_key_may_send_a_minutes_requests_at_once_and_then_as_time_allows():
    key, other = make_key("ann", READ, per_minute=3), make_key("bob", EDIT, per_minute=60)
    ring = KeyRing([key, other])
    assert [ring.charge(key, now) for now in (100, 100, 100, 100, 110, 119.9)] == [0, 0, 0, 20, 10, 1]
    assert [ring.charge(key, now) for now in (120, 120, 1_000, 1_000, 1_000, 1_000)] == [0, 20, 0, 0, 0, 20]
    assert [ring.charge(other, 100) for _ in range(61)] == [0] * 60 + [1]
    assert [ring.charge(make_key("eve", EDIT), 100) for _ in range(1_000)] == [0] * 1_000


def test_a_key_beyond_its_limit_is_told_when_to_come_back(connect):
    client = connect(keys=(make_key("ann", READ, per_minute=2), make_key("bob", EDIT)))
    asked = [client.get("/info", headers={"x-api-key": READ}) for _ in range(3)]
    assert [answer.status_code for answer in asked] == [200, 200, 429]
    assert asked[2].headers["retry-after"] == "30" and asked[2].json()["code"] == "rate"
    assert client.get("/info", headers={"x-api-key": EDIT}).status_code == 200
    assert client.get("/healthz").status_code == 200


def test_a_reading_key_changes_no_label(connect):
    client = connect(keys=(make_key("ann", READ, "read"), make_key("bob", EDIT, "edit")))
    tries = [
        ("POST", "/v1/labels", {"json": NEW}),
        ("PATCH", "/v1/labels", {"json": {"labels": [{"id": "L0", "text": "other"}]}}),
        ("DELETE", "/v1/labels", {"params": {"id": "L0"}}),
        ("POST", "/", {"data": {"label": "river lantern", "action": "add"}}),
    ]
    for method, path, options in tries:
        refused = client.request(method, path, headers={"x-api-key": READ}, **options)
        assert refused.status_code == 403, (method, path)
    assert client.get("/v1/labels?q=L0", headers={"x-api-key": READ}).json()["version"] == 0
    assert client.post("/v1/predict", json={"inputs": "river"}, headers={"x-api-key": READ}).status_code == 200
    for method, path, options in tries:
        allowed = client.request(method, path, headers={"x-api-key": EDIT}, **options)
        assert allowed.status_code == 200, allowed.text


def test_the_history_of_labels_has_the_name_of_the_key(connect, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    client = connect({"run": tmp_path / "run"}, keys=(make_key("bob", EDIT),))
    assert client.post("/v1/labels", json=NEW, headers={"x-api-key": EDIT}).status_code == 200
    [edit] = Predictor.load(tmp_path / "run", persistent=True).label_history()
    assert edit.author == "bob"


def test_requests_are_logged_with_the_name_of_the_key(connect, caplog):
    client = connect(keys=(make_key("ann", READ),), log_requests=True)
    with caplog.at_level(logging.INFO):
        answer = client.post("/v1/predict", json={"inputs": "river"}, headers={"x-api-key": READ})
        client.get("/v1/labels/nothing/here")
    [first, second] = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert first.pop("ms") >= 0
    assert first == {
        "request_id": answer.headers["x-request-id"],
        "method": "POST",
        "route": "/v1/predict",
        "status": 200,
        "bytes": len(answer.content),
        "key": "ann",
    }
    assert second["status"] == 401 and second["key"] is None and READ not in caplog.text


def test_keys_are_read_again_on_sighup_and_the_log_is_json(file, trained):
    process, port = start_process(
        trained, "--no-keep-edits", "--keys", file, "--log-requests", "--log-format", "json", DEXTER_API_KEY=""
    )
    try:
        wait_ready(port)

        def status(key):
            return call(port, "/info", headers={"x-api-key": key}).status_code

        def wait_for(key, expected):
            process.send_signal(signal.SIGHUP)
            eventually(lambda: status(key) == expected)

        assert [status(READ), status(EDIT)] == [200, 200]
        file.write_text(line("bob", "edit", EDIT))
        wait_for(READ, 401)
        assert status(EDIT) == 200
        file.write_text("nonsense\n")
        process.send_signal(signal.SIGHUP)
        assert status(EDIT) == 200  # the thread that answers has taken the signal first
        file.write_text(line("ann", "read", READ))
        wait_for(READ, 200)
        assert status(EDIT) == 401
    finally:
        process.terminate()
        said = process.communicate(timeout=60)[1]
    records = [json.loads(each) for each in said.splitlines()]
    assert all(record["time"].endswith("Z") and record["level"] for record in records)
    assert {record["key"] for record in records if record.get("route") == "/info"} == {"ann", "bob"}
    assert {record["key"] for record in records if record.get("status") == 401} == {None}
    assert any("old keys stay" in record.get("message", "") for record in records)
    assert process.returncode == 0 and READ not in said and EDIT not in said


def test_https(trained, tmp_path):
    certificate, private_key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(private_key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject, *files]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        pytest.skip("needs openssl to make a certificate")
    process, port = start_process(trained, "--no-keep-edits", "--tls-cert", certificate, "--tls-key", private_key)
    try:
        trust = ssl.create_default_context(cafile=str(certificate))
        wait_ready(port, scheme="https", verify=trust)
        large = call(port, "/v1/predict", "POST", scheme="https", content=b" " * 20_000_000, verify=trust)
        assert large.status_code == 413
        with pytest.raises(httpx.TransportError):
            call(port, "/readyz")
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_switched_off_explanations_and_texts(connect, world):
    client = connect(explanations=False)
    refused = client.post("/v1/predict", json={"inputs": "river", "explain": True})
    assert refused.status_code == 403 and refused.json()["code"] == "explain"
    assert client.get("/", params={"text": "river", "why": "L0"}).status_code == 200
    client = connect(training_texts=False)
    answer = client.post("/v1/predict", json={"inputs": world.train.texts[0], "explain": True}).json()
    assert all(label["explanation"]["neighbours"] == [] for label in answer["results"][0]["labels"])
    assert not any(text in client.get("/").text for text in world.train.texts)
