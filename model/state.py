"""The host's hand on the step state: what an answer needs set before the first launch, and reading it back.

Everything the launches read per token lives in arena slots and is advanced there by the last launch of a pass. The host
writes it once per answer: the knobs in one copy, from a mirror of their slots.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch

from monograph.arena import Arena, HostMemory
from monograph.model.layout import FIRST_KNOB, LAST_KNOB
from monograph.model.sampling import Sampling

USE_LOGIT_BIAS = 1
USE_PENALTIES = 2
_SCALARS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class Halted(enum.IntEnum):
    """Values of the ``halted`` slot; while it is not RUNNING a launch writes nothing."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    NOT_FINITE = 4


class StepState:
    """Writes and reads the step state of one engine. Nothing may be in flight while it writes.

    Args:
        arena: Holds the state slots.
        host: Holds ``cancel`` and the outbox through which tokens reach the host.
    """

    def __init__(self, arena: Arena, host: HostMemory) -> None:
        self._arena, self._host = arena, host
        self._outbox_tokens = host.numbers("outbox_tokens")
        # Position and halted are published as one word of 64 bits, and read as one: never the one without the other.
        self._outbox_status = host.numbers("outbox_status").cast("B").cast("q")
        self._cancel = host.numbers("cancel")
        self._region = arena.region(FIRST_KNOB, LAST_KNOB)
        self._mirror = torch.empty_like(self._region, device="cpu", pin_memory=self._region.is_cuda)
        self._mirror.copy_(self._region)  # the guards between the slots too
        start = arena.layout[FIRST_KNOB].offset
        self._knobs = {
            slot.name: self._mirror[slot.offset - start : slot.end - start].view(slot.dtype)
            for slot in arena.layout.entries
            if start <= slot.offset < start + len(self._region)
        }
        self._set("decode_gate", 1)
        self._set("halted", Halted.STOP)
        self._push()

    def begin(
        self,
        ids: Sequence[int],
        start: int,
        position_limit: int,
        stop_ids: Sequence[int],
        sampling: Sampling,
        answered: int = 0,
    ) -> None:
        """Set up one answer: the next prefill launch takes the prompt from ``start``.

        Args:
            ids: The whole prompt.
            start: Rows of the KV cache that already hold the keys and values of ``ids[:start]``.
            position_limit: The answer ends when prompt and answer are this many tokens.
            stop_ids: Token ids that end the answer, at most MAX_STOP_IDS.
            sampling: Effective settings, nothing left open.
            answered: How many of the last ``ids`` are an answer's beginning rather than its prompt.
        """
        self._cancel[0] = 0
        self._outbox_status[0] = 0
        self._set("position_limit", position_limit)
        self._knobs["stop_ids"].fill_(-1)
        self._knobs["stop_ids"][: len(stop_ids)] = torch.tensor(list(stop_ids), dtype=torch.int32)
        self._set_sampling(sampling)
        if sampling.uses_penalties:
            self._set_counts(ids, answered)
        self.begin_rows(ids, start)

    def begin_rows(self, ids: Sequence[int], start: int) -> None:
        """Write the token history, have rows ``start`` up to ``len(ids)`` prefilled, and let launches run."""
        self._arena.view("tokens")[start : len(ids)].copy_(torch.tensor(ids[start:], dtype=torch.int32))
        self._set("position", start)
        self._set("prefill_end", len(ids))
        self._set("halted", Halted.RUNNING)
        self._push()

    def set_position(self, position: int) -> None:
        """Move to another row; for teacher forcing, where no launch advances the position."""
        self._arena.view("position").fill_(position)

    def set_first_row(self, row: int) -> None:
        """Choose the first chunk row whose logits the next ``prefill_logits`` launch makes."""
        self._arena.view("first_row").fill_(row)

    def halt(self) -> None:
        """Make every further launch a no-op."""
        self._arena.view("halted").fill_(Halted.STOP)

    def cancel(self) -> None:
        """Ask the running answer to end; the last launch of a pass takes notice."""
        self._cancel[0] = 1

    def status(self) -> tuple[int, Halted]:
        """The position of the newest token in the outbox (0 before the first), and whether the answer has ended."""
        word = self._outbox_status[0]
        return word & 0xFFFFFFFF, Halted(word >> 32)

    def token(self, position: int) -> int:
        """The token at ``position``, as the outbox has it."""
        return self._outbox_tokens[position]

    def _set_sampling(self, sampling: Sampling) -> None:
        for name in _SCALARS:
            self._set(name, getattr(sampling, name))
        seed = sampling.seed or 0
        self._set("seed", seed - 2**64 if seed >= 2**63 else seed)  # the same 64 bits, as int64
        if sampling.logit_bias:
            bias = self._arena.view("logit_bias")
            ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64)
            values = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
            bias.zero_()
            bias[ids.to(bias.device)] = values.to(bias.device)
        used = (USE_LOGIT_BIAS if sampling.logit_bias else 0) | (USE_PENALTIES if sampling.uses_penalties else 0)
        self._set("processors", used)

    def _set_counts(self, ids: Sequence[int], answered: int) -> None:
        """Set the token counts that penalties read: of prompt and answer, and of what there is of the answer."""
        for name, counted in (("context_counts", ids), ("output_counts", ids[len(ids) - answered :])):
            counts = self._arena.view(name)
            seen = torch.bincount(torch.tensor(counted, dtype=torch.int64), minlength=counts.shape[0])
            counts.copy_(seen.to(torch.int32))

    def _set(self, name: str, value: float) -> None:
        self._knobs[name].fill_(value)

    def _push(self) -> None:
        self._region.copy_(self._mirror, non_blocking=True)
