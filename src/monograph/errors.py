"""Everything monograph raises on purpose. A leaf module: it imports nothing of ours.

Each error is also the built-in that a caller would catch for that kind of fault, so code that knows nothing of
monograph (``except ValueError``) still does the right thing.
"""

from __future__ import annotations


class MonographError(Exception):
    """Base of every error that monograph raises on purpose."""


class ConfigError(MonographError, ValueError):
    """A model configuration, setting or argument that is missing, wrong or not supported. Names the field."""


class CheckpointError(MonographError, OSError):
    """A checkpoint that is incomplete, damaged or does not match its configuration. Names the file or tensor."""


class CapacityError(MonographError, MemoryError):
    """What was asked for does not fit: says the need, what is free and the longest length that fits."""


class HubError(MonographError, OSError):
    """The Hugging Face Hub could not supply a file: gated, private, missing, or out of reach."""


class PromptError(MonographError, ValueError):
    """A prompt or a conversation that cannot be run: too long, empty, an unknown token, a refused role."""


class NumericsError(MonographError, ArithmeticError):
    """The model produced a logit that is not finite: the answer would be noise, so there is none."""


class EngineError(MonographError, RuntimeError):
    """An engine that was closed, or is busy with another answer."""
