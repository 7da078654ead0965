"""The documents are true: commands and code run, every page is on the site, links and anchors lead somewhere."""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from dexter.cli import main as cli
from dexter.cli.main import app
from dexter.data.formats import save_dataset
from tests.conftest import make_world
from tests.test_readme import ROOT, blocks, small_place  # noqa: F401 - fixture

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
RUN_IN = {"sh", "python"}
ELSEWHERE = {
    "distributed.md": "torchrun",
    "papers.md": "data of papers",
    "sklearn.md": "its own test",
    "vocabularies.md": "a corpus",
}
"""Pages whose blocks need what a test has not; other tests run the like. Their commands are parsed."""


@pytest.fixture
def place(small_place):  # noqa: F811
    """A folder with the files that the pages call yours, and the run of the first page."""
    world = make_world()
    with open("articles.csv", "w", encoding="utf-8", newline="") as handle:
        rows = csv.writer(handle, delimiter=";")
        rows.writerow(["id", "title", "body", "tags", "year"])
        for row, text in enumerate(world.train.texts):
            tags = [world.label_ids[column] for column in world.train.relevance[row].indices]
            rows.writerow([f"a{row}", text.partition(" ")[0], text.partition(" ")[2], json.dumps(tags), 2000 + row % 9])
    Path("more.csv").write_text("id,title,body\n1,river,stone and copper\n2,violin,falcon\n", encoding="utf-8")
    Path("new-labels.csv").write_text("id,text\nfloods,rivers and floods\nmines,copper mines\n", encoding="utf-8")
    Path("queries.jsonl").write_text('{"id": "1", "text": "river stone"}\n', encoding="utf-8")
    return small_place


def make_run(monkeypatch, capsys):
    """Make the data and the run of the first page."""
    save_dataset(make_world(), Path("data/pydocs"))
    call(["dexter", "train", "data/pydocs", "--out", "runs/pydocs", "--quiet"], monkeypatch, capsys)


def commands_of(text):
    """The commands of a block, continued lines joined, comments left out."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip() and not line.startswith("#")]


def call(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, (command, capsys.readouterr().err)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in ELSEWHERE], ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_in_order(page, place, monkeypatch, capsys):
    found = re.findall(r"^```(sh|python)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names = {}
    if found and page.name != "start.md":
        make_run(monkeypatch, capsys)
    for language, content in found:
        if language == "python":
            exec(compile(content, page.name, "exec"), names)
            continue
        for command in commands_of(content):
            assert command[0] == "dexter", "a block that a test cannot run is a text block"
            call(command, monkeypatch, capsys)


def shown_commands():
    """Every command of dexter in a document, whatever the block, and in the examples of --help."""
    for page in [*PAGES, ROOT / "README.md"]:
        for content in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            for line in content.replace("\\\n", " ").splitlines():
                found = re.match(r"(?:torchrun .*? -m )?(dexter (?!.*[|[(]|.*\b[A-Z]{2,}\b|.*\.\.\.).*)", line)
                if found and "  " not in found[1].strip():
                    yield page.name, found[1]
    for name, command in typer.main.get_command(app).commands.items():
        for inner in getattr(command, "commands", {name: command}).values():
            for example in re.findall(
                r"Example: (?:torchrun .*? -m )?(dexter .*?)(?=\n\n|\Z)", inner.help or "", re.DOTALL
            ):
                for part in " ".join(example.split()).split(" && "):
                    yield f"{name} --help", part


@pytest.mark.parametrize(("where", "command"), list(shown_commands()))
def test_every_command_shown_has_known_options(where, command):
    words = shlex.split(command, comments=True)[1:]
    words = [word for word in words if word not in ("--quiet", "--debug")]
    group = typer.main.get_command(app)
    with group.make_context("dexter", [words[0]], resilient_parsing=True) as context:
        verb, rest = group.get_command(context, words[0]), words[1:]
        assert verb is not None, words
        if hasattr(verb, "commands") and rest and rest[0] in verb.commands:
            verb, rest = verb.commands[rest[0]], rest[1:]
        verb.make_context("dexter", rest, parent=context)


NOT_RUN = {
    "serve": "does not end",
    "demo": "tests/cli/test_demo.py",
    "import": "needs a published encoder",
    "export": "needs a transformer",
    "examples": "needs corrections",
    "train": "named data of papers; the pages train",
}


NOT_THERE = ("part-", "runs/library", ".ttl")
"""Files and runs of the examples that this test does not make."""


def test_the_examples_of_help_run(place, monkeypatch, capsys):
    """One after the other, on one run: each ends with exit code 0."""
    make_run(monkeypatch, capsys)
    for name in ("a", "b"):
        shutil.copytree("runs/pydocs", f"runs/{name}")
    Path("new.jsonl").write_text('{"id": "fresh", "text": "fresh water"}\n', encoding="utf-8")
    Path("corrections.jsonl").write_text('{"text": "river stone", "labels": ["L1"]}\n', encoding="utf-8")
    ran = 0
    for where, command in shown_commands():
        if (
            where.endswith("--help")
            and where.split()[0] not in NOT_RUN
            and not any(one in command for one in NOT_THERE)
        ):
            command = command.replace("numpy.linalg.inv", "L0")
            command = re.sub(r"(build pydocs --out |split \S+ )data/", r"\1new/", command)
            call(shlex.split(command), monkeypatch, capsys)
            ran += 1
    assert ran > 20


def anchors(page):
    """The anchors of a document's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", one)).strip().lower().replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md"), ROOT / "bench" / "README.md"], ids=lambda page: page.name)
def test_links_and_anchors_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target}#{anchor}"


def navigation(entries):
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from navigation(value) if isinstance(value, list) else [value]


def test_every_page_is_in_the_navigation_and_none_leaves_the_site():
    class Loader(yaml.SafeLoader):
        """Reads `!!python/name:` tags, which mkdocs resolves, as their text."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)  # a safe loader
    assert sorted(navigation(settings["nav"])) == [page.name for page in PAGES]
    assert settings["theme"]["font"] is False, "fonts come from nowhere else"
    for page in PAGES:
        assert "](../" not in page.read_text(encoding="utf-8"), f"{page.name} links to a file that the site has not"


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_asks_nobody_for_anything(tmp_path):
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not [address for address in fetched if 'rel="canonical"' not in address], page
    assert "Predictor" in (tmp_path / "api" / "index.html").read_text()
    shutil.rmtree(tmp_path)
