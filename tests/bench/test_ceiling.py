"""The read ceiling's kernel reads every word once, in every configuration, and a wrong sum is noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from monograph.model.read_ceiling import CONFIGURATIONS, Configuration, is_right, read, read_ceiling_gb_s
from tests.kernels.rows import DEVICE


@pytest.mark.parametrize("how", CONFIGURATIONS, ids=str)
def test_sums(how: Configuration) -> None:
    how = replace(how, block=how.block // 64)  # the interpreter is slow
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (4096 * 36 + 5,), dtype=torch.int64, generator=generator)
    words = words.to(torch.int32).to(DEVICE)
    sums = torch.full((len(words),), -1, dtype=torch.int32, device=DEVICE)
    count, programs = read(words, sums, how, 3)
    assert len(words) - count < how.block * how.unroll * max(1, how.programs_per_sm * 3)
    assert is_right(words, sums, count, programs)
    words[count // 2] += 1
    assert not is_right(words, sums, count, programs)


def test_configurations_load_128_bits_a_thread_and_are_no_repeats() -> None:
    assert len(set(CONFIGURATIONS)) == len(CONFIGURATIONS)
    for how in CONFIGURATIONS:
        assert how.block % (32 * how.num_warps * 4) == 0


@pytest.mark.gpu
def test_ceiling_is_plausible() -> None:
    found = read_ceiling_gb_s(torch.device("cuda", 0), nbytes=1 << 30)
    assert len(found["configurations"]) == len(CONFIGURATIONS)
    assert all(row["gb_s"] for row in found["configurations"])
    assert found["ceiling_gb_s"] == max(row["gb_s"] for row in found["configurations"])
    assert 100 < found["ceiling_gb_s"] < 20000
