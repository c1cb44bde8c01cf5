"""The model as two ordered lists of launches over arena slots: one decode step, one prefill chunk.

Each launch names a kernel and its PyTorch reference, which take the same arguments and have the same effect. Nothing in
a list depends on the live length: kernels read it, and every other piece of step state, from the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from monograph.arena import Arena, HostMemory
from monograph.kernels.attention import attention, attention_torch
from monograph.kernels.attention_rows import attention_rows, attention_rows_torch
from monograph.kernels.embed import embed, embed_torch
from monograph.kernels.embed_rows import embed_rows, embed_rows_torch
from monograph.kernels.gate_up import gate_up, gate_up_torch
from monograph.kernels.gate_up_rows import gate_up_rows, gate_up_rows_torch
from monograph.kernels.head import head, head_torch
from monograph.kernels.last_row import last_row, last_row_torch
from monograph.kernels.linear_add import linear_add, linear_add_torch
from monograph.kernels.linear_add_rows import linear_add_rows, linear_add_rows_torch
from monograph.kernels.linear_rows import linear_rows, linear_rows_torch
from monograph.kernels.norm_rows import norm_rows, norm_rows_torch
from monograph.kernels.qkv import qkv, qkv_torch
from monograph.kernels.qkv_rows import qkv_rows, qkv_rows_torch
from monograph.kernels.sample import sample, sample_torch
from monograph.model.config import ModelConfig
from monograph.model.layout import Capacity

Kernel = Callable[..., None]
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
FILTERS = ("temperature", "top_k", "top_p", "min_p", "seed")


@dataclass(frozen=True)
class Launch:
    """One kernel over fixed slots.

    Attributes:
        name: Which launch of the pass this is, as in ``layers.3.qkv``.
        kernel: The Triton wrapper.
        reference: The same contract in plain PyTorch.
        args: Arena views (or None for a bias the model has not), in the kernel's order.
        constants: Keyword arguments that the configuration fixes.
        tile: Block sizes, warps and trigger that the kernel takes in the place of its own; empty for its own.
    """

    name: str
    kernel: Kernel
    reference: Kernel
    args: tuple[torch.Tensor | None, ...]
    constants: dict[str, Any] = field(default_factory=dict)
    tile: Mapping[str, int] = field(default_factory=dict)

    @property
    def use(self) -> str:
        """What the kernel is used for, the same in all layers: "qkv" of ``layers.3.qkv``."""
        return self.name.rpartition(".")[2]

    def run(self, pdl: bool = False) -> None:
        """Run once: the kernel on a GPU, the reference elsewhere.

        Args:
            pdl: On a GPU, let the launch overlap the one before it (programmatic dependent launch).
        """
        if self.args[0] is not None and self.args[0].is_cuda:
            chosen = {"tile": dict(self.tile)} if self.tile else {}
            self.kernel(*self.args, **self.constants, pdl=pdl, **chosen)
        else:
            self.reference(*self.args, **self.constants)


@dataclass(frozen=True)
class Program:
    """All launches of a model.

    Attributes:
        decode: One token: embedding, layers, head, choice of the next token.
        prefill: One chunk of a prompt; after the prompt's last chunk it chooses the first token too.
        prefill_logits: The head over ``logits_rows`` rows of the chunk that ``prefill_layers`` has just run.
    """

    decode: tuple[Launch, ...]
    prefill: tuple[Launch, ...]
    prefill_logits: tuple[Launch, ...]

    @property
    def decode_logits(self) -> tuple[Launch, ...]:
        """The decode step up to its logits, without the choice: for teacher forcing."""
        return self.decode[:-1]

    @property
    def prefill_layers(self) -> tuple[Launch, ...]:
        """The prefill chunk up to the last layer's residual stream: for teacher forcing."""
        return self.prefill[:-3]


def run(launches: Iterable[Launch], pdl: bool = False) -> None:
    """Run launches in order; with ``pdl``, all but the first may overlap the one before."""
    for i, launch in enumerate(launches):
        launch.run(pdl and i > 0)


