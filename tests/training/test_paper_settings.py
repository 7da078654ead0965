"""Settings that the papers need: each changes what a step computes, in the way that was published."""

import math

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

import dexter
from dexter import losses
from dexter.batches.sampler import Sampler
from dexter.config import BatchConfig, LossConfig, load_config
from dexter.data import Split
from dexter.encoders import build_encoder
from dexter.encoders.transformer import TransformerEncoder
from dexter.errors import UsageError
from dexter.planning.plan import plan
from dexter.training.presets import resolve_counts, resolve_presets
from dexter.training.run import open_run
from dexter.training.trainer import Trainer
from tests.conftest import SMALL, make_world

NUM_QUERIES, NUM_LABELS = 12, 60


def sampler(batch, loss=None, *, weights=None):
    generator = np.random.default_rng(0)
    dense = (generator.random((NUM_QUERIES, NUM_LABELS)) < 0.15).astype(np.float32)
    dense[:, :4] = 1 if weights is None else weights
    texts = [f"query {number}" for number in range(NUM_QUERIES)]
    return Sampler(Split(texts, texts, csr_matrix(dense)), BatchConfig(**batch), LossConfig(**(loss or {})), seed=0)


def pairs_of(pairs, labels=None):
    columns = pairs.columns.tolist() if labels is None else labels[pairs.columns.numpy()].tolist()
    return set(zip(pairs.rows.tolist(), columns, strict=True))


@pytest.mark.parametrize(("shortlist", "depth"), [(0, 6), (30, 30), (200, NUM_LABELS)])
def test_hard_negatives_are_drawn_from_a_shortlist_of_the_given_depth(shortlist, depth):
    made = sampler({"pool": "sampled", "size": 4, "hard_negatives": 2, "refresh": 3, "shortlist": shortlist})
    vectors = [torch.randn(count, 5, generator=torch.Generator().manual_seed(1)) for count in (NUM_QUERIES, NUM_LABELS)]
    made.refresh(0, *vectors)
    scores = (vectors[0] @ vectors[1].T).masked_fill(torch.from_numpy(made.relevance.toarray() > 0), -math.inf)
    nearest = scores.topk(depth, dim=1)
    expected = torch.where(nearest.values > -math.inf, nearest.indices, -1)
    assert made.state()["shortlist"].shape == (NUM_QUERIES, depth)
    assert [set(row) for row in made.state()["shortlist"].tolist()] == [set(row) for row in expected.tolist()]
    drawn = [made._hard_negatives(np.array([0]), epoch * made.steps_per_epoch)[0] for epoch in range(depth)]
    assert {len(labels) for labels in drawn} == {2}
    assert set(np.concatenate(drawn)) - {-1} == set(expected[0].tolist()) - {-1}


@pytest.mark.parametrize("pool", ["all", "in-batch", "sampled"])
@pytest.mark.parametrize("undrawn", ["ignore", "negative"])
def test_only_the_drawn_positives_count_in_every_pool(pool, undrawn):
    made = sampler({"pool": pool, "size": 4}, {"positives": 1, "undrawn": undrawn})
    everything = sampler({"pool": pool, "size": 4})
    seen = set()
    for step in range(12):
        rows = made.rows(step)
        got, whole = made.pool(rows, step), everything.pool(rows, step)
        drawn, all_pairs = pairs_of(got.positives, got.labels), pairs_of(whole.positives, whole.labels)
        assert sorted(row for row, _ in drawn) == [0, 1, 2, 3]
        assert drawn < all_pairs
        ignored = set() if got.ignore is None else pairs_of(got.ignore, got.labels)
        assert ignored == (all_pairs - drawn if undrawn == "ignore" else set())
        seen |= {(int(rows[row]), label) for row, label in drawn}
    assert len(seen) > NUM_QUERIES  # another draw in another epoch


