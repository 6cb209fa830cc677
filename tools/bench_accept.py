"""Accept length of the trained pair on held-out text: the chain against trees, by budget.

    python -m tools.bench_accept --out docs/bench

Serves the pair of tests/fixtures on the CPU in float32, once for the chain and once a budget, and asks each server
the same prompts. Accept length is committed tokens a verify step, the token that prefill gives not counted.
Writes accept.json, accept.md and, where matplotlib is installed, accept.png.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from tools import server as launcher
from tools.markdown import table
from tools.pair import DDTREE_FLAGS, TARGET, held_out_prompts

BUDGETS = (8, 16, 32, 64)
TEMPERATURES = (0.0, 0.7)
FLAGS = ["--dtype", "float32", "--context-length", "2048", *DDTREE_FLAGS]
# Equal to DFLASH's to the bit where DFLASH is lossless on a CPU: at temperature 0 (tests/ddtree/test_chain.py).
CHAIN = ["--speculative-ddtree-budget", "7", "--speculative-ddtree-topk", "1"]


def accept_length(server: launcher.Server, prompts: list[list[int]], tokens: int, temperature: float) -> float:
    """Committed tokens a verify step over all prompts, eight of them in flight."""
    committed = steps = 0
    for i in range(0, len(prompts), 8):
        for answer in server.generate(prompts[i : i + 8], tokens, temperature=temperature):
            committed += answer["meta_info"]["completion_tokens"] - 1
            steps += answer["meta_info"]["spec_verify_ct"]
    return committed / steps


def measure(prompts: list[list[int]], tokens: int, logs: Path) -> list[dict]:
    """One row a budget and temperature."""
    servers = {"chain": CHAIN} | {budget: ["--speculative-ddtree-budget", str(budget)] for budget in BUDGETS}
    lengths = {}
    for name, flags in servers.items():
        with launcher.running(TARGET, logs / f"accept-{name}.log", [*FLAGS, *flags]) as server:
            for temperature in TEMPERATURES:
                lengths[name, temperature] = accept_length(server, prompts, tokens, temperature)
                print(name, temperature, f"{lengths[name, temperature]:.3f}", flush=True)
    return [
        {
            "budget": budget,
            "temperature": temperature,
            "chain_accept_len": round(lengths["chain", temperature], 3),
            "tree_accept_len": round(lengths[budget, temperature], 3),
            "prompts": len(prompts),
            "tokens": tokens * len(prompts),
        }
        for temperature in TEMPERATURES
        for budget in BUDGETS
    ]


def markdown(rows: list[dict]) -> str:
    """The rows as a table with the gain of the tree."""
    lines = [
        "# Accept length on held-out text",
        "",
        f"Pair of tests/fixtures/pair, {rows[0]['prompts']} prompts, {rows[0]['tokens']} tokens, block 8, top-K 8, "
        "float32 on the CPU. Written by `python -m tools.bench_accept`.",
        "",
    ]
    cells = []
    for row in rows:
        chain, tree = row["chain_accept_len"], row["tree_accept_len"]
        figures = f"{chain:.2f}", f"{tree:.2f}", f"{tree / chain - 1:+.0%}"
        cells.append([str(row["temperature"]), str(row["budget"]), *figures])
    return "\n".join([*lines, *table("temperature | budget | chain | tree | tree / chain", cells)]) + "\n"


def plot(rows: list[dict], path: Path) -> None:
    """Accept length over budget, one line a temperature, the chain dashed."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for color, temperature in zip(("tab:blue", "tab:orange"), TEMPERATURES, strict=True):
        own = [row for row in rows if row["temperature"] == temperature]
        budgets = [row["budget"] for row in own]
        axes.plot(budgets, [row["tree_accept_len"] for row in own], "o-", color=color, label=f"tree, T = {temperature}")
        axes.plot(
            budgets, [row["chain_accept_len"] for row in own], "--", color=color, label=f"chain, T = {temperature}"
        )
    axes.set(xlabel="tree budget (nodes)", ylabel="committed tokens a step", xscale="log", ylim=(1, None))
    axes.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS])
    axes.minorticks_off()
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for accept.json, accept.md and accept.png")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens a prompt")
    parser.add_argument("--logs", type=Path, default=Path("build/logs"))
    args = parser.parse_args()
    rows = measure(held_out_prompts(args.prompts, (16, 200)), args.tokens, args.logs)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "accept.json").write_text(json.dumps(rows, indent=2) + "\n")
    (args.out / "accept.md").write_text(markdown(rows))
    if importlib.util.find_spec("matplotlib"):
        plot(rows, args.out / "accept.png")


if __name__ == "__main__":
    main()
