"""The search for faster tiles: one change at a time, judged by the time of the whole step, within a budget of seconds.

A kernel that is faster alone can slow its neighbours down: registers and shared memory decide how many programs fit
beside those of the next kernel, and the trigger when that may begin. So a candidate is always the whole step with
something in it changed, timed in turn with the best step so far, and it is accepted when the median of the ratios says
that it is faster by more than noise: by what the same step differs from itself, and by half a percent at least.
Greedy: each kernel's neighbours, largest kernel first; then triggers of several kernels together; again from there, for
as long as something improves and time lasts. What was found is compared once more with where it began.

Nothing here knows of GPUs: how a step is compiled, timed and checked is a ``Bench``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, Protocol

from monograph.model.tile_space import Tile, Tiles, joint_triggers, neighbours

# Live lengths at which a step is timed, and what each counts: most of a chat is about a thousand tokens long.
LENGTHS = (64, 1024, 16384)
WEIGHTS = (1.0, 2.0, 1.0)
DEFAULT_SECONDS = 30.0
MIN_GAIN = 0.005
MIN_ROUNDS, ROUNDS, FINAL_ROUNDS = 3, 7, 15
# Shares of the budget by which compiling the first candidates ends, the search, and the final comparison.
COMPILE_BY, SEARCH_BY, END_BY = 0.4, 0.85, 0.95

Stage = Literal["compile", "measure", "verify"]


class Bench(Protocol):
    """A decode step that can be had with any tiles.

    Attributes:
        multiprocessors: Of the GPU.
        weights: What each length counts, in the order of ``sample``.
    """

    multiprocessors: int
    weights: Sequence[float]

    def clock(self) -> float:
        """Seconds, from any beginning."""
        ...

    def compile(self, wanted: Sequence[tuple[str, Tile]], until: float, note: Callable[[int], None]) -> list[str]:
        """Get kernels ready.

        Args:
            wanted: Use and tile of each.
            until: When to begin no more, by ``clock``.
            note: Called with how many are done.

        Returns:
            For each "" if it can be used, or why it cannot.
        """
        ...

    def sample(self, tiles: Tiles) -> Sequence[float]:
        """Time the step once: milliseconds at each length."""
        ...

    def agrees(self, tiles: Tiles) -> bool:
        """Whether the step's logits are as right as those of the tiles that tuning began with."""
        ...


@dataclass(frozen=True)
class TuneProgress:
    """How far tuning is.

    Attributes:
        seconds: Since it began.
        stage: What it does.
        done: Of this stage.
        total: Of this stage, as far as is known.
        gain: By how much the best step is faster than the first, as a fraction.
        text: What has just been found; "" for nothing.
    """

    seconds: float
    stage: Stage
    done: int
    total: int
    gain: float
    text: str = ""


Report = Callable[[TuneProgress], None]


@dataclass
class Tuned:
    """What tuning found.

    Attributes:
        start: The tiles that it began with, by use.
        tiles: The best, by use; ``start`` where nothing is faster.
        before_ms: Milliseconds a token at each length with ``start``, timed in turn with ``after_ms``.
        after_ms: The same with ``tiles``.
        gain: By how much ``tiles`` are faster over the weighted lengths, as a fraction.
        noise: By how much the same step differed from itself.
        accepted: What was changed, in order.
        timed: Candidates that were timed.
        unusable: Those that did not compile, spilled registers, or changed the logits beyond the rule.
        left_out: Those for which there was no time.
        seconds: What it all took.
    """

    start: Tiles
    tiles: Tiles
    before_ms: list[float] = field(default_factory=list)
    after_ms: list[float] = field(default_factory=list)
    gain: float = 0.0
    noise: float = 0.0
    accepted: list[str] = field(default_factory=list)
    timed: int = 0
    unusable: int = 0
    left_out: int = 0
    seconds: float = 0.0


class OutOfTimeError(Exception):
    """The budget is spent; what has been found so far stands."""


def search(start: Tiles, bench: Bench, seconds: float = DEFAULT_SECONDS, report: Report | None = None) -> Tuned:
    """Look for tiles with which the step is faster.

    Args:
        start: Whole tiles of the kernels to tune, by use.
        bench: Compiles, times and checks.
        seconds: Budget, all included.
        report: Called as it goes on.

    Returns:
        What was found.
    """
    return _Search(start, bench, seconds, report).run()


def weighted_ratio(new: Sequence[float], old: Sequence[float], weights: Sequence[float]) -> float:
    """The mean over lengths of how long a step takes, relative to another."""
    total = sum(weight * (mine / other) for weight, mine, other in zip(weights, new, old, strict=True))
    return total / sum(weights)


