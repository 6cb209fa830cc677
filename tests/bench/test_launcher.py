"""However the process that started a server ends, the server's whole process tree ends too."""

from __future__ import annotations

import http.server
import os
import pty
import select
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from tools import server

ROOT = Path(__file__).resolve().parents[2]

# Stands in for the real server: it and a child of its own, deaf to what a terminal sends, hold the fifo open.
STAND_IN = """
import http.server, os, signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.alarm(120)
fifo = os.open(os.environ["FIFO"], os.O_WRONLY)
if os.fork() == 0:
    time.sleep(120)
    os._exit(0)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/health":
            os.write(fifo, b"asked")
            time.sleep(120)
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
# A thread waits for the server's answer, as in a bench: it must not hold up the exit.
ASK = """
    with server.running(Path("model"), Path(os.environ["LOG"]), defaults=()) as up, ThreadPoolExecutor(1) as pool:
        pool.submit(up.get, "/generate").result()
"""
IMPORTS = """
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tools import server
"""
TOOL = f"{IMPORTS}server.exit_on_signals()\nif True:{ASK}"
TESTS = f"""{IMPORTS}
def test_before(): pass
def test_asks():{ASK}
def test_after(): assert False
"""


class Fifo:
    """Tells when the stand-in has been asked, and when no process of it is left."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def wait(self, event: int) -> None:
        """Wait for POLLIN (asked) or POLLHUP (gone)."""
        poll = select.poll()
        poll.register(self._file, event)
        ((_, got),) = poll.poll(60_000) or [(0, 0)]
        assert got & event, "the server still runs" if event == select.POLLHUP else "the server was not asked"


def put_in_place(stand_in: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Fifo:
    """Make `stand_in` what is found in sglang's place."""
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").touch()  # or the installed sglang would be found, although it comes later
    (folder / "sglang" / "launch_server.py").write_text(stand_in)
    paths = f"{folder}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    for name, value in {"PYTHONPATH": paths, "FIFO": folder / "fifo", "LOG": folder / "log"}.items():
        monkeypatch.setenv(name, str(value))
    return Fifo(folder / "fifo")


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fifo:
    """Of the stand-in, which the launcher will find in sglang's place."""
    return put_in_place(STAND_IN, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_ends_tool_and_server(fifo, number, code):
    tool = subprocess.Popen([sys.executable, "-c", TOOL], cwd=ROOT)
    fifo.wait(select.POLLIN)
    tool.send_signal(number)
    assert tool.wait(20) == code
    fifo.wait(select.POLLHUP)


@pytest.mark.parametrize("serve", [["--serve"], []])
def test_ctrl_c_while_the_demo_starts_is_one_line_and_leaves_nothing(serve, tmp_path, monkeypatch):
    never_ready = STAND_IN.replace('self.path != "/health"', "True")
    fifo = put_in_place(never_ready, tmp_path, monkeypatch)
    command = [sys.executable, "-m", "tools.demo", *serve, "--work", str(tmp_path)]
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # as in a terminal, wherever the tests run
    demo = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=heeded)
    fifo.wait(select.POLLIN)
    demo.send_signal(signal.SIGINT)
    _, said = demo.communicate(timeout=20)
    assert (demo.returncode, said) == (130, "interrupted: the server has ended\n")
    fifo.wait(select.POLLHUP)


def test_another_server_at_the_port_is_not_taken_for_ours(tmp_path, monkeypatch):
    """Both were started while the port was free; ours comes too late, and ends."""
    slow = STAND_IN.replace("http.server.HTTPServer(", "time.sleep(2)\nhttp.server.HTTPServer(").replace(
        'os.open(os.environ["FIFO"], os.O_WRONLY)', "1"
    )
    put_in_place(slow, tmp_path, monkeypatch)
    answering = type("Answering", (http.server.SimpleHTTPRequestHandler,), {"do_GET": answer_at_once})
    with http.server.HTTPServer(("127.0.0.1", 0), answering) as other:
        Thread(target=other.serve_forever, daemon=True).start()
        port = other.server_address[1]
        with (
            pytest.raises(RuntimeError, match="the server exited with"),
            server.running(Path("model"), tmp_path / "log", defaults=(), port=port),
        ):
            pass
        other.shutdown()


def answer_at_once(handler: http.server.BaseHTTPRequestHandler) -> None:
    """200, whatever was asked."""
    handler.send_response(200)
    handler.end_headers()


def test_signals_on_each_others_heels_end_tool_and_server(fifo):
    """As a service manager sends them; whichever comes first."""
    tool = subprocess.Popen([sys.executable, "-c", TOOL], cwd=ROOT)
    fifo.wait(select.POLLIN)
    tool.send_signal(signal.SIGTERM)
    tool.send_signal(signal.SIGHUP)
    assert tool.wait(20) in (129, 143)
    fifo.wait(select.POLLHUP)


def test_a_signal_that_another_thread_gets_ends_the_tool():
    """Linux gives both of two at once to the thread that is first to run; the main thread waits on."""
    waiting = f"""{IMPORTS}
import signal, threading
server.exit_on_signals()
threading.Timer(1, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)).start()
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""
    assert subprocess.Popen([sys.executable, "-c", waiting], cwd=ROOT).wait(20) == 143


def test_what_a_forked_child_gets_is_not_its_parents():
    forking = f"""{IMPORTS}
import signal, time
server.exit_on_signals()
child = os.fork()
if not child:
    time.sleep(30)
time.sleep(0.5)
os.kill(child, signal.SIGTERM)
os.waitpid(child, 0)
time.sleep(0.5)
"""
    assert subprocess.Popen([sys.executable, "-c", forking], cwd=ROOT).wait(20) == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_while_a_server_is_ended_does_not_hold_up_the_exit(fifo, number):
    """The handler ends the server that `_stop` waits for already."""
    slow = f"""{IMPORTS}
import signal, subprocess
server.exit_on_signals()
process = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, start_new_session=True)
server._processes.add(process)
signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), {number}))
os.killpg = lambda *_: signal.setitimer(signal.ITIMER_REAL, 0.5)  # it does not die at once
threading = __import__("threading")
threading.Timer(3, process.kill).start()
server._stop(process)
"""
    tool = subprocess.Popen([sys.executable, "-c", slow], cwd=ROOT)
    assert tool.wait(20) == 128 + number


def test_a_closed_terminal_ends_tool_and_server(fifo):
    screen, terminal = pty.openpty()
    in_terminal = 'exec <"$0"; "$@"; true'  # a session's leader that opens a terminal gets it
    shell = subprocess.Popen(
        ["sh", "-c", in_terminal, os.ttyname(terminal), sys.executable, "-c", TOOL], cwd=ROOT, start_new_session=True
    )
    os.close(terminal)
    fifo.wait(select.POLLIN)
    os.close(screen)
    shell.wait(20)
    fifo.wait(select.POLLHUP)


def test_nohup_is_heeded(fifo):
    tool = subprocess.Popen(["nohup", sys.executable, "-c", TOOL], cwd=ROOT, stdout=subprocess.DEVNULL)
    fifo.wait(select.POLLIN)
    tool.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        tool.wait(1)
    tool.terminate()
    assert tool.wait(20) == 143


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_test_session(fifo, tmp_path, number, code):
    (tmp_path / "test_asking.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", "/dev/null", str(tmp_path)]
    session = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    fifo.wait(select.POLLIN)
    session.send_signal(number)
    said, _ = session.communicate(timeout=30)
    assert session.returncode == code, said
    fifo.wait(select.POLLHUP)
    assert "1 passed" in said and number.name in said
    assert "failed" not in said and "error" not in said
