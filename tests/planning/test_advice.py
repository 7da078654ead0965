"""What makes a run fit is tried, not guessed: the advice is applied and the peak looked at again."""

from dexter.config import load_config, parse_overrides
from dexter.planning.plan import count_processes, find_changes, plan_counts

COUNTS = {"num_queries": 2_000_000, "num_labels": 1_300_000, "tokens_per_text": 12}
DISTILBERT = {"encoder.kind": "transformer", "encoder.pretrained": "distilbert-base-uncased"}


def test_nothing_to_change_where_it_fits():
    assert find_changes(load_config("dexml"), 10, lambda config: 9.0) == ()


def test_no_change_helps():
    assert find_changes(load_config("dexml"), 10, lambda config: 11.0) is None


def test_the_first_single_change_is_taken():
    def peak(config):
        return float(config.loss.memory_megabytes)

    [change] = find_changes(load_config("dexml"), 100, peak)
    assert change == "loss.memory_megabytes=64"


def test_several_changes_where_one_is_not_enough():
    def peak(config):
        return float(config.loss.memory_megabytes + (config.batch.size or 1_024))

    changes = find_changes(load_config("dexml", {"batch.size": 1_024}), 60, peak)
    assert {change.partition("=")[0] for change in changes} == {"loss.memory_megabytes", "batch.size"}


def test_the_fewest_ranks():
    assert count_processes(10, lambda ranks: 70 / ranks) == 7
    assert count_processes(10, lambda ranks: 70 / ranks, fewest=8) == 8
    assert count_processes(10, lambda ranks: 11.0) is None


def test_following_the_advice_makes_it_fit():
    shared = {**COUNTS, "recipe": "dexml", "gpu_memory": 9}
    found = plan_counts(**shared, overrides=DISTILBERT, world_size=8)
    assert found.fits is False
    assert found.changes
    follow = parse_overrides(found.changes)
    assert plan_counts(**shared, overrides={**DISTILBERT, **follow}, world_size=8).fits
    assert found.processes_needed is None or found.processes_needed > 8


def test_processes_needed_are_enough_and_not_one_too_many():
    shared = {**COUNTS, "recipe": "dexml", "gpu_memory": 16, "overrides": DISTILBERT}
    needed = plan_counts(**shared, world_size=1).processes_needed
    assert needed > 1
    assert plan_counts(**shared, world_size=needed).fits
    assert not plan_counts(**shared, world_size=needed - 1).fits
