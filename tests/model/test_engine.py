"""The public way in: load, generate, stream, chat, logits, close; its limits and its errors."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import monograph as mg
from tests.checkpoints import tiny_config, tiny_ids
from tests.engines import tiny_engine, write_model


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[mg.Engine]:
    with tiny_engine(tmp_path) as loaded:
        yield loaded


PROMPT = tiny_ids(tiny_config(), 12, seed=3)


def free_running(engine: mg.Engine, count: int = 24, **options: Any) -> list[int]:
    """An answer that no stop token ends: EOS is banned."""
    sampling = mg.Sampling(logit_bias={2: -math.inf}, **options)
    return engine.generate(PROMPT, count, sampling=sampling).token_ids


def test_greedy_answers_follow_the_logits(engine: mg.Engine) -> None:
    answer = free_running(engine)
    logits = engine.logits([*PROMPT, *answer])
    logits[:, 2] = -math.inf
    assert logits[len(PROMPT) - 1 : -1].argmax(-1).tolist() == answer


def test_stream_gives_the_same_as_generate(engine: mg.Engine) -> None:
    whole = engine.generate(PROMPT, 20)
    with engine.stream(PROMPT, 20) as stream:
        chunks = list(stream)
    assert [i for chunk in chunks for i in chunk.token_ids] == whole.token_ids
    assert "".join(chunk.text for chunk in chunks) == whole.text == stream.completion.text
    assert stream.completion.finish_reason == whole.finish_reason
    assert whole.stats.prompt_tokens == len(PROMPT)
    assert whole.stats.completion_tokens == len(whole.token_ids)
    assert whole.stats.first_token_ms > 0


def test_load_says_what_it_took(tmp_path: Path) -> None:
    bytes_read: list[tuple[int, int]] = []
    with tiny_engine(tmp_path, load={"progress": lambda done, total: bytes_read.append((done, total))}) as engine:
        stats = engine.load_stats
        assert isinstance(stats, mg.LoadStats)
        phases = (stats.import_s, stats.open_s, stats.tokenizer_s, stats.plan_s, stats.arena_s, stats.weights_s)
        assert min(*phases, stats.total_s) > 0
        assert sum(phases) <= stats.total_s < sum(phases) + 1
        assert (stats.kernels, stats.compiled, stats.capture_s) == (0, 0, 0.0)
        assert stats.kernels_s < 0.1
        assert stats.weights_nbytes == engine.layout.nbytes_by_lifetime()["weight"]
        table = engine.layout["rope_table"].nbytes
        assert bytes_read[-1] == (stats.weights_nbytes - table, stats.weights_nbytes - table)


def test_max_new_tokens_and_the_end_of_the_arena(tmp_path: Path) -> None:
    with tiny_engine(tmp_path, load={"max_seq_len": 64}) as engine:
        ban = mg.Sampling(logit_bias={2: -math.inf})
        for prompt_tokens, max_new_tokens, expected in (
            (62, None, 2),
            (63, None, 1),
            (63, 100, 1),
            (60, 2, 2),
            (10, 1, 1),
        ):
            prompt = tiny_ids(tiny_config(), prompt_tokens)
            answer = engine.generate(prompt, max_new_tokens, sampling=ban)
            assert (len(answer.token_ids), answer.finish_reason) == (expected, "length")
        for prompt_tokens in (64, 65, 10_000):
            with pytest.raises(mg.PromptError, match=rf"prompt of {prompt_tokens:,} tokens .* max_seq_len 64"):
                engine.generate(tiny_ids(tiny_config(), prompt_tokens))
        assert engine.logits(tiny_ids(tiny_config(), 64)).shape == (64, 96)  # nothing is generated: all 64 fit
        assert len(engine.generate(PROMPT, 3, sampling=ban).token_ids) == 3


def test_a_stop_token_ends_the_answer_and_is_not_text(tmp_path: Path) -> None:
    with tiny_engine(tmp_path / "a") as engine:
        answer = free_running(engine)
    stop = answer[5]
    first = answer.index(stop)
    with tiny_engine(tmp_path / "b", tiny_config(eos_token_id=[stop, 95])) as engine:
        ended = engine.generate(PROMPT, 24)
    assert ended.token_ids == answer[: first + 1]
    assert ended.finish_reason == "stop"
    assert ended.text == engine.tokenizer.decode(answer[:first])


def test_every_eos_id_of_both_files_stops(tmp_path: Path) -> None:
    with tiny_engine(tmp_path / "a") as engine:
        answer = free_running(engine)
    early, late = answer[3], next(token for token in answer[4:] if token not in answer[:4])
    config = tiny_config(eos_token_id=late)
    with tiny_engine(tmp_path / "b", config, generation_config={"eos_token_id": [early]}) as engine:
        assert engine.generate(PROMPT, 24).token_ids == answer[: answer.index(early) + 1]
    with tiny_engine(tmp_path / "c", config, generation_config={"eos_token_id": [95]}) as engine:
        assert engine.generate(PROMPT, 24).token_ids == answer[: answer.index(late) + 1]


def test_b26_a_stop_string_is_cut_and_the_next_turn_is_right(engine: mg.Engine) -> None:
    answer = free_running(engine, 24)
    text = engine.tokenizer.decode(answer)
    stop = text[7:10]
    cut = text.index(stop)
    sampling = mg.Sampling(logit_bias={2: -math.inf})
    ended = engine.generate(PROMPT, 24, sampling=sampling, stop=[stop])
    assert (ended.text, ended.finish_reason) == (text[:cut], "stop")
    assert ended.token_ids == answer[: cut + len(stop)]
    # What follows reuses the rows that were written and equals a cold run.
    longer = [*PROMPT, *ended.token_ids, *PROMPT]
    warm = engine.generate(longer, 8, sampling=sampling, reuse=True)
    assert warm.stats.reused_tokens == len(PROMPT) + len(ended.token_ids) - 1
    assert warm.token_ids == engine.generate(longer, 8, sampling=sampling).token_ids


def test_cancelling_leaves_the_engine_usable(engine: mg.Engine) -> None:
    whole = free_running(engine)
    sampling = mg.Sampling(logit_bias={2: -math.inf})
    for count in (0, 1, 5):
        stream = engine.stream(PROMPT, 24, sampling=sampling)
        got = [next(stream).token_ids[0] for _ in range(count)]
        stream.close()
        assert got == whole[:count]
        assert stream.completion.finish_reason == "cancelled"
        assert stream.completion.token_ids == got
    dropped = engine.stream(PROMPT, 24, sampling=sampling)
    next(dropped)
    del dropped  # as a caller does who breaks out of a loop
    assert free_running(engine) == whole


def test_one_answer_at_a_time(engine: mg.Engine) -> None:
    first = engine.stream(PROMPT, 24)
    next(first)
    with pytest.raises(mg.EngineError, match="busy with another answer"):
        engine.generate(PROMPT, 2)
    with pytest.raises(mg.EngineError, match="busy"):
        engine.logits(PROMPT)
    faults: list[BaseException] = []

    def other() -> None:
        try:
            engine.generate(PROMPT, 2)
        except mg.EngineError as error:
            faults.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(faults) == 1
    first.close()
    assert len(engine.generate(PROMPT, 2).token_ids) == 2


def test_use_after_close(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path)
    stream = engine.stream(PROMPT, 24)
    next(stream)
    engine.close()
    engine.close()
    for use in (
        lambda: engine.generate(PROMPT),
        lambda: engine.logits(PROMPT),
        engine.chat,
        lambda: engine.stream("a"),
    ):
        with pytest.raises(mg.EngineError, match="closed"):
            use()
    with pytest.raises(mg.EngineError, match="closed"):
        list(stream)
    assert "closed" in repr(engine)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "at least one token"),
        ([1, 96], "got 96 at position 1"),
        ([-1], "got -1 at position 0"),
        ([1.5], "got 1.5"),
        ([True], "got True"),
        (["a"], "got 'a'"),
    ],
)
def test_bad_prompts_never_reach_a_kernel(engine: mg.Engine, ids: list[int], message: str) -> None:
    before = engine.arena.fingerprint()
    with pytest.raises(mg.PromptError, match=message):
        engine.generate(ids)
    assert engine.arena.fingerprint() == before


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_bad_max_new_tokens(engine: mg.Engine, value: object) -> None:
    with pytest.raises(mg.ConfigError, match="max_new_tokens"):
        engine.generate(PROMPT, value)  # type: ignore[arg-type]


def test_nothing_outside_the_slots_is_written_and_weights_stay(tmp_path: Path) -> None:
    with tiny_engine(tmp_path) as engine:
        weights = [slot.name for slot in engine.layout.slots.values() if slot.lifetime == "weight"]
        before = engine.arena.fingerprint(weights)
        free_running(engine)
        engine.logits(PROMPT)
        engine.arena.check_guards()
        assert engine.arena.fingerprint(weights) == before


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_nothing_beyond_the_live_rows_is_read(tmp_path: Path, poison: float) -> None:
    with tiny_engine(tmp_path) as engine:
        wanted = free_running(engine)
        wanted_logits = engine.logits(PROMPT)
        for name, slot in engine.layout.slots.items():
            if slot.dtype == torch.float32 and (slot.lifetime == "scratch" or name.endswith("_cache")):
                engine.arena.view(name).fill_(poison)
        assert free_running(engine) == wanted
        assert torch.equal(engine.logits(PROMPT), wanted_logits)


def test_answers_do_not_depend_on_the_arena_or_on_history(tmp_path: Path) -> None:
    write_model(tmp_path)
    answers = []
    for max_seq_len in (64, 100, 256):
        with mg.load(str(tmp_path), max_seq_len=max_seq_len, device="cpu") as engine:
            for _ in range(2):
                answers.append(free_running(engine, temperature=0.9, seed=7))
                engine.generate(PROMPT[::-1], 5)
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("prefix", [0, 1, 6, 12, 20])
def test_reuse_takes_the_longest_common_prefix(engine: mg.Engine, prefix: int) -> None:
    history = free_running(engine, 10)
    known = [*PROMPT, *history][:-1]  # the newest token was never fed
    new = [*known[:prefix], *([95 - i for i in known[prefix : prefix + 3]] or [5])]
    answer = engine.generate(new, 6, reuse=True)
    assert answer.stats.reused_tokens == prefix
    assert answer.token_ids == engine.generate(new, 6).token_ids


def test_text_prompts_are_encoded(engine: mg.Engine) -> None:
    ids = engine.tokenizer.encode("hello there")
    assert engine.generate("hello there", 5).token_ids == engine.generate(ids, 5).token_ids


def test_b22_penalised_answers_equal_transformers(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    with tiny_engine(tmp_path) as engine:
        oracle: Any = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        prompt = PROMPT
        for _ in range(2):  # the counts of the second turn are those of its whole prompt, and of nothing before
            wanted = oracle.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                repetition_penalty=1.3,
                max_new_tokens=50,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            sampling = mg.Sampling(repetition_penalty=1.3, temperature=0)
            answer = engine.generate(prompt, 50, sampling=sampling, reuse=True).token_ids
            assert answer == wanted[: len(answer)]
            assert len(answer) == 50 or answer[-1] == 2
            plain = engine.generate(prompt, 50).token_ids
            assert engine.generate(prompt, 50, sampling=mg.Sampling(repetition_penalty=1.0)).token_ids == plain
            prompt = [*prompt, *answer, 40, 41]


def test_presence_and_frequency_count_the_answer_alone(engine: mg.Engine) -> None:
    for sampling in (mg.Sampling(presence_penalty=3.0), mg.Sampling(frequency_penalty=1.5)):
        answer = engine.generate(PROMPT, 30, sampling=sampling).token_ids
        logits = engine.logits([*PROMPT, *answer])[len(PROMPT) - 1 : -1]
        counts = torch.zeros(96)
        for row, token in zip(logits, answer, strict=True):
            scores = row - (sampling.presence_penalty or 0) * (counts > 0) - (sampling.frequency_penalty or 0) * counts
            assert int(scores.argmax()) == token
            counts[token] += 1


def test_logit_bias_bans_and_forces(engine: mg.Engine) -> None:
    assert engine.generate(PROMPT, 6, sampling=mg.Sampling(logit_bias={50: 1e4})).token_ids == [50] * 6
    banned = engine.generate(PROMPT, 1).token_ids[0]
    assert engine.generate(PROMPT, 1, sampling=mg.Sampling(logit_bias={banned: -math.inf})).token_ids != [banned]
    with pytest.raises(mg.ConfigError, match=r"logit_bias: expected ids 0..95, got 96"):
        engine.generate(PROMPT, sampling=mg.Sampling(logit_bias={96: 1.0}))
    with pytest.raises(mg.ConfigError, match="every token is banned"):
        engine.generate(PROMPT, sampling=mg.Sampling(logit_bias=dict.fromkeys(range(96), -math.inf)))


def test_b23_seeds(engine: mg.Engine) -> None:
    rng = torch.get_rng_state()
    hot: dict[str, Any] = {"temperature": 1.5}
    first = free_running(engine, seed=42, **hot)
    free_running(engine, seed=1, **hot)
    assert free_running(engine, seed=42, **hot) == first
    assert free_running(engine, seed=0, **hot) != free_running(engine, seed=2**63, **hot)
    assert free_running(engine, seed=2**64 - 1, **hot) != first
    unseeded = {tuple(free_running(engine, **hot)) for _ in range(4)}
    assert len(unseeded) == 4
    assert torch.equal(torch.get_rng_state(), rng)


def test_an_unseeded_answer_can_be_repeated(engine: mg.Engine) -> None:
    """The settings in force, the drawn seed among them, are in the stats."""
    answer = engine.generate(PROMPT, 12, sampling=mg.Sampling(temperature=1.2))
    assert answer.stats.sampling.seed is not None
    assert engine.generate(PROMPT, 12, sampling=answer.stats.sampling).token_ids == answer.token_ids


def test_sampling_draws_what_the_logits_say(engine: mg.Engine) -> None:
    """Frequencies of the first token over 1,000 seeds against softmax; chi-square with a bound no fair draw passes."""
    logits = engine.logits(PROMPT)[-1].double()
    probabilities = torch.softmax(logits / 0.7, 0)
    keep = probabilities.topk(5)
    wanted = torch.zeros(96, dtype=torch.float64).index_put((keep.indices,), keep.values / keep.values.sum())
    counts = torch.zeros(96, dtype=torch.float64)
    for seed in range(1000):
        sampling = mg.Sampling(temperature=0.7, top_k=5, seed=seed)
        counts[engine.generate(PROMPT, 1, sampling=sampling, reuse=True).token_ids[0]] += 1
    assert counts[wanted == 0].sum() == 0
    expected = 1000 * wanted[wanted > 0]
    chi_square = float(((counts[wanted > 0] - expected) ** 2 / expected).sum())
    assert chi_square < 23.5  # p = 1e-4 at 4 degrees of freedom


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-10, 1e-38, 1e-45])
def test_b21_tiny_temperatures_are_greedy(engine: mg.Engine, temperature: float) -> None:
    greedy = free_running(engine)
    assert free_running(engine, temperature=temperature, top_p=0.9, seed=1) == greedy


def test_b21_temperature_of_1e_4_takes_a_clear_best(engine: mg.Engine) -> None:
    gap = engine.logits(PROMPT)[-1].topk(2).values
    assert gap[0] - gap[1] > 0.01
    for seed in range(10):
        drawn = engine.generate(PROMPT, 1, sampling=mg.Sampling(temperature=1e-4, top_p=0.9, seed=seed)).token_ids
        assert drawn == [int(engine.logits(PROMPT)[-1].argmax())]


def test_b04_explicit_over_file_over_built_in(tmp_path: Path) -> None:
    author = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    with tiny_engine(tmp_path, generation_config=author) as engine:

        def in_force(**said: float) -> tuple[object, ...]:
            used = engine.generate(PROMPT, 1, sampling=mg.Sampling(**said)).stats.sampling  # type: ignore[arg-type]
            return used.temperature, used.top_p, used.top_k, used.min_p

        assert in_force() == (0.6, 0.9, 20, 0.0)
        assert in_force(temperature=0) == (0.0, 0.9, 20, 0.0)
        assert in_force(top_p=1.0) == (0.6, 1.0, 20, 0.0)
        assert in_force(top_k=0) == (0.6, 0.9, 0, 0.0)
        logits = engine.logits(PROMPT)[-1]
        greedy = engine.generate(PROMPT, 1, sampling=mg.Sampling(temperature=0)).token_ids
        assert greedy == [int(logits.argmax())]
    with tiny_engine(tmp_path / "b") as engine:
        assert engine.generate(PROMPT, 1).stats.sampling.temperature == 0.0


def test_b09_default_dtype_follows_config_or_file(tmp_path: Path) -> None:
    from tests.checkpoints import ABSENT

    for i, (config, stored, wanted) in enumerate(
        [
            (tiny_config(torch_dtype="bfloat16"), torch.float32, torch.bfloat16),
            (tiny_config(torch_dtype=ABSENT, dtype="float16"), torch.float32, torch.float16),
            (tiny_config(torch_dtype=ABSENT), torch.bfloat16, torch.bfloat16),
            (tiny_config(torch_dtype=ABSENT), torch.float16, torch.float16),
        ]
    ):
        with tiny_engine(tmp_path / str(i), config, dtype=stored) as engine:
            assert engine.capacity.dtype == wanted
            assert engine.arena.view("embed").dtype == wanted


def test_b09_an_overflow_is_an_error_and_not_token_0(tmp_path: Path) -> None:
    """A value row of the KV cache that fp16 cannot hold; bfloat16 has the range."""
    from tests.checkpoints import tiny_tensors

    config = tiny_config(torch_dtype="bfloat16")
    tensors = tiny_tensors(config, dtype=torch.bfloat16)
    tensors["model.layers.0.self_attn.v_proj.weight"] *= 30_000
    tensors["model.layers.0.self_attn.o_proj.weight"] /= 30_000
    write_model(tmp_path, config, tensors=tensors)
    with mg.load(str(tmp_path), device="cpu") as engine:
        assert engine.capacity.dtype == torch.bfloat16
        assert len(engine.generate(PROMPT, 4).token_ids) == 4
    with mg.load(str(tmp_path), device="cpu", dtype="float16") as engine:
        for _ in range(2):
            with pytest.raises(mg.NumericsError, match=r"not finite.*float16"):
                engine.generate(PROMPT, 4)
    tensors["model.layers.0.self_attn.v_proj.weight"] *= 1_000
    write_model(tmp_path, config, tensors=tensors)
    with pytest.raises(mg.CheckpointError, match=r"v_proj.*does not fit float16"):
        mg.load(str(tmp_path), device="cpu", dtype="float16")


def test_b09_a_large_residual_is_no_fault_of_ours(tmp_path: Path) -> None:
    """The residual stream is fp32: it passes 65,504 in fp16 without harm, and the answer is that of fp32."""
    from tests.checkpoints import tiny_tensors

    tensors = tiny_tensors(tiny_config(), dtype=torch.float16)
    tensors["model.layers.0.mlp.down_proj.weight"] *= 20_000
    write_model(tmp_path, tiny_config(torch_dtype="float16"), tensors=tensors)
    with mg.load(str(tmp_path), device="cpu", dtype="float32") as wide, mg.load(str(tmp_path), device="cpu") as narrow:
        wanted, got = wide.logits(PROMPT), narrow.logits(PROMPT)
        assert wide.arena.view("x_rows").abs().max() > 7e4
        assert torch.isfinite(got).all()
        assert (got - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_reuse_is_of_the_cache_at_the_start(engine: mg.Engine) -> None:
    """Not of the cache when the stream was made: another answer may have used it in between."""
    cold = engine.generate([*PROMPT, 9], 8)
    engine.generate(PROMPT, 1)
    stream = engine.stream([*PROMPT, 9], 8, reuse=True)
    engine.generate([50, *PROMPT], 8)
    list(stream)
    assert stream.completion.token_ids == cold.token_ids
    assert stream.completion.stats.reused_tokens == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": None}, "prompt: expected text or token ids, got NoneType"),
        ({"prompt": b"abc"}, "prompt: expected text or token ids, got bytes"),
        ({"stop": "END"}, "stop: expected a list of strings, got the string 'END'"),
        ({"stop": None}, "stop: expected a list of strings, got NoneType"),
        ({"sampling": {"temperature": 0}}, "sampling: expected a Sampling, got dict; write Sampling"),
        ({"sampling": 0.7}, "sampling: expected a Sampling, got float"),
    ],
)
def test_wrong_arguments_are_named(engine: mg.Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(mg.MonographError, match=message):
        engine.stream(**{"prompt": PROMPT, **arguments})


def test_closing_during_logits_is_said(engine: mg.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread may do."""
    work = engine._decoder._beside_passes

    def close_first(step: Any) -> Any:
        engine.close()
        return work(step)

    monkeypatch.setattr(engine._decoder, "_beside_passes", close_first)
    with pytest.raises(mg.EngineError, match="closed meanwhile"):
        engine.logits(PROMPT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": None}, "model: expected a repository's name, a folder or a .gguf file, got None"),
        ({"model": b"x"}, "model: expected .*, got b'x'"),
        ({"dtype": None}, "dtype: expected auto, .*, got None"),
        ({"dtype": 16}, "dtype: expected auto, .*, got 16"),
    ],
)
def test_wrong_arguments_of_a_load_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(mg.ConfigError, match=message):
        mg.load(**{"model": str(write_model(tmp_path)), "device": "cpu", **arguments})
