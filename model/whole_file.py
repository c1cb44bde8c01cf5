"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file beside ``path`` to write to, which takes its name, and the place of what had it, at the end.

    Args:
        path: Its final name.

    Raises:
        OSError: It cannot be written; nothing is left of it, as after any other exception, and what was there is as it
            was.
    """
    unfinished = path.with_name(f".{path.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def write_whole(path: str | Path, text: str) -> None:
    """Write text as UTF-8. A file that is there is replaced at the end; a link is followed; a device is written to.

    Args:
        path: Where to.
        text: What.

    Raises:
        OSError: It cannot be written; nothing is left of it, and a file that was there is as it was.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a pipe or a terminal; a folder raises
        return
    with whole_file(path) as file:
        file.write(text.encode())
