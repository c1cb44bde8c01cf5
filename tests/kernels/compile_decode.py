"""Compiles the decode kernels ahead of time, as their wrappers would launch them, and reports what came out.

Run as a script with jobs like 90:bfloat16:llama-3.2-1b or, for some launches alone, 80:float16:odd:qkv,head; no GPU is
needed, and TRITON_INTERPRET must not be set. The wrappers are called with tensors that have shape and type but no
memory; each launch is caught and compiled instead. Prints one JSON object a launch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

from monograph.kernels.attention import attention
from monograph.kernels.embed import embed
from monograph.kernels.gate_up import gate_up
from monograph.kernels.head import head
from monograph.kernels.linear_add import linear_add
from monograph.kernels.qkv import qkv
from monograph.kernels.sample import sample
from monograph.kernels.tile import BINS, BUFFERS, LIST
from monograph.model.layout import DRAW_PROGRAMS

# hidden_size, intermediate_size, num_q_heads, num_kv_heads, head_dim, vocab_size, biases
SHAPES = {
    "smollm2-135m": (576, 1536, 9, 3, 64, 49152, False),
    "llama-3.2-1b": (2048, 8192, 32, 8, 64, 128256, False),
    "llama-3.1-8b": (4096, 14336, 32, 8, 128, 128256, False),
    "mqa": (1088, 2048, 17, 1, 64, 32000, False),  # one KV head for more query heads than a tile of a dot has rows
    "odd": (200, 333, 6, 2, 80, 1000, True),
}
LAUNCHES = ("embed", "qkv", "attention", "o", "gate_up", "down", "head", "sample")
MAX_SEQ_LEN, NUM_SPLITS, NUM_PROGRAMS = 131072, 33, 528
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def launches(dtype: torch.dtype, shape: tuple[int, ...], pdl: bool) -> dict[str, Callable[[], None]]:
    hidden, inter, num_q_heads, num_kv_heads, head_dim, vocab, biases = shape

    def new(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device="meta")

    def fp32(*size: int) -> torch.Tensor:
        return new(*size, dtype=torch.float32)

    def int32(*size: int) -> torch.Tensor:
        return new(*size, dtype=torch.int32)

    def bias(size: int) -> torch.Tensor | None:
        return new(size) if biases else None

    one = int32(1)
    cache = new(num_kv_heads, MAX_SEQ_LEN, head_dim)
    q, features = fp32(num_q_heads, head_dim), (num_q_heads + 2 * num_kv_heads) * head_dim
    qkv_weights = new(features, hidden), bias(features)
    live = fp32(MAX_SEQ_LEN, head_dim), one, one
    partials = fp32(NUM_SPLITS, num_q_heads, head_dim), fp32(NUM_SPLITS, num_q_heads), int32(num_kv_heads)
    counts, bests = (int32(vocab), int32(vocab)), (fp32(NUM_PROGRAMS), int32(NUM_PROGRAMS))
    x, norm, tokens = fp32(hidden), new(hidden), int32(MAX_SEQ_LEN)
    knobs = fp32(1), one, fp32(1), fp32(1), new(1, dtype=torch.int64)
    draw_slots = int32(2), *(new(*size, dtype=torch.int64) for size in ((BUFFERS, BINS), (LIST,), (DRAW_PROGRAMS,)))
    eps: dict[str, Any] = {"eps": 1e-5, "pdl": pdl}
    run_head: Callable[..., None] = head  # so that lists of arguments need no lengths
    run_sample: Callable[..., None] = sample
    o, down = new(hidden, num_q_heads * head_dim), new(hidden, inter)
    return {
        "embed": lambda: embed(tokens, one, one, new(vocab, hidden), x, pdl=pdl),
        "qkv": lambda: qkv(x, norm, *qkv_weights, *live, q, cache, cache, **eps),
        "attention": lambda: attention(q, cache, cache, one, one, *partials, q, scale=0.1, pdl=pdl),
        "o": lambda: linear_add(q, o, bias(hidden), one, x, pdl=pdl),
        "gate_up": lambda: gate_up(x, norm, new(2 * inter, hidden), bias(2 * inter), one, fp32(inter), **eps),
        "down": lambda: linear_add(fp32(inter), down, bias(hidden), one, x, pdl=pdl),
        "head": lambda: run_head(
            x,
            norm,
            new(vocab, hidden),
            one,
            *[fp32(1)] * 3,
            fp32(vocab),
            *counts,
            one,
            one,
            *[fp32(vocab)] * 2,
            *bests,
            **eps,
        ),
        "sample": lambda: run_sample(
            fp32(vocab), *bests, *knobs, int32(8), *[one] * 3, tokens, one, one, *counts, one, tokens, int32(2),
            *draw_slots, chunk=512, pdl=pdl,
        ),
    }  # fmt: skip


def compile_launch(kernel: JITFunction, capability: int, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """Compiles for the specialisation that the launch would choose: pointers and sizes that 16 divides, sizes of 1."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def report(compiled: Any) -> dict[str, Any]:
    """What the tests ask of a compiled kernel.

    Returns:
        registers, stack (bytes; 0 without spills), shared (bytes); waits: how often the program can wait; stores_early:
        whether anything is stored before the last wait; loads_early: tensors requested between the way out of a halted
        launch and the wait; weight_loads and wide_weight_loads: instructions, and those of 128 bits or more.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = compiled.asm["ttgir"].splitlines()  # in the order of the source
    waits = [i for i, line in enumerate(lines) if re.search("grid_dependency_wait|griddepcontrol.wait", line)]
    wait = waits[1] if len(waits) > 1 else 0
    # A second way through, from where the first one ends: what is rehearsed there stores nothing, by its masks.
    other_way = (
        range(
            waits[-1] - next(i for i, line in enumerate(reversed(lines[: waits[-1]])) if "} else {" in line), waits[-1]
        )
        if len(waits) > 2
        else ()
    )
    way_out = next((i for i, line in enumerate(lines) if "tt.return" in line), 0)
    stores = [i for i, line in enumerate(lines) if re.search(r"tt\.(store|atomic)|st\.\w+\.sys", line)]
    loads = [i for i, line in enumerate(lines) if re.search("tt.load|async_copy_global", line) and "tensor<" in line]
    weights = re.findall(r"ld\.global\S*evict_first\S*", compiled.asm["ptx"])
    wide = r"\.(v4\.b32|v2\.b64|v8\.b32|v4\.b64)$"
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "stack": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared": compiled.metadata.shared,
        "waits": len(waits),
        "stores_early": (bool(stores) and stores[0] < wait) or any(i in other_way for i in stores),
        "loads_early": sum(way_out < i < wait for i in loads),
        "weight_loads": len(weights),
        "wide_weight_loads": sum(bool(re.search(wide, load)) for load in weights),
        "wide_loads": len(re.findall(r"ld\.global\S*" + wide[:-1] + r"\b|cp\.async\.cg", compiled.asm["ptx"])),
        "mma": "mma" in compiled.asm["ptx"],
        "tf32": "tf32" in compiled.asm["ptx"],
    }


def main(jobs: list[str]) -> None:
    for job in jobs:
        capability, dtype, shape, *names = job.split(":")
        made: list[Any] = []

        def run(
            kernel: JITFunction,
            *args: Any,
            grid: Any,
            warmup: bool,
            capability: str = capability,
            made: list[Any] = made,
            **keywords: Any,
        ) -> None:
            parameters = [parameter.name for parameter in kernel.params]
            options = {key: value for key, value in keywords.items() if key not in parameters}
            given = {key: value for key, value in keywords.items() if key in parameters}
            arguments = dict(zip(parameters, args, strict=False)) | given
            made.append(compile_launch(kernel, int(capability), arguments, options))

        JITFunction.run = run
        chosen = launches(getattr(torch, dtype), SHAPES[shape], pdl=int(capability) >= 90)
        for name in names[0].split(",") if names else LAUNCHES:
            chosen[name]()
            print(json.dumps({"job": job, "launch": name} | report(made.pop())), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
