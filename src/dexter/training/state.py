"""Everything that the rest of a run depends on, taken out of a trainer and put back: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dexter.errors import ModelError
from dexter.training.checkpoint import Checkpoint, Rows
from dexter.training.objective import is_by_label

if TYPE_CHECKING:
    from dexter.training.trainer import Trainer

_COUNTERS = ("best", "best_step", "num_worse", "seconds")


def take_state(trainer: Trainer) -> Checkpoint:
    """The state of a run after the step it has just taken."""
    objective = {f"objective:{name}": value for name, value in trainer.objective.state_dict().items()}
    tensors = {f"encoder:{name}": value for name, value in trainer.encoder.state_dict().items()}
    tensors |= {name: value for name, value in objective.items() if not is_by_label(name)}
    tensors |= {f"optimizer:{name}": value for name, value in trainer.optimizers.state(by_label=False).items()}
    tensors |= {f"sampler:{name}": value for name, value in trainer.sampler.state().items()}
    by_label = {name: value for name, value in objective.items() if is_by_label(name)}
    by_label |= {f"optimizer:{name}": value for name, value in trainer.optimizers.state(by_label=True).items()}
    by_text = {f"labels:{name}": value for name, value in trainer.label_side.state().items()}
    return Checkpoint(
        trainer.step,
        tensors,
        {name: getattr(trainer, name) for name in _COUNTERS},
        rows={"label": Rows(trainer.shard.labels, by_label), "text": Rows(trainer.shard.texts, by_text)},
        own=random_state(),
    )


def put_state(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Continue from a checkpoint as if the run had never stopped."""
    sections: dict[str, dict[str, Tensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        section, _, rest = name.partition(":")
        sections.setdefault(section, {})[rest] = tensor
    try:
        trainer.encoder.load_state_dict(sections["encoder"])
        trainer.objective.load_state_dict(sections.get("objective", {}))
    except (KeyError, RuntimeError) as error:
        raise ModelError(f"{trainer.folder}: its checkpoint does not fit the data and settings ({error})") from None
    trainer.optimizers.load_state(sections.get("optimizer", {}))
    trainer.label_side.load_state(sections.get("labels", {}), trainer.device)
    trainer.sampler.load_state(sections["sampler"])
    trainer.step = checkpoint.step
    for name in _COUNTERS:
        setattr(trainer, name, checkpoint.values[name])
    if checkpoint.own:
        restore_random_state(checkpoint.own)
    else:
        # Another number of ranks wrote it: what was drawn so far was drawn by others.
        seed_rank(trainer.config.seed, trainer.processes.rank, step=trainer.step)


def random_state() -> dict[str, Tensor]:
    """The states of the generators that dropout draws from."""
    states = {"random:cpu": torch.get_rng_state()}
    return states | ({"random:cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Take back what `random_state` gave."""
    torch.set_rng_state(states["random:cpu"])
    if "random:cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["random:cuda"])


def seed_rank(seed: int, rank: int, *, step: int = 0) -> None:
    """Give a rank draws of its own: equal dropout on all ranks would drop the same features of all queries."""
    torch.manual_seed(int(np.random.SeedSequence((seed, rank, step)).generate_state(1, np.uint64)[0] >> np.uint64(1)))
