"""Settings that follow from the data and the machine: values left at 0 or `auto` are chosen here."""

from __future__ import annotations

import math
import os
from dataclasses import replace

from dexter.config import CORRECTED_LOSSES, BatchConfig, Config, ValidationConfig
from dexter.data import Dataset
from dexter.errors import UsageError
from dexter.processes import num_cores

_STATIC_RATE = 5e-3
_STATIC_HEAD_FACTOR, _TRANSFORMER_HEAD_FACTOR = 0.2, 2.0
"""Learning rate of the heads' projections relative to the encoder's. A static encoder's rate is that of a table whose
rows change seldom: the heads, which every step changes, get worse at such rates (docs/claims.md, claim 4)."""
_TRANSFORMER_RATE = 5e-5
_TRANSFORMER_REFERENCE_BATCH = 512
_STATIC_TOKENS = 1_000_000
_CUT_OFF = 5
_FEW_LABELS = 8_192
_RANDOM_LABELS = 768
_FEW_LABELS_PER_QUERY = 16
"""All labels are in the pool while they are at most this many times the queries of a batch, and `_FEW_LABELS`."""
_RANDOM_LABELS_PER_QUERY = 6
"""Random labels of a sampled pool for each query of the batch, up to `_RANDOM_LABELS` in all."""
_STEPS = 90
"""Steps after which the default recipe has learned what few queries can teach; more epochs learn them by heart."""
_FEWEST_EPOCHS, _MOST_EPOCHS = 2, 4
SCALED_SETTINGS = (
    "batch.size",
    "train.learning_rate",
    "train.head_learning_rate",
    "train.classifier_learning_rate",
    "train.scale_with_processes",
)
"""Settings that `train.scale_with_processes` changes when a run starts."""
_TRANSFORMER_TOKENS = {"cpu": 1_024, "cuda": 16_384, "mps": 4_096}


def resolve_presets(config: Config, dataset: Dataset, *, num_processes: int = 1) -> Config:
    """Choose every open value from the data and this machine; raise a UsageError where they do not fit the settings."""
    if config.train.device != "auto":
        check_device(config.train.device)
    resolved = resolve_counts(
        config, num_queries=len(dataset.train), num_labels=dataset.num_labels, num_processes=num_processes
    )
    from dexter.training.precision import check_precision

    check_precision(resolved.train.precision, resolved.train.device)
    return resolved


def resolve_counts(config: Config, *, num_queries: int, num_labels: int, num_processes: int = 1) -> Config:
    """Choose every open value given only the size of the data; the device need not exist on this machine.

    With `train.scale_with_processes`, batch size and learning rates are multiplied by the number of processes.
    """
    metric = _metric(config.validation, num_labels)
    device = _device(config.train.device)
    static = config.encoder.kind == "static"
    batch_size = config.batch.size or _batch_size(num_queries, static=static, sampled=config.batch.pool == "auto")
    rate = config.train.learning_rate or _learning_rate(batch_size, static=static)
    head_factor = _STATIC_HEAD_FACTOR if static else _TRANSFORMER_HEAD_FACTOR
    epochs = config.train.epochs or _epochs(num_queries, batch_size)
    # A few held-out queries would often prefer a model of the middle of the schedule, by luck: it is worse on others.
    between = config.validation.every_epochs if config.train.epochs else max(epochs, config.validation.every_epochs)
    times = num_processes if config.train.scale_with_processes else 1
    tokens = _STATIC_TOKENS if static else _TRANSFORMER_TOKENS.get(device.split(":")[0], 4_096)
    return replace(
        config,
        validation=replace(config.validation, metric=metric, every_epochs=float(between)),
        batch=replace(_with_pool(config, batch_size, num_labels), size=times * batch_size),
        train=replace(
            config.train,
            epochs=epochs,
            device=device,
            scale_with_processes=False,
            learning_rate=times * rate,
            head_learning_rate=times * (config.train.head_learning_rate or head_factor * rate),
            classifier_learning_rate=times * (config.train.classifier_learning_rate or (rate if static else 10 * rate)),
            tokens_per_micro_batch=config.train.tokens_per_micro_batch or tokens,
            threads=config.train.threads or _threads(num_processes),
        ),
    )


