"""Device helpers that several kernels share."""

from __future__ import annotations
