"""What all test folders share: fixtures, and what ends a session."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import server

REPOSITORY = Path(__file__).resolve().parent.parent
EXIT_CODE = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Tests are of the CPU engine and leave a GPU alone, but for the kernels' where these are run by themselves."""
    kernels = REPOSITORY / "tests" / "kernels"
    if all(Path(argument.partition("::")[0]).resolve().is_relative_to(kernels) for argument in config.args):
        return
    from sglang_sm120.cpu import standin

    os.environ.setdefault(standin.ENGINE, "1")
    standin.install_if_needed()


def pytest_sessionstart(session: pytest.Session) -> None:
    """A signal that ends a process ends the session, not the test that happens to run."""

    def leave(code: int) -> None:
        session.config.stash[EXIT_CODE] = code
        # pytest.exit's exception is an Exception: a handler on the way, or an event loop, would keep it.
        raise KeyboardInterrupt(signal.Signals(code - 128).name)

    server.exit_on_signals(leave)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where a signal ended the session, the exit code says which."""
    session.exitstatus = session.config.stash.get(EXIT_CODE, session.exitstatus)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Code under test leaves the handlers alone: with its own, a signal would end one test and not the session."""
    before = [signal.getsignal(number) for number in server.ENDING_SIGNALS]
    yield
    assert [signal.getsignal(number) for number in server.ENDING_SIGNALS] == before, (
        "a test may not call exit_on_signals"
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random Kimi-shaped checkpoint of `make demo`, made once a session."""
    from tools import tiny_model as maker

    return maker.write(tmp_path_factory.mktemp("tiny-mla"))
