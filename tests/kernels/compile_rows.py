"""Compiles the prefill kernels ahead of time, as their wrappers would launch them, and reports what came out.

Run as a script with a compute capability, a dtype and one of SHAPES; no GPU is needed. The wrappers are called with
tensors that have shape and type but no memory, on a pretended device of the wanted capability; each launch is caught
and compiled instead. Prints one JSON object a kernel: its name, registers, stack (bytes, 0 without spills), shared
(bytes), whether it waits before it stores, and which matrix instructions it uses.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from monograph.kernels.attention_rows import attention_rows
from monograph.kernels.embed_rows import embed_rows
from monograph.kernels.gate_up_rows import gate_up_rows
from monograph.kernels.last_row import last_row
from monograph.kernels.linear_add_rows import linear_add_rows
from monograph.kernels.linear_rows import linear_rows
from monograph.kernels.norm_rows import norm_rows
from monograph.kernels.qkv_rows import qkv_rows
from tests.kernels.compile_decode import CUOBJDUMP, SHAPES, compile_launch

CHUNK, MAX_SEQ_LEN, LOGITS_ROWS = 512, 131072, 64


def launch_all(dtype: torch.dtype, shape: tuple[int, ...], pdl: bool) -> None:
    hidden, inter, num_q_heads, num_kv_heads, head_dim, vocab, biases = shape

    def new(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="cuda")

    def bias(size: int) -> torch.Tensor | None:
        return new(size) if biases else None

    position, prefill_end, halted, first_row, gate = (new(1, dtype=torch.int32) for _ in range(5))
    at = position, prefill_end, halted
    x, x_last = new(CHUNK, hidden, dtype=torch.float32), new(hidden, dtype=torch.float32)
    a, q, h = new(CHUNK, hidden), new(CHUNK, num_q_heads, head_dim), new(CHUNK, inter)
    cache = new(num_kv_heads, MAX_SEQ_LEN, head_dim)
    rope_table = new(MAX_SEQ_LEN, head_dim, dtype=torch.float32)
    heads = (num_q_heads + 2 * num_kv_heads) * head_dim
    embed_rows(new(MAX_SEQ_LEN, dtype=torch.int32), *at, new(vocab, hidden), x, pdl=pdl)
    norm_rows(x, new(hidden), *at, a, eps=1e-5, pdl=pdl)
    qkv_rows(a, new(heads, hidden), bias(heads), rope_table, *at, q, cache, cache, pdl=pdl)
    attention_rows(q, cache, cache, *at, q, scale=head_dim**-0.5, pdl=pdl)
    linear_add_rows(q.view(CHUNK, -1), new(hidden, num_q_heads * head_dim), bias(hidden), *at, x, pdl=pdl)
    gate_up_rows(a, new(2 * inter, hidden), bias(2 * inter), *at, h, pdl=pdl)
    linear_rows(a, new(vocab, hidden), *at, first_row, new(LOGITS_ROWS, vocab, dtype=torch.float32), pdl=pdl)
    last_row(x, *at, x_last, gate, pdl=pdl)


def report(kernel: JITFunction, compiled: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ptx = compiled.asm["ptx"]
    wait, store = ptx.find("griddepcontrol.wait"), ptx.find("st.global")
    return {
        "kernel": kernel.fn.__name__,
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "stack": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared": compiled.metadata.shared,
        "waits_before_it_stores": 0 <= wait < store,
        "mma": re.findall(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", ptx)[:1],
        "tf32": "tf32" in ptx,
    }


def main(capability: int, dtype: str, shape: str) -> None:
    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        options = {key: value for key, value in keywords.items() if key not in names}
        arguments = dict(zip(names, args, strict=False)) | {key: keywords[key] for key in names if key in keywords}
        compiled = compile_launch(kernel, capability, arguments, options)
        print(json.dumps(report(kernel, compiled)), flush=True)

    JITFunction.run = run
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    with FakeTensorMode():
        launch_all(getattr(torch, dtype), SHAPES[shape], pdl=capability >= 90)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
