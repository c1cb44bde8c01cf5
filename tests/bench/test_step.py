"""A step is judged before it is timed: what is wrong with it must show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.judge import SUM_ORDER
from bench.step import Step, graph_facts
from bench.step_profile import end_to_end, family, least_nbytes
from tests.bench.tiny import CONFIG, tiny_step


@pytest.fixture
def step() -> Step:
    return tiny_step()


@pytest.mark.parametrize("seq_len", [1, 2, 33, 63, 64])
def test_a_right_step_passes(step: Step, seq_len: int) -> None:
    verdict = step.check(seq_len)
    assert str(verdict) == "ok"
    assert verdict.error < SUM_ORDER
    assert verdict.argmax_agrees


@pytest.mark.parametrize("seq_len", [1, 2, 33, 64])
def test_plain_pytorch_computes_the_same_step(step: Step, seq_len: int) -> None:
    want = step.reference_logits(seq_len)
    plain = step.plain_logits(seq_len)
    assert float((plain - want).norm() / want.norm()) < SUM_ORDER


def test_the_bound_follows_the_precision(step: Step) -> None:
    """Plain PyTorch in bfloat16 errs by more than its own bound in float32 and by less than that in bfloat16."""
    want = step.reference_logits(40)
    step.dtype = torch.bfloat16
    plain = step.plain_logits(40)
    assert 50 * SUM_ORDER < float((plain - want).norm() / want.norm()) < 0.1


def test_the_rows_before_the_live_one_stay(step: Step) -> None:
    keys = step.arena.view("layers.1.k_cache")
    before = keys.clone()
    step.check(40)
    assert torch.equal(keys[:, :39], before[:, :39])
    assert torch.equal(keys[:, 40:], before[:, 40:])
    assert not torch.equal(keys[:, 39], before[:, 39])


def spoil(step: Step, monkeypatch: pytest.MonkeyPatch, name: str, by: Any) -> None:
    """Have the runner's decode do one thing more at its end."""
    decode = step.runner.decode

    def spoilt() -> None:
        decode()
        by(step.arena.view(name))

    monkeypatch.setattr(step.runner, "decode", spoilt)


@pytest.mark.parametrize(
    ("name", "by", "fault"),
    [
        ("logits", lambda t: t.mul_(1.0 + 1e-6), "differ in logits"),
        ("logits", lambda t: t.mul_(1.001), "error 1.0e-03 above"),
        ("logits", lambda t: t.fill_(float("nan")), "not finite"),
        ("layers.1.v_cache", lambda t: t[1, 39].add_(1e-6), "differ in KV rows"),
        ("position", lambda t: t.add_(1), "token, position, halted"),
        ("tokens", lambda t: t.add_(1), "token, position, halted"),
    ],
)
def test_a_wrong_step_does_not_pass(
    step: Step, monkeypatch: pytest.MonkeyPatch, name: str, by: Any, fault: str
) -> None:
    spoil(step, monkeypatch, name, by)
    assert fault in str(step.check(40))


def test_a_softmax_scale_wrong_by_one_percent_is_beyond_the_tolerance(step: Step) -> None:
    want = step.reference_logits(40)
    for launch in step.program.decode:
        if family(launch) == "attention":
            launch.constants["scale"] *= 1.01
    assert float((step.reference_logits(40) - want).norm() / want.norm()) > 10 * SUM_ORDER


def test_times(step: Step) -> None:
    timing = step.time(20, replays=30, alone=3)
    assert len(timing.batched) == 2
    assert len(timing.alone) == 3
    assert timing.mean_seq_len == 27.5
    assert step.time(64, replays=16, alone=1).mean_seq_len == 56.5  # the last of the batch has the longest length


def test_a_replay_that_does_nothing_is_not_timed(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step.runner, "decode", lambda: None)
    with pytest.raises(RuntimeError, match="after timing position 19, halted 0; expected 35"):
        step.time(20, replays=16)


def test_host_loop_and_halted(step: Step) -> None:
    loop = step.host_loop(new_tokens=16)
    assert set(loop) == {"wall_ms", "cpu_ms", "first_token_ms"}
    assert all(value > 0 for value in loop.values())
    assert 0 < step.halted_ms(3) < loop["wall_ms"]
    assert step.submit_us(4) > 0


def test_graph_facts_without_a_graph(step: Step) -> None:
    assert graph_facts(step) == {"graphs": 0, "nodes": 5 * CONFIG.num_layers + 3}


def test_overlapping_kernels_share_out_the_time_of_a_replay() -> None:
    spans = [(0.0, 10.0), (2.0, 15.0), (3.0, 16.0)]
    spans += [(start + 100, end + 100) for start, end in spans]
    assert end_to_end(spans, 3) == [10.0, 5.0, 1.0]


def test_bytes_of_the_kernels_add_up_to_those_of_the_step(step: Step) -> None:
    nbytes = least_nbytes(step, 40)
    assert sum(nbytes.values()) == step.nbytes(40) + (CONFIG.num_layers - 1) * CONFIG.head_dim * 4  # RoPE rows