def test_undrawn_positives_stay_in_the_denominator_where_they_are_negatives():
    queries, labels = torch.eye(3)[:1], torch.tensor([[2.0, 0, 0], [1.0, 0, 0], [0.5, 0, 0]])
    values = {}
    for undrawn in ("ignore", "negative"):
        made = sampler({"pool": "all", "size": 4}, {"positives": 1, "undrawn": undrawn})
        made.relevance = csr_matrix(np.array([[1, 1, 0]], dtype=np.float32))
        pool = made.pool(np.array([0]), 0)
        drawn = int(pool.positives.columns[0])
        values[undrawn] = losses.softmax(queries, labels, pool.positives, temperature=1.0, ignore=pool.ignore).item()
    scores = [2.0, 1.0, 0.5]
    others = {"ignore": [scores[drawn], 0.5], "negative": scores}
    for undrawn, summed in others.items():
        assert values[undrawn] == pytest.approx(math.log(sum(map(math.exp, summed))) - scores[drawn], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch.positives": 1}, "loss.positives"),
        ({"loss.undrawn": "negative"}, "loss.undrawn"),
        ({"loss.average": "sum"}, "loss.average"),
        ({"loss.name": "psl", "loss.average": "query"}, "loss.average"),
        ({"batch.shortlist": 5}, "batch.shortlist"),
        ({"batch.pool": "sampled", "batch.shortlist": 5, "batch.hard_negatives": 6}, "batch.shortlist"),
        ({"loss.classifier_balance": 1.5}, "loss.classifier_balance"),
        ({"encoder.dropout": -0.5}, "encoder.dropout"),
        ({"encoder.token_dropout": 1.0}, "encoder.token_dropout"),
        ({"train.beta2": 1.0}, "train.beta2"),
        (
            {"batch.pool": "in-batch", "batch.correct_pool": True, "loss.positives": 1, "loss.undrawn": "negative"},
            "loss.undrawn",
        ),
    ],
)
def test_settings_that_have_no_meaning_are_refused(changes, message):
    base = {"batch.pool": "all", "loss.name": "decoupled_softmax"}
    with pytest.raises(UsageError, match=message):
        load_config("dexter", base | changes)


def trainer(tmp_path, recipe="dexml", world=None, **changes):
    world = world or make_world()
    return Trainer(resolve_presets(load_config(recipe, {**SMALL, **changes}), world), world, tmp_path)


def first_loss(tmp_path, recipe, **changes):
    return float(trainer(tmp_path, recipe, **changes).take_step().loss)


def test_bce_is_the_mean_over_all_pairs_or_a_sum(tmp_path):
    world = make_world()
    mean, query, total = (
        first_loss(tmp_path, "bce", **{"loss.average": average}) for average in ("mean", "query", "sum")
    )
    assert query == pytest.approx(world.num_labels * mean, rel=1e-5)
    rows = len(trainer(tmp_path, "bce").sampler.rows(0))
    assert total == pytest.approx(rows * query, rel=1e-5)


def test_published_bce_equals_its_formula(tmp_path):
    made = trainer(tmp_path, "bce", **{"validation.fraction": 0.0})
    assert not hasattr(made.objective, "scale")
    rows = made.sampler.rows(0)
    made.encoder.eval()
    from dexter.encoders import embed

    queries, labels = embed(made.encoder, made.query_tokens)[rows], embed(made.encoder, made.label_tokens)
    positives = made.sampler.pool(rows, 0).positives
    scores = 20 * queries @ labels[made.text_of_label].T
    targets = torch.zeros_like(scores)
    targets[positives.rows, positives.columns] = 1
    assert targets.sum() == len(rows)  # one drawn positive of each query
    expected = torch.nn.functional.binary_cross_entropy_with_logits(scores, targets)
    assert float(made.take_step().loss) == pytest.approx(float(expected), rel=1e-4)


def test_each_head_has_its_own_balance(tmp_path):
    quick = {"head.projection": 8, "head.dropout": 0.0, "batch.start": 9}

    def loss(weight, balance, classifier_balance):
        return first_loss(
            tmp_path,
            "unidec",
            **quick,
            **{
                "head.encoder_weight": weight,
                "loss.balance": balance,
                "loss.classifier_balance": classifier_balance,
            },
        )

    dual, classifier = loss(1.0, 0.2, 0.9), loss(0.0, 0.2, 0.9)
    assert dual == loss(1.0, 0.2, 0.5) != loss(1.0, 0.9, 0.5)
    assert classifier == loss(0.0, 0.7, 0.9) != loss(0.0, 0.7, 0.2)
    assert loss(0.3, 0.2, 0.9) == pytest.approx(0.3 * dual + 0.7 * classifier, rel=1e-5)


