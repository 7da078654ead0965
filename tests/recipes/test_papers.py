"""The papers' recipes against a literal table: what was published, typed from the publications, and nothing else."""

import pytest

from dexter.config import load_config
from dexter.recipes import paper_names, read_recipe

DEXML = {  # Gupta et al., ICLR 2024, and its public code's base configuration
    "data.own_labels": "keep",
    "encoder.kind": "transformer",
    "encoder.pretrained": "distilbert-base-uncased",
    "encoder.pooling": "cls",
    "encoder.normalize": True,
    "encoder.dropout": -1.0,  # the backbone's own
    "batch.order": "shuffled",
    "batch.pool": "all",
    "loss.name": "decoupled_softmax",
    "loss.temperature": 0.05,
    "loss.positives": 1,
    "loss.undrawn": "ignore",
    "train.epochs": 100,
    "train.weight_decay": 0.01,
    "train.beta2": 0.999,
    "train.warmup": 0.1,
    "train.gradient_clip": 0.0,
    "train.scale_with_processes": True,
    "train.precision": "float16",
    "validation.fraction": 0.0,
    "scoring.neighbours": 0,
}
EURLEX = DEXML | {
    "encoder.max_length_query": 128,
    "encoder.max_length_label": 128,
    "batch.size": 512,
    "train.learning_rate": 5e-5,
    "train.tokens_per_micro_batch": 4096 * 128,
}
TITLES_131K = DEXML | {
    "encoder.max_length_query": 32,
    "encoder.max_length_label": 32,
    "batch.size": 3000,
    "train.learning_rate": 3e-4,
    "train.tokens_per_micro_batch": 3000 * 32,
}
WIKIPEDIA = DEXML | {
    "encoder.max_length_query": 128,
    "encoder.max_length_label": 128,
    "encoder.normalize": False,
    "loss.temperature": 1.0,
    "batch.size": 768,
    "train.learning_rate": 7e-5,
    "train.tokens_per_micro_batch": 512 * 128,
}
TITLES_1_3M = TITLES_131K | {"encoder.normalize": False, "loss.temperature": 1.0}
SOFTMAX = {"loss.name": "softmax", "loss.undrawn": "negative"}
TOPK = {"loss.name": "soft_topk", "loss.k": 5, "loss.alpha": 2.0, "loss.positives": 5}
HARD = {  # 100 nearest labels, one drawn, from epoch 5 on, mined every 5 epochs
    "batch.pool": "sampled",
    "batch.positives": 1,
    "batch.hard_negatives": 1,
    "batch.shortlist": 100,
    "batch.start": 5,
    "batch.refresh": 5,
}
SUPCONDE = {  # Kharbanda et al., 2024, section 4 and appendix C, and its public code
    "data.own_labels": "keep",
    "encoder.kind": "transformer",
    "encoder.pretrained": "sentence-transformers/msmarco-distilbert-base-v4",
    "encoder.pooling": "mean",
    "encoder.normalize": False,
    "encoder.dropout": -1.0,
    "batch.order": "clustered",
    "batch.pool": "sampled",
    "batch.positives": 3,
    "batch.hard_negatives": 6,
    "batch.shortlist": 6 * 5,
    "batch.start": 5,
    "batch.refresh": 5,
    "head.projection": 384,
    "head.dropout": 0.1,
    "loss.name": "psl",
    "loss.reduction": "pal-n",
    "loss.average": "sum",
    "loss.balance": 0.5,
    "loss.temperature": 1 / 18,
    "train.epochs": 150,
    "train.learning_rate": 1e-4,
    "train.head_learning_rate": 2e-4,
    "train.weight_decay": 0.05,
    "train.beta2": 0.999,
    "train.warmup": 3 / 150,
    "train.gradient_clip": 0.0,
    "train.precision": "float16",
    "validation.fraction": 0.0,
    "scoring.neighbours": 0,
}
UNIDEC = SUPCONDE | {
    "head.classifier": True,
    "head.encoder_weight": 0.5,
    "head.row_dropout": 0.1,
    "loss.classifier_balance": 0.5,
    "train.classifier_learning_rate": 1e-3,
}


def shape(length, batch, cap):
    return {
        "encoder.max_length_query": length,
        "encoder.max_length_label": length,
        "batch.size": batch,
        "batch.cap": cap,
    }


