"""``python -m monograph``: the same as the ``monograph`` command."""

from __future__ import annotations

import sys

from monograph.cli import main

if __name__ == "__main__":
    sys.exit(main())
