"""Nothing happens on the host for a token but a launch and a look: no allocation, no compilation, no new address."""

from __future__ import annotations

import pytest
import torch

from monograph.model.decoder import Decoder
from monograph.model.read_ceiling import Configuration, read
from monograph.model.sampling import Sampling
from tests.gpu import tiny

pytestmark = pytest.mark.gpu

STEPS = 5000
COUNTERS = (
    "allocation.all.allocated",
    "allocation.all.freed",
    "segment.all.allocated",
    "num_alloc_retries",
    "num_ooms",
)


def counters() -> dict[str, int]:
    """What PyTorch's allocator has done so far on the device."""
    stats = torch.cuda.memory_stats(tiny.DEVICE)
    return {name: stats.get(name, 0) for name in COUNTERS}


@pytest.mark.parametrize("sampling", [tiny.GREEDY, tiny.DRAWN], ids=["greedy", "drawn"])
def test_5000_steps(bf16: Decoder, compilations: list[str], sampling: Sampling) -> None:
    """Through the loop that users have, from the tenth token to the last."""
    addresses = {name: bf16.arena.view(name).data_ptr() for name in bf16.arena.layout}
    assert addresses == bf16.arena.addresses()
    graphs = tiny.graphs_of(bf16.runner)
    assert len(graphs) == 2  # one decode step, one prefill chunk
    ids = tiny.random_ids(20)
    run = bf16.answer(ids, reuse=False, position_limit=len(ids) + STEPS, stop_ids=(), sampling=sampling)
    before: dict[str, int] = {}
    for i, _ in enumerate(run.tokens()):
        if i == 10:
            before = counters()
    after = counters()
    assert len(run.token_ids) == STEPS
    assert before == after
    assert before["allocation.all.allocated"] > 0  # it counts
    assert not compilations
    assert tiny.graphs_of(bf16.runner) == graphs
    bf16.arena.check_addresses()
    bf16.arena.check_guards()
    assert addresses == bf16.arena.addresses()
    assert addresses == {name: bf16.arena.view(name).data_ptr() for name in bf16.arena.layout}


def test_the_counters_count(compilations: list[str]) -> None:
    """They see what the test above denies."""
    before = counters()
    words = torch.zeros(512, dtype=torch.int32, device=tiny.DEVICE)
    assert counters() != before
    read(words, torch.zeros(1, dtype=torch.int32, device=tiny.DEVICE), Configuration(512, 1, 1, 0, False), 1)
    assert len(compilations) == 1
