"""Models on the Hugging Face hub: the real client against a hub on this machine, and what happens without one."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dexter.errors import ModelError, ResourceError
from dexter.model import hub
from dexter.predict import Predictor

COMMITS = {"main": "1" * 40, "v1": "2" * 40}


class FakeHub(BaseHTTPRequestHandler):
    """Answers what `snapshot_download` asks, for one repository with a folder for each revision."""

    folders: dict[str, Path]
    asked: list[str]

    def do_GET(self):
        path = urlsplit(self.path).path
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[4] == "revision" and parts[5] in COMMITS:
            return self.answer(json.dumps({"id": "org/world", "sha": COMMITS[parts[5]], "siblings": []}).encode())
        if parts[:2] == ["api", "models"] and parts[4] == "tree":
            folder = self.folders[parts[5]]
            files = [each for each in folder.rglob("*") if each.is_file()]
            return self.answer(json.dumps([self.entry(each, folder) for each in files]).encode())
        if parts[2:3] == ["resolve"]:
            name = "/".join(parts[4:])
            self.asked.append(name)
            return self.answer((self.folders[parts[3]] / name).read_bytes(), commit=parts[3])
        return self.send_error(404)

    do_HEAD = do_GET

    @staticmethod
    def entry(file, folder):
        oid = hashlib.sha1(file.read_bytes()).hexdigest()
        return {"type": "file", "path": file.relative_to(folder).as_posix(), "size": file.stat().st_size, "oid": oid}

    def answer(self, content, *, commit=""):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def served(trained, tmp_path):
    """A hub with the model at two revisions; v1 has a hostile page and code beside it."""
    folders = {COMMITS[name]: shutil.copytree(trained / "model", tmp_path / "hub" / name) for name in COMMITS}
    (folders[COMMITS["v1"]] / "README.md").write_text("---\nlicense: !!python/object/apply:os.abort []\n---\n")
    (folders[COMMITS["v1"]] / "modeling.py").write_text("raise SystemExit('run')")
    handler = type("Hub", (FakeHub,), {"folders": folders, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def load(endpoint, home, code="Predictor.load('org/world')", text="river stone", **environment):
    """Run Python where the hub is at the address given and its cache is empty, or as an earlier call left it."""
    program = (
        f"import sys\nfrom dexter.predict import Predictor\np = {code}\nprint(p.predict([{text!r}], k=1)[0][0].id)"
    )
    known = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"} | environment
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=known, timeout=120)


def test_a_model_of_the_hub_is_downloaded_once_and_then_needs_no_hub(served, trained, tmp_path):
    endpoint, handler = served
    expected = Predictor.load(trained).predict(["river stone"], k=1)[0][0].id
    first = load(endpoint, tmp_path / "home")
    assert first.stdout.strip() == expected, first.stderr
    handler.asked.clear()
    offline = load("http://127.0.0.1:9", tmp_path / "home", HF_HUB_OFFLINE="1")
    assert offline.stdout.strip() == expected, offline.stderr
    assert handler.asked == []


def test_a_revision_is_what_was_asked_for_and_no_code_is_fetched(served, trained, tmp_path):
    endpoint, handler = served
    loaded = load(endpoint, tmp_path / "home", "Predictor.load('org/world', revision='v1')")
    assert loaded.returncode == 0, loaded.stderr
    assert (tmp_path / "home" / "dexter" / "org--world" / COMMITS["v1"] / "MANIFEST.json").exists()
    assert "MANIFEST.json" in handler.asked
    assert not [name for name in handler.asked if name.endswith((".py", ".md"))]
    missing = load(endpoint, tmp_path / "home", "Predictor.load('org/world', revision='v2')")
    assert missing.returncode == 1 and "gave none at revision 'v2'" in missing.stderr.splitlines()[-1]


def test_what_moved_on_the_hub_is_loaded_whole(served, trained, tmp_path, monkeypatch):
    """A branch that leads to another commit: no file of the old one is left in the way."""
    endpoint, handler = served
    old = handler.folders[COMMITS["main"]]
    model = Predictor.load(old, persistent=True)
    model.add_labels([("new", "zeppelin")])
    assert load(endpoint, tmp_path / "home", text="zeppelin").stdout.strip() == "new"
    monkeypatch.setitem(COMMITS, "main", "3" * 40)
    handler.folders["3" * 40] = shutil.copytree(trained / "model", tmp_path / "hub" / "next")
    moved = load(endpoint, tmp_path / "home", text="zeppelin")
    assert moved.stdout.strip() not in ("", "new"), moved.stderr


def test_an_altered_file_of_the_hub_is_refused(served, tmp_path):
    endpoint, handler = served
    path = handler.folders[COMMITS["main"]] / "dexter" / "labels.jsonl"
    path.write_bytes(path.read_bytes().replace(b"river", b"rivet"))
    refused = load(endpoint, tmp_path / "home")
    assert refused.returncode == 1 and "differs from its manifest" in refused.stderr.splitlines()[-1]


def test_without_a_hub_the_error_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="no such run folder here, and the Hugging Face hub gave none") as caught:
        Predictor.load("org/world")
    assert len(str(caught.value).splitlines()) == 1


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ResourceError, match=r"pip install 'dexter-xmc\[hub\]'"):
        Predictor.load("org/world")


@pytest.mark.parametrize("name", ["../runs/x", "runs/x/model", "/runs/x", "x", "~/x", Path("runs/x")])
def test_what_is_no_name_never_asks_the_hub(monkeypatch, name):
    monkeypatch.setattr(hub, "_download", lambda *_: pytest.fail("asked"))
    with pytest.raises(ModelError, match="no such run folder"):
        Predictor.load(name)


def test_a_revision_stays_inside_its_folder(trained):
    with pytest.raises(ModelError, match="expected a commit"):
        Predictor.load("org/world", revision="../../x")
    with pytest.raises(ModelError, match="has no revisions"):
        Predictor.load(trained, revision="v1")
