"""Every paper's recipe trains for a few steps: generated data of the same kind, a tiny DistilBERT in a folder."""

import json

import numpy as np
import pytest
import torch
from transformers import DistilBertConfig, DistilBertModel

import dexter
from dexter.batches.order import steps_per_epoch
from dexter.config import load_config
from dexter.encoders.transformer import TransformerEncoder
from dexter.predict.predictor import Predictor
from dexter.recipes import paper_names
from dexter.training.presets import resolve_counts, resolve_presets
from dexter.training.trainer import Trainer
from tests.conftest import make_world

REPRESENTATIVE = (
    "dexml-eurlex-4k",
    "dexml-eurlex-4k-bce",
    "dexml-lf-amazontitles-131k-topk",
    "dexml-lf-wikipedia-500k-hnm",
    "supconde-query2bid-450m",
    "unidec-lf-amazon-131k-pos-clf",
)
"""One run of each kind, in the quick suite; the others are marked slow."""
RUNS = [
    pytest.param(name, marks=[] if name in REPRESENTATIVE else [pytest.mark.slow], id=name) for name in paper_names()
]
SMALLER = {
    "batch.size": 16,
    "train.epochs": 3,
    "train.tokens_per_micro_batch": 300,
    "train.precision": "float32",
    "train.device": "cpu",
    "train.threads": 1,
}


@pytest.fixture(scope="module")
def data():
    return make_world(num_train=48, num_test=12, num_labels=130)


@pytest.fixture(scope="module")
def distilbert(data, tmp_path_factory):
    """A folder with a random DistilBERT and its tokenizer, as from a hub."""
    folder = tmp_path_factory.mktemp("distilbert")
    texts = [*data.train.texts, *data.label_texts]
    tokenizer = TransformerEncoder.random(texts, num_layers=1, hidden_size=8)._pretrained_tokenizer
    sizes = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40}
    torch.manual_seed(0)
    DistilBertModel(DistilBertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def smaller(name, distilbert):
    """A paper's settings but for sizes: hard negatives from the second epoch on, and pools that reach their cap."""
    config = load_config(name)
    changes = SMALLER | {"encoder.pretrained": distilbert}
    if config.batch.hard_negatives:
        changes |= {"batch.start": 1, "batch.refresh": 1}
    if config.batch.cap:
        changes["batch.cap"] = 40
    return changes


@pytest.mark.parametrize("name", RUNS)
def test_a_papers_recipe_trains(name, data, distilbert, tmp_path):
    changes = smaller(name, distilbert)
    run = dexter.train(data, recipe=name, out=tmp_path / "run", overrides=changes)
    published, used = load_config(name), run.config
    for section in ("encoder", "batch", "head", "loss", "validation", "scoring", "data"):
        for key, value in vars(getattr(published, section)).items():
            if f"{section}.{key}" not in changes and (section, key) != ("validation", "metric"):
                assert getattr(getattr(used, section), key) == value, (section, key)
    records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert losses and np.isfinite(losses).all()
    assert run.best == {}  # trained on every query, nothing was held out
    predictor = Predictor.load(run.path)
    assert predictor.choice.head == ("unified" if published.head.classifier else "encoder")
    assert predictor.choice.votes is None
    report = dexter.evaluate(run.path, data, ks=(1,), num_resamples=0)
    assert 0 <= report.metrics["P@1"] <= 100


@pytest.mark.parametrize("name", ["dexml-eurlex-4k", "unidec-lf-amazon-131k"])
def test_the_first_steps_reach_every_weight_and_use_the_models_dropout(name, data, distilbert, tmp_path):
    config = resolve_presets(load_config(name, smaller(name, distilbert)), data)
    trainer = Trainer(config, data, tmp_path)
    dropouts = {module.p for module in trainer.encoder.modules() if isinstance(module, torch.nn.Dropout)}
    assert dropouts == {0.1}
    before = {name: value.clone() for name, value in trainer.encoder.named_parameters()}
    for _ in range(3):
        assert torch.isfinite(trainer.take_step().loss)
    # The bias of a key adds the same to every score of a query: attention does not depend on it.
    same = {name for name, value in trainer.encoder.named_parameters() if torch.equal(value, before[name])}
    assert all("k_lin.bias" in name for name in same), same


@pytest.mark.parametrize(
    ("name", "num_queries", "published"),
    [
        ("unidec-lf-amazon-131k", 294_805, 576),
        ("supconde-lf-wikiseealso-320k", 693_082, 677),
        ("unidec-lf-wikititles-500k", 1_813_391, 886),
        ("unidec-lf-amazontitles-1.3m", 2_248_619, 1098),
    ],
)
def test_clusters_have_the_published_number_of_queries(name, num_queries, published):
    """Clusters come from halving: sizes differ by at most one, and the largest is the published batch."""
    config = resolve_counts(load_config(name), num_queries=num_queries, num_labels=131_073)
    batches = steps_per_epoch(num_queries, config.batch.size, is_clustered=True)
    sizes = {num_queries // batches, -(-num_queries // batches)}
    assert batches == 2 ** int(np.log2(batches))
    assert sizes <= {published - 1, published}
    assert max(sizes) == published
