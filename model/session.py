"""A conversation as a file: written with its KV rows, and gone on with as if it had never stopped."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from monograph.errors import CapacityError, CheckpointError, ConfigError, MonographError, PromptError
from monograph.model.chat import Chat, ChatState
from monograph.model.decoder import Decoder
from monograph.model.fingerprint import Fingerprint, differences
from monograph.model.sampling import Sampling
from monograph.model.session_file import Entry, SessionFile, whole, write
from monograph.model.transcript import Piece, Transcript
from monograph.model.turn import Cut

if TYPE_CHECKING:
    from monograph.model.engine import Engine

logger = logging.getLogger("monograph")


def session_path(path: str | Path) -> Path:
    """The file of a conversation.

    Raises:
        ConfigError: No file has such a name.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in str(path) or not str(path):
        raise ConfigError(f"path: expected the name of a file, got {path!r}")
    return Path(path)


def write_session(path: Path, state: ChatState, decoder: Decoder, model: Fingerprint, machine: Fingerprint) -> None:
    """Write a conversation. The decoder must be idle.

    The file holds the tokens whose keys and values the cache has ("tokens"), those rows of every layer, the tokens that
    no launch has read yet ("pending"; after an answer, its newest), and the counts that penalties go by, as pairs of
    token and count. The state of the random numbers is the seed: they are a function of it and the position.

    Args:
        path: The file.
        state: The conversation.
        decoder: Holds its rows, or those of what it shares with another conversation.
        model: Fingerprint of the model.
        machine: Fingerprint of everything else that bits depend on.

    Raises:
        PromptError: The messages are not JSON.
        OSError: It cannot be written.
    """
    ids, cut = state.ids, state.cut
    rows = decoder.cached_prefix(ids)
    session = {
        "model": model,
        "machine": machine,
        "messages": state.messages,
        "on_full": state.on_full,
        "pieces": [[piece.text, len(piece.ids)] for piece in state.transcript.pieces],
        "answer": None
        if cut is None
        else {
            "tokens": len(cut.answer_ids),
            "finish_reason": cut.finish_reason,
            "sampling": dataclasses.asdict(cut.sampling),
        },
    }
    entries = [whole(_int32(ids[:rows]), "tokens"), whole(_int32(ids[rows:]), "pending")]
    entries += [
        whole(_counts(ids), "context_counts"),
        whole(_counts([] if cut is None else cut.answer_ids), "output_counts"),
    ]
    if rows:
        entries += [_rows_entry(decoder, name, rows) for name in _cache_names(decoder)]
    try:
        json.dumps(state.messages)
    except (TypeError, ValueError) as error:
        raise PromptError(f"messages: what they hold cannot be saved: {error}") from error
    write(path, session, entries)


def read_session(path: Path, engine: Engine, decoder: Decoder, model: Fingerprint, machine: Fingerprint) -> Chat:
    """Read a conversation and put its rows into the cache. The decoder must be idle.

    Nothing is written before the whole file has been found right.

    Args:
        path: The file.
        engine: Whose chat it becomes.
        decoder: The engine's.
        model: Fingerprint of its model.
        machine: Fingerprint of everything else that bits depend on; another one costs a warning.

    Raises:
        CheckpointError: The file is damaged or of another kind.
        ConfigError: It belongs to another model.
        CapacityError: Its rows do not fit.
    """
    file = SessionFile(path)
    try:
        differing = differences(file.session["model"], model)
        if differing:
            raise ConfigError(f"{path}: was saved with another model; what differs: {', '.join(differing)}")
        tokens: list[int] = file.read("tokens").tolist()
        ids: list[int] = [*tokens, *file.read("pending").tolist()]
        state = _state(file.session, ids)
        changed = differences(file.session["machine"], machine)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, MonographError):
            raise
        raise CheckpointError(f"{path}: holds what this version does not understand: {error!r}") from error
    _check_content(file, state, len(tokens), decoder)
    if changed:
        logger.warning("%s: last bits may differ from those of going on there: %s", path, ", ".join(changed))
    decoder.remember(())
    with decoder.runner.context(), torch.no_grad():
        decoder.arena.view("tokens")[: len(tokens)].copy_(_int32(tokens))
        for name in _cache_names(decoder) if tokens else ():
            for head, saved in zip(decoder.arena.view(name), file.read(name), strict=True):
                head[: len(tokens)].copy_(saved)
    decoder.runner.drain()
    decoder.remember(tokens)
    return Chat.of_state(engine, state)


def _state(session: Any, ids: list[int]) -> ChatState:
    pieces: list[Piece] = []
    start = 0
    for text, count in session["pieces"]:
        pieces.append(Piece(str(text), tuple(ids[start : start + count])))
        start += count
    cut, answer = None, session["answer"]
    if answer is not None:
        first = len(ids) - answer["tokens"]
        sampling = dict(answer["sampling"])
        if sampling["logit_bias"]:
            sampling["logit_bias"] = {int(token_id): value for token_id, value in sampling["logit_bias"].items()}
        ends = [sum(len(piece.ids) for piece in pieces[:i]) for i in range(len(pieces) + 1)]
        cut = Cut(
            messages=list(session["messages"]),
            prompt=Transcript(pieces[: ends.index(first)]),
            answer_ids=ids[first:],
            sampling=Sampling(**sampling),
            finish_reason=answer["finish_reason"],
        )
    return ChatState(list(session["messages"]), session["on_full"], Transcript(pieces), cut)


def _check_content(file: SessionFile, state: ChatState, rows: int, decoder: Decoder) -> None:
    """Refuse a file whose parts do not belong together, and one whose rows do not fit."""
    limit = decoder.capacity.max_seq_len
    if rows > limit:
        raise CapacityError(
            f"{file.path}: has {rows:,} rows of KV cache, more than max_seq_len {limit:,}; load the model with "
            f"max_seq_len={rows + 256} or more"
        )
    answer = [] if state.cut is None else state.cut.answer_ids
    for name, ids in (("context_counts", state.ids), ("output_counts", answer)):
        if not torch.equal(file.read(name), _counts(ids)):
            raise CheckpointError(f"{file.path}: its {name} are not those of its tokens")
    for name in _cache_names(decoder) if rows else ():
        heads, _, head_dim = decoder.arena.view(name).shape
        expected, got = (heads, rows, head_dim), file.shapes.get(name)
        if got != expected:
            raise CheckpointError(f"{file.path}: {name}: expected {expected}, got {got}")


def _cache_names(decoder: Decoder) -> list[str]:
    return [f"layers.{i}.{cache}" for i in range(decoder.config.num_layers) for cache in ("k_cache", "v_cache")]


def _rows_entry(decoder: Decoder, name: str, rows: int) -> Entry:
    cache = decoder.arena.view(name)

    def parts() -> Iterator[torch.Tensor]:
        for head in cache:  # its live rows lie side by side, so the copy needs no room on the device
            with decoder.runner.context(), torch.no_grad():
                part = head[:rows].to("cpu")
            yield part

    return Entry(name, (cache.shape[0], rows, cache.shape[2]), cache.dtype, parts)


def _counts(ids: Sequence[int]) -> torch.Tensor:
    """int32 [distinct tokens, 2]: each token and how often it occurs, by token."""
    if not ids:
        return torch.empty(0, 2, dtype=torch.int32)
    tokens, counts = torch.unique(_int32(ids), return_counts=True)
    return torch.stack([tokens, counts.int()], dim=1)


def _int32(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int32)
