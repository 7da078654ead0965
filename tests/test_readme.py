"""The documents are true: their code runs, their links lead somewhere, and the map names every room."""

import re
import shlex
import sys
from pathlib import Path

import pytest

import dexter
from dexter.cli import main as cli
from dexter.config import load_config
from dexter.data import sources
from dexter.data.formats import save_dataset
from dexter.recipes import method_names
from tests.conftest import SMALL, all_verbs, make_world

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def blocks(text, language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [content for name, content in found if name == language]


@pytest.fixture
def small_place(monkeypatch, tmp_path):
    """A current folder where pydocs is a small world and training takes a second."""
    real = dexter.train

    def quick(data, *, overrides=None, **settings):
        return real(data, overrides={**SMALL, **(overrides or {})}, **settings)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dexter, "train", quick, raising=False)
    monkeypatch.setattr("dexter.training.train", quick)
    monkeypatch.setattr(sources, "build", lambda name: make_world())
    return tmp_path


def test_the_python_of_the_readme_runs(small_place, capsys):
    save_dataset(make_world(), small_place / "data" / "pydocs")
    code = "\n".join(blocks(README, "python"))
    exec(compile(code, "README.md", "exec"), {})  # the blocks follow on from one another
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_the_commands_of_the_readme_run(small_place, monkeypatch, capsys):
    commands = [shlex.split(line) for block in blocks(README, "sh") for line in block.splitlines()]
    assert len(commands) >= 4
    for command in commands:
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code, (command, capsys.readouterr().err)


def test_the_file_map_names_every_module():
    [tree] = [block for block in blocks(README, "") if block.startswith("src/dexter/")]
    named = set(re.findall(r"^  (\S+?)/?(?: |$)", tree, re.MULTILINE))
    there = {path.name for path in (ROOT / "src" / "dexter").iterdir() if path.name != "__pycache__"}
    assert named == there


def test_every_recipe_is_described():
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE)) == set(method_names())


def test_the_recipe_of_the_documents_loads(tmp_path):
    [recipe] = blocks((ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"), "toml")
    (tmp_path / "mine.toml").write_text(recipe)
    assert load_config(tmp_path / "mine.toml").encoder.kind == "transformer"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert not missing


def test_every_verb_and_exit_code_is_documented():
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    verbs = [verb.split() for verb in all_verbs()]
    assert ["tune"] in verbs and ["labels", "add"] in verbs
    assert not [verb for verb in verbs if not re.search(rf"^dexter {' +'.join(verb)} ", text, re.MULTILINE)]
    assert not [code for code in (0, 1, 2, 3, 4, 5, 6, 130) if not re.search(rf"^\| {code}\b", text, re.MULTILINE)]
