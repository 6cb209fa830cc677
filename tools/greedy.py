"""Whether two servers answer greedily alike, token by token, and what is a tie between close calls."""

from __future__ import annotations

import itertools
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tools import kernels, server
from tools.bench_run import Run, ask


def compare_greedy(
    want: list[dict[str, Any]], got: list[dict[str, Any]], yardstick: float | None = None
) -> dict[str, Any]:
    """Compare greedy answers with top-2 log-probabilities.

    Noise is the largest difference of a chosen token's log-probability over the positions before any divergence. The
    first divergence of a prompt is a tie when the reference's top-2 gap there is at most twice the `yardstick`, the
    noise of a pair that is known to be right (this pair's own if None, which an error would raise too); the rest of
    that prompt follows another text and is not compared.
    """
    differences, divergences = [], []
    for prompt, (a, b) in enumerate(zip(want, got, strict=True)):
        pairs = zip(a["meta_info"]["output_token_logprobs"], b["meta_info"]["output_token_logprobs"], strict=True)
        for at, (left, right) in enumerate(pairs):
            if left[1] != right[1]:
                top = a["meta_info"]["output_top_logprobs"][at]
                divergences.append({"prompt": prompt, "at": at, "gap": top[0][0] - top[1][0]})
                break
            differences.append(abs(left[0] - right[0]))
    noise = max(differences, default=0.0)
    tie_gap = 2 * (noise if yardstick is None else yardstick)
    errors = [d for d in divergences if d["gap"] > tie_gap]
    return {
        "kernel_hash": kernels.source_hash(),
        "prompts": len(want),
        "positions": len(differences),
        "noise": noise,
        "tie_gap": tie_gap,
        "mean": statistics.fmean(differences or [0.0]),
        "identical": len(want) - len(divergences),
        "ties": len(divergences) - len(errors),
        "errors": errors,
    }


def greedy(up: server.Server, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """32 greedy tokens of each prompt, one prompt after the other, with the top two log-probabilities."""
    return [ask(up, [prompt], 32, return_logprob=True, top_logprobs_num=2)[0] for prompt in prompts]


def compare(
    run: Run, pairs: list[tuple[str, str]], prompts: list[list[int]], yardstick: tuple[str, str] | None = None
) -> float | None:
    """Greedy answers of all servers named in `pairs` (reference, other), asked side by side, compared pair by pair.

    The noise of the `yardstick`, one of the pairs, says what is a tie in all whose KV has one dtype; returned.
    """
    answers: dict[str, list[dict[str, Any]]] = {}

    def answer(name: str) -> None:
        with run.attempt(f"greedy tokens of {name}"):
            answers[name] = greedy(run.ups[name], prompts)

    names = [name for name in dict.fromkeys(itertools.chain(*pairs)) if name in run.ups]
    with ThreadPoolExecutor(len(names) or 1) as pool:
        list(pool.map(answer, names))
    noise = None
    if yardstick and all(name in answers for name in yardstick):
        noise = compare_greedy(answers[yardstick[0]], answers[yardstick[1]])["noise"]
    for reference, other in pairs:
        if reference in answers and other in answers:
            one_dtype = ("fp8" in reference) == ("fp8" in other)
            found = compare_greedy(answers[reference], answers[other], noise if one_dtype else None)
            if one_dtype and noise is None:
                found["note"] = "by its own noise"
            run.note_equal(f"{other} against {reference}", found)
    run.save()
    return noise


def control(run: Run, name: str, prompts: list[list[int]], others: list[int], yardstick: float | None) -> None:
    """What the comparison sees of an attention that errs: one server, the first half of long prompts from `others`."""
    with run.attempt(f"control of {name}"):
        long = [prompt for prompt in prompts if len(prompt) >= 1000]
        changed = [others[: len(p) // 2] + p[len(p) // 2 :] for p in long]
        found = compare_greedy(greedy(run.ups[name], long), greedy(run.ups[name], changed), yardstick)
        run.note_equal(f"control: {name}, half of each prompt replaced", found)
        run.save()
