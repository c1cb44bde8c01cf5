"""A dependent link: out[i] = 3 in[i + 1] + 1, cyclic, int32. A chain of them shows whether launches may overlap safely.

Every program reads what another program of the launch before has written, so a launch that starts too early computes
a wrong number. Integers wrap around as they do in PyTorch.
"""

from __future__ import annotations

import torch

from monograph.kernels.device import enter
from monograph.kernels.tile import launch_options
from monograph.kernels.triton_import import tl, triton


@triton.jit
def _pdl_probe_kernel(
    source_ptr,  # int32 [num_programs * BLOCK]
    out_ptr,  # int32 [num_programs * BLOCK]
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    size = tl.num_programs(0) * BLOCK
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    enter(PDL)
    tl.store(out_ptr + offs, 3 * tl.load(source_ptr + (offs + BLOCK) % size) + 1)


def pdl_probe(
    source: torch.Tensor,  # int32 [n], n a multiple of 32
    out: torch.Tensor,  # int32 [n]
    *,
    pdl: bool = False,
) -> None:
    """Writes one link of the chain into `out`."""
    assert source.shape == out.shape and source.shape[0] % 32 == 0, (source.shape, out.shape)
    grid = (source.shape[0] // 32,)
    _pdl_probe_kernel[grid](source, out, BLOCK=32, PDL=int(pdl), num_warps=1, **launch_options(pdl))


def pdl_probe_torch(source: torch.Tensor, out: torch.Tensor) -> None:
    """The same in plain PyTorch."""
    out.copy_(3 * torch.roll(source, -32) + 1)
