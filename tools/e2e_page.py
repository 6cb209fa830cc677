"""The page and the plot of `bench_e2e`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.markdown import number, table

MODES = ["plain", "dflash", "ddtree"]


def render(document: dict[str, Any], out: Path) -> None:
    """`bench-e2e.md` and `bench-e2e.png` from the results."""
    rows = compared(document["cells"])
    (out / "bench-e2e.md").write_text(markdown(document, rows))
    plot(rows, out / "bench-e2e.png")


def compared(cells: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a (mode, context, batch): ours, and stock in the same mode (for ddtree: stock's dflash)."""
    rows = []
    for key, ours in cells.items():
        who, mode, context, batch = key.split("/")
        if who == "ours":
            peer = "dflash" if mode == "ddtree" else mode
            stock = cells.get(f"stock/{peer}/{context}/{batch}", {})
            rows.append({"mode": mode, "context": int(context), "batch": int(batch), "ours": ours, "stock": stock})
    return sorted(rows, key=lambda row: (MODES.index(row["mode"]), row["context"], row["batch"]))


def markdown(document: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The page."""
    about = document["identity"]
    backends = ", ".join(f"{name} {backend(facts)}" for name, facts in document["servers"].items())
    prompts = f"Excerpts of a text ({about['text_sha256']})" if about["text_sha256"] else "Random prompts"
    lines = [
        f"# End to end: {about['model']} on {about['gpus']} x {about['gpu']}",
        "",
        f"sglang {about['sglang']}, torch {about['torch']}, kernel sources {about['kernel_hash'][:12]}, drafter "
        f"{about['draft']}. Flags {about['flags']}. Attention backends: {backends}.",
        f"{prompts}, {about['output_tokens']} tokens answered, {about['rounds']} rounds a cell, one run, servers up "
        f"{'together' if about['together'] else 'one by one'}. tok/s is output tokens over the whole run, prompts "
        "included; TPOT is the median time a token after the first. Stock in ddtree rows is stock's dflash.",
        "",
        *table(
            "mode | context | batch | stock tok/s | ours tok/s | ours / stock | stock TPOT ms | ours TPOT ms "
            "| stock TTFT ms | ours TTFT ms | stock accept length | ours accept length",
            map(_cells, rows),
        ),
        "",
        *(f"- {note}" for note in document.get("notes", [])),
        "",
        "![output tokens a second by context](bench-e2e.png)",
    ]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    sides = row["stock"], row["ours"]
    speeds = [side.get("output_throughput") for side in sides]
    ratio = speeds[1] / speeds[0] if all(speeds) else None
    pairs = [
        number(side.get(name), digits)
        for name, digits in (("median_tpot_ms", 2), ("median_ttft_ms", 0), ("accept_length", 2))
        for side in sides
    ]
    keys = [row["mode"], f"{row['context']:,}", str(row["batch"])]
    return [*keys, *(number(speed, 1) for speed in speeds), number(ratio, 2), *pairs]


def backend(facts: dict[str, Any]) -> str:
    """The attention backend of a server; two where prompts have one of their own."""
    one, *two = (facts[f"{kind}attention_backend"] for kind in ("", "prefill_", "decode_"))
    return " + ".join(dict.fromkeys(name or one or "?" for name in two))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Output tokens a second by context: ours drawn through, stock dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for color, (mode, batch) in enumerate(sorted({(row["mode"], row["batch"]) for row in rows})):
        for who, style in (("ours", "-o"), ("stock", "--x")):
            chosen = [row for row in rows if (row["mode"], row["batch"]) == (mode, batch)]
            points = [(row["context"], row[who]["output_throughput"]) for row in chosen if "duration" in row[who]]
            if points and not (who == "stock" and mode == "ddtree"):
                label = f"{who}, {mode}, batch {batch}"
                axes.plot(*zip(*points, strict=True), style, color=f"C{color}", label=label)
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="output tokens per second")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
