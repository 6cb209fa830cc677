"""TCP ports of this machine: `python3 tools/port.py PORT` refuses one that cannot be had, before anything is built.

Runs on any Python 3: nothing is installed yet.
"""

import argparse
import socket
import sys


def free_port(port: int = 0) -> int:
    """A TCP port of the loopback interface that nothing listens on now, `port` if given.

    Raises OSError if that one is in use or not for us, OverflowError if it is no port.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what still closes there is no listener
        probe.bind(("127.0.0.1", port))
        return probe.getsockname()[1]


def open_port(text: str) -> int:
    """The port that `text` names, any free one for 0. Raises argparse's error if a server cannot have it."""
    try:
        return free_port(int(text))
    except (ValueError, OverflowError, OSError) as error:
        reason = "it is no number" if isinstance(error, ValueError) else error
        raise argparse.ArgumentTypeError(f"cannot listen at {text} ({reason}); give another one, or none") from error


if __name__ == "__main__":
    try:
        open_port(sys.argv[1])
    except argparse.ArgumentTypeError as error:
        sys.exit(f"error: PORT: {error}")
