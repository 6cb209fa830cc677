"""What `make demo` and `make serve-tiny` say before and around their server."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from tools import demo, draw_tree, server

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


def test_a_server_that_ends_by_itself_is_said_and_is_an_error(monkeypatch, tmp_path):
    answer = {"text": "", "output_ids": [1], "meta_info": {"spec_accept_length": 1.0}}
    up = Mock(**{"generate.return_value": [answer], "process.poll.side_effect": [None, -9], "log": tmp_path / "log"})
    monkeypatch.setattr(server, "running", lambda *_, **__: nullcontext(up))
    monkeypatch.setattr(demo, "print_evidence", lambda _up: None)
    monkeypatch.setattr(draw_tree, "best_step", lambda *_: "")
    monkeypatch.setattr("sys.argv", ["demo", "--serve"])
    with pytest.raises(SystemExit, match=r"error: the server ended by itself \(-9\): see .*log"):
        demo.main()


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


@pytest.mark.parametrize("target", ["demo", "serve-tiny", "serve"])
def test_make_refuses_a_port_before_it_builds(target, tmp_path):
    """Where nothing is that could build."""
    (tmp_path / "tools").mkdir()
    for name in ("Makefile", "tools/port.py"):
        shutil.copy(README.parent / name, tmp_path / name)

    def make(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", target, "MODEL=m", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    refused = make("PORT=70000")
    assert refused.returncode == 2 and refused.stdout == ""
    error, _ = refused.stderr.splitlines()  # the other line is make's
    assert "error: PORT: cannot listen at http (it is no number); give" in make("PORT=http").stderr
    assert error.startswith("error: PORT: cannot listen at 70000 (")
    assert make("PORT=1", "--dry-run").stdout.splitlines()[-1].count("--port 1") == 1
    assert "--port" not in make("--dry-run").stdout and "setup.py" in make().stderr


def test_the_readme_shows_how_to_read_a_tree():
    assert f"one of its trees {demo.LEGEND}: ..." in README.read_text()
