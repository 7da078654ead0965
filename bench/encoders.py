"""The transformer encoder beside sentence-transformers: texts per second of encoding and of training.

Both run the same MiniLM weights on the same texts at the same length, turn by turn in one process, so that the ratios
hold on a machine that is not quiet.

    python bench/encoders.py --data DATA --threads 2          # needs: pip install accelerate datasets
    python bench/encoders.py --only encode --texts 1000       # without --data: docstrings of the standard library

*Encoding* counts everything from strings to vectors. *Training* counts optimiser steps after the first: in-batch
softmax over pairs (MultipleNegativesRankingLoss there), gradients clipped, fused AdamW, linear decay. Each library
runs with its own dropout default (theirs: the model's 0.1; ours on a CPU: 0) and with the other's.

Packing saves padding, so the gain depends on the data: *padded/real* is the number of tokens of batches padded to their
longest text for each real token, an upper bound of the gain. With texts that all fill the length there is none.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dexter.batches import Positives
from dexter.data.tokens import Tokens
from dexter.encoders import embed
from dexter.encoders.pretrained import locate_minilm
from dexter.encoders.transformer import TransformerEncoder
from dexter.losses import softmax

LENGTH = 32
BATCH = 64
SCALE = 20.0
LEARNING_RATE = 2e-5
MODEL_DROPOUT = 0.1
Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Number of texts, wall seconds and processor seconds of one timed run."""

    texts: int
    wall: float
    cpu: float


class Stopwatch:
    """Measures wall and processor seconds since its creation."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def stop(self, texts: int) -> Run:
        """Return the run of `texts` texts that ends now."""
        return Run(texts=texts, wall=time.perf_counter() - self.wall, cpu=time.process_time() - self.cpu)


def read_pairs(folder: Path) -> Iterator[Pair]:
    """Yield the (query, first label) texts of a data set folder."""
    labels = list(_lines(folder, "lbl"))
    texts = {label["uid"]: label["text"] for label in labels} | {i: label["text"] for i, label in enumerate(labels)}
    for query in _lines(folder, "trn"):
        if query["labels"] and query["text"]:
            yield query["text"], texts[query["labels"][0]]


def _lines(folder: Path, name: str) -> Iterator[dict]:
    path = next(path for path in (folder / f"{name}.jsonl.gz", folder / f"{name}.jsonl") if path.exists())
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        yield from map(json.loads, lines)


def docstring_pairs() -> Iterator[Pair]:
    """Yield (first line of docstring, name) of functions and classes of the standard library, by parsing only."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                if len(first) > 10:
                    yield first, f"{path.stem} {node.name}".replace("_", " ")


def bench_encoding(texts: list[str], *, repeats: int) -> None:
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(str(locate_minilm()), device="cpu")
    peer.max_seq_length = LENGTH
    encoder = TransformerEncoder.from_pretrained("minilm", max_length_label=LENGTH)
    outputs: dict[str, np.ndarray] = {}

    def run_peer() -> Run:
        watch = Stopwatch()
        outputs["peer"] = peer.encode(texts, show_progress_bar=False)
        return watch.stop(len(texts))

    def run_ours() -> Run:
        watch = Stopwatch()
        outputs["ours"] = embed(encoder, encoder.tokenize(texts, side="label")).numpy()
        return watch.stop(len(texts))

    lengths = encoder.tokenize(texts, side="label").lengths
    print(f"\nencoding: {len(texts):,} texts, {lengths.mean():.1f} tokens on average, at most {LENGTH}")
    peer.encode(texts[:64], show_progress_bar=False)
    embed(encoder, encoder.tokenize(texts[:64], side="label"))
    _compare({"sentence-transformers": run_peer, "dexter": run_ours}, repeats=repeats)
    print(f"largest difference between the vectors: {np.abs(outputs['peer'] - outputs['ours']).max():.1e}")


def bench_training(pairs: list[Pair], *, repeats: int) -> None:
    num_steps = len(pairs) // BATCH
    print(f"\ntraining: {num_steps} steps of {BATCH} pairs, length at most {LENGTH}; {_padding(pairs)}")
    runs = {
        "sentence-transformers (dropout 0.1)": lambda: train_peer(pairs, dropout=MODEL_DROPOUT),
        "dexter (dropout 0)": lambda: train_ours(pairs, dropout=0.0),
        "sentence-transformers (dropout 0)": lambda: train_peer(pairs, dropout=0.0),
        "dexter (dropout 0.1)": lambda: train_ours(pairs, dropout=MODEL_DROPOUT),
    }
    medians = _compare(runs, repeats=repeats)
    for dropout in ("0.1", "0"):
        theirs, ours = medians[f"sentence-transformers (dropout {dropout})"], medians[f"dexter (dropout {dropout})"]
        print(f"both at dropout {dropout}: {ours[0] / theirs[0]:.2f}x wall, {ours[1] / theirs[1]:.2f}x processor")