class _Search:
    def __init__(self, start: Tiles, bench: Bench, seconds: float, report: Report | None) -> None:
        self.bench, self.report, self.seconds = bench, report, seconds
        self.began = bench.clock()
        self.found = Tuned(start=start, tiles=start)
        self.best = start
        self.gain = 0.0
        self.margin = MIN_GAIN
        self.ready: dict[tuple[str, str], str] = {(use, _text(tile)): "" for use, tile in start.items()}
        self.tried = {_text_of_all(start)}

    def run(self) -> Tuned:
        found = self.found
        self.find_noise()
        try:
            while self.one_pass():
                pass
        except OutOfTimeError:
            pass
        if self.best != found.start:
            self.verify()
        found.seconds = self.bench.clock() - self.began
        return found

    def find_noise(self) -> None:
        """Time the first step against itself."""
        ratios = [self.round(self.best, self.best, i)[0] for i in range(ROUNDS)]
        self.found.noise = median(abs(ratio - 1) for ratio in ratios)
        self.margin = max(MIN_GAIN, 2 * self.found.noise)

    def one_pass(self) -> bool:
        """Try all that is a step away from the best; whether any of it was better."""
        before = self.best
        singles = [
            (use, tile) for use in self.best for tile in neighbours(use, self.best[use], self.bench.multiprocessors)
        ]
        self.compile(singles)
        self.try_all(({**self.best, use: tile} for use, tile in singles), len(singles))
        # Relative to the best after the singles: fixed now, since what is accepted changes what is a step away.
        joint = list(joint_triggers(self.best))
        self.compile([(use, tiles[use]) for tiles in joint for use in tiles])
        self.try_all(joint, len(joint))
        return self.best != before

    def compile(self, wanted: Sequence[tuple[str, Tile]]) -> None:
        """Get what is new of the tiles wanted ready, as far as time goes."""
        new = {(use, _text(tile)): (use, tile) for use, tile in wanted if (use, _text(tile)) not in self.ready}
        if not new:
            return
        # The first time, what is left of the budget is for timing; later, a candidate is worth what it takes.
        now = self.bench.clock()
        until = max(self.began + COMPILE_BY * self.seconds, now + (self.deadline() - now) / 3)

        def note(done: int) -> None:
            self.say("compile", done, len(new))

        outcomes = self.bench.compile(list(new.values()), min(until, self.deadline()), note)
        for name, outcome in zip(new, outcomes, strict=True):
            if outcome == OUT_OF_TIME:
                self.found.left_out += 1
            else:
                self.ready[name] = outcome
                self.found.unusable += bool(outcome)

    def try_all(self, candidates: Iterable[Tiles], count: int) -> None:
        for number, candidate in enumerate(candidates, 1):
            if self.bench.clock() >= self.deadline():
                self.found.left_out += count - number + 1
                raise OutOfTimeError
            name = _text_of_all(candidate)
            usable = all(self.ready.get((use, _text(tile)), OUT_OF_TIME) == "" for use, tile in candidate.items())
            if name in self.tried or not usable:
                continue
            self.tried.add(name)
            self.say("measure", number, count, self.try_one(candidate))

    def try_one(self, candidate: Tiles) -> str:
        """Time a candidate in turn with the best step, and put it in its place if it is faster; what was found."""
        self.found.timed += 1
        ratios: list[float] = []
        for i in range(ROUNDS):
            ratios.append(self.round(candidate, self.best, i)[0])
            slower = len(ratios) >= MIN_ROUNDS and median(ratios) >= 1
            if slower or (len(ratios) == 2 and min(ratios) > 1 + self.margin):
                return ""
        ratio = median(ratios)
        if ratio >= 1 - self.margin:
            return ""
        change = describe_change(candidate, self.best)
        if not self.bench.agrees(candidate):
            self.found.unusable += 1
            return f"{change}: dropped, it changes the logits by more than rounding may"
        self.best = candidate
        self.gain = 1 - (1 - self.gain) * ratio
        self.found.accepted.append(change)
        return f"{change}: {1 - ratio:.1%} faster"

    def verify(self) -> None:
        """Compare the best with the first step once more: a lucky candidate or two must not be kept."""
        found, rounds = self.found, list[tuple[float, Sequence[float], Sequence[float]]]()
        while len(rounds) < FINAL_ROUNDS:
            if len(rounds) >= MIN_ROUNDS and self.bench.clock() >= self.began + END_BY * self.seconds:
                break
            rounds.append(self.round(self.best, found.start, len(rounds)))
            self.say("verify", len(rounds), FINAL_ROUNDS)
        ratio = median(ratio for ratio, _, _ in rounds)
        found.before_ms = [median(times) for times in zip(*(old for _, _, old in rounds), strict=True)]
        found.after_ms = [median(times) for times in zip(*(new for _, new, _ in rounds), strict=True)]
        if ratio < 1 - self.margin and self.bench.agrees(self.best):
            found.tiles, found.gain = self.best, 1 - ratio
        else:
            found.after_ms = list(found.before_ms)

    def round(self, new: Tiles, old: Tiles, number: int) -> tuple[float, Sequence[float], Sequence[float]]:
        """Time two steps, the one that goes first in turn, so that a drift favours neither."""
        if number % 2:
            new_ms = self.bench.sample(new)
            old_ms = self.bench.sample(old)
        else:
            old_ms = self.bench.sample(old)
            new_ms = self.bench.sample(new)
        if new is old is self.found.start and not self.found.before_ms:
            self.found.before_ms, self.found.after_ms = list(old_ms), list(new_ms)
        return weighted_ratio(new_ms, old_ms, self.bench.weights), new_ms, old_ms

    def deadline(self) -> float:
        return self.began + SEARCH_BY * self.seconds

    def say(self, stage: Stage, done: int, total: int, text: str = "") -> None:
        if self.report is not None:
            self.report(TuneProgress(self.bench.clock() - self.began, stage, done, total, self.gain, text))


OUT_OF_TIME = "no time"


def describe_change(new: Tiles, old: Tiles) -> str:
    """What differs, in words: "gate_up BLOCK_N 2 -> 4"."""
    return ", ".join(_changes(new, old))


def _changes(new: Tiles, old: Tiles) -> Iterator[str]:
    for use, tile in new.items():
        changed = [f"{key} {old[use].get(key)} -> {value}" for key, value in tile.items() if old[use].get(key) != value]
        if changed:
            yield f"{use} {', '.join(changed)}"


def _text(tile: Tile) -> str:
    return ",".join(f"{key}={tile[key]}" for key in sorted(tile))


def _text_of_all(tiles: Tiles) -> str:
    return ";".join(f"{use}:{_text(tiles[use])}" for use in sorted(tiles))
