"""Several programs draw one token together, waiting for each other: without a GPU each of them is a process.

The interpreter runs the programs of a launch one after another, so that the first would wait for ever for the second.
Here every process interprets one program, over tensors in memory that all of them share.
"""

from __future__ import annotations

import multiprocessing
import warnings
from typing import Any

import pytest
import torch

from monograph.kernels.draw import draw_torch
from monograph.kernels.tile import BINS, BUFFERS, LIST
from monograph.kernels.triton_import import triton
from tests.kernels.rows import ON_GPU
from tests.kernels.test_draw import HEAD_PROGRAMS, NO_FUSION, _draw_kernel, head_best, one, random_scores

PROGRAMS = 3
# top_k, top_p, min_p: the short way, with a list that is too long, and both searches
LIMITS = [(9, 0.8, 0.05), (100, 1.0, 0.0), (400, 0.7, 0.0), (0, 0.9, 0.01), (0, 1.0, 0.0)]


def run_program(program: int, arguments: tuple[torch.Tensor, ...], sizes: dict[str, int]) -> None:
    """In a process of its own: one program of the launch, where the interpreter takes it for the only one."""
    from triton.runtime.interpreter import interpreter_builder

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    set_dim, set_index = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
    interpreter_builder.set_grid_dim = lambda *_: set_dim(PROGRAMS, 1, 1)
    interpreter_builder.set_grid_idx = lambda *_: set_index(program, 0, 0)
    _draw_kernel[(1,)](*arguments, **sizes, **NO_FUSION)


@pytest.mark.skipif(ON_GPU, reason="a GPU runs the programs of a launch at once: see test_draw.py")
@pytest.mark.parametrize(("std", "decimals"), [(2.0, None), (0.05, 2)], ids=["peaked", "flat ties"])
def test_programs_in_processes_draw_what_the_reference_draws(std: float, decimals: int | None) -> None:
    n, block = 700, 256
    context = multiprocessing.get_context("fork")
    sizes: dict[str, Any] = {"N": n, "BLOCK_P": triton.next_power_of_2(HEAD_PROGRAMS), "BLOCK_V": block, "PART": 128}
    sizes |= {"DRAWERS": PROGRAMS, "BLOCK_D": 4, "CLEARS": triton.next_power_of_2(-(-BINS // PROGRAMS))}
    arrivals = torch.zeros(2, dtype=torch.int32).share_memory_()
    histogram = torch.zeros(BUFFERS, BINS, dtype=torch.int64).share_memory_()
    listed = torch.full((LIST,), -77, dtype=torch.int64).share_memory_()
    masses = torch.full((PROGRAMS,), -77, dtype=torch.int64).share_memory_()
    for seed, (top_k, top_p, min_p) in enumerate(LIMITS):
        scores = random_scores(n, std, seed, decimals)
        knobs = one(0.8), one(top_k, torch.int32), one(top_p), one(min_p), one(seed, torch.int64)
        out = torch.full((1,), -77, dtype=torch.int32).share_memory_()
        packed = torch.cat([scores.max()[None], knobs[0], knobs[2], knobs[3]])
        shared = arrivals, histogram, listed, masses, out
        arguments = (scores, head_best(scores), packed, knobs[1], knobs[4], one(5, torch.int32), *shared)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a fork beside PyTorch's threads, which do nothing here
            processes = [context.Process(target=run_program, args=(i, arguments, sizes)) for i in range(PROGRAMS)]
            for process in processes:
                process.start()
        try:
            for process in processes:
                process.join(20)
            assert [process.exitcode for process in processes] == [0] * PROGRAMS
        finally:
            for process in processes:
                process.kill()
        assert int(out) == draw_torch(scores, *knobs, 5)[0]
        assert not arrivals.any()  # ready for the next launch
        assert not histogram.any()