def _padding(pairs: list[Pair]) -> str:
    """How much of a randomly drawn batch is padding."""
    encoder = TransformerEncoder.from_pretrained("minilm", max_length_query=LENGTH, max_length_label=LENGTH)
    real = padded = 0
    for texts in zip(*pairs, strict=True):
        lengths_SB = encoder.tokenize(texts, side="query").lengths[: len(pairs) // BATCH * BATCH].reshape(-1, BATCH)
        real += lengths_SB.sum()
        padded += lengths_SB.max(axis=1).sum() * BATCH
    return f"{real / len(pairs) / 2:.1f} tokens on average, padded/real {padded / real:.2f}"


def train_peer(pairs: list[Pair], *, dropout: float) -> Run:
    """One epoch of sentence-transformers' trainer."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from transformers import TrainerCallback

    model = SentenceTransformer(str(locate_minilm()), device="cpu")
    model.max_seq_length = LENGTH
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout

    class Timer(TrainerCallback):
        watch: Stopwatch | None = None
        run: Run | None = None

        def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
            self.watch = self.watch or Stopwatch()
            self.run = self.watch.stop((state.global_step - 1) * BATCH * 2)  # type: ignore[attr-defined]

    timer = Timer()
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            learning_rate=LEARNING_RATE,
            dataloader_drop_last=True,
            optim="adamw_torch_fused",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        columns = {"anchor": [query for query, _ in pairs], "positive": [label for _, label in pairs]}
        loss = MultipleNegativesRankingLoss(model, scale=SCALE)
        trainer = SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=Dataset.from_dict(columns), loss=loss, callbacks=[timer]
        )
        trainer.train()
    assert timer.run is not None
    return timer.run


def train_ours(pairs: list[Pair], *, dropout: float) -> Run:
    """One epoch of the same step with packed micro-batches; tokenising is in the time."""
    encoder = TransformerEncoder.from_pretrained(
        "minilm", max_length_query=LENGTH, max_length_label=LENGTH, dropout=dropout
    ).train()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    order = np.random.default_rng(0).permutation(len(pairs))
    batches = [order[start : start + BATCH] for start in range(0, len(pairs) - BATCH + 1, BATCH)]
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches))
    tokenising = Stopwatch()
    queries = encoder.tokenize([query for query, _ in pairs], side="query")
    labels = encoder.tokenize([label for _, label in pairs], side="label")
    tokenised = tokenising.stop(0)
    own = Positives(torch.arange(BATCH), torch.arange(BATCH))
    watch: Stopwatch | None = None
    for rows in batches:
        query_vectors, label_vectors = (embed_with_graph(encoder, tokens, rows) for tokens in (queries, labels))
        softmax(query_vectors, label_vectors, own, temperature=1 / SCALE).backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        watch = watch or Stopwatch()
    assert watch is not None
    run = watch.stop((len(batches) - 1) * BATCH * 2)
    return Run(texts=run.texts, wall=run.wall + tokenised.wall, cpu=run.cpu + tokenised.cpu)


def embed_with_graph(encoder: TransformerEncoder, tokens: Tokens, rows: np.ndarray) -> Tensor:
    """Embed some rows in micro-batches, ready for backward."""
    parts = encoder.micro_batches(tokens.lengths[rows])
    vectors = []
    for part in parts:
        ids, offsets = tokens.select(rows[part])
        vectors.append(encoder(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(offsets)))
    return torch.cat(vectors)[torch.from_numpy(np.argsort(np.concatenate(parts)))]


def _compare(runs: dict[str, Callable[[], Run]], *, repeats: int) -> dict[str, tuple[float, float]]:
    """Run all turn by turn, print the median texts per second of each and its ratio to the first."""
    results: dict[str, list[Run]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            results[name].append(run())
    medians = {}
    print(f"{'texts/s':40} {'wall':>8} {'ratio':>7} {'processor':>10} {'ratio':>7}")
    for name, timed in results.items():
        wall = statistics.median(run.texts / run.wall for run in timed)
        cpu = statistics.median(run.texts / run.cpu for run in timed)
        medians[name] = (wall, cpu)
        first = next(iter(medians.values()))
        print(f"{name:40} {wall:8.1f} {wall / first[0]:6.2f}x {cpu:10.1f} {cpu / first[1]:6.2f}x")
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a data set folder; docstrings of the standard library without it")
    parser.add_argument("--texts", type=int, default=2_000, help="texts to encode")
    parser.add_argument("--steps", type=int, default=12, help="training steps, the first of them not timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["encode", "train"])
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(arguments.threads)
    pairs = list(read_pairs(arguments.data) if arguments.data else docstring_pairs())
    rows = np.random.default_rng(0).permutation(len(pairs))
    pairs = [pairs[row] for row in rows[: max(arguments.texts, arguments.steps * BATCH)]]
    if arguments.only != "train":
        bench_encoding([label for _, label in pairs[: arguments.texts]], repeats=arguments.repeats)
    if arguments.only != "encode":
        bench_training(pairs[: arguments.steps * BATCH], repeats=arguments.repeats)


if __name__ == "__main__":
    main()
