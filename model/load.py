"""``monograph.load``: the door to an engine, which is open before PyTorch is imported."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from monograph.model.early import beginning
from monograph.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from monograph.model.engine import Engine
    from monograph.model.tiles import Tune
    from monograph.model.upload import Progress


def load(
    model: str,
    *,
    revision: str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    max_seq_len: int | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    progress: Progress | None = None,
    debug: bool = False,
    tune: Tune = "auto",
) -> Engine:
    """Load a Llama-style model.

    Args:
        model: "org/name" on the Hugging Face Hub, a folder in its form, or a .gguf file.
        revision: Branch, tag or commit on the Hub.
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1".
        dtype: Of weights and KV cache: "auto" (the checkpoint's), "bfloat16", "float16" or "float32".
        max_seq_len: Tokens of prompt and answer together that the arena has room for; None for the model's own
            maximum, or the longest that fits.
        token: Hub access token; by default the one that is logged in.
        local_files_only: Never ask the network.
        progress: Called while weights are read, with the bytes so far and in all.
        debug: On a GPU, check guards and addresses before every replay: slow, and finds what strays.
        tune: Block sizes of the decode kernels on a GPU. "auto": those that an earlier tuning of this shape on this GPU
            has kept on disk, else shipped ones, else the kernels' own. True: the same, but where nothing is kept, tune
            now, which takes half a minute, and keep it. "off" or False: leave what is kept aside. They differ in speed,
            and in the last bits of logits.

    Returns:
        The engine, ready to answer. Close it, or use it in a with statement, to free its memory.

    Raises:
        HubError: The Hub could not supply the files.
        ConfigError: The model is of a kind that is not supported, or an argument is wrong.
        CheckpointError: Files are missing, damaged or do not match the configuration.
        CapacityError: It does not fit; says the need, what is free and the longest length that fits.
    """
    started = time.perf_counter()
    tokenizer = None
    with beginning(device) as begun:
        if begun is not None:
            tokenizer = _read_ahead(model)  # holds the interpreter's lock, which loading libraries does not need
            begun.hash_triton()
        from monograph.model.engine import load_engine
    return load_engine(
        model,
        revision=revision,
        device=device,
        dtype=dtype,
        max_seq_len=max_seq_len,
        token=token,
        local_files_only=local_files_only,
        progress=progress,
        debug=debug,
        tune=tune,
        tokenizer=tokenizer,
        started=started,
    )


def _read_ahead(model: str) -> Tokenizer | None:
    """The tokenizer of a model in a folder here. None for any other; and if it is damaged, which is said later: what
    is wrong with the configuration comes first."""
    try:
        folder = Path(model).expanduser()
        return Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    except Exception:
        return None
