"""Parts of `bench_defrag` that need a CUDA GPU and the kernel library, not SGLang: attention and move by contiguity."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tools import kernels

HEAD_DIM = 576
HEADS = 8
RUN_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1_024, 4_096, 131_072)
# How the kernel's loader finds a slot, and how it would if a request's KV were one run.
INDEXED = re.compile(r"ptx::cp_async_4\((\w+) \+ to \* kSlotBatchBytes, (\w+) \+ min\(at, length - 1\)\);")
CONTIGUOUS = r"""asm volatile("st.shared.u32 [%0], %1;" ::"r"(\1 + to * kSlotBatchBytes),
                 "r"(\2[0] + min(at, length - 1)) : "memory");
    __syncwarp();"""


def kernel(repeats: int = 3) -> dict:
    """Attention time against contiguity, page sizes 1 and 64: one long request, decoding and verifying, and a batch.

    Slots lie in runs of one length, at random places of a pool four times as large. A table of 64-token pages at some
    contiguity is a table of slots in longer runs, which is all that the kernel sees of it.
    """
    tokens = 131_072
    pool = torch.randn(4 * tokens, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    cases = []
    for batch, q_len in ((1, 1), (1, 17), (32, 1)):
        length = tokens // batch
        tables = {run: _table(pool.shape[0], batch, length, run) for run in RUN_LENGTHS if run <= length}
        times: dict[int, list[float]] = {run: [] for run in tables}
        for _ in range(repeats):
            for run, table in tables.items():
                times[run].append(median_ms(_attention(pool, table, q_len)))
        for run, table in tables.items():
            runs, pages = table.shape[1] // run, table.shape[1] // 64
            ms = statistics.median(times[run])
            case = {
                "requests": batch,
                "q_len": q_len,
                "run_length": run,
                "contiguity_page_1": 1 - (runs - 1) / (length - 1),
                "contiguity_page_64": 1 - (runs - 1) / (pages - 1) if run >= 64 else None,
                "ms": ms,
                "gb_per_s": tokens * HEAD_DIM * 2 / ms / 1e6,
            }
            cases.append(case)
            print(json.dumps(case), flush=True)
    return {"tokens": tokens, "heads": HEADS, "kv": "bfloat16", "repeats": repeats, "cases": cases}


def _table(pool_slots: int, batch: int, length: int, run: int) -> torch.Tensor:
    """A `req_to_token [batch, length]` whose slots lie in runs of `run`, at random places."""
    starts = torch.randperm(pool_slots // run, device="cuda")[: batch * length // run] * run
    return (starts[:, None] + torch.arange(run, device="cuda")).view(batch, length).int()


def _attention(pool: torch.Tensor, table: torch.Tensor, q_len: int) -> Callable[[], object]:
    """One call of the kernel: every row of the table is a request that asks `q_len` queries."""
    from sglang_sm120 import ops

    batch, length = table.shape
    q = torch.randn(batch * q_len, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(batch, device="cuda")
    lens = torch.full((batch,), length, device="cuda")
    return lambda: ops.mla_verify(q, pool, table, rows, lens, q_len=q_len, sm_scale=0.1)


def fastpath(repeats: int = 5) -> dict:
    """What reading no indices would win: the kernel against itself with slots computed from a request's first one.

    On contiguous KV both read the same bytes. The second kernel is built here, from the sources with one line changed.
    """
    from sglang_sm120 import ops

    major, minor = torch.cuda.get_device_capability()
    sources = Path(shutil.copytree(kernels.SOURCES, "build/contiguous", dirs_exist_ok=True)).resolve()
    read_no_indices(sources)
    library = kernels.build([f"sm_{major}{minor}"], sources / "lib", sources=sources)
    paths = {"indices": ops.LIBRARY_PATH, "contiguous": library}

    tokens = 131_072
    pool = torch.randn(tokens, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    cases = []
    for batch, q_len in ((1, 1), (1, 17), (32, 1)):
        table = torch.arange(tokens, device="cuda", dtype=torch.int32).view(batch, -1)
        attend = _attention(pool, table, q_len)
        times: dict[str, list[float]] = {name: [] for name in paths}
        for _ in range(repeats):
            for name, path in paths.items():
                ops.LIBRARY_PATH = path
                ops._library.cache_clear()
                times[name].append(median_ms(attend))
        ms = {name: statistics.median(values) for name, values in times.items()}
        cases.append({"requests": batch, "q_len": q_len, "ms": ms, "gain": ms["indices"] / ms["contiguous"] - 1})
        print(json.dumps(cases[-1]), flush=True)
    ops.LIBRARY_PATH = paths["indices"]
    ops._library.cache_clear()
    return {"tokens": tokens, "cases": cases}


def read_no_indices(sources: Path) -> None:
    """Change the statement that reads slots. RuntimeError if there is none, or more than one."""
    changed = 0
    for path in sources.rglob("*.cuh"):
        text, count = INDEXED.subn(CONTIGUOUS, path.read_text())
        path.write_text(text)
        changed += count
    if changed != 1:
        raise RuntimeError(
            f"{sources} does not read slots by one `{INDEXED.pattern}`: tell tools/defrag_kernels.py how"
        )


def move(layers: int = 61, slots: int = 73_728) -> dict:
    """Bandwidth of the move that compaction launches, by window, against a plain copy on the device."""
    from sglang_sm120 import ops
    from sglang_sm120.kvdefrag import serving

    buffers = [torch.randn(slots, HEAD_DIM, device="cuda").bfloat16() for _ in range(layers)]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], device="cuda")
    row_bytes = HEAD_DIM * 2
    copied = [torch.empty_like(buffer) for buffer in buffers]
    copy_ms = median_ms(lambda: [a.copy_(b) for a, b in zip(copied, buffers, strict=True)])
    moved_bytes = 2 * slots * row_bytes * layers  # read and written
    cases = []
    for window in (384, 768, 1_536, 3_072, 6_144):
        base = torch.arange(slots // window, device="cuda")[:, None] * window
        src = base + torch.stack([torch.randperm(window, device="cuda") for _ in range(len(base))])
        dst = base + torch.arange(window, device="cuda")

        ms = median_ms(partial(ops.move_kv, pointers, row_bytes, src, dst.contiguous()))
        case = {"window_units": window, "ms": ms, "gb_per_s": moved_bytes / ms / 1e6, "of_copy_rate": copy_ms / ms}
        cases.append(case)
        print(json.dumps(case), flush=True)
    # A pass that gathers moves lists whose slots lie anywhere.
    src = torch.randperm(slots, device="cuda").view(-1, serving.WINDOW_UNITS)
    dst = src.roll(1, dims=1)
    ms = median_ms(partial(ops.move_kv, pointers, row_bytes, src, dst))
    anywhere = {"list_units": serving.WINDOW_UNITS, "ms": ms, "of_copy_rate": copy_ms / ms}
    print(json.dumps(anywhere), flush=True)
    copy = {"copy_gb_per_s": moved_bytes / copy_ms / 1e6}
    return {"layers": layers, "slots": slots} | copy | {"cases": cases, "anywhere": anywhere}


def median_ms(call: Callable[[], object], repeats: int = 21) -> float:
    """Median GPU milliseconds of `call`; 1 GB is written before each: no cache holds what it reads, and the
    host has launched all of it when the GPU begins."""
    scratch = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(repeats + 3):
        scratch.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])
