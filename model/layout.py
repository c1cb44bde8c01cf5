"""Every tensor of a model, planned from its configuration before anything is allocated.

Nothing here depends on the live length of a sequence: sizes follow ``Capacity`` alone, so the addresses that come out
are right for the whole life of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from monograph.arena import Layout, SlotRequest, Span, plan
from monograph.errors import ConfigError
from monograph.kernels.tile import BINS, BUFFERS, LIST
from monograph.model.config import ModelConfig

# One prefill launch takes this many prompt tokens. A constant, so that nothing about the bits of a prompt's KV rows
# depends on the arena's size.
CHUNK_ROWS = 512
# Rows of teacher-forced logits made in one piece: 64 rows of a 128k vocabulary are 33 MB.
LOGITS_ROWS = 64
# Attention programs over all KV heads at full split: two for each of the 132 SMs of an H200.
ATTENTION_PROGRAMS = 264
# Programs of the head, each with a row in best_score and best_id; four for each SM of an H200.
HEAD_PROGRAMS = 528
# The most programs that draw a token together, each with a row in draw_masses.
DRAW_PROGRAMS = 512
MAX_STOP_IDS = 64
FIRST_KNOB, LAST_KNOB = "position", "processors"


@dataclass(frozen=True)
class Capacity:
    """The sizes that a layout is planned for.

    Attributes:
        max_seq_len: Tokens of prompt and answer together.
        dtype: Of weights and KV cache.
        chunk_rows: Prompt tokens of one prefill launch.
        logits_rows: Rows of teacher-forced logits in one piece.
        num_splits: The most pieces that the KV range of one head is cut into.
        head_programs: Programs of the output head.
    """

    max_seq_len: int
    dtype: torch.dtype
    chunk_rows: int
    logits_rows: int
    num_splits: int
    head_programs: int

    @classmethod
    def for_model(cls, config: ModelConfig, max_seq_len: int, dtype: torch.dtype) -> Capacity:
        """The capacities of ``config``; all but ``max_seq_len`` and ``dtype`` are constants of the model."""
        check_max_seq_len(config, max_seq_len)
        return cls(
            max_seq_len=max_seq_len,
            dtype=dtype,
            chunk_rows=CHUNK_ROWS,
            logits_rows=LOGITS_ROWS,
            num_splits=max(1, ATTENTION_PROGRAMS // config.num_kv_heads),
            head_programs=min(HEAD_PROGRAMS, config.vocab_size),
        )


def check_max_seq_len(config: ModelConfig, max_seq_len: int) -> None:
    """Refuse a capacity that the model cannot use.

    Raises:
        ConfigError: Not an integer from 2 to the model's max_position_embeddings, or to its sliding_window if that is
            shorter.
    """
    longest = config.longest_seq_len
    if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or not 2 <= max_seq_len <= longest:
        reason = "the model's max_position_embeddings"
        if longest < config.max_position_embeddings:
            reason = (
                f"the model's sliding_window, which is supported as long as it hides nothing, though its "
                f"max_position_embeddings is {config.max_position_embeddings:,}; pass max_seq_len={longest} or less"
            )
        raise ConfigError(f"max_seq_len: expected an integer from 2 to {longest:,} ({reason}), got {max_seq_len!r}")


def plan_layout(config: ModelConfig, capacity: Capacity) -> Layout:
    """Plan the arena of a model.

    Args:
        config: The model.
        capacity: What to plan for.

    Returns:
        The layout: weights, then state (KV cache, tokens, position, knobs), then scratch of both passes.
    """
    return plan([*_weights(config, capacity), *_state(config, capacity), *_scratch(config, capacity)])


def plan_host_layout(capacity: Capacity) -> Layout:
    """Plan the host memory through which tokens come out and a cancel goes in."""
    return plan(
        [
            SlotRequest("outbox_tokens", (capacity.max_seq_len,), torch.int32, "state"),
            SlotRequest("outbox_status", (2,), torch.int32, "state"),
            SlotRequest("cancel", (1,), torch.int32, "state"),
        ]
    )


def _weights(config: ModelConfig, capacity: Capacity) -> Iterator[SlotRequest]:
    hidden, inter = config.hidden_size, config.intermediate_size
    q_rows = config.num_q_heads * config.head_dim
    qkv_rows = q_rows + 2 * config.num_kv_heads * config.head_dim

    def weight(name: str, *shape: int, dtype: torch.dtype = capacity.dtype) -> SlotRequest:
        return SlotRequest(name, shape, dtype, "weight")

    yield weight("embed", config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        yield weight(f"{layer}.attn_norm", hidden)
        yield weight(f"{layer}.qkv", qkv_rows, hidden)
        if config.attention_bias:
            yield weight(f"{layer}.qkv_bias", qkv_rows)
        yield weight(f"{layer}.o", hidden, q_rows)
        if config.output_bias:
            yield weight(f"{layer}.o_bias", hidden)
        yield weight(f"{layer}.mlp_norm", hidden)
        yield weight(f"{layer}.gate_up", 2 * inter, hidden)
        if config.mlp_bias:
            yield weight(f"{layer}.gate_up_bias", 2 * inter)
        yield weight(f"{layer}.down", hidden, inter)
        if config.mlp_bias:
            yield weight(f"{layer}.down_bias", hidden)
    yield weight("final_norm", hidden)
    if not config.tie_word_embeddings:
        yield weight("lm_head", config.vocab_size, hidden)
    yield weight("rope_table", capacity.max_seq_len, config.head_dim, dtype=torch.float32)
    if config.layers_without_rope:  # a table that turns by nothing, so that all layers run one kernel
        yield weight("no_rope_table", capacity.max_seq_len, config.head_dim, dtype=torch.float32)


def _state(config: ModelConfig, capacity: Capacity) -> Iterator[SlotRequest]:
    def state(name: str, *shape: int, dtype: torch.dtype = torch.int32) -> SlotRequest:
        return SlotRequest(name, shape, dtype, "state")

    yield state("tokens", capacity.max_seq_len)
    # The knobs: neighbours, so that the host writes them all in one copy.
    for name in (FIRST_KNOB, "prefill_end", "position_limit", "halted", "prefill_gate", "decode_gate", "first_row"):
        yield state(name, 1)
    yield state("stop_ids", MAX_STOP_IDS)
    yield state("seed", 1, dtype=torch.int64)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        yield state(name, 1, dtype=torch.float32)
    yield state("top_k", 1)
    yield state(LAST_KNOB, 1)
    yield state("arrivals", config.num_kv_heads)
    yield state("draw_arrivals", 2)
    yield state("draw_histogram", BUFFERS, BINS, dtype=torch.int64)
    yield state("logit_bias", config.vocab_size, dtype=torch.float32)
    yield state("context_counts", config.vocab_size)
    yield state("output_counts", config.vocab_size)
    cache = (config.num_kv_heads, capacity.max_seq_len, config.head_dim)
    for i in range(config.num_layers):
        yield state(f"layers.{i}.k_cache", *cache, dtype=capacity.dtype)
        yield state(f"layers.{i}.v_cache", *cache, dtype=capacity.dtype)


def _scratch(config: ModelConfig, capacity: Capacity) -> Iterator[SlotRequest]:
    hidden, inter, heads, dim = config.hidden_size, config.intermediate_size, config.num_q_heads, config.head_dim
    fp32, chunk = torch.float32, capacity.chunk_rows

    def decode(name: str, *shape: int, dtype: torch.dtype = fp32) -> SlotRequest:
        return SlotRequest(name, shape, dtype, "scratch")

    # Decode launches overlap, so nothing of theirs shares bytes.
    yield decode("x", hidden)
    yield decode("q", heads, dim)
    yield decode("partial_out", capacity.num_splits, heads, dim)
    yield decode("partial_lse", capacity.num_splits, heads)
    yield decode("attention_out", heads, dim)
    yield decode("h", inter)
    yield decode("logits", config.vocab_size)
    yield decode("scores", config.vocab_size)
    yield decode("best_score", capacity.head_programs)
    yield decode("best_id", capacity.head_programs, dtype=torch.int32)
    yield decode("draw_list", LIST, dtype=torch.int64)
    yield decode("draw_masses", DRAW_PROGRAMS, dtype=torch.int64)

    # Spans count the launches of a layer: norm 1, qkv 2, attention 3, output 4, norm 5, gate-up 6, down 7. What lives
    # inside a layer may share bytes with what lives elsewhere in it; the layers follow each other over the same bytes.
    def prefill(name: str, first: int, last: int, *shape: int, dtype: torch.dtype = capacity.dtype) -> SlotRequest:
        return SlotRequest(name, shape, dtype, "scratch", Span("prefill", first, last))

    yield prefill("x_rows", 0, 9, chunk, hidden, dtype=fp32)
    yield prefill("norm_rows", 1, 2, chunk, hidden)
    yield prefill("q_rows", 2, 3, chunk, heads, dim)
    yield prefill("attention_rows", 3, 4, chunk, heads, dim)
    yield prefill("mlp_norm_rows", 5, 6, chunk, hidden)
    yield prefill("h_rows", 6, 7, chunk, inter)
    yield prefill("final_norm_rows", 8, 9, chunk, hidden)
    yield prefill("logits_rows", 9, 9, capacity.logits_rows, config.vocab_size, dtype=fp32)
