"""The sliding window of a config.json: how far back a layer attends, and how long a sequence it leaves undisturbed.

Up to as many tokens as the window is wide, a window hides nothing, and attention to everything is the same. That is
what is supported: a model with a window runs up to that length.
"""

from __future__ import annotations

from collections.abc import Collection

from monograph.errors import ConfigError
from monograph.model.config_fields import MAX_POSITIONS, Fields
from monograph.model.family import Family
from monograph.model.json_file import describe

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Layers below this have no window, where a file does not say.
_DEFAULT_MAX_WINDOW_LAYERS = 28


def read_window(fields: Fields, family: Family, num_layers: int, layers_without_rope: Collection[int]) -> int | None:
    """Read the window of the layers that have one.

    Args:
        fields: The content of a config.json.
        family: Of the model.
        num_layers: Of the model.
        layers_without_rope: In some families, those that have a window where the file does not say.

    Returns:
        The number of positions, its own among them, that a position attends to at most; None if no layer is limited.

    Raises:
        ConfigError: A family without windows has one, or fields contradict each other. The message names the field.
    """
    kinds = _layer_types(fields, family, num_layers)
    use = fields.values.get("use_sliding_window")
    use = fields.flag("use_sliding_window", False) if family.windows != "none" else use
    if family.windows == "none":
        if use is not None and use is not False:
            raise ConfigError(f"use_sliding_window: expected null or false, got {describe(use)}; not supported")
        window = fields.values.get("sliding_window")
        if window is not None and use is not False and (window != 0 or isinstance(window, bool)):
            raise ConfigError(f"sliding_window: expected null for {family.name}, got {describe(window)}; not supported")
        return None
    if family.windows == "every layer":
        window = _window(fields, family)
        if window is None and kinds is not None and _SLIDING in kinds:
            raise ConfigError(f"layer_types: expected only {_FULL!r} without a sliding_window, got {_SLIDING!r}")
        return window
    if kinds is None and family.windows == "layers without RoPE":
        is_limited = use is True and len(layers_without_rope) > 0
    elif kinds is None:
        first = fields.integer("max_window_layers", 0, MAX_POSITIONS)
        is_limited = use is True and (_DEFAULT_MAX_WINDOW_LAYERS if first is None else first) < num_layers
    else:
        is_limited = _SLIDING in kinds
    if not is_limited:
        return None
    window = _window(fields, family) if use else None
    if window is None and kinds is not None:
        raise ConfigError(
            f"layer_types: expected only {_FULL!r}, since use_sliding_window or sliding_window is off, got {_SLIDING!r}"
        )
    return window


def _window(fields: Fields, family: Family) -> int | None:
    if "sliding_window" not in fields.values:
        return family.sliding_window
    return fields.integer("sliding_window", 2, MAX_POSITIONS)


def _layer_types(fields: Fields, family: Family, num_layers: int) -> list[str] | None:
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return None
    known = (_FULL,) if family.windows == "none" else (_FULL, _SLIDING)
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in known:
            expected = " or ".join(repr(each) for each in known)
            raise ConfigError(f"layer_types: expected only {expected}, got {describe(kind)}; not supported")
    if not isinstance(kinds, list):
        raise ConfigError(f"layer_types: expected a list, got {describe(kinds)}")
    if len(kinds) != num_layers:
        raise ConfigError(f"layer_types: expected {num_layers} entries (num_hidden_layers), got {len(kinds)}")
    return kinds