BENCHMARKS = {
    "dexml-eurlex-4k": EURLEX,
    "dexml-eurlex-4k-softmax": EURLEX | SOFTMAX,
    "dexml-eurlex-4k-topk": EURLEX | TOPK,
    "dexml-eurlex-4k-topk100": EURLEX | TOPK | {"loss.k": 100, "loss.positives": 100},
    "dexml-eurlex-4k-bce": EURLEX
    | {"loss.name": "bce", "loss.average": "mean", "loss.learn_scale": False, "loss.undrawn": "negative"},
    "dexml-eurlex-4k-hnm": EURLEX | HARD,
    "dexml-lf-amazontitles-131k": TITLES_131K,
    "dexml-lf-amazontitles-131k-softmax": TITLES_131K | SOFTMAX,
    "dexml-lf-amazontitles-131k-topk": TITLES_131K | TOPK,
    "dexml-lf-amazontitles-131k-hnm": TITLES_131K | HARD,
    "dexml-lf-wikipedia-500k": WIKIPEDIA,
    "dexml-lf-wikipedia-500k-hnm": WIKIPEDIA | HARD | {"batch.hard_negatives": 5, "train.learning_rate": 2e-5},
    "dexml-lf-amazontitles-1.3m": TITLES_1_3M,
    "supconde-lf-amazon-131k": SUPCONDE | shape(128, 576, 1500),
    "supconde-lf-amazontitles-131k": SUPCONDE | shape(32, 576, 1500),
    "supconde-lf-wikiseealso-320k": SUPCONDE | shape(128, 677, 1500),
    "supconde-lf-wikiseealsotitles-320k": SUPCONDE | shape(32, 677, 1500) | {"head.projection": 512},
    "supconde-lf-wikititles-500k": SUPCONDE | shape(32, 886, 1500) | {"head.projection": 512},
    "supconde-lf-amazontitles-1.3m": SUPCONDE | shape(32, 1098, 4000) | {"batch.positives": 1},
    "supconde-lf-amazontitles-1.3m-pal": SUPCONDE
    | shape(32, 1098, 4000)
    | {"batch.positives": 1, "loss.reduction": "pal"},
    "supconde-query2bid-450m": SUPCONDE | shape(12, 2048, 4000) | {"head.projection": 64},
    "unidec-lf-amazon-131k": UNIDEC | shape(128, 576, 1500) | {"head.encoder_weight": 0.3},
    "unidec-lf-amazon-131k-pal": UNIDEC
    | shape(128, 576, 1500)
    | {"head.encoder_weight": 0.3, "head.projection": 256, "loss.reduction": "pal"},
    "unidec-lf-amazon-131k-pos-clf": UNIDEC
    | shape(128, 576, 1500)
    | {"head.encoder_weight": 0.3, "batch.classifier_positives": 6},
    "unidec-lf-amazontitles-131k": UNIDEC | shape(32, 576, 1500),
    "unidec-lf-wikiseealso-320k": UNIDEC | shape(128, 677, 1500),
    "unidec-lf-wikiseealsotitles-320k": UNIDEC | shape(32, 677, 1500),
    "unidec-lf-wikititles-500k": UNIDEC | shape(32, 886, 1500),
    "unidec-lf-amazontitles-1.3m": UNIDEC | shape(32, 1098, 3000) | {"head.projection": 256, "batch.positives": 1},
    "unidec-lf-amazontitles-1.3m-pal": UNIDEC
    | shape(32, 1098, 3000)
    | {"head.projection": 256, "batch.positives": 2, "batch.hard_negatives": 5, "batch.shortlist": 25}
    | {"train.epochs": 100, "train.warmup": 0.03, "loss.reduction": "pal"},
    "unidec-lf-amazontitles-1.3m-pos-clf": UNIDEC
    | shape(32, 1098, 3000)
    | {"head.projection": 256, "batch.positives": 2, "batch.hard_negatives": 3, "batch.shortlist": 15}
    | {"train.epochs": 100, "train.warmup": 0.03, "batch.classifier_positives": 6},
}


def test_every_run_of_a_paper_is_in_the_table():
    assert sorted(BENCHMARKS) == sorted(paper_names())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_papers_recipe_has_what_was_published_and_no_more(name):
    recipe = read_recipe(name)
    given = {f"{section}.{key}": value for section, keys in recipe.values.items() for key, value in keys.items()}
    assert given == pytest.approx(BENCHMARKS[name])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_resolved_configuration_has_these_values(name):
    config = load_config(name)
    for key, value in BENCHMARKS[name].items():
        section, setting = key.split(".")
        assert getattr(getattr(config, section), setting) == pytest.approx(value), key


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_value_says_where_it_comes_from(name):
    recipe = read_recipe(name)
    assert set(recipe.sources) == set(BENCHMARKS[name])
    starts = ("paper", "code", "not published")
    assert all(source.startswith(starts) for source in recipe.sources.values())
