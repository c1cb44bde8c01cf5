"""Named shapes are those of the real models, and random weights keep activations healthy."""

from __future__ import annotations

import pytest
import torch

from bench.shapes import SHAPES, caches, random_cache, random_decoder
from monograph.model.gguf_config import config_from_gguf
from monograph.model.layout import Capacity, plan_layout
from monograph.model.rope import rope_table
from monograph.model.step_nbytes import kv_row_nbytes, step_nbytes
from tests import smollm2
from tests.bench.tiny import CONFIG, tiny_step

CPU = torch.device("cpu")


# Parameters that the authors publish, and bytes a step reads by the project's own tables.
@pytest.mark.parametrize(
    ("name", "parameters", "gigabytes", "kv_kib"),
    [("llama-3.2-1b", 1_235_814_400, 2.472, 32), ("llama-3.1-8b", 8_030_261_248, 15.01, 128)],
)
def test_sizes_are_those_of_the_real_models(name: str, parameters: int, gigabytes: float, kv_kib: int) -> None:
    config = SHAPES[name]
    layout = plan_layout(config, Capacity.for_model(config, 131072, torch.bfloat16))
    weights = [s for s in layout.entries if s.lifetime == "weight" and s.name != "rope_table"]
    assert sum(slot.nbytes for slot in weights) == 2 * parameters
    assert step_nbytes(layout, config, 0) / 1e9 == pytest.approx(gigabytes, abs=0.005)
    assert kv_row_nbytes(layout, config) == kv_kib * 1024
    assert step_nbytes(layout, config, 1024) - step_nbytes(layout, config, 0) == 1024 * kv_kib * 1024


def test_smollm2_is_as_its_file_says() -> None:
    named = SHAPES["smollm2-135m"]
    real = config_from_gguf(smollm2.path())
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads", "num_kv_heads", "head_dim")
    for field in (*same, "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_ids"):
        assert getattr(named, field) == getattr(real, field), field
    assert named.rope.theta == real.rope.theta
    assert named.rms_norm_eps == pytest.approx(real.rms_norm_eps)


def test_weights_follow_the_seed() -> None:
    prints = []
    for seed in (0, 0, 1):
        decoder = random_decoder(CONFIG, torch.bfloat16, 32, CPU, seed=seed)
        prints.append(decoder.arena.fingerprint())
        decoder.close()
    assert prints[0] == prints[1] != prints[2]


def test_weights_are_healthy() -> None:
    step = tiny_step()
    arena = step.arena
    for name, std in (("layers.1.qkv", CONFIG.hidden_size**-0.5), ("layers.0.down", CONFIG.intermediate_size**-0.5)):
        assert float(arena.view(name).std()) == pytest.approx(std, rel=0.1)
    assert float(arena.view("final_norm").mean()) == pytest.approx(1, abs=0.05)
    assert torch.allclose(arena.view("rope_table"), rope_table(CONFIG, 64), rtol=0, atol=1e-7)
    assert 0.2 < float(step.reference_logits(40).std()) < 5
    assert float(arena.view("x").std()) < 20


def test_cache_rows() -> None:
    decoder = random_decoder(CONFIG, torch.float32, 64, CPU)
    random_cache(decoder.arena, CONFIG, std=3.0, rows=40)
    for keys, values in caches(decoder.arena, CONFIG):
        assert float(keys[:, :40].std()) == pytest.approx(3, rel=0.1)
        assert float(values[:, :40].std()) == pytest.approx(1, rel=0.1)
        assert not keys[:, 40:].any()
    decoder.close()
