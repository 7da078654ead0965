"""Arrays of mapped files: the memory that reading took is given back, and the values stay."""

from pathlib import Path

import numpy as np
import pytest

from dexter.tensor_files import read_tensors, release, write_tensors


def resident_pages_of_files():
    return int(Path("/proc/self/statm").read_text().split()[2])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts pages as Linux tells them")
def test_released_memory_is_given_back_and_read_again_when_used(tmp_path):
    numbers = np.arange(2**23, dtype=np.float32)
    write_tensors(tmp_path / "numbers.safetensors", {"numbers": numbers})
    mapped = read_tensors(tmp_path / "numbers.safetensors")["numbers"]
    total = mapped.sum()
    used = resident_pages_of_files()
    release(mapped[10:], np.zeros(3))
    assert used - resident_pages_of_files() > numbers.nbytes // 4_096 * 0.9
    assert mapped.sum() == total
