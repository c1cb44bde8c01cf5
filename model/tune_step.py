"""Tuning the decode step of a model in memory: captured whole with each candidate, timed by replays, checked, kept.

Timing runs over the model's own arena, whose KV rows are filled with random numbers for it; the caller's cache is lost
and everything that a step counts up is put back to zero afterwards.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from monograph.errors import CapacityError, ConfigError
from monograph.kernels.tile import multiprocessors
from monograph.kernels.triton_import import triton
from monograph.model.decoder import Decoder
from monograph.model.graph import GraphRunner
from monograph.model.kept_tiles import check_place, keep_tiles
from monograph.model.prepare import num_threads
from monograph.model.program import Launch, with_tiles
from monograph.model.sampling import Sampling
from monograph.model.state import Halted
from monograph.model.tile_key import TileKey
from monograph.model.tile_space import Tile, Tiles
from monograph.model.tiles import ChosenTiles, current_tiles
from monograph.model.tune import DEFAULT_SECONDS, LENGTHS, OUT_OF_TIME, WEIGHTS, Report, Tuned, search

GREEDY = Sampling(temperature=0.0, seed=0).resolve({})
NEVER = 2**31 - 1
BATCH_MS = 6.0  # replays in a row that are timed together take about this long,
BATCHES = (4, 16)  # and are from 4 to 16
SHORTEST = 64  # max_seq_len in which a batch fits behind the middle
KEPT_GRAPHS = 3  # the first step, the best, the candidate
# The order of sums of thousands of terms in fp32, relative to the logits: two right steps may differ by this.
SUM_ORDER = 2e-5
ALLOWED = 2.0  # times the error of the untuned step


def tune_decoder(decoder: Decoder, seconds: float = DEFAULT_SECONDS, report: Report | None = None) -> Tuned:
    """Tune the decode step of a decoder on a CUDA device and leave it with the best tiles found.

    Args:
        decoder: No answer is under way; its cache is lost.
        seconds: Budget.
        report: Called as it goes on.

    Returns:
        What was found.

    Raises:
        CapacityError: There is no memory for the check, which widens one matrix at a time to fp32.
        ConfigError: The arena has no room to time anything in, or the budget is no time.
    """
    assert isinstance(decoder.runner, GraphRunner), "there is nothing to tune without a GPU"
    if decoder.capacity.max_seq_len < SHORTEST:
        raise ConfigError(
            f"tune: expected max_seq_len of at least {SHORTEST}, got {decoder.capacity.max_seq_len}; tune with more: "
            "the outcome holds for every length"
        )
    if not seconds > 0:
        raise ConfigError(f"tune: expected a budget of more than 0 seconds, got {seconds!r}")
    began = perf_counter()
    start = current_tiles(decoder.program)
    if not decoder.runner.pdl:  # launches do not overlap: triggers are not used
        start = {use: {key: value for key, value in tile.items() if key != "trigger"} for use, tile in start.items()}
    with torch.cuda.device(decoder.arena.device), StepBench(decoder) as bench:
        found = search(start, bench, max(seconds - (perf_counter() - began), 0.1), report)
    if found.tiles != found.start:
        decoder.set_tiles(found.tiles)
    found.seconds = perf_counter() - began
    return found


def tune_and_keep(
    decoder: Decoder, seconds: float = DEFAULT_SECONDS, report: Report | None = None
) -> tuple[Tuned, ChosenTiles]:
    """The same, and keep the outcome on disk for later loads.

    Returns:
        What was found, and the tiles that the decoder has now.

    Raises:
        ConfigError: The outcome cannot be written; said before anything is tuned.
    """
    check_place(TileKey.of(decoder.config, decoder.capacity.dtype, decoder.arena.device))
    found = tune_decoder(decoder, seconds, report)
    return found, ChosenTiles(found.tiles, "tuned", str(keep_tuned(decoder, found)))


def keep_tuned(decoder: Decoder, found: Tuned) -> Path:
    """Keep all tiles, changed or not, since they were judged together; the file. Raises ConfigError if it cannot."""
    key = TileKey.of(decoder.config, decoder.capacity.dtype, decoder.arena.device)
    return keep_tiles(key, found.tiles, measured_facts(found, decoder.capacity.max_seq_len))


def measured_facts(found: Tuned, max_seq_len: int) -> dict[str, Any]:
    """What is written beside tiles, for people."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "max_seq_len": max_seq_len,
        "lengths": list(lengths_for(max_seq_len)),
        "before_ms": [round(ms, 5) for ms in found.before_ms],
        "after_ms": [round(ms, 5) for ms in found.after_ms],
        "gain": round(found.gain, 5),
        "noise": round(found.noise, 5),
        "accepted": found.accepted,
        "timed": found.timed,
        "seconds": round(found.seconds, 2),
    }


