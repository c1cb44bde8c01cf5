"""Byte counts as people read them."""

from __future__ import annotations


def format_nbytes(nbytes: int) -> str:
    """Formats a byte count with one decimal in the largest binary unit that keeps it at or above 1.

    Args:
        nbytes: Bytes, zero or more.

    Returns:
        ``"640 B"``, ``"1.9 GiB"``; whole bytes have no decimal.
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    units = ("KiB", "MiB", "GiB", "TiB", "PiB")
    power = 1
    while power < len(units) and round(nbytes / 1024**power, 1) >= 1024:
        power += 1
    return f"{nbytes / 1024**power:,.1f} {units[power - 1]}"
