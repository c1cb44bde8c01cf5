"""B11: kernels on the GPU against fp64, with bounds from theory.

fp32 may be off by 1e-5 of the largest value: a dot product in TF32, which Triton takes where nobody says otherwise, is
off by 3e-4. In 16 bits, from inputs that the dtype holds exactly, the error may be at most twice that of PyTorch in the
same precision, in the worst element and in the mean. A scale that is wrong by 1 % fails both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from monograph.kernels.attention import attention
from monograph.kernels.attention_rows import attention_rows
from monograph.kernels.gate_up import gate_up
from monograph.kernels.linear_add import linear_add
from monograph.kernels.linear_rows import linear_rows
from tests.gpu import tiny

pytestmark = pytest.mark.gpu

FP32_ERROR = 1e-5  # of the largest magnitude
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS, KV_HEADS, DIM = tiny.CONFIG.num_q_heads, tiny.CONFIG.num_kv_heads, tiny.CONFIG.head_dim
CAPACITY, SPLITS, ROWS = 4096, 132, 64


@dataclass
class Case:
    """A kernel's result, the same in fp64, and by PyTorch in the kernel's dtype."""

    got: torch.Tensor
    exact: torch.Tensor
    torch_says: torch.Tensor

    def fault(self, dtype: torch.dtype) -> str | None:
        """What is wrong, if anything is."""
        error = (self.got.double() - self.exact).abs()
        if not bool(torch.isfinite(self.got).all()):
            return "not finite"
        if dtype == torch.float32:
            relative = float(error.max() / self.exact.abs().max())
            return None if relative < FP32_ERROR else f"{relative:.1e} of the largest value"
        peer = (self.torch_says.double() - self.exact).abs()
        for name, ours, theirs in (
            ("worst", error.max(), peer.max()),
            ("RMS", error.square().mean().sqrt(), peer.square().mean().sqrt()),
        ):
            if float(ours) > 2 * float(theirs):
                return f"{name} {float(ours):.1e}, PyTorch {float(theirs):.1e}"
        return None


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    """Normal numbers that the dtype holds exactly."""
    generator = torch.Generator(tiny.DEVICE).manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator, device=tiny.DEVICE) * std).to(dtype)


def scalar(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=tiny.DEVICE)


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=tiny.DEVICE)


def attention_case(dtype: torch.dtype, wrong: float, length: int = 1000) -> Case:
    """One query token over the live rows; the rows beyond are NaN."""
    q, keys = rand(HEADS, DIM, dtype=dtype), nan(KV_HEADS, CAPACITY, DIM, dtype=dtype)
    values = keys.clone()
    keys[:, :length], values[:, :length] = rand(2, KV_HEADS, length, DIM, dtype=dtype, seed=1)
    out, arrivals = nan(HEADS, DIM), torch.zeros(KV_HEADS, dtype=torch.int32, device=tiny.DEVICE)
    partials = nan(SPLITS, HEADS, DIM), nan(SPLITS, HEADS)
    scale = DIM**-0.5
    attention(q.float(), keys, values, scalar(length - 1), scalar(0), *partials, arrivals, out, scale=scale * wrong)
    exact, peer = both(q[:, None], repeated(keys[:, :length]), repeated(values[:, :length]), scale)
    return Case(out, exact.view_as(out), peer.view_as(out))


def repeated(cache: torch.Tensor) -> torch.Tensor:
    """KV heads once for each of their query heads."""
    return cache.repeat_interleave(HEADS // KV_HEADS, dim=0)


def both(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of [heads, rows, dim] in fp64, and in the dtype by the kernel that PyTorch takes for it."""
    attend = F.scaled_dot_product_attention
    exact = attend(q.double(), keys.double(), values.double(), attn_mask=mask, scale=scale)
    return exact, attend(q[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]


def attention_rows_case(dtype: torch.dtype, wrong: float, start: int = 700) -> Case:
    """A chunk of rows over the cache and themselves, causal; rows and keys beyond are NaN."""
    rows, end = ROWS - 3, start + ROWS - 3
    q = rand(ROWS, HEADS, DIM, dtype=dtype)
    keys = nan(KV_HEADS, CAPACITY, DIM, dtype=dtype)
    values = keys.clone()
    keys[:, :end], values[:, :end] = rand(2, KV_HEADS, end, DIM, dtype=dtype, seed=1)
    out, scale = nan(ROWS, HEADS, DIM, dtype=dtype), DIM**-0.5
    attention_rows(q, keys, values, scalar(start), scalar(end), scalar(0), out, scale=scale * wrong)
    mask = torch.ones(rows, end, dtype=torch.bool, device=tiny.DEVICE).tril(start)
    exact, peer = both(q[:rows].transpose(0, 1), repeated(keys[:, :end]), repeated(values[:, :end]), scale, mask)
    return Case(out[:rows], exact.transpose(0, 1), peer.transpose(0, 1))


def linear_add_case(dtype: torch.dtype, wrong: float) -> Case:
    """The product of the down projection's shape."""
    n, k = tiny.CONFIG.hidden_size, tiny.CONFIG.intermediate_size
    weight, a, x = rand(n, k, dtype=dtype, std=k**-0.5), rand(k, dtype=dtype), torch.zeros(n, device=tiny.DEVICE)
    linear_add(a.float() * wrong, weight, None, scalar(0), x)
    return Case(x, weight.double() @ a.double(), weight @ a)


def gate_up_case(dtype: torch.dtype, wrong: float) -> Case:
    """RMSNorm, two products and the gated unit."""
    n, k, eps = tiny.CONFIG.intermediate_size, tiny.CONFIG.hidden_size, 1e-5
    weight, x = rand(2 * n, k, dtype=dtype, std=k**-0.5), rand(k, dtype=dtype)
    norm, h = rand(k, dtype=dtype, std=0.1) + 1, nan(n)
    gate_up(x.float(), norm * wrong if wrong != 1 else norm, weight, None, scalar(0), h, eps=eps)

    def unit(kind: torch.dtype) -> torch.Tensor:
        gate, up = (weight.to(kind) @ F.rms_norm(x.to(kind), (k,), norm.to(kind), eps)).chunk(2)
        return F.silu(gate) * up

    return Case(h, unit(torch.float64), unit(dtype))


def linear_rows_case(dtype: torch.dtype, wrong: float) -> Case:
    """Rows of logits."""
    n, k = tiny.CONFIG.vocab_size, tiny.CONFIG.hidden_size
    weight, a, out = rand(n, k, dtype=dtype, std=k**-0.5), rand(512, k, dtype=dtype), nan(ROWS, n)
    linear_rows((a * wrong).to(dtype), weight, scalar(0), scalar(ROWS), scalar(0), scalar(0), out)
    return Case(out, a[:ROWS].double() @ weight.double().T, a[:ROWS] @ weight.T)


CASES: dict[str, Callable[[torch.dtype, float], Case]] = {
    "attention": attention_case,
    "attention_rows": attention_rows_case,
    "linear_add": linear_add_case,
    "gate_up": gate_up_case,
    "linear_rows": linear_rows_case,
}


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_b11_error_against_fp64(name: str, dtype: torch.dtype) -> None:
    assert CASES[name](dtype, 1.0).fault(dtype) is None


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_b11_one_percent_fails(name: str, dtype: torch.dtype) -> None:
    assert CASES[name](dtype, 1.01).fault(dtype) is not None


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 383, 384, 385, 3000])
def test_b11_attention_on_both_sides_of_its_blocks(length: int, dtype: torch.dtype) -> None:
    assert attention_case(dtype, 1.0, length).fault(dtype) is None
