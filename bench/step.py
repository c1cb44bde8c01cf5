"""One decode step under measurement: set to any live length, judged, timed.

A step is judged before it is timed, at the same length: its logits against the PyTorch references over the same arena
in fp32 (by the rule of bench/judge.py), and the captured graph against the same launches made one by one, in bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.common import Clock, percentile
from bench.judge import Bounds, relative_error
from bench.plain import plain_logits
from bench.shapes import caches
from monograph.model.decoder import Decoder
from monograph.model.program import Launch, run
from monograph.model.runner import LaunchRunner
from monograph.model.sampling import Sampling
from monograph.model.step_nbytes import step_nbytes

GREEDY = Sampling(temperature=0.0, seed=0).resolve({})
NEVER = 2**31 - 1  # a position limit that no step reaches
BATCH = 16  # replays in a row that are timed together; the live length grows by one in each


@dataclass
class Verdict:
    """What was found wrong with a step at one length; nothing, if it is right.

    Attributes:
        error: Of the logits against the fp32 reference, relative, in the Euclidean norm.
        plain_error: The same of plain PyTorch in the precision of the weights.
        argmax_agrees: Whether graph and reference choose the same token.
        faults: In words.
    """

    error: float = float("nan")
    plain_error: float = float("nan")
    argmax_agrees: bool = False
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "; ".join(self.faults) or "ok"


@dataclass(frozen=True)
class Timing:
    """Milliseconds a token.

    Attributes:
        batched: Of every batch of replays in a row, divided by their number: what a stream of tokens costs.
        alone: Of single replays, each with the wait for its launch.
        mean_seq_len: Mean live length of the replays of a batch.
    """

    batched: list[float]
    alone: list[float]
    mean_seq_len: float


class Step:
    """The decode step of a decoder.

    Args:
        decoder: Its answers so far are lost: the step writes its state.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.arena, self.program = decoder, decoder.arena, decoder.program
        self.runner, self.state, self.config = decoder.runner, decoder.state, decoder.config
        self.device = decoder.arena.device
        self.dtype, self.max_seq_len = decoder.capacity.dtype, decoder.capacity.max_seq_len
        self.pdl = bool(getattr(self.runner, "pdl", False))

    @contextmanager
    def context(self) -> Iterator[None]:
        """Issue work in order with the replays."""
        with self.runner.context(), torch.inference_mode():
            yield

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def token(self, seq_len: int) -> int:
        """The token that a step at this length reads, some other one for every length."""
        return (1000 + 777 * seq_len) % self.config.vocab_size

    def begin(self, seq_len: int, token: int | None = None) -> None:
        """Make ``seq_len`` the live length of the next step, its token included. The rows before it stay as they are.

        Args:
            seq_len: 1 to max_seq_len.
            token: Token that the step reads; that of ``token`` by default.
        """
        self.settle()
        token = self.token(seq_len) if token is None else token
        with self.context():
            self.state.begin([token] * seq_len, seq_len - 1, NEVER, (), GREEDY)

    def nbytes(self, seq_len: float) -> float:
        """The fewest bytes that the step reads."""
        return step_nbytes(self.arena.layout, self.config, seq_len)

    def reference_logits(self, seq_len: int) -> torch.Tensor:
        """What the PyTorch references make of the same arena, in fp32: [vocab_size]."""
        self.begin(seq_len)
        with self.context(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            for launch in self.program.decode_logits:
                launch.reference(*launch.args, **launch.constants)
            return self.arena.view("logits").clone()

    def plain_logits(self, seq_len: int) -> torch.Tensor:
        """What plain PyTorch makes of the same step in the precision of the weights, in fp32: [vocab_size]."""
        with self.context():
            return plain_logits(self.arena, self.config, self.token(seq_len), seq_len - 1, self.dtype)

    def check(self, seq_len: int) -> Verdict:
        """Judge one step at one length. Scratch is poisoned before each way of running it."""
        verdict = Verdict()
        want = self.reference_logits(seq_len)
        eager, graph = self._outcome(seq_len, eagerly=True), self._outcome(seq_len, eagerly=False)
        for name, bits in eager.items():
            if not torch.equal(bits, graph[name]):
                verdict.faults.append(f"graph and eager launches differ in {name}")
        got = graph["logits"].view(torch.float32)
        if not bool(torch.isfinite(got).all()):
            verdict.faults.append("logits are not finite")
            return verdict
        bounds = Bounds.of(want, self.plain_logits(seq_len))
        verdict.error, verdict.plain_error = relative_error(got, want), bounds.plain_error
        verdict.faults += bounds.faults(got, want)
        chosen = int(got.argmax())
        verdict.argmax_agrees = chosen == int(want.argmax())
        state = graph["state"].tolist()
        if state != [chosen, seq_len, 0]:
            verdict.faults.append(f"token, position, halted are {state}, expected {[chosen, seq_len, 0]}")
        return verdict

    def _outcome(self, seq_len: int, eagerly: bool) -> dict[str, torch.Tensor]:
        """Run once; what the step leaves behind: bits of logits and of the new KV rows; token, position, halted."""
        self.arena.poison()
        self.begin(seq_len)
        with self.context():
            if eagerly:
                run(self.program.decode, self.pdl)
            else:
                self.runner.decode()
        self.settle()
        with self.context():
            rows = [cache[:, seq_len - 1] for pair in caches(self.arena, self.config) for cache in pair]
            # The token is the head's best; in the sequence it lies only where there is room for another.
            token = self.arena.view("tokens")[seq_len] if seq_len < self.max_seq_len else self._best_token()
            scalars = [token, self.arena.view("position")[0], self.arena.view("halted")[0]]
            return {
                "logits": self.arena.view("logits").clone().view(torch.int32),
                "KV rows": torch.stack(rows).view(torch.uint8),
                "state": torch.stack([scalar.to(torch.int32) for scalar in scalars]),
            }

    def _best_token(self) -> torch.Tensor:
        score, token = self.arena.view("best_score"), self.arena.view("best_id")
        return token[score == score.max()].min()

    def time(self, seq_len: int, replays: int = 200, alone: int = 50) -> Timing:
        """Time replays at a live length, which the position is put back to outside of what is timed.

        Args:
            seq_len: Live length of the first replay of a batch; near the capacity, of a middle one.
            replays: At least this many, in batches of BATCH in a row.
            alone: This many more, one by one.

        Raises:
            RuntimeError: A replay did not do its work.
        """
        batch = min(BATCH, self.max_seq_len)
        start = min(seq_len, self.max_seq_len - batch + 1)
        batched = self.time_runs([self.runner.decode] * batch, start, -(-replays // batch))
        self._expect_position(start - 1 + batch)
        single = self.time_runs([self.runner.decode], start, alone)
        self._expect_position(start)
        return Timing([span / batch for span in batched], single, start + (batch - 1) / 2)

    def time_runs(self, calls: Iterable[Any], seq_len: int, count: int) -> list[float]:
        """Milliseconds of each of ``count`` runs of the calls, the first of which finds the live length given."""
        calls, clock = list(calls), Clock(self.device)
        self.begin(seq_len)
        with self.context():
            for _ in range(count + 2):  # two warm up
                self.state.set_position(seq_len - 1)
                with clock.span():
                    for call in calls:
                        call()
        return clock.times_ms()[2:]

    def halted_ms(self, count: int = 50) -> float:
        """Milliseconds of a replay that finds the step halted, in a row of them."""
        clock = Clock(self.device)
        self.settle()
        with self.context():
            self.state.halt()
            for _ in range(count):
                with clock.span():
                    for _ in range(BATCH):
                        self.runner.decode()
        return percentile(clock.times_ms(), 50) / BATCH

    def submit_us(self, count: int = 200) -> float:
        """Microseconds of CPU that submitting a replay takes."""
        count = min(count, self.max_seq_len - 1)
        self.begin(1)
        with self.context():
            started = time.thread_time()
            for _ in range(count):
                self.runner.decode()
            spent = time.thread_time() - started
        self.settle()
        return spent / count * 1e6

    def host_loop(self, prompt_tokens: int = 16, new_tokens: int = 256) -> dict[str, float]:
        """An answer as users get it: "wall_ms" a token after the first, "cpu_ms" of all threads, "first_token_ms"."""
        ids = [(17 + 31 * i) % self.config.vocab_size for i in range(prompt_tokens)]
        limit = min(prompt_tokens + new_tokens, self.max_seq_len)
        self.settle()
        self._answer(ids, limit)  # warms up
        return self._answer(ids, limit)

    def _answer(self, ids: list[int], limit: int) -> dict[str, float]:
        answer = self.decoder.answer(ids, reuse=False, position_limit=limit, stop_ids=(), sampling=GREEDY)
        started = time.process_time()
        count = sum(1 for _ in answer.tokens())
        cpu = time.process_time() - started
        stats = answer.stats()
        return {
            "wall_ms": stats.decode_ms / max(count - 1, 1),
            "cpu_ms": cpu * 1e3 / count,
            "first_token_ms": stats.first_token_ms,
        }

    def _expect_position(self, position: int) -> None:
        found, halted = int(self.arena.view("position")), int(self.arena.view("halted"))
        if (found, halted) != (position, 0):
            raise RuntimeError(f"after timing position {found}, halted {halted}; expected {position}, 0")


def graph_facts(step: Step) -> dict[str, int | str]:
    """How many graphs decode, and what is in one: nodes and edges, from a second capture that keeps its source.

    Returns:
        "graphs", "nodes", and where the CUDA bindings say so "edges" and "programmatic_edges".
    """
    launches = step.program.decode
    if isinstance(step.runner, LaunchRunner):
        return {"graphs": 0, "nodes": len(launches)}
    try:
        nodes, edges, programmatic = _count(launches, step)
    except Exception as fault:  # bindings and drivers differ; a figure less is no reason to lose the run
        return {"graphs": 1, "nodes": len(launches), "nodes_counted": f"launches ({type(fault).__name__}: {fault})"}
    return {"graphs": 1, "nodes": nodes, "edges": edges, "programmatic_edges": programmatic}


def _count(launches: tuple[Launch, ...], step: Step) -> tuple[int, int, int]:
    from cuda.bindings import runtime  # type: ignore[import-not-found]

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    step.begin(1)
    with torch.cuda.graph(graph, stream=step.runner.stream, capture_error_mode="thread_local"):  # type: ignore[attr-defined]
        run(launches, step.pdl)
    raw = runtime.cudaGraph_t(int(graph.raw_cuda_graph()))

    def answers(call: Any, *arguments: Any) -> Any:
        error, *values = call(*arguments)
        if int(error):
            raise RuntimeError(f"{call.__name__}: {error}")
        return values

    nodes = answers(runtime.cudaGraphGetNodes, raw)[-1]
    edges = answers(runtime.cudaGraphGetEdges, raw)[-1]
    details = answers(runtime.cudaGraphGetEdges, raw, edges)
    kinds = next(value for value in details if isinstance(value, list) and value and hasattr(value[0], "from_port"))
    return int(nodes), int(edges), sum(int(kind.type) == 1 for kind in kinds[:edges])