def with_tiles(program: Program, tiles: Mapping[str, Mapping[str, int]]) -> Program:
    """The same program with other tiles for some of its decode kernels, wherever those are launched.

    Args:
        program: The launches.
        tiles: By use ("qkv", "down", "head"); a use that is not in it is left as it is.
    """
    kernels = {launch.kernel for launch in program.decode}

    def tiled(launches: Iterable[Launch]) -> tuple[Launch, ...]:
        return tuple(
            replace(launch, tile=tiles[launch.use]) if launch.kernel in kernels and launch.use in tiles else launch
            for launch in launches
        )

    return Program(tiled(program.decode), tiled(program.prefill), tiled(program.prefill_logits))


def build_program(config: ModelConfig, capacity: Capacity, arena: Arena, host: HostMemory) -> Program:
    """Bind the launches of a model to the slots of its arena.

    Args:
        config: The model.
        capacity: What the arena was planned for.
        arena: Planned by ``plan_layout(config, capacity)``.
        host: Host memory with ``outbox_tokens``, ``outbox_status`` and ``cancel``.

    Returns:
        The program. Nothing is run.
    """
    builder = _Builder(config, capacity, arena, host)
    return Program(
        decode=tuple(builder.decode()),
        prefill=tuple(builder.prefill()),
        prefill_logits=tuple(builder.prefill_logits()),
    )


