"""Paths for the tests that need no server."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "overlay"))
sys.path.insert(0, str(ROOT))
