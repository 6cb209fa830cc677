"""Errors meant for the reader of a terminal, and progress lines."""

import time

_START_S = time.monotonic()


class ForkError(Exception):
    """A failure the user can act on. Its text is one line: what is wrong, with the file or value, and what to do."""


def say(message: str) -> None:
    """Print one progress line with the seconds since the command began."""
    print(f"[{time.monotonic() - _START_S:5.1f}s] {message}", flush=True)