class _Builder:
    def __init__(self, config: ModelConfig, capacity: Capacity, arena: Arena, host: HostMemory) -> None:
        self.config, self.capacity, self.arena, self.host = config, capacity, arena, host
        self.eps = {"eps": config.rms_norm_eps}
        self.scale = {"scale": config.scale}

    def slots(self, *names: str) -> tuple[torch.Tensor, ...]:
        return tuple(self.arena.view(name) for name in names)

    def layer(self, i: int, *names: str) -> tuple[torch.Tensor | None, ...]:
        """Slots of layer ``i``; a bias that the model has not is None."""
        full = (f"layers.{i}.{name}" for name in names)
        return tuple(self.arena.view(name) if name in self.arena else None for name in full)

    def rope_table(self, i: int) -> str:
        return "no_rope_table" if i in self.config.layers_without_rope else "rope_table"

    def decode(self) -> Iterator[Launch]:
        yield Launch("embed", embed, embed_torch, self.slots("tokens", "position", "halted", "embed", "x"))
        for i in range(self.config.num_layers):
            yield Launch(
                f"layers.{i}.qkv",
                qkv,
                qkv_torch,
                self.slots("x")
                + self.layer(i, "attn_norm", "qkv", "qkv_bias")
                + self.slots(self.rope_table(i), "position", "halted", "q")
                + self.layer(i, "k_cache", "v_cache"),
                self.eps,
            )
            yield Launch(
                f"layers.{i}.attention",
                attention,
                attention_torch,
                self.slots("q")
                + self.layer(i, "k_cache", "v_cache")
                + self.slots("position", "halted", "partial_out", "partial_lse", "arrivals", "attention_out"),
                self.scale,
            )
            yield self.linear_add(f"layers.{i}.o", "attention_out", i, "o")
            yield Launch(
                f"layers.{i}.gate_up",
                gate_up,
                gate_up_torch,
                self.slots("x") + self.layer(i, "mlp_norm", "gate_up", "gate_up_bias") + self.slots("halted", "h"),
                self.eps,
            )
            yield self.linear_add(f"layers.{i}.down", "h", i, "down")
        yield from self.head_and_sample(gate="decode_gate")

    def linear_add(self, name: str, source: str, i: int, weight: str) -> Launch:
        flat = self.arena.view(source).view(-1)
        args = (flat, *self.layer(i, weight, f"{weight}_bias"), *self.slots("halted", "x"))
        return Launch(name, linear_add, linear_add_torch, args)

    def head_and_sample(self, gate: str) -> Iterator[Launch]:
        head_weight = "embed" if self.config.tie_word_embeddings else "lm_head"
        yield Launch(
            "head",
            head,
            head_torch,
            self.slots("x", "final_norm", head_weight, "processors", *PENALTIES)
            + self.slots("logit_bias", "context_counts", "output_counts", gate, "halted")
            + self.slots("logits", "scores", "best_score", "best_id"),
            self.eps,
        )
        yield Launch(
            "sample",
            sample,
            sample_torch,
            (
                *self.slots("scores", "best_score", "best_id", *FILTERS, "stop_ids", "position_limit"),
                self.host.view("cancel"),
                *self.slots(gate, "tokens", "position", "prefill_end", "output_counts", "context_counts", "halted"),
                self.host.view("outbox_tokens"),
                self.host.view("outbox_status"),
                *self.slots("draw_arrivals", "draw_histogram", "draw_list", "draw_masses"),
            ),
            {"chunk": self.capacity.chunk_rows},
        )

    def prefill(self) -> Iterator[Launch]:
        live = self.slots("position", "prefill_end", "halted")
        yield Launch(
            "embed_rows", embed_rows, embed_rows_torch, self.slots("tokens") + live + self.slots("embed", "x_rows")
        )
        for i in range(self.config.num_layers):
            yield self.norm_rows(f"layers.{i}.attn_norm", f"layers.{i}.attn_norm", "norm_rows")
            yield Launch(
                f"layers.{i}.qkv",
                qkv_rows,
                qkv_rows_torch,
                self.slots("norm_rows")
                + self.layer(i, "qkv", "qkv_bias")
                + self.slots(self.rope_table(i))
                + live
                + self.slots("q_rows")
                + self.layer(i, "k_cache", "v_cache"),
            )
            yield Launch(
                f"layers.{i}.attention",
                attention_rows,
                attention_rows_torch,
                self.slots("q_rows") + self.layer(i, "k_cache", "v_cache") + live + self.slots("attention_rows"),
                self.scale,
            )
            yield self.linear_add_rows(f"layers.{i}.o", "attention_rows", i, "o")
            yield self.norm_rows(f"layers.{i}.mlp_norm", f"layers.{i}.mlp_norm", "mlp_norm_rows")
            yield Launch(
                f"layers.{i}.gate_up",
                gate_up_rows,
                gate_up_rows_torch,
                self.slots("mlp_norm_rows") + self.layer(i, "gate_up", "gate_up_bias") + live + self.slots("h_rows"),
            )
            yield self.linear_add_rows(f"layers.{i}.down", "h_rows", i, "down")
        yield Launch(
            "last_row", last_row, last_row_torch, self.slots("x_rows") + live + self.slots("x", "prefill_gate")
        )
        yield from self.head_and_sample(gate="prefill_gate")

    def norm_rows(self, name: str, weight: str, out: str) -> Launch:
        args = self.slots("x_rows", weight, "position", "prefill_end", "halted", out)
        return Launch(name, norm_rows, norm_rows_torch, args, self.eps)

    def linear_add_rows(self, name: str, source: str, i: int, weight: str) -> Launch:
        rows = self.arena.view(source).view(self.capacity.chunk_rows, -1)
        live = self.slots("position", "prefill_end", "halted")
        args = (rows, *self.layer(i, weight, f"{weight}_bias"), *live, *self.slots("x_rows"))
        return Launch(name, linear_add_rows, linear_add_rows_torch, args)

    def prefill_logits(self) -> Iterator[Launch]:
        live = self.slots("position", "prefill_end", "halted")
        head_weight = "embed" if self.config.tie_word_embeddings else "lm_head"
        yield self.norm_rows("final_norm", "final_norm", "final_norm_rows")
        yield Launch(
            "logits",
            linear_rows,
            linear_rows_torch,
            self.slots("final_norm_rows", head_weight) + live + self.slots("first_row", "logits_rows"),
        )
