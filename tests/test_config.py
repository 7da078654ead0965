import dataclasses

import pytest

from dexter.config import Config, config_from_dict, config_to_toml, load_config, parse_overrides
from dexter.errors import UsageError
from dexter.recipes import method_names


@pytest.mark.parametrize("name", method_names())
def test_every_recipe_loads_and_survives_toml(name, tmp_path):
    config = load_config(name)
    assert config.recipe == name
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(config))
    assert load_config(path) == config


def test_overrides_go_on_top():
    config = load_config("dexml", {"train.epochs": 7, "encoder.kind": "transformer", "loss.temperature": 1})
    assert (config.train.epochs, config.encoder.kind, config.loss.temperature) == (7, "transformer", 1.0)


def test_assignments_are_toml_or_text():
    assert parse_overrides(
        ["train.epochs=5", "loss.prior=true", "encoder.pretrained=minilm", "train.learning_rate=5e-5"]
    ) == {
        "train.epochs": 5,
        "loss.prior": True,
        "encoder.pretrained": "minilm",
        "train.learning_rate": 5e-5,
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trian": {}}, "did you mean 'train"),
        ({"train": {"epoch": 1}}, "did you mean 'train.epochs'"),
        ({"train": {"epochs": "three"}}, "train.epochs: expected int, got 'three'"),
        ({"train": {"epochs": True}}, "expected int"),
        ({"train": {"epochs": -1}}, "train.epochs must be 0 or more"),
        ({"train": 3}, "train: expected a section"),
        ({"loss": {"name": "hinge"}}, "expected one of softmax"),
        ({"loss": {"temperature": 0}}, "loss.temperature must be above 0"),
        ({"epochs": 3}, "did you mean 'train.epochs'"),
        ({"batch": {"correct_pool": True}}, "unless pool = 'in-batch'"),
        ({"batch": {"correct_pool": True, "pool": "in-batch"}, "loss": {"name": "bce"}}, "softmax, psl"),
        ({"batch": {"correct_pool": True, "pool": "in-batch", "order": "clustered"}}, "batches are shuffled"),
        ({"validation": {"metric": "accuracy"}}, "such as P@1"),
    ],
)
def test_bad_settings_are_named(values, message):
    with pytest.raises(UsageError, match=message):
        config_from_dict(values)


@pytest.mark.parametrize("assignment", ["train.epochs", "=3"])
def test_bad_assignments(assignment):
    with pytest.raises(UsageError, match="KEY=VALUE"):
        parse_overrides([assignment])


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'dexml'"):
        load_config("dexm")


def test_missing_and_malformed_recipe_files(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        load_config(tmp_path / "missing.toml")
    path = tmp_path / "bad.toml"
    path.write_text("train = [")
    with pytest.raises(UsageError, match="not valid TOML"):
        load_config(path)


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 1
