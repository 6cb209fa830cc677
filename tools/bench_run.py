"""A run of a bench: servers that are up at once and take turns, what they have given so far, and how they are asked."""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import server

GPU_FLAGS = shlex.split(
    "--dtype bfloat16 --page-size 1 --disable-prefill-cuda-graph --skip-server-warmup --sampling-backend pytorch "
    "--sleep-on-idle --random-seed 1 --max-running-requests 16 --chunked-prefill-size 8192 "
    "--mem-fraction-static 0.6 --cuda-graph-bs-decode 1 4 16"
)
OURS = ["--attention-backend", "sm120_mla"]
SIMULATED_ACCEPT_LEN = 4
START_TIMEOUT_S = 300  # four beside each other took 156 s where nothing was compiled yet
REQUEST_TIMEOUT_S = 45
# Of steps or tokens, until the requests of a batch are sure to run together.
MOST_FEW_STEPS = 512


@dataclass
class Run:
    """Servers that are up, the results so far, and when to stop measuring."""

    out: Path
    deadline: float
    ups: dict[str, server.Server] = field(default_factory=dict)
    stacks: dict[str, ExitStack] = field(default_factory=dict)
    results: dict[str, Any] = field(
        default_factory=lambda: {"rows": [], "prefill": [], "equal": {}, "metrics": {}, "absent": {}}
    )
    lock: threading.Lock = field(default_factory=threading.Lock)

    def late(self) -> bool:
        """Whether the time for measuring is over."""
        return time.monotonic() > self.deadline

    def save(self) -> None:
        """Write what there is: a run that is cut short keeps it."""
        with self.lock:
            write_result(self.out / "server-run.json", self.results)

    def note_equal(self, pair: str, found: dict[str, Any]) -> None:
        """Keep how two servers' greedy tokens compare."""
        with self.lock:
            self.results["equal"][pair] = found
        print(f"{pair}: {found}", flush=True)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Note what fails under `absent` and go on: whatever went wrong costs its own rows, and no time on a GPU."""
        try:
            yield
        except Exception as error:
            self.results["absent"][what] = f"{type(error).__name__}: {error}"
            print(f"{what} failed: {self.results['absent'][what]}", flush=True)

    def launch(self, stack: ExitStack, model: Path, variants: dict[str, list[str]], gpus: int = 1) -> None:
        """Start every variant at once."""
        everywhere = os.sched_getaffinity(0)

        def start(name: str) -> None:
            os.sched_setaffinity(0, cpus_of(variants[name], everywhere, gpus))  # of this thread; the server inherits it
            # Beside other servers, the memory of two GPUs is never alike.
            env = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
            if "chain-q" in name:
                env["SGLANG_SIMULATE_ACC_LEN"] = str(SIMULATED_ACCEPT_LEN)
            log = self.out / "logs" / f"{name}.log"
            with self.attempt(name):
                running = server.running(model, log, variants[name], env, GPU_FLAGS, START_TIMEOUT_S)
                self.stacks[name] = stack.enter_context(ExitStack())
                self.ups[name] = self.stacks[name].enter_context(running)

        begin = time.monotonic()
        with ThreadPoolExecutor(len(variants)) as pool:
            list(pool.map(start, variants))
        print(f"{len(self.ups)} servers ready after {time.monotonic() - begin:.0f} s", flush=True)

    def end(self, names: Iterable[str]) -> None:
        """End servers that are not needed any more."""
        for name in names:
            if self.ups.pop(name, None):
                self.stacks[name].close()


def cpus_of(flags: list[str], everywhere: set[int], gpus: int) -> set[int]:
    """The part of the CPUs that goes with the server's GPU; all of them where it names none."""
    if "--base-gpu-id" not in flags:
        return everywhere
    gpu, each = int(flags[flags.index("--base-gpu-id") + 1]), len(everywhere) // gpus
    return set(sorted(everywhere)[gpu * each : (gpu + 1) * each]) or everywhere


def ask(up: server.Server, prompts: list[list[int]], new_tokens: int, **more: Any) -> list[dict[str, Any]]:
    """Greedy answers to prompts sent together."""
    body = {"input_ids": prompts, "sampling_params": server.greedy_sampling(new_tokens)} | more
    return up.post("/generate", body, REQUEST_TIMEOUT_S)


def ask_encoded(up: server.Server, encoded: str, new_tokens: int, timeout_s: float) -> list[dict[str, Any]]:
    """What the server says of each greedy answer to prompts that are JSON already: long ones take seconds to encode."""
    body = f'{{"input_ids": {encoded}, "sampling_params": {json.dumps(server.greedy_sampling(new_tokens))}}}'.encode()
    return [answer["meta_info"] for answer in up.post("/generate", body, timeout_s)]


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result with the machine it was measured on."""
    import torch

    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    path.write_text(json.dumps(where | result, indent=1) + "\n")


def together(call: Callable[[int], tuple[float, float]], least: int, most: int = MOST_FEW_STEPS) -> int:
    """How many steps or tokens a request takes until none of its batch is done before the last has come.

    `call` says after how many seconds the first and the last request of a batch are done; the last to be done with
    `least` has come by then. Gives up at `most`.
    """
    few = least
    first_s, arrived_s = call(few)
    while first_s < 0.98 * arrived_s and few < most:
        few *= 4
        first_s, _ = call(few)
    return few
