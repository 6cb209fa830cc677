"""Errors meant for the reader of a terminal, and progress lines."""

import re
import time

FORK = ".venv/bin/python -m tools.fork"
"""How messages tell the reader to call the tool where make has no word for it."""
INTERRUPTED = "interrupted: run the same command again to go on"
_FULL_DISK = re.compile(r"No space left|Out of diskspace|File too large|Disk quota exceeded")
_START_S = time.monotonic()


class ForkError(Exception):
    """A failure the user can act on. Its text is one line: what is wrong, with the file or value, and what to do."""


def is_full_disk(text: str) -> bool:
    """Whether a program's error text says that it could not write for lack of room."""
    return _FULL_DISK.search(text) is not None


def say(message: str) -> None:
    """Print one progress line with the seconds since the command began."""
    print(f"[{time.monotonic() - _START_S:5.1f}s] {message}", flush=True)
