"""What defragmentation is worth: `python -m tools.bench_defrag PART ... [--out FILE]`, of these parts, or all.

    churn        replays one trace with upstream's allocator and with extents; runs anywhere
    map          compacts a churned pool to the end: runs, and kv-map.png beside the file; runs anywhere
    kernel       attention bandwidth against contiguity (needs a CUDA GPU and the kernel library, not SGLang)
    fastpath     what the kernel would win if it read no indices where KV is contiguous (as kernel; builds one)
    move         bandwidth of the move that compaction launches (as kernel)
    compaction   what whole passes cost, and how fast they move KV (needs a CUDA GPU)
    steps        decode step times while compacting and not (needs a CUDA GPU)
    serve        tokens a second with tiers off, 0, 1, and 0 with 1 (needs a CUDA GPU)
    render       defrag.md and defrag.png beside the file, of the parts that it has (after `--add`, with those of
                 another file)

Every comparison is of medians within one run; results are merged into the JSON file under the name of the part. A part
that fails costs only itself. CUDA_VISIBLE_DEVICES picks the GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tools import defrag_kernels, defrag_page, defrag_pool, defrag_traffic, kernels, server

GPU_PARTS = ("kernel", "fastpath", "move", "compaction", "steps", "serve")


def machine() -> dict[str, str]:
    """What it ran on."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "kernel_hash": kernels.source_hash(),
        "gpu": f"{gpu.name}, sm_{gpu.major}{gpu.minor}" if gpu else "none",
        "cpu": platform.machine(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Run parts, or all that this machine can, and merge their results into the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="+", choices=["churn", "map", *GPU_PARTS, "all", "render"])
    parser.add_argument("--out", type=Path, default=Path("docs/bench/defrag.json"))
    parser.add_argument("--add", type=Path, help="results of another run, to take over the parts that it has")
    arguments = parser.parse_args()
    if arguments.add:
        write(arguments.out, json.loads(arguments.add.read_text()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = [part for part in arguments.part if part != "render"]
    if "all" in wanted:
        wanted = ["churn", "map", *(GPU_PARTS if device == "cuda" else ())]
    needs_gpu = sorted(set(wanted) & set(GPU_PARTS))
    if device == "cpu" and needs_gpu:
        parser.error(f"{' and '.join(needs_gpu)}: needs a CUDA GPU; churn and map run without")
    parts: dict[str, Callable[[Callable[[dict], None]], dict]] = {
        "churn": lambda _: defrag_pool.churn(device),
        "map": lambda _: defrag_pool.draw_map(device, arguments.out.with_name("kv-map.png")),
        "kernel": lambda _: defrag_kernels.kernel(),
        "fastpath": lambda _: defrag_kernels.fastpath(),
        "move": lambda _: defrag_kernels.move(),
        "compaction": lambda _: defrag_pool.compaction(),
        "steps": lambda _: defrag_pool.steps(),
        "serve": defrag_traffic.serve,
    }
    failed = []
    for part in wanted:
        save = partial(keep, arguments.out, f"{part} on {device}" if part == "churn" else part)
        try:
            save(parts[part](save))
        except Exception:
            traceback.print_exc()
            failed.append(part)
        if device == "cuda":
            torch.cuda.empty_cache()  # the servers of another part need it
    if "render" in arguments.part:
        defrag_page.render(arguments.out)
    if failed:
        raise SystemExit(f"error: failed: {', '.join(failed)}")


def keep(file: Path, name: str, result: dict) -> None:
    """Write down the result of a part, and what it ran on."""
    write(file, {name: {"machine": machine()} | result})


def write(file: Path, parts: dict[str, dict]) -> None:
    """Put parts into the file, beside what others may have put there meanwhile."""
    results = json.loads(file.read_text()) if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results | parts, indent=1) + "\n")


if __name__ == "__main__":
    server.exit_on_signals()
    main()
