"""Arrays of mapped files: the memory that reading took is given back, and the values stay."""

from pathlib import Path

import numpy as np
import pytest

from dexter.tensor_files import read_tensors, release, write_tensors


def resident_kilobytes(path):
    """Memory of this process that shows a file."""
    _, _, mapped = Path("/proc/self/smaps").read_text().partition(f"{path}\n")
    return int(mapped.split("Rss:")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="counts memory as Linux tells it")
def test_released_memory_is_given_back_and_read_again_when_used(tmp_path):
    numbers = np.arange(2**23, dtype=np.float32)
    write_tensors(tmp_path / "numbers.safetensors", {"numbers": numbers})
    mapped = read_tensors(tmp_path / "numbers.safetensors")["numbers"]
    total = mapped.sum()
    assert resident_kilobytes(tmp_path / "numbers.safetensors") > 0
    release(mapped[10:], np.zeros(3))
    assert resident_kilobytes(tmp_path / "numbers.safetensors") < numbers.nbytes // 1_024 // 10
    assert mapped.sum() == total
