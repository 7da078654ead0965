"""Memory and time of a training step over all labels, beside what `dexter plan` says.

On a CUDA device: 131,073 labels (LF-AmazonTitles-131K) and the packaged six-layer MiniLM. On the CPU: the same code
with a small world and one tiny layer.
"""

import time

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from dexter.config import load_config
from dexter.data import Dataset, Split
from dexter.encoders.transformer import TransformerEncoder
from dexter.planning.plan import plan
from dexter.training.presets import resolve_presets
from dexter.training.trainer import Trainer

NUM_STEPS = 3


def make_titles(num_queries, num_labels):
    """Queries and labels of eight random words, one to three labels each."""
    random = np.random.default_rng(0)
    words = np.array([f"word{number}" for number in range(5_000)])

    def texts(count):
        return [" ".join(row) for row in words[random.integers(0, len(words), (count, 8))]]

    counts = random.integers(1, 4, num_queries)
    columns = random.integers(0, num_labels, int(counts.sum()))
    rows = np.repeat(np.arange(num_queries), counts)
    relevance = csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(num_queries, num_labels))
    train = Split(texts(num_queries), [f"q{row}" for row in range(num_queries)], relevance)
    return Dataset("titles", texts(num_labels), [f"l{label}" for label in range(num_labels)], train)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float16"])
def test_a_step_over_all_labels_beside_the_plan(device, precision, tmp_path, record_property):
    on_gpu = device == "cuda"
    dataset = make_titles(4_096, 131_073) if on_gpu else make_titles(64, 200)
    overrides = {
        "encoder.kind": "transformer",
        "encoder.max_length_query": 32,
        "encoder.max_length_label": 32,
        "batch.size": 512 if on_gpu else 16,
        "train.device": device,
        "train.precision": precision,
        "train.threads": 1,
        "train.epochs": 1,
        "validation.fraction": 0.0,
        "scoring.neighbours": 0,
    }
    if not on_gpu:
        TransformerEncoder.random(dataset.label_texts, num_layers=1, hidden_size=16).save(tmp_path / "tiny")
        overrides["encoder.pretrained"] = str(tmp_path / "tiny")
    planned = plan(dataset, recipe="dexml", overrides=overrides)
    assert planned.duration is not None

    trainer = Trainer(resolve_presets(load_config("dexml", overrides), dataset), dataset, tmp_path)
    trainer.take_step()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(NUM_STEPS):
        assert torch.isfinite(trainer.take_step().loss)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / NUM_STEPS
    step_terms = [term for term in planned.memory.terms if term.phase in ("always", "trained", "step")]
    planned_bytes = sum(term.bytes for term in step_terms if term.location == "device" and term.name != "CUDA context")
    record_property("labels", dataset.num_labels)
    record_property("seconds of a step", seconds)
    record_property("planned seconds", planned.duration.step)
    record_property("planned bytes on the device", planned_bytes)
    assert planned_bytes > 0
    if on_gpu:
        peak = torch.cuda.max_memory_allocated()
        record_property("peak bytes allocated", peak)
        assert 0.5 < peak / planned_bytes < 2.0
        assert 0.5 < seconds / planned.duration.step < 2.0
