"""Labels that no training query had compete with those that were trained, also before a classifier."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

import dexter
from dexter import Predictor
from dexter.data import Dataset, Split
from dexter.index import search
from tests.conftest import SMALL

NUM_KNOWN = 30
SETTINGS = {
    "with a prior": ("dexter", {"head.classifier": True, "encoder.normalize": False}),
    "normalised": ("dexml", {"head.classifier": True, "encoder.normalize": False, "head.projection": 24}),
}


@pytest.fixture(scope="module", params=SETTINGS)
def predictor(request, world, tmp_path_factory):
    """A model that was trained on the first labels, and to which the others were added."""
    relevance = csr_matrix(world.train.relevance[:, :NUM_KNOWN])
    rows = np.flatnonzero(np.diff(relevance.indptr))
    train = Split([world.train.texts[row] for row in rows], [world.train.uids[row] for row in rows], relevance[rows])
    known = Dataset("known", world.label_texts[:NUM_KNOWN], world.label_ids[:NUM_KNOWN], train, None)
    recipe, settings = SETTINGS[request.param]
    out = tmp_path_factory.mktemp("unseen") / "run"
    dexter.train(known, recipe=recipe, out=out, overrides={**SMALL, **settings, "train.epochs": 4})
    found = Predictor.load(out, head="unified")
    found.add_labels(list(zip(world.label_ids, world.label_texts, strict=True))[NUM_KNOWN:])
    return found


def recall(world, model, labels_LD, kind):
    """The share of the relevant labels of a kind that are among the first five."""
    top = search(model.query_vectors(world.test.texts, head="unified"), labels_LD, 5).ids
    relevant = world.test.relevance.toarray()[:, kind] > 0
    hits = [np.isin(np.arange(37)[kind], row) for row in top]
    return float((relevant & np.array(hits)).sum() / relevant.sum())


def test_new_labels_are_found_and_the_others_stay(predictor, world):
    model, new, known = predictor.model, slice(NUM_KNOWN, None), slice(NUM_KNOWN)
    filled_LD = model.label_vectors(head="unified")
    width = model.label_vectors(head="encoder").shape[1]
    empty_LD = filled_LD.clone()
    empty_LD[new, width : width + model.classifier.table.weight.shape[1]] = 0
    assert torch.equal(filled_LD[known], empty_LD[known])
    assert recall(world, model, filled_LD, new) > max(0.7, recall(world, model, empty_LD, new))
    assert recall(world, model, filled_LD, known) > 0.7
