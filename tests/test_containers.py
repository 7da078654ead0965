"""The container files: linted, consistent, and their commands run here, where no engine builds images."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.serving.sockets import wait_ready

ROOT = Path(__file__).parents[1]
yaml = pytest.importorskip("yaml")


def instructions():
    """(stage, instruction, argument) of every instruction of the Dockerfile; the stage is its name."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE))
    stage = None
    for line in filter(None, text.splitlines()):
        name, _, argument = line.partition(" ")
        stage = argument.split()[-1] if name == "FROM" else stage
        yield stage, name, argument


def of_stage(stage, name):
    """The arguments of an instruction in a stage and those it builds on, nearest first."""
    base = next(argument.split()[0] for each, kind, argument in instructions() if (each, kind) == (stage, "FROM"))
    found = [argument for each, kind, argument in instructions() if (each, kind) == (stage, name)][::-1]
    return found + (of_stage(base, name) if base in {each for each, _, _ in instructions()} else [])


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((ROOT / "compose.yaml").read_text())


def test_the_linter_has_nothing_to_say():
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed")
    found = subprocess.run([linter, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("stage", ["serve", "train"])
def test_an_image_runs_as_nobody_in_particular_and_has_one_volume(stage):
    assert of_stage(stage, "USER")[0] == "10001"
    assert of_stage(stage, "VOLUME") == ["/runs"]
    assert of_stage(stage, "ENTRYPOINT")[0] == '["dexter"]'


def test_the_image_that_serves_has_no_torch():
    lock = (ROOT / "constraints" / "serve.lock").read_text()
    assert "fastapi==" in lock and "psycopg==" in lock
    assert not re.search(r"^(torch|transformers|nvidia)", lock, re.MULTILINE)
    [install] = [each for each in of_stage("serve-packages", "RUN") if "serve.lock" in each]
    assert "--require-hashes" in install


def test_what_is_copied_is_there_and_nothing_else_is_sent():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] not in "#!"]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source
        for _, name, argument in instructions()
        if name == "COPY" and not argument.startswith("--from")
        for source in argument.split()[:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    assert ignored[0] == "*" and copied == kept
    assert not [name for name in kept if fnmatch.fnmatch(name, "*.env")]


def test_every_service_is_contained(compose):
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        assert service["user"] not in ("root", "0", 0), name
        assert "privileged" not in service and "network_mode" not in service, name


def test_the_compose_file_refers_to_what_there_is(compose):
    stages = {stage for stage, _, _ in instructions()}
    services = compose["services"]
    for name, service in services.items():
        if "build" in service:
            assert service["build"]["target"] in stages
        for other, needed in service.get("depends_on", {}).items():
            assert needed == {"condition": "service_healthy"} and "healthcheck" in services[other]
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source.startswith("./") or source in compose["volumes"], (name, volume)
        assert set(service["networks"]) <= set(compose["networks"])
    assert compose["networks"]["back"]["internal"] is True and services["database"]["networks"] == ["back"]
    assert services["service"]["volumes"] == ["runs:/runs"]


def test_secrets_are_asked_for_and_no_host_is_named(compose):
    text = (ROOT / "compose.yaml").read_text()
    assert len(re.findall(r"\$\{DEXTER_API_KEY:\?", text)) == 1
    assert len(re.findall(r"\$\{DEXTER_DATABASE_PASSWORD:\?", text)) == 2 and "PASSWORD: $" in text
    assert all(port.startswith("127.0.0.1:") for port in compose["services"]["service"]["ports"])
    images = [service["image"] for service in compose["services"].values() if "image" in service]
    images += [argument.split()[0] for _, name, argument in instructions() if name == "FROM"]
    assert not [image for image in images if "." in image.split("/")[0] and "/" in image]


def test_the_service_has_time_to_finish(compose):
    assert int(compose["services"]["service"]["stop_grace_period"].removesuffix("s")) >= 28
    assert of_stage("serve", "STOPSIGNAL") == ["SIGTERM"]


class Replay:
    """Runs the instructions of stages below a folder, which stands for the root of each image."""

    def __init__(self, place):
        self.place = place

    def inside(self, text, stage):
        """A command with the paths of an image moved below the folder."""
        moved = text.replace("/opt/dexter", f"{self.place}/opt/dexter")
        return moved.replace("/build", f"{self.place}/{stage}/build")

    def run(self, stage):
        folder = self.place / stage / "build"
        folder.mkdir(parents=True)
        for each, name, argument in instructions():
            if each != stage:
                continue
            if name == "COPY" and argument.startswith("--from="):
                other, source, target = argument.removeprefix("--from=").split()
                shutil.copytree(self.place / other / source.strip("/"), folder / target)
            elif name == "COPY":
                for source in argument.split()[:-1]:
                    copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                    copy(ROOT / source, folder / source)
            elif name == "RUN":
                done = subprocess.run(
                    self.inside(argument, stage), shell=True, cwd=folder, capture_output=True, text=True
                )
                assert done.returncode == 0, done.stderr


@pytest.mark.slow(minutes=4)
@pytest.mark.timeout(900)
def test_the_commands_of_the_image_make_a_service(trained, tmp_path):
    """Packages by hash, without torch; a run is served, the health check passes, a label is added, SIGTERM ends it."""
    replay = Replay(tmp_path)
    for stage in ("wheel", "serve-packages"):
        replay.run(stage)
    programs = tmp_path / "opt" / "dexter" / "bin"
    listed = subprocess.run([programs / "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert "dexter-xmc" in listed and not re.search(r"^(torch|transformers) ", listed, re.MULTILINE)
    run = shutil.copytree(trained, tmp_path / "runs" / "current")
    command = json.loads(of_stage("serve", "ENTRYPOINT")[0]) + json.loads(of_stage("serve", "CMD")[0])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [programs / command[0], *(str(run) if part == "/runs/current" else part for part in command[1:])]
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "DEXTER_API_KEY": "k" * 32,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    service = subprocess.Popen([*command, "--port", str(port)], env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_ready(port)
        check = json.loads(of_stage("serve", "HEALTHCHECK")[0].partition("CMD ")[2])
        check[2] = check[2].replace(":8000/", f":{port}/")
        assert subprocess.run(check, env=environment).returncode == 0
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"X-API-Key": "k" * 32})
        assert client.post("/v1/labels", json={"labels": [{"id": "new", "text": "zeppelin"}]}).status_code < 300
        found = client.post("/v1/predict", json={"inputs": "zeppelin", "k": 1}).json()
        assert found["results"][0]["labels"][0]["id"] == "new"
        assert httpx.get(f"http://127.0.0.1:{port}/info").status_code == 401
    finally:
        service.send_signal(signal.SIGTERM)
    assert service.wait(timeout=30) == 0
    assert subprocess.run(check, env=environment, stderr=subprocess.DEVNULL).returncode != 0


def test_the_versions_of_training_are_those_of_the_lock():
    """The file of versions that the image of training makes has torch and no hashes."""
    [command] = [each for each in of_stage("train-packages", "RUN") if "sed " in each]
    [sed] = [shlex.split(each.partition(">")[0]) for each in command.split("&&") if each.strip().startswith("sed")]
    made = subprocess.run(sed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lock = (ROOT / "constraints" / "dev.lock").read_text()
    assert re.search(r"^torch==[\d.]+$", made, re.MULTILINE) and "sha256" not in made
    assert len(made.splitlines()) == len(re.findall(r"^[a-z0-9]\S*==", lock, re.MULTILINE))
