"""What torchrun starts in the tests of dying and hanging ranks: a training run in which one rank meets with something.

stricken_rank.py OUT NONE|KILL|STOP STEP
"""

import os
import signal
import sys

import dexter
from dexter.training import trainer as module
from tests.conftest import SMALL, make_world


def main():
    out, what, step = sys.argv[1], sys.argv[2], int(sys.argv[3])
    take_step = module.Trainer.take_step

    def stricken(self):
        first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if what != "NONE" and first_attempt and self.processes.rank == 1 and self.step == step:
            os.kill(os.getpid(), getattr(signal, f"SIG{what}"))
        return take_step(self)

    module.Trainer.take_step = stricken
    changes = {"train.epochs": 3, "train.checkpoint_steps": 5, "encoder.token_dropout": 0.1, "loss.prior": True}
    dexter.train(
        make_world(num_train=200), recipe="dexml", out=out, overrides={**SMALL, **changes}, keep_checkpoints=True
    )


if __name__ == "__main__":
    main()