def test_beta2_reaches_every_optimiser(tmp_path):
    made = trainer(tmp_path, "unidec", **{"train.beta2": 0.999, "head.projection": 8})
    groups = [group for each in made.optimizers._optimizers for group in each.param_groups]
    assert len(made.optimizers._optimizers) == 2
    assert {group["betas"] for group in groups} == {(0.9, 0.999)}
    assert {group["betas"] for group in trainer(tmp_path).optimizers._optimizers[0].param_groups} == {(0.9, 0.99)}


def test_heads_decay_like_the_encoder(tmp_path):
    made = trainer(tmp_path, "supconde", **{"train.weight_decay": 0.05, "head.projection": 8})
    decays = {
        id(parameter): group["weight_decay"]
        for each in made.optimizers._optimizers
        for group in each.param_groups
        for parameter in group["params"]
        if "weight_decay" in group
    }
    linear = made.objective.dual.project[0]
    assert (decays[id(linear.weight)], decays[id(linear.bias)]) == (0.05, 0.0)


SCALED = {"train.scale_with_processes": True, "batch.size": 10, "train.learning_rate": 0.01}


def test_batch_and_learning_rates_grow_with_the_number_of_processes():
    config = load_config("unidec", SCALED | {"train.classifier_learning_rate": 0.5})
    one, four = (
        resolve_counts(config, num_queries=500, num_labels=50, num_processes=processes) for processes in (1, 4)
    )
    assert (one.batch.size, four.batch.size) == (10, 40)
    rates = [
        (each.train.learning_rate, each.train.head_learning_rate, each.train.classifier_learning_rate)
        for each in (one, four)
    ]
    assert rates == [(0.01, 0.002, 0.5), (0.04, 0.008, 2.0)]
    # Resolved once: the saved settings are not multiplied again.
    assert resolve_counts(four, num_queries=500, num_labels=50, num_processes=4) == four
    unscaled = resolve_counts(load_config("unidec", {"batch.size": 10}), num_queries=500, num_labels=50)
    assert unscaled.batch.size == 10


def test_the_saved_settings_say_what_is_used_and_the_same_command_resumes(tmp_path):
    world = make_world()
    overrides = {**SMALL, **SCALED}
    config = open_run(tmp_path / "run", world, "dexml", overrides, resume=False, num_processes=3)
    assert (config.batch.size, config.train.learning_rate) == (30, pytest.approx(0.03))
    assert load_config(tmp_path / "run" / "config.toml") == config
    assert open_run(tmp_path / "run", world, "dexml", overrides, resume=True, num_processes=3) == config
    with pytest.raises(UsageError, match=r"keeps its settings; train.epochs"):
        open_run(tmp_path / "run", world, "dexml", overrides | {"train.epochs": 9}, resume=True)


def test_a_plan_of_several_processes_has_their_batch():
    world = make_world()
    made = plan(world, recipe="dexml", overrides={**SMALL, **SCALED}, world_size=4)
    assert made.config.batch.size == 40
    assert made.config.train.learning_rate == pytest.approx(0.04)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    world, path = make_world(num_train=60), tmp_path_factory.mktemp("encoder")
    TransformerEncoder.random([*world.train.texts, *world.label_texts], num_layers=1, hidden_size=16).save(path)
    return str(path)


@pytest.mark.parametrize(("dropout", "expected"), [(-1.0, 0.1), (0.0, 0.0), (0.3, 0.3)])
def test_a_transformer_keeps_its_own_dropout_unless_one_is_set(folder, dropout, expected):
    settings = {"encoder.kind": "transformer", "encoder.pretrained": folder, "encoder.dropout": dropout}
    encoder = build_encoder(load_config("dexml", settings).encoder, [], [])
    found = {module.p for module in encoder.modules() if isinstance(module, torch.nn.Dropout)}
    assert found == {expected}
    ids, offsets = torch.arange(5, 15), torch.tensor([0, 4, 10])
    encoder.train()
    assert torch.equal(encoder(ids, offsets), encoder(ids, offsets)) == (expected == 0.0)
    encoder.eval()
    assert torch.equal(encoder(ids, offsets), encoder(ids, offsets))


def test_a_run_of_summed_losses_still_learns(tmp_path):
    world = make_world()
    changes = {"train.epochs": 8, "head.projection": 24, "batch.start": 1, "batch.refresh": 2}
    run = dexter.train(world, recipe="unidec", out=tmp_path / "run", overrides={**SMALL, **changes})
    assert run.config.loss.average == "sum"
    assert dexter.evaluate(run.path, world, ks=(1,), num_resamples=0).metrics["P@1"] > 80
