"""What the GPU tests share: a tiny model in memory, set to known states, run by graphs or launch by launch, compared in
bits.

No size of the model is a power of two or a multiple of a tile, and three query heads share a KV head. All decoders have
a ``max_seq_len`` that 16 divides and one set of sizes, so that kernels are compiled once a dtype.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from bench.shapes import caches, random_decoder
from monograph.arena import Arena
from monograph.model.config import ModelConfig, RopeConfig
from monograph.model.decoder import Decoder
from monograph.model.layout import Capacity, plan_layout
from monograph.model.program import run
from monograph.model.runner import Runner
from monograph.model.sampling import Sampling

DEVICE = torch.device("cuda", 0)
MAX_SEQ_LEN = 6144
CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=515,
    hidden_size=96,
    intermediate_size=200,
    num_layers=2,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=1 << 27,
    rms_norm_eps=1e-5,
    rope=RopeConfig(
        rope_type="llama3",
        theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
)
GREEDY = Sampling(temperature=0.0, seed=0).resolve({})
DRAWN = Sampling(temperature=1.0, top_k=40, top_p=0.95, repetition_penalty=1.1, seed=42).resolve({})
NEVER = 2**31 - 1  # a position limit that nothing reaches

Bits = dict[str, bytes]


def make(
    dtype: torch.dtype = torch.bfloat16,
    max_seq_len: int = MAX_SEQ_LEN,
    device: torch.device | None = None,
    *,
    seed: int = 0,
    debug: bool = False,
) -> Decoder:
    """A decoder of the tiny model with random weights; the same seed gives the same weights."""
    return random_decoder(CONFIG, dtype, max_seq_len, device or DEVICE, seed=seed, debug=debug)


@contextmanager
def made(
    dtype: torch.dtype = torch.bfloat16, max_seq_len: int = MAX_SEQ_LEN, *, seed: int = 0, debug: bool = False
) -> Iterator[Decoder]:
    """The same for the length of a with statement."""
    decoder = make(dtype, max_seq_len, seed=seed, debug=debug)
    try:
        yield decoder
    finally:
        decoder.close()
        del decoder
        gc.collect()


def twin_on_cpu(decoder: Decoder, max_seq_len: int) -> Decoder:
    """A decoder with the same weights that runs the PyTorch references on the CPU, in fp32."""
    capacity = Capacity.for_model(CONFIG, max_seq_len, torch.float32)
    layout = plan_layout(CONFIG, capacity)

    def fill(arena: Arena) -> None:
        for slot in layout.entries:
            if slot.lifetime == "weight":
                view = arena.view(slot.name)
                view.copy_(decoder.arena.view(slot.name)[: len(view)])

    return Decoder(CONFIG, capacity, layout, torch.device("cpu"), fill)


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Token ids of the tiny model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CONFIG.vocab_size, (count,), generator=generator).tolist()


def settle() -> None:
    """Wait for all work of the device."""
    torch.cuda.synchronize(DEVICE)


def begin(
    decoder: Decoder,
    ids: Sequence[int],
    start: int = 0,
    sampling: Sampling = GREEDY,
    limit: int = NEVER,
    stop_ids: Sequence[int] = (),
) -> None:
    """Set the state up for an answer, as an answer does; nothing runs yet."""
    decoder.runner.drain()
    with decoder.runner.context():
        decoder.state.begin(ids, start, limit, stop_ids, sampling)


def clean(decoder: Decoder) -> None:
    """Forget everything an earlier run left: zeros in all that a run builds up, poison in scratch."""
    arena = decoder.arena
    settle()
    for name in ("tokens", "context_counts", "output_counts"):
        arena.view(name).zero_()
    for pair in caches(arena, CONFIG):
        for cache in pair:
            cache.zero_()
    assert not arena.view("arrivals").any()
    arena.poison()


def chunks(decoder: Decoder, prompt_tokens: int) -> int:
    """Prefill passes that a prompt takes."""
    return -(-prompt_tokens // decoder.capacity.chunk_rows)


def replay(decoder: Decoder, ids: Sequence[int], steps: int, sampling: Sampling = GREEDY) -> None:
    """From a clean state: prefill a prompt and decode some steps by graph replays."""
    clean(decoder)
    begin(decoder, ids, sampling=sampling)
    with decoder.runner.context():
        for _ in range(chunks(decoder, len(ids))):
            decoder.runner.prefill()
        for _ in range(steps):
            decoder.runner.decode()
    settle()


def launch(decoder: Decoder, ids: Sequence[int], steps: int, pdl: bool, sampling: Sampling = GREEDY) -> None:
    """The same, launch by launch."""
    clean(decoder)
    begin(decoder, ids, sampling=sampling)
    with decoder.runner.context():
        for _ in range(chunks(decoder, len(ids))):
            run(decoder.program.prefill, pdl)
        for _ in range(steps):
            run(decoder.program.decode, pdl)
    settle()


def prefill(decoder: Decoder) -> None:
    """One prefill pass, ordered after and before all other work."""
    settle()
    decoder.runner.prefill()
    settle()


def decode(decoder: Decoder) -> None:
    """One decode step, ordered after and before all other work."""
    settle()
    decoder.runner.decode()
    settle()


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def bits(decoder: Decoder, length: int) -> Bits:
    """All that a run has made, by slot: KV rows 0 to ``length``, tokens, logits, scores, state."""
    settle()
    arena = decoder.arena
    found = {"tokens": raw(arena.view("tokens")[: length + 1])}
    for i, pair in enumerate(caches(arena, CONFIG)):
        for name, cache in zip(("k_cache", "v_cache"), pair, strict=True):
            found[f"layers.{i}.{name}"] = raw(cache[:, :length])
    for name in ("logits", "scores", "position", "halted", "context_counts", "output_counts", "arrivals"):
        found[name] = raw(arena.view(name))
    return found


def differing(one: Bits, other: Bits) -> list[str]:
    """The slots in which two runs differ."""
    assert one.keys() == other.keys()
    return [name for name in one if one[name] != other[name]]


def digest(found: Bits) -> str:
    """One word for a run, to compare over processes."""
    total = hashlib.blake2b(digest_size=16)
    for name, content in found.items():
        total.update(name.encode() + content)
    return total.hexdigest()


def answer(decoder: Decoder, ids: Sequence[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    """The tokens of an answer, through the loop that users have."""
    run = decoder.answer(list(ids), reuse=False, position_limit=len(ids) + count, stop_ids=(), sampling=sampling)
    return list(run.tokens())


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over largest magnitude; NaN is never small."""
    assert got.shape == want.shape
    error = (got.double().cpu() - want.double().cpu()).abs().max() / want.double().abs().max().cpu()
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def graphs_of(runner: Runner) -> list[torch.cuda.CUDAGraph]:
    """Every captured graph that a runner holds."""
    return [value for value in vars(runner).values() if isinstance(value, torch.cuda.CUDAGraph)]
