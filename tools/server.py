"""Start the installed server on the CPU, talk to it, stop it. Used by the demo, the tests and the bench."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from tools.port import free_port

# Small pools keep start-up short: sizing them from free memory takes longer than all the rest. An idle server that
# sleeps leaves its core to the one that is asked.
CPU_FLAGS = shlex.split(
    "--device cpu --attention-backend sm120_mla --max-total-tokens 16384 --max-running-requests 16 "
    "--context-length 8192 --skip-server-warmup --sleep-on-idle"
)
READY_TIMEOUT_S = 300
KILLED_WITHIN_S = 30
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# OpenMP's threads spin where they wait, by default: beside another busy process a step of milliseconds takes seconds.
SERVER_ENV = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
# Tells it from a server on this machine's GPUs, if there are some (sglang_sm120/cpu/standin.py).
CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1"}
# Beside the server a shell waits for the end of its input, a pipe that this process holds: however this process ends,
# the server's process group is killed. The kernel's parent-death signal would not do: it comes when the thread that
# started the server ends, and misses the server's children.
GUARDED = 'exec 3<&0 </dev/null; { read -r _ <&3; kill -KILL 0; } & exec "$@" 3<&-'


@dataclass
class Server:
    """A running server: its base URL, the file its output goes to, and its process, the parent of all others of it."""

    url: str
    log: Path
    process: subprocess.Popen

    def post(self, path: str, body: dict[str, Any] | bytes, timeout_s: float = 600) -> Any:
        """POST JSON (bytes are sent as they are), return JSON. Raises RuntimeError with the server's own refusal."""
        return json.loads(self.post_text(path, body, timeout_s))

    def post_text(self, path: str, body: dict[str, Any] | bytes, timeout_s: float = 60) -> str:
        """As `post`, for answers that are not JSON."""
        return b"".join(self.stream(path, body, timeout_s)).decode()

    def stream(self, path: str, body: dict[str, Any] | bytes, timeout_s: float = 60) -> Iterator[bytes]:
        """As `post`, but the lines of the answer as they come; `timeout_s` holds for each."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, {"Content-Type": "application/json"})
        try:
            with _open(request, timeout=timeout_s) as response:
                yield from response
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path} answered {error.code}: {error.read().decode(errors='replace')}") from error

    def get(self, path: str, timeout_s: float = 60) -> str:
        """GET, return the body as text."""
        with _open(self.url + path, timeout=timeout_s) as response:
            return response.read().decode()

    def info(self) -> dict[str, Any]:
        """Its flags and, under `internal_states`, what each of its schedulers says of itself."""
        return json.loads(self.get("/server_info"))

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **sampling: Any) -> list[dict[str, Any]]:
        """Continue prompts given as token ids, all in one request; greedy unless `sampling` says otherwise.

        Each answer has `output_ids` and upstream's `meta_info`.
        """
        body = {"input_ids": [list(p) for p in prompts], "sampling_params": greedy_sampling(max_new_tokens) | sampling}
        return self.post("/generate", body)


def greedy_sampling(new_tokens: int) -> dict[str, Any]:
    """Sampling parameters of exactly so many greedy tokens."""
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}


# The server is on this machine: no proxy that the environment names leads to it.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
_processes: set[subprocess.Popen] = set()


def exit_on_signals(leave: Callable[[int], object] = sys.exit) -> None:
    """At SIGTERM (of `timeout`, say) and SIGHUP (of a closed terminal) end every server and `leave(128 + signal)`.

    For the start of a process, not for what tests call: the handlers are the whole process's. The servers end first:
    threads that wait for one would else hold up the exit.
    """

    def end(number: int, _: object) -> None:
        for again in ENDING_SIGNALS:  # `timeout` sends one twice, service managers send both
            signal.signal(again, signal.SIG_IGN)
        for process in tuple(_processes):
            _stop(process)
        leave(128 + number)

    for number in ENDING_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(number, end)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # what a child gets is not for us
    threading.Thread(target=_wake_main_thread, args=(reader,), daemon=True).start()


def _wake_main_thread(reader: int) -> None:
    """Send the main thread, in which handlers run, the first of ENDING_SIGNALS once more.

    Of two at once Linux may give both to another thread; the main thread would go on to wait, for a lock say, forever.
    """
    while (number := os.read(reader, 1)[0]) not in ENDING_SIGNALS:
        pass
    signal.pthread_kill(threading.main_thread().ident or 0, number)


@contextmanager
def running(
    model: Path,
    log: Path,
    flags: Sequence[str] = (),
    env: dict[str, str] | None = None,
    defaults: Sequence[str] = CPU_FLAGS,
    ready_timeout_s: float = READY_TIMEOUT_S,
    port: int | None = None,
) -> Iterator[Server]:
    """Serve `model` with this interpreter's `sglang`, on the CPU by default; later `flags` override the `defaults`.

    Without a `port` a free one is taken.
    Raises RuntimeError with the end of the log if the server dies or is not ready in time.
    """
    port = port or free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            ["sh", "-c", GUARDED, "sh", *command, *defaults, *flags],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | SERVER_ENV | (CPU_ENV if _device(*defaults, *flags) == "cpu" else {}) | (env or {}),
        )
    _processes.add(process)
    server = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        _wait_ready(server, port, ready_timeout_s)
        yield server
    finally:
        _stop(process)
        _processes.discard(process)


def _device(*arguments: str) -> str:
    """What the last --device of a server says, "" if there is none."""
    return next((value for flag, value in reversed([*pairwise(arguments)]) if flag == "--device"), "")


def _wait_ready(server: Server, port: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (code := server.process.poll()) is not None:
            raise RuntimeError(f"the server exited with {code}; the end of {server.log}:\n{_tail(server.log)}")
        with suppress(OSError):  # urllib's are such
            server.get("/health", timeout_s=30)
            if _listens(server.process, port):
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready in {timeout_s:.0f} s; the end of {server.log}:\n{_tail(server.log)}")


def _listens(process: subprocess.Popen, port: int) -> bool:
    """Whether it is this server that answers there: another one may have taken the port since it was found free."""
    with suppress(psutil.Error):  # it has just ended
        parent = psutil.Process(process.pid)
        sockets = [s for one in (parent, *parent.children(recursive=True)) for s in one.net_connections("tcp")]
        return any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets)
    return False


def _stop(process: subprocess.Popen) -> None:
    """End the whole session: the scheduler and detokenizer are children of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # Without a limit a handler that interrupts this wait could not wait for the same process: the wait holds a lock.
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_WITHIN_S)
    assert process.stdin is not None  # the guard's pipe
    process.stdin.close()


def _tail(log: Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
