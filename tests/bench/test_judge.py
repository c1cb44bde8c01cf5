"""What is wrong with logits is said, and what is as good as its precision passes."""

from __future__ import annotations

import pytest
import torch

from bench.judge import ALLOWED, ALLOWED_OTHERS, CAP, SUM_ORDER, Bounds, relative_error, token_fault

VOCAB = 1000
WANT = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))


def test_relative_error() -> None:
    assert relative_error(WANT * 1.01, WANT) == pytest.approx(0.01, rel=1e-3)


def test_bounds_follow_the_plain_step_between_their_limits() -> None:
    for noise, error in ((0.0, SUM_ORDER), (0.01, 0.01 * ALLOWED), (1.0, CAP)):
        bounds = Bounds.of(WANT, WANT + noise * NOISE)
        assert bounds.error == pytest.approx(error, rel=0.05)
        assert bounds.plain_error == pytest.approx(noise, rel=0.05)
    strict, loose = (Bounds.of(WANT, WANT + 0.001 * NOISE, allowed) for allowed in (2.0, ALLOWED_OTHERS))
    assert loose.error == pytest.approx(5 * strict.error)
    assert loose.worst == pytest.approx(5 * strict.worst)


def test_faults() -> None:
    bounds = Bounds.of(WANT, WANT + 0.01 * NOISE)
    assert bounds.faults(WANT + 0.015 * NOISE, WANT) == []
    assert "error 3.0e-02 above" in bounds.faults(WANT * 1.03, WANT)[0]
    one_off = WANT.clone()
    one_off[7] += 0.2
    assert [fault.partition(" is ")[0] for fault in bounds.faults(one_off, WANT)] == ["a logit"]
    other = WANT.clone()
    other[int(WANT.argmin())] = 9.0
    assert bounds.faults(other, WANT)[-1] == f"token {int(WANT.argmin())}, the reference has {int(WANT.argmax())}"
    assert bounds.faults(torch.full((VOCAB,), float("nan")), WANT)


def test_a_token_alone() -> None:
    best, second = WANT.topk(2).indices.tolist()
    close = WANT.clone()
    close[second] = close[best] - 0.1
    assert token_fault(best, WANT) is None
    assert token_fault(second, close) is None
    assert token_fault(int(WANT.argmin()), WANT) == f"token {int(WANT.argmin())}, the reference has {best}"
