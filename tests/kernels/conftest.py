"""Kernel tests import the overlay and tools from the checkout, so that they run without an installed wheel."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for path in (ROOT, ROOT / "overlay", Path(__file__).parent):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
