"""What `make demo` and `make serve-tiny` say before and around their server."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
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


def bare_make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`make` in a clone without .venv that has no tools but those that run before it is made."""
    (folder / "tools").mkdir(exist_ok=True)
    for name in ("Makefile", "tools/port.py", "tools/gpu.py"):
        shutil.copy(README.parent / name, folder / name)
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", ["demo", "serve-tiny", "serve"])
def test_make_refuses_a_port_before_it_builds(target, tmp_path):
    make = partial(bare_make, tmp_path, f"PYTHON={sys.executable}", target, "MODEL=m")
    refused = make("PORT=70000")
    assert refused.returncode == 2 and refused.stdout == ""
    error, _ = refused.stderr.splitlines()  # the other line is make's
    assert error.startswith("error: PORT: cannot listen at 70000 (")
    assert "error: PORT: cannot listen at http (it is no number); give" in make("PORT=http").stderr
    assert make("PORT=1", "--dry-run").stdout.splitlines()[-1].count("--port 1") == 1
    assert "--port" not in make("--dry-run").stdout
    assert ("gpu.py" if target == "serve" else "setup.py") in make("--dry-run").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve", "set MODEL to a folder or a Hugging Face name: make serve MODEL="),
        ("bench-e2e", "set MODEL to a folder or a Hugging Face name: make bench-e2e MODEL="),
        ("install KERNELS=no", "KERNELS=no: give KERNELS=0 to leave the CUDA kernels out, or nothing"),
        ("check PYTHON=/nope", "PYTHON=/nope: no such program; install Python 3.11 or 3.12"),
    ],
)
def test_make_refuses_its_variables_before_anything_is_downloaded(words, said, tmp_path):
    done = bare_make(tmp_path, *words.split())
    assert said in done.stderr and len(done.stderr.splitlines()) == 1
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.skipif(shutil.which("cc") is None, reason="compiles a stand-in for the driver: needs cc")
@pytest.mark.parametrize("devices", [0, 1])
def test_make_serve_asks_the_driver_before_anything_is_downloaded(devices, tmp_path, monkeypatch):
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(f"int cuInit(int f) {{ return 0; }} int cuDeviceGetCount(int *n) {{ *n = {devices}; return 0; }}")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    done = bare_make(tmp_path, "serve", "MODEL=m")
    assert done.returncode == 2 and ("setup.py" if devices else "error: no CUDA device here") in done.stderr


def test_make_clean_without_venv_says_that_it_did_nothing(tmp_path):
    assert bare_make(tmp_path, "clean").returncode == 0
    (tmp_path / "build").mkdir()
    done = bare_make(tmp_path, "clean")
    assert done.returncode == 2 and done.stderr.startswith("error: build/ is left as it is")


def test_the_readme_shows_how_to_read_a_tree():
    assert f"one of its trees {demo.LEGEND}: ..." in README.read_text()
