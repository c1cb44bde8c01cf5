"""The tensors of a GGUF file, under Hugging Face's names and in Hugging Face's row order.

The converter to GGUF stores the rows of q and k (weights and biases) of each head in the order of the original Llama
release, where the two numbers that RoPE rotates together are neighbours: row `2 j + p` of a head there is row
`p * head_dim / 2 + j` here. Rows of k are grouped by KV heads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
import torch

from monograph.errors import CheckpointError
from monograph.model.config import ModelConfig
from monograph.model.gguf_config import config_from_gguf
from monograph.model.gguf_dequantise import dequantise, dtype_of, is_float, is_supported
from monograph.model.gguf_file import GGUFFile
from monograph.model.gguf_header import GGUFTensor

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(rf"blk\.(\d+)\.({'|'.join(_LAYER_NAMES)})\.(weight|bias)")
# Elements dequantised at a time: 0.5 MiB of float32, the fastest of 2^14 to 2^20 on SmolLM2 (0.58 s for the whole
# model, one thread; 0.88 s at either end).
_SLAB_ELEMENTS = 1 << 17


class GGUFSource:
    """A GGUF model of architecture llama as a checkpoint (see `checkpoint.Source`).

    Tensors of the file that Llama does not have keep their GGUF names, so that a check for completeness names them.
    `rope_freqs.weight` is not among them: it is part of the configuration.

    Args:
        file: The path of the file, or the open file (closed by `close`).

    Raises:
        CheckpointError: The file is damaged, or holds a type that the gguf library does not dequantise.
        ConfigError: Another architecture, or settings that are not supported.
    """

    config: ModelConfig

    def __init__(self, file: str | os.PathLike[str] | GGUFFile) -> None:
        self._file = file if isinstance(file, GGUFFile) else GGUFFile(file)
        self._pool: ThreadPoolExecutor | None = None
        try:
            self.config = config_from_gguf(self._file)
            self._tensors = {hf_name(t.name): t for t in self._file.tensors.values() if t.name != "rope_freqs.weight"}
            for name, tensor in self._tensors.items():
                if not is_supported(tensor.type):
                    raise self._error(f"tensor {tensor.name} ({name}) is of type {tensor.type.name}, not supported")
        except BaseException:
            self.close()
            raise

    def names(self) -> set[str]:
        """Return the name of every tensor in the checkpoint."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its data."""
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `read` would give: the file's for plain floats, float32 for quantised blocks."""
        return dtype_of(self._tensor(name).type)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, contiguous and on the CPU. Raises CheckpointError if its data cannot be read."""
        out = torch.empty(self.shape(name), dtype=self.dtype(name))
        self._run(self._tasks(name, 0, out))
        return out

    def read_rows(self, name: str, first: int, out: torch.Tensor) -> None:
        """Read rows of a tensor into memory that is there already, on the thread that asks; see `checkpoint.Source`."""
        for task in self._tasks(name, first, out):
            task()

    def row_unit(self, name: str) -> int:
        """Return how many rows can only be read together: those of a head where the file has them in another order."""
        tensor, num_heads = self._tensor(name), self._num_permuted_heads(name)
        if num_heads == 0:
            return 1
        if tensor.shape[0] % (2 * num_heads):
            raise self._error(f"tensor {tensor.name}: {tensor.shape[0]} rows do not divide into {num_heads} heads")
        return tensor.shape[0] // num_heads

    def _tasks(self, name: str, first: int, out: torch.Tensor) -> list[Callable[[], None]]:
        """What fills `out` with the rows from `first` on, cut into calls that write to disjoint places."""
        tensor, unit = self._tensor(name), self.row_unit(name)
        assert out.dtype == self.dtype(name) and out.is_contiguous(), (name, out.dtype, out.stride())
        assert out.shape[1:] == tensor.shape[1:] and 0 <= first <= tensor.shape[0] - len(out), (name, first, out.shape)
        assert first % unit == len(out) % unit == 0, (name, first, len(out), unit)
        if is_float(tensor.type) and unit == 1:
            start = tensor.nbytes * first // tensor.shape[0]
            return [partial(self._file.read_into, tensor, start, out.view(-1).view(torch.uint8).numpy())]
        return [
            partial(self._read_slab, tensor, first + rows.start, unit, out[rows]) for rows in _slabs(out.shape, unit)
        ]

    def _read_slab(self, tensor: GGUFTensor, first: int, unit: int, out: torch.Tensor) -> None:
        """Read some rows; `unit` is the number of rows of a permuted head, or 1."""
        num_rows = tensor.shape[0]
        raw = np.empty(tensor.nbytes * len(out) // num_rows, dtype=np.uint8)
        self._file.read_into(tensor, tensor.nbytes * first // num_rows, raw)
        values = dequantise(raw, tensor.type)
        if unit == 1:
            out.view(-1).copy_(values)
            return
        values = values.view(-1, unit // 2, 2, out[0].numel()).transpose(1, 2)  # [heads, 2, unit / 2, row]
        out.view(values.shape).copy_(values)

    def _run(self, tasks: list[Callable[[], None]]) -> None:
        """Run tasks that write to disjoint places; numpy leaves the interpreter lock while it works on a slab."""
        num_threads = min(torch.get_num_threads(), 16)
        if num_threads == 1 or len(tasks) == 1:
            for task in tasks:
                task()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="gguf")
        for future in [self._pool.submit(task) for task in tasks]:
            future.result()

    def _num_permuted_heads(self, name: str) -> int:
        if re.search(r"\.q_proj\.", name):
            return self.config.num_q_heads
        if re.search(r"\.k_proj\.", name):
            return self.config.num_kv_heads
        return 0

    def _tensor(self, name: str) -> GGUFTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise self._error(f"holds no tensor {name}") from None

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path}: {text}")

    @property
    def is_quantised(self) -> bool:
        """Whether any tensor is stored as quantised blocks, so that no dtype of the weights is the natural one."""
        return not all(is_float(tensor.type) for tensor in self._tensors.values())

    def close(self) -> None:
        """Release the file. Calling it twice does no harm."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def hf_name(name: str) -> str:
    """Return Hugging Face's name of a tensor of Llama; any other name unchanged."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return _TOP_NAMES.get(name, name)
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _slabs(shape: tuple[int, ...], unit: int) -> Iterator[slice]:
    """Cut rows of a tensor into slabs of whole units; vectors stay whole."""
    num_rows = shape[0]
    if len(shape) == 1:
        yield slice(0, num_rows)
        return
    row_elements = int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, _SLAB_ELEMENTS // (row_elements * unit)) * unit
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
