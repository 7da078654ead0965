"""Memory and time of one training step over all labels, and what its two switches save and cost.

    python bench/label_step.py --threads 1                     both tables
    python bench/label_step.py --threads 1 --only memory       the first
    python bench/label_step.py --threads 1 --only switches --steps 4 --warmup 8      a quick look at the second

*Memory*: encode the queries and every label, decoupled softmax, gradients of every weight; ours (streamed loss, room
for scores set by `loss.memory_megabytes`) beside plain autograd on the full matrix of scores, each in a process of its
own. Peak memory is that of the first step, above what was resident before it. *least* is what no way can do without:
the labels' vectors, their gradient and the gradient of the token table. By default the static encoder keeps the graph
of all labels; "small" encodes 20,000 tokens at a time, twice, and gives the scores 32 MB.

*Switches*: `train.label_backward` leaves labels with small gradients out of the backward pass, `train.label_refresh`
lets labels that no query needs be a few steps old. All settings start from the same partly trained model and take the
same batches. *error* is that of the gradient of all weights, |g - exact| / |exact|, where exact is taken at the same
weights on the same batch: the mean over every fourth step. *left out* is the share of the exact gradient by the labels'
vectors, in norm, that belongs to labels whose gradient was not pushed. The static encoder encodes all labels in one
micro-batch and keeps its graph, so there is no second pass for `label_backward` to save; the transformer (2 layers of
64, random start) encodes labels twice, as any transformer does.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import softplus

import shared_data
from dexter.batches import Positives
from dexter.batches.order import shuffled
from dexter.config import load_config
from dexter.data import Dataset
from dexter.data.tokens import Tokens
from dexter.losses import decoupled_softmax
from dexter.training.gradcache import Side, backward
from dexter.training.labels import LabelSide
from dexter.training.presets import resolve_presets
from dexter.training.trainer import Trainer

MEGABYTE = 1e6
MEMORY_DATA = ("debian-related", "moby-thesaurus")
SWITCH_DATA = "debian-related"
ERROR_EVERY = 4
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "default": {},
    "small": {"loss__memory_megabytes": 32, "train__tokens_per_micro_batch": 20_000},
}
"""The rows of the memory table and their settings."""
Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """One choice of the two switches."""

    label_backward: float = 0.0
    label_refresh: int = 1

    def __str__(self) -> str:
        if self == EXACT:
            return "exact"
        if self.label_refresh > 1:
            return f"label_refresh = {self.label_refresh}"
        return f"label_backward = {self.label_backward:g}"


EXACT = Setting()
SETTINGS = (
    EXACT,
    Setting(label_backward=0.001),
    Setting(label_backward=0.01),
    Setting(label_refresh=4),
    Setting(label_refresh=16),
)


@dataclass(frozen=True)
class Work:
    """What a step did to the label texts."""

    encoded: Rows
    """Texts that were encoded."""
    gradients_UD: Tensor
    """The gradient of the loss by the vectors of these."""
    replayed: int
    """How many of them were encoded again for their gradient."""

    def pushed(self, share: float) -> Rows:
        """The texts whose gradient went into the encoder."""
        norms = self.gradients_UD.norm(dim=1)
        chosen: Rows = self.encoded[(norms >= share * norms.max()).numpy()]
        return chosen


def make_trainer(dataset: Dataset, folder: Path, *, threads: int, **settings: Any) -> Trainer:
    """A trainer of the recipe `dexml`, before its first step."""
    overrides = {"train.threads": threads, "validation.fraction": 0.0}
    overrides |= {name.replace("__", "."): value for name, value in settings.items()}
    return Trainer(resolve_presets(load_config("dexml", overrides), dataset), dataset, folder)


def batch_rows(trainer: Trainer, step: int) -> Rows:
    """The queries of a step."""
    epoch, position = divmod(step, trainer.steps_per_epoch)
    rows: Rows = shuffled(len(trainer.train_split), trainer.steps_per_epoch, seed=0, epoch=epoch)[position]
    return rows


def encode(trainer: Trainer, tokens: Tokens, rows: Rows) -> Tensor:
    """Vectors of some rows of a token table, with their graph."""
    ids, offsets = tokens.select(rows)
    vectors: Tensor = trainer.encoder(
        torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(offsets.astype(np.int64))
    )
    return vectors


def streamed_step(trainer: Trainer, rows: Rows, labels: LabelSide, *, step: int = 0, share: float = 0.0) -> Work:
    """The gradients of a step as the trainer takes it: gradient caching around the streamed loss."""
    positives = Positives.from_csr(trainer.train_split.relevance[rows])
    texts = labels.texts_to_encode(None, needed=np.unique(positives.columns.numpy()), step=step)

    def side(tokens: Tokens, chosen: Rows, *, backward_share: float = 0.0) -> Side:
        def cut(places: Rows) -> list[Rows]:
            return trainer.encoder.micro_batches(tokens.lengths[chosen[places]])

        return Side(
            encode=lambda places: encode(trainer, tokens, chosen[places]),
            micro_batches=cut(np.arange(len(chosen))),
            backward_share=backward_share,
            cut_again=cut,
        )

    def objective(queries_BD: Tensor, texts_UD: Tensor) -> Tensor:
        return decoupled_softmax(
            queries_BD,
            labels.assemble(texts_UD, texts, None),
            positives,
            temperature=trainer.config.loss.temperature,
            streaming=trainer.objective.streaming,
        )

    outcome = backward(
        objective,
        side(trainer.query_tokens, rows),
        side(trainer.label_tokens, texts, backward_share=share),
    )
    labels.learn()
    return Work(texts, outcome.gradients[1], outcome.replayed[1])


def plain_step(trainer: Trainer, rows: Rows) -> None:
    """The gradients of the same step by autograd, with the matrix of all scores."""
    positives = Positives.from_csr(trainer.train_split.relevance[rows])
    texts = encode(trainer, trainer.label_tokens, np.arange(len(trainer.label_tokens)))
    labels = texts[torch.from_numpy(trainer.label_side.places)]
    scores = encode(trainer, trainer.query_tokens, rows) @ labels.T / trainer.config.loss.temperature
    chosen = scores[positives.rows, positives.columns]
    masked = scores.index_put((positives.rows, positives.columns), torch.tensor(-torch.inf))
    counts = positives.counts(len(rows))
    share = 1.0 / (counts[positives.rows] * (counts > 0).sum())
    loss = (share * softplus(masked.logsumexp(1)[positives.rows] - chosen)).sum()
    loss.backward()  # type: ignore[no-untyped-call]


def parameters(trainer: Trainer) -> dict[str, torch.nn.Parameter]:
    """Every weight that a step has a gradient for."""
    return dict(trainer.encoder.named_parameters()) | dict(trainer.objective.named_parameters())


def take_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """The gradients of all weights, which then have none."""
    taken = {name: value.grad for name, value in parameters(trainer).items() if value.grad is not None}
    for value in parameters(trainer).values():
        value.grad = None
    return taken


def relative_error(got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The norm of the difference of two gradients by the norm of the second."""
    differences, norms = [], []
    for name, want in exact.items():
        differences.append(float((got[name] - want).to_dense().norm() if name in got else want.to_dense().norm()))
        norms.append(float(want.to_dense().norm()))
    return float(np.linalg.norm(differences) / np.linalg.norm(norms))


