from __future__ import annotations

import pytest

from monograph.arena.units import format_nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1_048_524, "1023.9 KiB"),
        (1_048_575, "1.0 MiB"),  # not 1024.0 KiB
        (1 << 30, "1.0 GiB"),
        (16 << 30, "16.0 GiB"),
        (5 << 40, "5.0 TiB"),
        (3000 << 50, "3,000.0 PiB"),
    ],
)
def test_format_nbytes(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text.replace("1023.9", "1,023.9")
