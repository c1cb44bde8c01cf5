"""Gives what the Gluon kernels take from Triton under one set of names, and stand-ins where Triton is absent."""

from __future__ import annotations

from typing import Any

from monograph.kernels.triton_import import triton

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

    # Two names changed after Triton 3.6.
    barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
    async_load = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)
    commit_group = async_copy.commit_group
    wait_group = async_copy.wait_group
except ModuleNotFoundError:
    gluon: Any = triton  # type: ignore[no-redef]
    gl: Any = triton  # type: ignore[no-redef]
    mma_v2: Any = triton  # type: ignore[no-redef]
    async_load = commit_group = wait_group = barrier = triton

__all__ = ["async_load", "barrier", "commit_group", "gl", "gluon", "mma_v2", "wait_group"]
