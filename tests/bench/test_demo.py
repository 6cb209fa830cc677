"""What `make demo` and `make serve-tiny` say before and around their server."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tools import demo, server

README = Path(__file__).resolve().parents[2] / "README.md"


def start(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run the demo up to the start of its server; the server's port."""
    ports = []

    def running(*_, port: int, **__):
        ports.append(port)
        raise InterruptedError

    monkeypatch.setattr(server, "running", running)
    monkeypatch.setattr("sys.argv", ["demo", "--serve", *words])
    with pytest.raises(InterruptedError):
        demo.main()
    return ports[0]


def test_the_address_is_said_before_the_server_is_up(monkeypatch, capsys):
    port = start(monkeypatch)
    assert f"to answer at http://127.0.0.1:{port} ..." in capsys.readouterr().out
    assert start(monkeypatch, "--port", str(port)) == port


@pytest.mark.parametrize("port", ["used", "70000", "http"])
def test_a_port_that_cannot_be_had_is_refused_at_once(port, monkeypatch, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1]) if port == "used" else port
        monkeypatch.setattr("sys.argv", ["demo", "--serve", "--port", port])
        with pytest.raises(SystemExit):
            demo.main()
    assert f"argument --port: cannot listen at {port} (" in capsys.readouterr().err


def test_the_readme_shows_how_to_read_a_tree():
    assert f"one of its trees {demo.LEGEND}: ..." in README.read_text()