def lengths_for(max_seq_len: int) -> tuple[int, ...]:
    """The live lengths to time at: those of LENGTHS for which there is room, or the middle of a short arena."""
    fitting = tuple(length for length in LENGTHS if length + BATCHES[1] + 2 <= max_seq_len)
    return fitting or (max(1, max_seq_len // 2),)


def within_rule(got: torch.Tensor, untuned: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether logits are at most twice as far from the fp32 reference as those of the untuned step.

    In the Euclidean norm and in the worst element; not finite is never right.

    Args:
        got: Of the candidate: [vocab_size] fp32, like the others.
        untuned: Of the step that tuning began with.
        want: Of the PyTorch references.
    """
    if not bool(torch.isfinite(got).all()):
        return False
    off, allowed = (got - want).double(), (untuned - want).double()
    norm_bound = max(ALLOWED * float(allowed.norm()), SUM_ORDER * float(want.double().norm()))
    worst_bound = max(ALLOWED * float(allowed.abs().max()), SUM_ORDER * float(want.abs().max()))
    return float(off.norm()) <= norm_bound and float(off.abs().max()) <= worst_bound


class StepBench:
    """The decode step of a decoder with any tiles. Use it in a with statement: it puts the state back in order."""

    def __init__(self, decoder: Decoder) -> None:
        assert isinstance(decoder.runner, GraphRunner)
        self._decoder, self._runner, self._program = decoder, decoder.runner, decoder.program
        self._arena, self._state = decoder.arena, decoder.state
        self._device = decoder.arena.device
        self._start = current_tiles(decoder.program)
        self._max_seq_len = decoder.capacity.max_seq_len
        self._lengths = lengths_for(self._max_seq_len)
        self._batch = BATCHES[1]
        self._graphs: OrderedDict[str, torch.cuda.CUDAGraph] = OrderedDict()
        self._first = {launch.use: launch for launch in reversed(decoder.program.decode)}
        self._halted = torch.full((1,), int(Halted.STOP), dtype=torch.int32, device=self._device)
        self.multiprocessors = multiprocessors(self._device)
        self.weights: Sequence[float] = [
            WEIGHTS[LENGTHS.index(length)] if length in LENGTHS else 1.0 for length in self._lengths
        ]

    def __enter__(self) -> StepBench:
        self._runner.drain()
        self._decoder.remember(())
        with self._context():
            generator = torch.Generator(self._device).manual_seed(0)
            for rows in self._rows():
                rows.normal_(generator=generator)
        self._runner.drain()
        self.sample({})  # warms up
        shortest = max(min(self.sample({})), 1e-3)
        self._batch = min(max(ceil(BATCH_MS / shortest), BATCHES[0]), BATCHES[1])
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.drain()
        self._graphs.clear()
        with self._context():
            self._state.halt()
            for name in ("tokens", "context_counts", "output_counts"):
                self._arena.view(name).zero_()
            for rows in self._rows():
                rows.zero_()
        self._runner.drain()

    def clock(self) -> float:
        """Seconds."""
        return perf_counter()

    def compile(self, wanted: Sequence[tuple[str, Tile]], until: float, note: Callable[[int], None]) -> list[str]:
        """Compile and load kernels on several threads: each is launched once, halted, and writes nothing."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with _compiled_kernels() as newest:

            def make(use: str, tile: Tile) -> str:
                if self.clock() >= until:
                    return OUT_OF_TIME
                newest.pop(threading.get_ident(), None)
                launch, first = self._halted_launch(use), self._program.decode[0]
                options = {**launch.constants, "pdl": self._runner.pdl and launch.name != first.name}
                try:
                    with torch.cuda.device(self._device), torch.cuda.stream(stream):
                        launch.kernel(*launch.args, **options, tile=dict(tile))
                except Exception as error:  # Triton has many, none of which is fatal before a launch
                    return f"{type(error).__name__}: {error}".partition("\n")[0]
                spills = _spills(newest.get(threading.get_ident()))
                return f"{spills} registers spilled" if spills else ""

            pool = ThreadPoolExecutor(num_threads(), thread_name_prefix="tune")
            try:
                futures: list[Future[str]] = [pool.submit(make, *one) for one in wanted]
                for done, _ in enumerate(as_completed(futures), 1):
                    note(done)
            finally:
                pool.shutdown(cancel_futures=True)
                stream.synchronize()  # raises here what a launch did wrong
        return [future.result() for future in futures]

    def sample(self, tiles: Tiles) -> list[float]:
        """Milliseconds of a replay at each length, of some in a row."""
        graph = self._graph(tiles)
        found: list[float] = []
        for length in self._lengths:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            with self._context():
                self._begin(length)
                graph.replay()  # while it runs the others are submitted
                start.record()
                for _ in range(self._batch):
                    graph.replay()
                end.record()
                end.synchronize()
            position, halted = int(self._arena.view("position")), int(self._arena.view("halted"))
            if (position, halted) != (length + self._batch, Halted.RUNNING):
                raise AssertionError(f"tune: after timing position {position}, halted {halted} at length {length}")
            found.append(start.elapsed_time(end) / self._batch)
        return found

    def agrees(self, tiles: Tiles) -> bool:
        """Whether the logits obey the rule of ``within_rule`` at every length."""
        try:
            return all(
                within_rule(
                    self._logits(tiles, length), self._logits(self._start, length), self._reference_logits(length)
                )
                for length in self._lengths
            )
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                "tune: no memory left for the check, which widens one matrix at a time to float32; "
                f"use less than max_seq_len {self._max_seq_len:,}: the outcome holds for every length"
            ) from error

    @contextmanager
    def _context(self) -> Iterator[None]:
        with self._runner.context(), torch.inference_mode():
            yield

    def _rows(self) -> Iterator[torch.Tensor]:
        """The rows of every KV cache that timing reads or writes."""
        count = max(self._lengths) + BATCHES[1] + 2
        for i in range(self._decoder.config.num_layers):
            for name in ("k_cache", "v_cache"):
                yield self._arena.view(f"layers.{i}.{name}")[:, :count]

    def _begin(self, length: int) -> None:
        token = (1000 + 777 * length) % self._decoder.config.vocab_size
        self._state.begin([token] * length, length - 1, NEVER, (), GREEDY)

    def _graph(self, tiles: Tiles) -> torch.cuda.CUDAGraph:
        """The step captured with some tiles, whose kernels have been compiled; the last few are at hand."""
        name = repr(sorted((use, sorted(tile.items())) for use, tile in tiles.items()))
        if name not in self._graphs:
            while len(self._graphs) >= KEPT_GRAPHS:
                self._graphs.popitem(last=False)
            self._graphs[name] = self._runner.capture(with_tiles(self._program, tiles).decode)
        self._graphs.move_to_end(name)
        return self._graphs[name]

    def _logits(self, tiles: Tiles, length: int) -> torch.Tensor:
        graph = self._graph(tiles)
        with self._context():
            self._begin(length)
            graph.replay()
        self._runner.drain()
        return self._taken_logits()

    def _reference_logits(self, length: int) -> torch.Tensor:
        with self._context(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            self._begin(length)
            for launch in self._program.decode_logits:
                launch.reference(*launch.args, **launch.constants)
        self._runner.drain()
        return self._taken_logits()

    def _taken_logits(self) -> torch.Tensor:
        with self._context():
            taken = self._arena.view("logits").clone()
        self._runner.drain()
        return taken

    def _halted_launch(self, use: str) -> Launch:
        """The first launch of a use, reading a flag of its own: what is timed is not halted."""
        launch, flag = self._first[use], self._arena.view("halted")
        args = tuple(self._halted if arg is flag else arg for arg in launch.args)
        assert any(arg is self._halted for arg in args), use
        return Launch(launch.name, launch.kernel, launch.reference, args, launch.constants)


@contextmanager
def _compiled_kernels() -> Iterator[dict[int, tuple[Any, Any, Any]]]:
    """Collects for each thread the kernel that Triton made last there: function, device and key in its cache."""
    newest: dict[int, tuple[Any, Any, Any]] = {}
    before = triton.knobs.runtime.jit_post_compile_hook

    def note(*, key: Any, fn: Any, compile: Mapping[str, Any], **facts: Any) -> Any:  # noqa: A002  # Triton's name
        newest[threading.get_ident()] = (fn.jit_function, compile["device"], key)
        return None if before is None else before(key=key, fn=fn, compile=compile, **facts)

    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        yield newest
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


def _spills(made: tuple[Any, Any, Any] | None) -> int:
    """Registers that a kernel keeps in memory; 0 too where Triton does not say: the clock will tell."""
    if made is None:
        return 0
    function, device, key = made
    try:
        return int(function.device_caches[device][0][key].n_spills or 0)
    except (AttributeError, KeyError, IndexError, TypeError):
        return 0


def shipped_entry(found: Tuned, key: TileKey, measured: str | Path) -> str:
    """The outcome as an entry of the table of shipped tiles, in Python."""
    tiles = {use: dict(tile) for use, tile in found.tiles.items()}
    return (
        f"ShippedTiles(\n    gpu={key.gpu!r},\n    dtype={key.dtype!r},\n    shape={key.shape!r},\n"
        f"    tiles={tiles!r},\n    measured={str(measured)!r},\n)"
    )