def describe(config: Config, *, num_steps: int, num_processes: int = 1) -> str:
    """One line that describes a run of `num_steps` steps per epoch."""
    train = config.train
    return (
        f"recipe {config.recipe}: {config.encoder.kind} encoder, loss {config.loss.name}, pool {config.batch.pool}, "
        f"{train.epochs} epochs of {num_steps:,} steps x {config.batch.size} queries, "
        f"learning rate {train.learning_rate:.2g}, {train.tokens_per_micro_batch:,} tokens per micro-batch, "
        f"{train.device}, {train.precision}, {train.threads} threads"
        + (f", {num_processes} processes" if num_processes > 1 else "")
    )


def _threads(num_processes: int) -> int:
    """All cores, or fewer if `OMP_NUM_THREADS` says so, which torchrun sets to 1 by itself where there are several."""
    wanted = os.environ.get("OMP_NUM_THREADS", "") if num_processes == 1 else ""
    return min(num_cores(), int(wanted)) if wanted.isdecimal() and int(wanted) else num_cores()


def _metric(validation: ValidationConfig, num_labels: int) -> str:
    """The metric that decides which model is best."""
    if validation.metric == "auto":
        return f"nDCG@{min(_CUT_OFF, num_labels)}"
    if validation.cut_off > num_labels:
        raise UsageError(f"validation.metric {validation.metric} needs more labels than {num_labels}")
    return validation.metric


def _with_pool(config: Config, batch_size: int, num_labels: int) -> BatchConfig:
    """The batch settings with the pool chosen: all labels where they are few, else a corrected sample of them.

    A sample that grows with a small batch keeps the time of an epoch the same for any batch; from 128 queries on the
    batch's own positives are many.
    """
    batch = config.batch
    if batch.pool != "auto":
        return batch
    if num_labels <= min(_FEW_LABELS, _FEW_LABELS_PER_QUERY * batch_size):
        return replace(batch, pool="all")
    corrected = config.loss.name in CORRECTED_LOSSES and config.loss.undrawn == "ignore" and not batch.hard_negatives
    num_random = batch.random_labels or min(_RANDOM_LABELS, _RANDOM_LABELS_PER_QUERY * batch_size)
    return replace(batch, pool="in-batch", random_labels=num_random, correct_pool=corrected)


def _batch_size(num_queries: int, *, static: bool, sampled: bool) -> int:
    """A power of two within 32 and 1,024 queries (transformers: 16 and 512).

    The largest that makes at least 64 steps per epoch. With a pool that is chosen too (`sampled`), up to 3 times the
    root of the number of queries where that is more: 64 for 1,000, 256 for 10,000.
    """
    smallest, largest = (32, 1024) if static else (16, 512)
    wanted = max(1, num_queries // 64, 3 * math.isqrt(num_queries) if sampled else 0)
    return min(largest, max(smallest, 1 << (wanted.bit_length() - 1)))


def _epochs(num_queries: int, batch_size: int) -> int:
    """As many epochs as make about 90 steps, within 2 and 4."""
    return min(_MOST_EPOCHS, max(_FEWEST_EPOCHS, round(_STEPS * batch_size / max(1, num_queries))))


def _learning_rate(batch_size: int, *, static: bool) -> float:
    if static:
        return _STATIC_RATE
    return _TRANSFORMER_RATE * math.sqrt(batch_size / _TRANSFORMER_REFERENCE_BATCH)


def check_device(name: str) -> None:
    """Raise a UsageError unless this machine has the device."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"train.device {name!r} is unknown: expected auto, cpu, cuda, cuda:1 or mps") from None
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if device.type not in count:
        raise UsageError(f"train.device {name!r} is not supported: expected auto, cpu, cuda, cuda:1 or mps")
    if (device.index or 0) >= count[device.type]:
        raise UsageError(
            f"train.device is {name!r}, but this machine has {count[device.type]} {device.type} devices that torch can "
            "use: set train.device=auto or cpu, or install a torch build for your accelerator"
        )


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
