"""`dexter recipes`: every recipe is listed with a line on it, and shown with the source of every value."""

import json
import tomllib

import pytest
from typer.testing import CliRunner

from dexter.cli.main import app
from dexter.config import load_config
from dexter.errors import UsageError
from dexter.recipes import method_names, paper_names, recipe_names


def run(*arguments):
    result = CliRunner().invoke(app, ["recipes", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_methods_come_first_and_each_has_one_line():
    lines = [line for line in run().splitlines() if line.startswith("  ")]
    assert [line.split()[0] for line in lines] == [*method_names(), *paper_names()]
    assert all(len(line.split(None, 1)) == 2 for line in lines), "a recipe without a summary"
    listed = json.loads(run("--json"))
    assert [entry["name"] for entry in listed] == recipe_names()
    assert {entry["kind"] for entry in listed} == {"method", "paper"}


@pytest.mark.parametrize("name", ["dexml-lf-amazontitles-131k", "unidec"])
def test_json_has_value_and_source_of_every_setting(name):
    shown = json.loads(run("show", name, "--json"))
    config = load_config(name)
    for section, settings in shown.items():
        assert {key: entry["value"] for key, entry in settings.items()} == vars(getattr(config, section))
        assert all(set(entry) == {"value", "source"} and entry["source"] for entry in settings.values())
    assert set(shown) == {"data", "encoder", "batch", "head", "loss", "train", "validation", "scoring"}


def test_sources_are_the_papers_the_recipes_or_the_defaults():
    paper = json.loads(run("show", "dexml-lf-amazontitles-131k", "--json"))
    assert paper["batch"]["size"] == {
        "value": 3000,
        "source": "code, configuration of LF-AmazonTitles-131K, per GPU",
    }
    assert paper["train"]["checkpoint_minutes"]["source"] == "default"
    method = json.loads(run("show", "dexml", "--json"))
    assert method["loss"]["positives"] == {"value": 1, "source": "recipe dexml"}


@pytest.mark.parametrize("name", recipe_names())
def test_what_is_shown_is_a_recipe(name, tmp_path):
    shown = run("show", name)
    values = tomllib.loads(shown)
    (tmp_path / f"{name}.toml").write_text(shown)
    assert load_config(tmp_path / f"{name}.toml") == load_config(name)
    assert values["summary"]


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'dexml-eurlex-4k'"):
        run("show", "dexml-eurlex4k")
