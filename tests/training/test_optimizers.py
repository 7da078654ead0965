import subprocess
import sys

import torch
from torch import nn

from dexter.training.optimizers import DenseAdam


def test_dense_adam_equals_that_of_torch_bit_for_bit():
    ours, theirs = ([nn.Parameter(torch.arange(12.0).view(4, 3)), nn.Parameter(torch.ones(5))] for _ in range(2))
    groups = [
        [{"params": [matrix], "lr": 0.1, "weight_decay": 0.01}, {"params": [vector], "lr": 0.02, "weight_decay": 0.0}]
        for matrix, vector in (ours, theirs)
    ]
    optimizers = DenseAdam(groups[0], betas=(0.9, 0.99)), torch.optim.AdamW(groups[1], betas=(0.9, 0.99), fused=True)
    for step in range(5):
        for parameters in (ours, theirs):
            generator = torch.Generator().manual_seed(step)
            for parameter in parameters[: 1 if step == 2 else 2]:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_training_does_not_import_the_compiler_of_torch(tmp_path):
    code = f"""
import sys
import dexter
from dexter.data import Dataset, Split
from scipy.sparse import identity
texts = [f"word{{n}} text" for n in range(40)]
data = Dataset("tiny", texts, [str(n) for n in range(40)], Split(texts, texts, identity(40, "float32", "csr")), None)
dexter.train(data, out={str(tmp_path / "run")!r}, overrides={{"data.own_labels": "keep"}})
print([name for name in ("torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy") if name in sys.modules])
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
