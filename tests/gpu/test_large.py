"""B13: a KV cache of more than 2^31 elements, used at its end. B19: what does not fit is refused before loading."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import monograph as mg
import monograph.arena.arena
from bench.shapes import SHAPES, caches, random_cache
from bench.step import Step
from monograph.arena import device_free_nbytes
from monograph.model.decoder import Decoder
from monograph.model.layout import Capacity, plan_layout
from monograph.model.plan import make_plan
from tests.checkpoints import tiny_config
from tests.engines import write_model
from tests.gpu import tiny

pytestmark = pytest.mark.gpu

RELATIVE_ERROR = 3e-4  # fp32 scores of 20 to 30 are off by 1e-5, and so are their exponentials; wrong rows by 1
# Prefill adds up one block of keys after the other, millions of them: each sum of 1e-5 is rounded to the ulp of a total
# of 50, 4e-6, which comes to 0.2 % in the end (numpy's sequential sums agree). Wrong rows are still off by 1.
PREFILL_ERROR = 2e-2
MAX_SEQ_LEN = 2**31 // (tiny.CONFIG.num_kv_heads * tiny.CONFIG.head_dim) + 16
MARGIN = 1 << 20
CANARY = 0x5A


@pytest.fixture(scope="module")
def huge() -> Iterator[tuple[Decoder, torch.Tensor]]:
    """Both layers' keys and values, 8 GiB each, between canaries. Keys are long, so that attention picks a few rows of
    many, anywhere: a wrong address shows."""
    held: list[torch.Tensor] = []

    def between_canaries(nbytes: int, device: torch.device) -> torch.Tensor:
        held.append(torch.full((nbytes + 2 * MARGIN,), CANARY, dtype=torch.uint8, device=device))
        return held[0][MARGIN : MARGIN + nbytes]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monograph.arena.arena, "_allocate", between_canaries)
        decoder = tiny.make(torch.float32, MAX_SEQ_LEN)
    assert decoder.arena.view("layers.1.v_cache").numel() > 2**31
    random_cache(decoder.arena, tiny.CONFIG, std=4.0)
    yield decoder, held[0]
    decoder.close()
    del decoder
    held.clear()
    torch.cuda.empty_cache()


def test_b13_decode_at_the_last_position(huge: tuple[Decoder, torch.Tensor]) -> None:
    decoder, _ = huge
    step = Step(decoder)
    keys, values = list(caches(decoder.arena, tiny.CONFIG))[-1]
    for length in (MAX_SEQ_LEN - 17, MAX_SEQ_LEN):
        want = step.reference_logits(length)
        step.begin(length)
        before = keys[:, length - 2].clone()
        with step.context():
            decoder.runner.decode()
        tiny.settle()
        assert tiny.relative_error(decoder.arena.view("logits"), want) < RELATIVE_ERROR
        assert torch.equal(keys[:, length - 2], before)
        # The last layer's attention alone, from the row that the step itself has written there.
        queries = decoder.arena.view("q").view(tiny.CONFIG.num_kv_heads, -1, tiny.CONFIG.head_dim)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            exact = torch.nn.functional.scaled_dot_product_attention(
                queries[None], keys[None, :, :length], values[None, :, :length], scale=tiny.CONFIG.scale
            )
        got = decoder.arena.view("attention_out")
        assert tiny.relative_error(got, exact.view_as(got)) < RELATIVE_ERROR
        weakest = exact.abs().amax(dim=-1).min()
        assert float(weakest) > 0.01  # a few rows decide, not the mean of all


def test_b13_prefill_at_the_last_positions(huge: tuple[Decoder, torch.Tensor]) -> None:
    """The prompt's last rows end with the cache; the rows before them are taken as they are."""
    decoder, _ = huge
    step = Step(decoder)
    start = MAX_SEQ_LEN - 5
    ids = tiny.random_ids(4)

    def rows() -> torch.Tensor:
        tiny.settle()
        return torch.stack(
            [cache[:, start : start + 4] for pair in caches(decoder.arena, tiny.CONFIG) for cache in pair]
        )

    with step.context():
        decoder.state.begin([0] * start + ids, start, tiny.NEVER, (), tiny.GREEDY)
        decoder.runner.prefill()
        prefilled, logits = rows(), decoder.arena.view("logits").clone()
        assert int(decoder.arena.view("position")) == start + 4
    for i, token in enumerate(ids):
        step.begin(start + i + 1, token)
        with step.context():
            decoder.runner.decode()
    assert tiny.relative_error(prefilled, rows()) < PREFILL_ERROR
    assert tiny.relative_error(logits, decoder.arena.view("logits")) < PREFILL_ERROR


def test_b13_canaries_around_it_are_unchanged(huge: tuple[Decoder, torch.Tensor]) -> None:
    decoder, whole = huge
    decoder.arena.check_guards()
    assert bool((whole[:MARGIN] == CANARY).all())
    assert bool((whole[MARGIN + decoder.arena.layout.nbytes :] == CANARY).all())


def test_b19_a_cache_that_does_not_fit_is_refused_with_the_longest_that_does() -> None:
    config = dataclasses.replace(SHAPES["llama-3.1-8b"], max_position_embeddings=1 << 24)
    free = device_free_nbytes(tiny.DEVICE)
    assert free is not None
    with pytest.raises(
        mg.CapacityError, match=r"needs .* is free on cuda:0, .* short; the longest max_seq_len"
    ) as error:
        make_plan(config, tiny.DEVICE, torch.bfloat16, 1 << 24)
    found = re.search(r"the longest max_seq_len that fits is ([\d,]+)", str(error.value))
    assert found is not None
    longest = int(found[1].replace(",", ""))

    def need(length: int) -> int:
        return plan_layout(config, Capacity.for_model(config, length, torch.bfloat16)).nbytes

    assert need(longest) <= free + (64 << 20)
    assert need(longest + 1024) > free - (64 << 20)
    assert make_plan(config, tiny.DEVICE, torch.bfloat16, longest - 1024).max_seq_len == longest - 1024


def test_b19_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    config = tiny_config(max_position_embeddings=1 << 29, num_key_value_heads=4)
    folder = write_model(tmp_path, config)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(tiny.DEVICE)
    allocated = torch.cuda.memory_allocated(tiny.DEVICE)
    with pytest.raises(mg.CapacityError, match="the longest max_seq_len that fits is"):
        mg.load(str(folder), device="cuda", max_seq_len=1 << 29)
    # CUDA may be woken by an allocation of one block; the smallest slot of weights is larger.
    assert torch.cuda.max_memory_allocated(tiny.DEVICE) <= allocated + 512
