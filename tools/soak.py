"""Soak of the CPU server: random clients, good and bad, 64 at a time, with DDTREE and KV compaction on.

    python -m tools.soak --minutes 20 --out docs/bench

Every few minutes the clients pause: then the pool must be whole again. Fails on a crash, a 5xx answer, a bad request
that is accepted, a good one that is refused, a health check that does not answer 200, a slot that is still taken when
the server is idle, and on memory or file handles that grow after the first third of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tools import server
from tools.markdown import table
from tools.pair import DDTREE_FLAGS, TARGET

FLAGS = [
    "--dtype", "float32", "--context-length", "1024", "--max-total-tokens", "8192", "--chunked-prefill-size", "128",
    *DDTREE_FLAGS, "--speculative-ddtree-budget", "12",
]  # fmt: skip
# Compaction whenever there is a gap to close, not only when it would pay.
ENVIRONMENT = {"SGLANG_SM120_KV_COMPACT": "auto", "SGLANG_SM120_KV_COMPACT_BELOW": "1"}
CONTEXT_TOKENS = 1024
CLIENTS = 64
PAUSES = 6
START_S, WAIT_S = (15, 60), (5, 30)
"""How long the server takes to start, and at a pause the clients to get their last answers: free machine, busy one."""
MEMORY_SLACK = 1.10
"""Resident memory at the last pause over that at a third of the time."""
HANDLES_SLACK = 16
"""File handles more than at a third of the time: sockets that are just being closed."""
HEALTH_TIMEOUT_S = 60

Send = Callable[["Client"], Awaitable[str]]


@dataclass
class Report:
    """What happened: answers by kind of request, complaints, and one sample a pause."""

    answers: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    health_checks: int = 0
    slowest_health_s: float = 0.0
    samples: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, kind: str, got: str, allowed: set[str]) -> None:
        """Count an answer; one that is not `allowed` is a complaint."""
        self.answers[f"{kind}: {got}"] += 1
        if got not in allowed:
            self.complaints.append(f"{kind} was answered {got}, not {' or '.join(sorted(allowed))}")


class Client:
    """One client: its own random numbers, the shared session, and request ids that nobody else has."""

    def __init__(self, number: int, session: aiohttp.ClientSession) -> None:
        self.random, self.session = random.Random(number), session
        self._number, self._requests = number, 0

    def body(self, tokens: int | None = None, **more: Any) -> dict[str, Any]:
        """A good request for /generate: one of a few prefixes, then tokens of its own."""
        self._requests += 1
        rng = self.random
        length = tokens or rng.randint(1, 200)
        prefix = [3 + rng.randrange(8)] * min(length // 2, 90)
        ids = prefix + [rng.randrange(3, 500) for _ in range(length - len(prefix))]
        sampling = {"max_new_tokens": rng.randint(1, 48), "temperature": rng.choice([0.0, 0.7, 1.0])}
        sampling["ignore_eos"] = rng.random() < 0.5
        return {"input_ids": ids, "sampling_params": sampling, "rid": f"{self._number}-{self._requests}"} | more

    async def post(self, path: str, body: Any) -> str:
        """The status of the answer, read to its end."""
        async with self.session.post(path, json=body) as answer:
            await answer.read()
            return str(answer.status)


async def good(client: Client) -> str:
    """An ordinary request."""
    return await client.post("/generate", client.body())


async def completion(client: Client) -> str:
    """An ordinary request to the OpenAI endpoint."""
    text = "def f(x):\n    return x" * client.random.randint(1, 5)
    return await client.post("/v1/completions", {"model": "m", "prompt": text, "max_tokens": 16})


async def streamed(client: Client) -> str:
    """A stream read to its end."""
    return await client.post("/generate", client.body(stream=True))


async def hangs_up(client: Client) -> str:
    """A stream whose reader goes away after the first piece."""
    body = client.body(stream=True)
    body["sampling_params"] |= {"max_new_tokens": 400, "ignore_eos": True}
    async with client.session.post("/generate", json=body) as answer:
        await answer.content.readany()
        answer.close()
        return str(answer.status)


async def gives_up(client: Client) -> str:
    """A request whose client disconnects before anything came back."""
    try:
        await asyncio.wait_for(client.post("/generate", client.body()), client.random.random() * 0.3)
    except TimeoutError:
        return "disconnected"
    return "200"


async def aborted(client: Client) -> str:
    """A request that another call aborts."""
    body = client.body()
    body["sampling_params"] |= {"max_new_tokens": 400, "ignore_eos": True}
    asking = asyncio.create_task(client.post("/generate", body))
    await asyncio.sleep(client.random.random() * 3)
    await client.post("/abort_request", {"rid": body["rid"]})
    return await asking


async def huge(client: Client) -> str:
    """A prompt longer than the context."""
    return await client.post("/generate", client.body(tokens=CONTEXT_TOKENS * client.random.randint(1, 200) + 1))


async def invalid(client: Client) -> str:
    """A parameter out of its range or of the wrong type."""
    wrong: list[dict[str, Any]] = [
        {"temperature": -1.0}, {"top_p": 2.0}, {"max_new_tokens": -5}, {"min_new_tokens": 99},
        {"top_k": -7, "temperature": 1.0},
        {"temperature": "hot"}, {"stop_token_ids": "x"}, {"frequency_penalty": 77.0}, {"logit_bias": {"-7": 5}},
        {"min_new_tokens": 2, "stop_token_ids": [10**9]}, {"regex": "("}, {"json_schema": "{"},
    ]  # fmt: skip
    body = client.body()
    body["sampling_params"] |= {"max_new_tokens": 8} | client.random.choice(wrong)
    return await client.post("/generate", body)


async def bad_ids(client: Client) -> str:
    """Token ids that the vocabulary does not have, or none at all, or more log-probabilities than it has tokens."""
    wrong: list[dict[str, Any]] = [{"input_ids": ids} for ids in ([10**9], [-3], [], ["a"], None)]
    wrong += [{"input_ids": None, "text": ""}, {"return_logprob": True, "top_logprobs_num": 10**6}]
    return await client.post("/generate", client.body() | client.random.choice(wrong))


async def bad_json(client: Client) -> str:
    """A body that is no JSON."""
    text = client.random.choice([b"{", b"", b"\xff\xfe", b"[1, 2", b'{"input_ids": [1, 2', b"null"])
    async with client.session.post("/generate", data=text, headers={"Content-Type": "application/json"}) as answer:
        await answer.read()
        return str(answer.status)


REFUSED = {"400", "404", "413", "422"}
# Kind: weight, what sends it, the answers that are right.
KINDS: dict[str, tuple[int, Send, set[str]]] = {
    "good": (30, good, {"200"}),
    "completion": (8, completion, {"200"}),
    "streamed": (15, streamed, {"200"}),
    "hangs up": (12, hangs_up, {"200"}),
    "gives up": (10, gives_up, {"200", "disconnected"}),
    "aborted": (8, aborted, {"200", "400"}),
    "huge prompt": (5, huge, REFUSED),
    "invalid parameter": (6, invalid, REFUSED),
    "bad token ids": (4, bad_ids, REFUSED),
    "bad JSON": (4, bad_json, REFUSED),
}


async def clients(up: server.Server, report: Report, seconds: float, first_number: int) -> None:
    """64 clients, each one request after the other until the time is over."""
    until = time.monotonic() + seconds
    kinds, weights = list(KINDS), [weight for weight, _, _ in KINDS.values()]

    async def one(client: Client) -> None:
        while time.monotonic() < until:
            kind = client.random.choices(kinds, weights)[0]
            _, send, allowed = KINDS[kind]
            try:
                got = await send(client)
            except (aiohttp.ClientError, TimeoutError) as error:
                got = type(error).__name__
                await asyncio.sleep(1)
            report.answer(kind, got, allowed)

    limit = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(up.url, connector=limit, timeout=timeout) as session:
        await asyncio.gather(*(one(Client(first_number + i, session)) for i in range(CLIENTS)))


async def watch_health(up: server.Server, report: Report) -> None:
    """Ask /health every two seconds until cancelled."""
    timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
    async with aiohttp.ClientSession(up.url, timeout=timeout) as session:
        while True:
            begin = time.monotonic()
            try:
                async with session.get("/health") as answer:
                    got = str(answer.status)
            except (aiohttp.ClientError, TimeoutError) as error:
                got = type(error).__name__
            report.health_checks += 1
            report.slowest_health_s = max(report.slowest_health_s, time.monotonic() - begin)
            report.answer("health", got, {"200"})
            await asyncio.sleep(2)


def sample(up: server.Server, elapsed_s: float) -> dict[str, Any]:
    """The idle server: slots taken after the prefix cache is flushed, memory and handles of all its processes."""
    taken = idle_slots(up)
    process = psutil.Process(up.process.pid)
    family = [process, *process.children(recursive=True)]
    compaction = up.info()["internal_states"][0]["sm120_kv"]
    return {
        "minute": round(elapsed_s / 60, 1),
        "slots_taken": taken,
        "resident_mib": round(sum(p.memory_info().rss for p in family) / 2**20),
        "file_handles": sum(p.num_fds() for p in family),
        "compaction_passes": compaction["passes"],
        "compaction_refused": compaction["refused_because"],
    }


def idle_slots(up: server.Server, patience_s: float = 60) -> int:
    """Slots that are not free once nothing runs and the prefix cache is flushed; aborted requests may take a moment."""
    until = time.monotonic() + patience_s
    while True:
        up.get("/flush_cache")
        loads = json.loads(up.get("/v1/loads"))["loads"]
        taken = sum(load["num_used_tokens"] for load in loads)
        if taken == 0 or time.monotonic() > until:
            return taken
        time.sleep(1)


async def soak(up: server.Server, report: Report, minutes: float, pauses: int) -> None:
    """Traffic in `pauses` stretches, a sample after each."""
    begin = time.monotonic()
    health = asyncio.create_task(watch_health(up, report))
    for stretch in range(pauses):
        await clients(up, report, minutes * 60 / pauses, 1000 * stretch)
        report.samples.append(await asyncio.to_thread(sample, up, time.monotonic() - begin))
        print(json.dumps(report.samples[-1]), f"{sum(report.answers.values())} answers", flush=True)
    health.cancel()


def judge(report: Report) -> None:
    """Complain of what the samples show."""
    base, last = report.samples[(len(report.samples) - 1) // 3], report.samples[-1]
    for at in report.samples:
        if at["slots_taken"]:
            report.complaints.append(f"{at['slots_taken']} slots were still taken at minute {at['minute']}")
        if at["compaction_refused"]:
            report.complaints.append(f"compaction went off: {at['compaction_refused']}")
    if last["resident_mib"] > MEMORY_SLACK * base["resident_mib"]:
        report.complaints.append(f"resident memory grew from {base['resident_mib']} to {last['resident_mib']} MiB")
    if last["file_handles"] > base["file_handles"] + HANDLES_SLACK:
        report.complaints.append(f"file handles grew from {base['file_handles']} to {last['file_handles']}")
    if not last["compaction_passes"]:
        report.complaints.append("compaction moved nothing: the soak did not test it")


def as_minutes(minutes: float) -> str:
    """With its unit."""
    return f"{minutes:g} minute" if minutes == 1 else f"{minutes:g} minutes"


def outlook(minutes: float, pauses: int) -> str:
    """What comes, and how long it will take in all."""
    least, most = (minutes + (start + pauses * wait) / 60 for start, wait in zip(START_S, WAIT_S, strict=True))
    return (
        f"{as_minutes(minutes)} of requests in {pauses} stretches; with the server's start and, after each stretch, "
        f"the wait for the last answers, {least:.0f} to {most:.0f} minutes in all"
    )


def markdown(report: Report, minutes: float) -> str:
    """The page."""
    columns = ("minute", "slots_taken", "resident_mib", "file_handles", "compaction_passes")
    lines = [
        "# Soak of the CPU server",
        "",
        f"{as_minutes(minutes)}, {CLIENTS} random clients at a time on the trained pair: DDTREE with a budget of 12,",
        "compaction on `auto`, a pool of 8,192 tokens. Made by `make soak`. After each stretch the clients wait and",
        "the prefix cache is flushed: then no slot may be taken.",
        "",
        *table(
            " | ".join(column.replace("_", " ") for column in columns),
            ([f"{at[column]:,}" for column in columns] for at in report.samples),
        ),
        "",
        f"{report.health_checks} health checks, the slowest {report.slowest_health_s:.1f} s. Answers:",
        "",
        *table("request: answer | number", ([answer, f"{n:,}"] for answer, n in sorted(report.answers.items()))),
        "",
        "No complaints." if not report.complaints else f"{len(report.complaints)} complaints, the first:",
        *(f"- {complaint}" for complaint in report.complaints[:20]),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Soak, write `soak.json` and `soak.md`; 1 if there is anything to complain of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20,
                        help="of requests; start and pauses come on top (default: %(default)s)")  # fmt: skip
    parser.add_argument("--pauses", type=int, default=PAUSES,
                        help="how often the clients wait and the pool is checked (default: %(default)s)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="folder of soak.json, soak.md, server.log")
    args = parser.parse_args()
    if args.minutes <= 0 or args.pauses <= 0:
        parser.error("--minutes and --pauses must be above 0")
    print(outlook(args.minutes, args.pauses), flush=True)
    report, log = Report(), Path("build/soak/server.log")
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with server.running(TARGET, log, FLAGS, ENVIRONMENT) as up:
            print("the server is ready", flush=True)
            asyncio.run(soak(up, report, args.minutes, args.pauses))
        judge(report)
    except OSError as error:
        report.complaints.append(f"the server stopped answering ({error}); see {log}")
    (args.out / "soak.json").write_text(json.dumps(vars(report), indent=1) + "\n")
    (args.out / "soak.md").write_text(markdown(report, args.minutes))
    print(markdown(report, args.minutes))
    return 1 if report.complaints else 0


if __name__ == "__main__":
    server.exit_on_signals()
    sys.exit(main())
