"""From a checkpoint into the arena: every tensor straight into the rows that the kernels will read.

q, k and v of a layer share one slot, gate and up another; each is copied into its range of rows, so nothing is
concatenated and no second copy exists. Beside the arena, at most one tensor of the checkpoint is alive at any moment;
on the way to a GPU, a few pieces of one (`upload`).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch

from monograph.errors import CheckpointError
from monograph.model.checkpoint import (
    EMBED,
    FINAL_NORM,
    LM_HEAD,
    Source,
    check_complete,
    layer_name,
    projections,
)
from monograph.model.config import ModelConfig
from monograph.model.rope import rope_table
from monograph.model.upload import Progress, Transfer, narrows, upload

# Elements converted, compared or tabulated at a time: what a conversion needs beside slot and tensor.
_BLOCK_ELEMENTS = 1 << 20

# The slot of a layer that each projection's rows are in.
_SLOTS = {
    "self_attn.q_proj": "qkv",
    "self_attn.k_proj": "qkv",
    "self_attn.v_proj": "qkv",
    "self_attn.qkv_proj": "qkv",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate_up",
    "mlp.up_proj": "gate_up",
    "mlp.gate_up_proj": "gate_up",
    "mlp.down_proj": "down",
}


class Views(Protocol):
    """What this module asks of an arena: the tensor of a slot by name."""

    def view(self, name: str) -> torch.Tensor: ...


class Placement(NamedTuple):
    """Where a tensor of the checkpoint goes: rows first_row .. first_row + rows of a slot."""

    tensor: str
    slot: str
    first_row: int
    rows: int


def placements(config: ModelConfig) -> Iterator[Placement]:
    """Yield the place of every wanted tensor, in the order of the checkpoint."""
    hidden = config.hidden_size
    yield Placement(EMBED, "embed", 0, config.vocab_size)
    for layer in range(config.num_layers):
        slots = f"layers.{layer}."
        yield Placement(layer_name(layer, "input_layernorm"), f"{slots}attn_norm", 0, hidden)
        filled: dict[str, int] = {}
        for part, rows, _, bias in projections(config):
            slot = _SLOTS[part]
            first_row = filled.get(slot, 0)
            filled[slot] = first_row + rows
            yield Placement(layer_name(layer, part), slots + slot, first_row, rows)
            if bias:
                yield Placement(layer_name(layer, part, "bias"), f"{slots}{slot}_bias", first_row, rows)
        yield Placement(layer_name(layer, "post_attention_layernorm"), f"{slots}mlp_norm", 0, hidden)
    yield Placement(FINAL_NORM, "final_norm", 0, hidden)
    if not config.tie_word_embeddings:
        yield Placement(LM_HEAD, "lm_head", 0, config.vocab_size)


def load_weights(source: Source, config: ModelConfig, arena: Views, progress: Progress | None = None) -> None:
    """Fill every weight slot of an arena, the RoPE tables included.

    Args:
        source: The checkpoint; stays open.
        config: The model that the arena was planned for.
        arena: Gives the slots; the dtype of each decides what its tensors are converted to.
        progress: Called now and then with the bytes filled so far and in all.

    Raises:
        CheckpointError: The checkpoint is incomplete or does not fit the configuration (nothing has been written then),
            a finite weight does not fit the slot's dtype, or a head that should be tied differs from the embedding.
    """
    check_complete(source, config)
    if arena.view("embed").is_cuda:
        _load_to_gpu(source, config, arena, progress)
    else:
        _load_to_host(source, config, arena, progress)
        _fill_rope_tables(config, arena)


def _load_to_host(source: Source, config: ModelConfig, arena: Views, progress: Progress | None) -> None:
    names = source.names()
    total = sum(_rows(arena, place).nbytes for place in placements(config))
    done = 0
    for place in placements(config):
        stored = _stored_name(place, names)
        destination = _rows(arena, place)
        _copy(source.read(stored), destination, stored)
        done += destination.nbytes
        if progress is not None:
            progress(done, total)
    if config.tie_word_embeddings and {EMBED, LM_HEAD} <= names:
        _check_tied(source.read(LM_HEAD), arena.view("embed"))


def _load_to_gpu(source: Source, config: ModelConfig, arena: Views, progress: Progress | None) -> None:
    names = source.names()
    transfers = [Transfer(_stored_name(place, names), _rows(arena, place)) for place in placements(config)]
    with ThreadPoolExecutor(1, thread_name_prefix="rope") as side:  # 0.3 s of one core for 131,072 positions
        table = side.submit(_fill_rope_tables, config, arena)
        overflown = upload(source, transfers, progress)
        table.result()
    for name in overflown:
        stored = source.read(name)
        _check_range(stored, stored.to(arena.view("embed").dtype), name)
    is_stored_twice = config.tie_word_embeddings and {EMBED, LM_HEAD} <= names
    if is_stored_twice and upload(source, [Transfer(LM_HEAD, arena.view("embed"), compares=True)]):
        raise _not_tied()


def _stored_name(place: Placement, names: set[str]) -> str:
    """The name under which a checkpoint has a tensor: a tied embedding may be there as the head alone."""
    return LM_HEAD if place.tensor == EMBED and EMBED not in names else place.tensor


def _rows(arena: Views, place: Placement) -> torch.Tensor:
    return arena.view(place.slot)[place.first_row : place.first_row + place.rows]


def _copy(tensor: torch.Tensor, destination: torch.Tensor, name: str) -> None:
    if tensor.shape != destination.shape:
        raise CheckpointError(f"{name}: expected shape {list(destination.shape)}, got {list(tensor.shape)}")
    may_overflow = narrows(tensor.dtype, destination.dtype)
    for block in _blocks(tensor.shape):
        converted = tensor[block]
        if may_overflow:
            converted = converted.to(destination.dtype)
            _check_range(tensor[block], converted, name)
        destination[block].copy_(converted)


def _check_range(stored: torch.Tensor, converted: torch.Tensor, name: str) -> None:
    overflown = converted.isinf() & stored.isfinite()
    if overflown.any():
        worst, dtype = stored[overflown].abs().max().item(), converted.dtype
        raise CheckpointError(
            f"{name}: a weight of magnitude {worst:g} does not fit {str(dtype).removeprefix('torch.')} (largest value "
            f"{torch.finfo(dtype).max:g}); load the model in bfloat16 or float32"
        )


def _check_tied(head: torch.Tensor, embed: torch.Tensor) -> None:
    for block in _blocks(head.shape):
        if not torch.equal(head[block].to(embed.dtype), embed[block]):
            raise _not_tied()


def _not_tied() -> CheckpointError:
    return CheckpointError(
        f"{LM_HEAD}: expected the same values as {EMBED}, since tie_word_embeddings is true, got others; "
        "a model with a head of its own needs tie_word_embeddings false in config.json"
    )


def _fill_rope_tables(config: ModelConfig, arena: Views) -> None:
    if config.layers_without_rope:
        cosines, sines = arena.view("no_rope_table").chunk(2, dim=1)
        cosines.fill_(1.0)
        sines.fill_(0.0)
    table = arena.view("rope_table")
    max_seq_len = table.shape[0]
    for block in _blocks(table.shape):
        table[block].copy_(rope_table(config, min(block.stop, max_seq_len), first=block.start))


def _blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    rows = max(1, _BLOCK_ELEMENTS // max(1, torch.Size(shape[1:]).numel()))
    for first in range(0, shape[0], rows):
        yield slice(first, min(first + rows, shape[0]))