# Memory


def measure_memory(name: str, how: str, *, threads: int, queries: int, steps: int) -> dict[str, Any]:
    """Peak memory of a first step and the time of later ones, in this process."""
    dataset = shared_data.load(name)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(dataset, Path(folder), threads=threads, batch__size=queries, **WAYS[how])
    trainer.encoder.train()
    work: Callable[[Rows], object] = (
        (lambda rows: plain_step(trainer, rows))
        if how == "plain"
        else (lambda rows: streamed_step(trainer, rows, trainer.label_side))
    )
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work(batch_rows(trainer, 0))
    peak = _resident("VmHWM") - before
    gradient_bytes = sum(_bytes(gradient) for gradient in take_gradients(trainer).values())
    seconds = []
    for step in range(1, steps + 1):
        started = time.process_time()
        work(batch_rows(trainer, step))
        seconds.append(time.process_time() - started)
        take_gradients(trainer)
    return {
        "labels": dataset.num_labels,
        "least": 2 * 4 * dataset.num_labels * trainer.encoder.dimension + gradient_bytes,
        "peak": peak,
        "seconds": statistics.median(seconds),
    }


def print_memory(arguments: argparse.Namespace) -> None:
    """The first table: one process per line."""
    print(f"A step of {arguments.queries} queries over all labels, static encoder, {arguments.threads} threads")
    print(f"{'data':16s}{'labels':>9s} {'how':16s}{'peak MB':>9s}{'least':>7s}{'CPU s':>8s}   memory and time of plain")
    for name in MEMORY_DATA:
        shared_data.locate(name)
        measured = {how: _in_child(name, how, arguments) for how in WAYS}
        for how, got in measured.items():
            title = "plain autograd" if how == "plain" else f"dexter, {how}"
            ratios = ", ".join(f"{measured['plain'][key] / got[key]:.1f}x" for key in ("peak", "seconds"))
            print(
                f"{name:16s}{got['labels']:9,d} {title:16s}{got['peak'] / MEGABYTE:9.0f}{got['least'] / MEGABYTE:7.0f}"
                f"{got['seconds']:8.2f}   {ratios}",
                flush=True,
            )


