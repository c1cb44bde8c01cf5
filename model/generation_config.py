"""What the author of a model recommends for generation: the file generation_config.json.

Three layers decide a setting: what the caller says explicitly (0 included), then this file, then the built-in value.
`first_given` of sampling.py is that rule. Nothing here is a demand: keys that are not followed are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from monograph.errors import ConfigError
from monograph.model.config import ModelConfig
from monograph.model.config_fields import MAX_POSITIONS, MAX_VOCAB_SIZE, Fields
from monograph.model.json_file import describe, read_json_object


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Followed by transformers' generate, not by ours: a reader of the file's effect should hear of them.
NOT_FOLLOWED = _names(
    """bad_words_ids begin_suppress_tokens constraints diversity_penalty encoder_no_repeat_ngram_size epsilon_cutoff
    eta_cutoff exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale
    length_penalty min_length min_new_tokens no_repeat_ngram_size num_beams penalty_alpha sequence_bias suppress_tokens
    top_h typical_p"""
)
_OFF: tuple[object, ...] = (None, False, 0, 1, [], {})


@dataclass(frozen=True)
class GenerationDefaults:
    """The settings of a generation_config.json. A field is None (or empty) where the file says nothing.

    Attributes:
        do_sample: Whether the author means tokens to be drawn; greedy otherwise.
        eos_token_ids: Ids that end an answer, beside those of config.json.
        stop_strings: Texts that end an answer.
        not_followed: Keys of the file that change what transformers generates and have no effect here.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    not_followed: tuple[str, ...] = ()

    @classmethod
    def from_folder(cls, path: str | Path, vocab_size: int = MAX_VOCAB_SIZE) -> GenerationDefaults:
        """Read `path`/generation_config.json; without such a file, nothing is recommended."""
        file = Path(path) / "generation_config.json"
        return cls.from_file(file, vocab_size) if file.exists() else cls()

    @classmethod
    def from_file(cls, path: Path | None, vocab_size: int = MAX_VOCAB_SIZE) -> GenerationDefaults:
        """Read a file; None stands for a model without one. Raises ConfigError naming the file and the field."""
        if path is None:
            return cls()
        return cls.from_dict(read_json_object(path, ConfigError), str(path), vocab_size)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], source: str = "generation_config.json", vocab_size: int = MAX_VOCAB_SIZE
    ) -> GenerationDefaults:
        """Read the content of a generation_config.json.

        Args:
            values: The parsed object.
            source: Name of its origin, for error messages.
            vocab_size: Token ids must lie below it.

        Raises:
            ConfigError: A field that is followed has the wrong type or is out of range.
        """
        try:
            return _read(Fields(values), vocab_size)
        except ConfigError as fault:
            raise ConfigError(f"{source}: {fault}") from None

    def sampling(self) -> dict[str, float | int]:
        """Return the recommended sampling settings by name, only those that are given.

        Where the author does not ask for sampling, the recommendation is temperature 0: greedy.
        """
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if not self.do_sample:
            given["temperature"] = 0.0
        elif self.temperature is None:
            given["temperature"] = 1.0
        return given

    def __str__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = [f"{name}={value}" for name, value in given.items() if value is not None and value != ()]
        return ", ".join(shown) or "nothing recommended"


def merged_eos_token_ids(config: ModelConfig, defaults: GenerationDefaults) -> tuple[int, ...]:
    """Return every id that ends an answer: those of config.json, then those of generation_config.json, each once."""
    return tuple(dict.fromkeys((*config.eos_token_ids, *defaults.eos_token_ids)))


def _read(given: Fields, vocab_size: int) -> GenerationDefaults:
    do_sample = given.flag("do_sample", False) if "do_sample" in given else None
    return GenerationDefaults(
        do_sample=do_sample,
        temperature=_ranged(given, "temperature", 0.0, None),
        top_k=given.integer("top_k", 0, 2**31 - 1),
        top_p=_ranged(given, "top_p", 0.0, 1.0),
        min_p=_ranged(given, "min_p", 0.0, 1.0),
        repetition_penalty=given.number("repetition_penalty"),
        max_new_tokens=given.integer("max_new_tokens", 1, MAX_POSITIONS),
        bos_token_id=given.integer("bos_token_id", 0, vocab_size - 1),
        eos_token_ids=given.token_ids("eos_token_id", vocab_size),
        stop_strings=_texts(given, "stop_strings"),
        not_followed=tuple(name for name in NOT_FOLLOWED if given.values.get(name) not in _OFF),
    )


def _ranged(given: Fields, name: str, low: float, high: float | None) -> float | None:
    value = given.number(name, above=-1.0)
    if value is None or (value >= low and (high is None or value <= high)):
        return value
    wanted = f"a number in {low:g}..{high:g}" if high is not None else f"a number of at least {low:g}"
    raise ConfigError(f"{name}: expected {wanted}, got {describe(given.values[name])}")


def _texts(given: Fields, name: str) -> tuple[str, ...]:
    value = given.values.get(name)
    if value is None:
        return ()
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{name}: expected a text or a list of texts, got {describe(value)}")
    return tuple(texts)