def _in_child(name: str, how: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, how]
    command += ["--threads", str(arguments.threads), "--queries", str(arguments.queries)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    measured: dict[str, Any] = json.loads(told)
    return measured


def _bytes(gradient: Tensor) -> int:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return values.numel() * values.element_size()


def _resident(field: str) -> int:
    """A memory figure of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


# Switches


@dataclass
class Snapshot:
    """The state that every setting starts from."""

    encoder: dict[str, Tensor]
    optimizers: dict[str, Tensor]
    step: int

    @classmethod
    def of(cls, trainer: Trainer, step: int) -> Snapshot:
        """A copy of the trainer's state as it is."""
        return cls(deepcopy(trainer.encoder.state_dict()), deepcopy(trainer.optimizers.state()), step)

    def restore(self, trainer: Trainer) -> None:
        """Put a trainer back."""
        trainer.encoder.load_state_dict(self.encoder)
        trainer.optimizers.load_state(deepcopy(self.optimizers))


@dataclass(frozen=True)
class Measured:
    """One line of the second table, per step."""

    seconds: float
    encoded: float
    replayed: float
    left_out: float
    error: float


def warm_up(trainer: Trainer, steps: int) -> Snapshot:
    """Some exact steps, so that most labels are told apart already."""
    trainer.encoder.train()
    for step in range(steps):
        streamed_step(trainer, batch_rows(trainer, step), trainer.label_side)
        trainer.optimizers.step(step)
    return Snapshot.of(trainer, steps)


def measure_setting(trainer: Trainer, start: Snapshot, setting: Setting, *, steps: int) -> Measured:
    """Steps with a setting; the first is not counted, because a refreshed side encodes every label in it."""
    start.restore(trainer)
    exact_side = LabelSide(trainer.label_side.places)
    labels = LabelSide(trainer.label_side.places, refresh=setting.label_refresh)
    num_texts = len(trainer.label_tokens)
    seconds, encoded, replayed, left_out, errors = [], [], [], [], []
    for step in range(start.step, start.step + steps + 1):
        rows, counted = batch_rows(trainer, step), step - start.step
        compared = counted > 0 and counted % ERROR_EVERY == 0
        if compared:
            exact_work = streamed_step(trainer, rows, exact_side)
            exact = take_gradients(trainer)
        started = time.process_time()
        work = streamed_step(trainer, rows, labels, step=step, share=setting.label_backward)
        seconds.append(time.process_time() - started)
        encoded.append(len(work.encoded) / num_texts)
        replayed.append(work.replayed / num_texts)
        if compared:
            got = take_gradients(trainer)
            errors.append(relative_error(got, exact))
            left_out.append(share_without(exact_work.gradients_UD, work.pushed(setting.label_backward)))
            for name, value in parameters(trainer).items():
                value.grad = got.get(name)
        trainer.optimizers.step(step)
    return Measured(
        seconds=statistics.mean(seconds[1:]),
        encoded=statistics.mean(encoded[1:]),
        replayed=statistics.mean(replayed[1:]),
        left_out=statistics.mean(left_out),
        error=statistics.mean(errors),
    )


def share_without(gradients_UD: Tensor, kept: Rows) -> float:
    """The norm of the rows that are not kept by the norm of all."""
    rest_UD = gradients_UD.clone()
    rest_UD[torch.from_numpy(kept)] = 0.0
    return float(rest_UD.norm() / gradients_UD.norm())


@contextmanager
def switch_trainers(arguments: argparse.Namespace) -> Iterator[dict[str, Callable[[], Trainer]]]:
    """The two models of the second table, made when asked for."""
    dataset = shared_data.load(SWITCH_DATA)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def static() -> Trainer:
            return make_trainer(dataset, folder, threads=arguments.threads, batch__size=512)

        def transformer() -> Trainer:
            from dexter.encoders.transformer import TransformerEncoder

            fewer = commonest_labels(dataset, arguments.transformer_labels)
            encoder = TransformerEncoder.random(fewer.label_texts, num_layers=2, hidden_size=64, num_words=4_000)
            encoder.save(folder / "encoder")
            return make_trainer(
                fewer,
                folder,
                threads=arguments.threads,
                batch__size=64,
                encoder__kind="transformer",
                encoder__pretrained=str(folder / "encoder"),
                encoder__max_length_query=48,
                train__learning_rate=2e-3,
            )

        yield {"static, batch 512": static, "transformer 2 x 64, batch 64": transformer}


def commonest_labels(dataset: Dataset, number: int) -> Dataset:
    """The data set with its most frequent labels only, and the training queries that have one."""
    kept = np.sort(np.argsort(-dataset.label_counts, kind="stable")[:number])
    relevance = dataset.train.relevance[:, kept]
    rows = np.flatnonzero(np.diff(relevance.indptr))
    train = replace(dataset.train, relevance=relevance).select(rows)
    texts, ids = ([values[label] for label in kept] for values in (dataset.label_texts, dataset.label_ids))
    return Dataset(name=dataset.name, label_texts=texts, label_ids=ids, train=train)


def print_switches(arguments: argparse.Namespace) -> None:
    """The second table."""
    with switch_trainers(arguments) as trainers:
        for title, make in trainers.items():
            trainer = make()
            start = warm_up(trainer, arguments.warmup)
            print(f"\n{title}, {trainer.dataset.num_labels:,} labels, after {start.step} exact steps")
            columns = {"CPU s/step": 11, "x exact": 9, "encoded": 9, "replayed": 9, "left out": 10, "error": 10}
            print(f"{'setting':24s}" + "".join(f"{column:>{width}s}" for column, width in columns.items()))
            reference: float | None = None
            for setting in SETTINGS:
                got = measure_setting(trainer, start, setting, steps=arguments.steps)
                reference = reference or got.seconds
                print(
                    f"{setting!s:24s}{got.seconds:11.3f}{reference / got.seconds:9.2f}{got.encoded:9.1%}"
                    f"{got.replayed:9.1%}{got.left_out:10.1e}{got.error:10.1e}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["memory", "switches"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--queries", type=int, default=1024, help="batch size of the memory table")
    parser.add_argument("--steps", type=int, default=16, help="counted steps per setting, at least 4")
    parser.add_argument("--warmup", type=int, default=100, help="exact steps before the settings part")
    parser.add_argument("--transformer-labels", type=int, default=3_000)
    parser.add_argument("--child", nargs=2, metavar=("DATA", "HOW"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    if arguments.child:
        measured = measure_memory(*arguments.child, threads=arguments.threads, queries=arguments.queries, steps=3)
        print(json.dumps(measured))
        return
    if arguments.only != "switches":
        print_memory(arguments)
    if arguments.only != "memory":
        print_switches(arguments)


if __name__ == "__main__":
    main()
