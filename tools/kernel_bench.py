"""Times the verify kernel and its peers on this machine's GPU, in one run, and says how far from the hardware they are.

`bench` writes docs/bench/kernel.{json,md,png}; `gpu-report` runs a correctness pass and a short table and writes
build/gpu-report.md, something to attach to an issue.

All figures are medians of CUDA-graph replays, L2 in the state the previous replay left it. A peer that is
not installed or does not run gives null: SGLang's Triton kernels (the stock path of
TARGET_VERIFY and of decode), FlashMLA (Hopper only, no tree mask), FlashInfer FA2 (the peer built on mma.sync) and FA3.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "overlay"))

from sglang_sm120 import ops  # noqa: E402

from tools import kernel_page, kernels, require_gpu  # noqa: E402

SM_SCALE = 1 / math.sqrt(192)
FLOP_PER_ROW_AND_TOKEN = 2 * (576 + 512)
FP8_SCALE = 1 / 16


@dataclass(frozen=True)
class Shape:
    """One row of the table. `layout`: scattered (random pages; random slots at page size 1) or contiguous."""

    h: int
    bs: int
    ctx: int
    q: int
    page: int = 1
    kv_dtype: str = "bf16"
    layout: str = "scattered"

    @property
    def kv_bytes(self) -> int:
        """Bytes of latent rows, each counted once."""
        return self.bs * self.ctx * 576 * (1 if self.kv_dtype == "fp8" else 2)

    @property
    def flop(self) -> int:
        """Operations of both products."""
        return self.bs * self.ctx * self.h * self.q * FLOP_PER_ROW_AND_TOKEN


SHORT = [Shape(8, 1, 4096, 9), Shape(8, 1, 185_000, 1), Shape(8, 1, 185_000, 9), Shape(8, 1, 185_000, 33)]
FULL = [
    *(Shape(8, 1, 185_000, q) for q in (1, 9, 17, 33, 65)),
    *(Shape(8, 1, 4096, q) for q in (1, 9, 17, 33)),
    *(Shape(8, 1, 32_768, q) for q in (1, 9, 17, 33)),
    *(Shape(8, 4, 185_000, q) for q in (1, 9, 33)),
    *(Shape(8, bs, 185_000, q, kv_dtype="fp8") for bs in (1, 4) for q in (1, 9, 33)),
    *(Shape(8, 1, 185_000, q, layout="contiguous") for q in (1, 9, 33)),
    *(Shape(16, 1, 185_000, q) for q in (1, 9, 33)),
    *(Shape(64, 1, 185_000, q) for q in (1, 9)),
    Shape(64, 4, 185_000, 33),
    *(Shape(64, 1, 185_000, q, kv_dtype="fp8") for q in (1, 9)),
    *(Shape(8, 1, 8192, q) for q in (1, 9)),
    *(Shape(8, 1, 185_000, q, page=64) for q in (1, 9, 33)),
    Shape(8, 4, 32_768, 17),
]


@dataclass
class Case:
    """Tensors of a shape: the pool, the table that finds each request's slots, and causal queries."""

    shape: Shape
    q: torch.Tensor
    pool: torch.Tensor
    req_to_token: torch.Tensor
    requests: torch.Tensor
    kv_lens: torch.Tensor

    @property
    def slots(self) -> torch.Tensor:
        """int64 `[bs, ctx]` slot of every token."""
        return self.req_to_token[:, : self.shape.ctx].long()


def make_case(shape: Shape, seed: int = 0) -> Case:
    """Random values (zeros would flatter the tensor cores) in a pool of a million slots or twice what is used."""
    gen = torch.Generator(device="cuda").manual_seed(seed)
    used = shape.bs * shape.ctx
    slots = (max(1_000_000, used + used // 4) + 63) // 64 * 64
    pool = torch.randn(slots, 576, device="cuda", generator=gen, dtype=torch.bfloat16)
    if shape.kv_dtype == "fp8":
        pool = (pool / FP8_SCALE).to(torch.float8_e4m3fn)
    if shape.layout == "contiguous":
        order = torch.arange(slots, device="cuda")
    else:
        pages = torch.randperm(slots // shape.page, device="cuda", generator=gen)
        order = (pages[:, None] * shape.page + torch.arange(shape.page, device="cuda")).flatten()
    per_request = (shape.ctx + shape.page - 1) // shape.page * shape.page
    if per_request * shape.bs > slots:
        raise ValueError(f"{shape} does not fit the pool")
    req_to_token = order[: per_request * shape.bs].view(shape.bs, per_request).int().contiguous()
    q = torch.randn(shape.bs * shape.q, shape.h, 576, device="cuda", generator=gen).bfloat16()
    requests = torch.arange(shape.bs, device="cuda", dtype=torch.int64)
    return Case(
        shape, q, pool, req_to_token, requests, torch.full((shape.bs,), shape.ctx, device="cuda", dtype=torch.int32)
    )


def time_ms(call: Callable[[], object]) -> float:
    """Median milliseconds of one call, from replays of a graph that holds enough calls to hide its launch."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        inner = max(1, min(10, int(2 / max(start.elapsed_time(end), 0.02))))
        repeats = 5 if inner == 1 else 15
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(inner):
                call()
        times = []
        for step in range(3 + repeats):
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if step >= 3:
                times.append(start.elapsed_time(end) / inner)
    return sorted(times)[len(times) // 2]


def ours(case: Case) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """The verify kernel, outputs and workspace made beforehand."""
    out, lse = case.q.new_empty(*case.q.shape[:2], 512), torch.empty(case.q.shape[:2], device="cuda")
    workspace = ops.new_workspace(case.q.device)
    return lambda: ops.mla_verify(
        case.q, case.pool, case.req_to_token, case.requests, case.kv_lens, q_len=case.shape.q, sm_scale=SM_SCALE,
        kv_scale=FP8_SCALE if case.shape.kv_dtype == "fp8" else 1.0, workspace=workspace, out=out, lse=lse,
    )  # fmt: skip


def triton_verify(case: Case) -> Callable[[], object]:
    """SGLang's extend kernel with a custom mask: what stock TARGET_VERIFY launches."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    s = case.shape
    prefix = s.ctx - s.q
    indptr = torch.arange(s.bs + 1, device="cuda", dtype=torch.int32)
    mask = torch.ones(s.bs, s.q, s.ctx, dtype=torch.bool, device="cuda")
    mask[:, :, prefix:] = torch.ones(s.q, s.q, dtype=torch.bool, device="cuda").tril()
    pool = case.pool.view(-1, 1, 576)
    new = pool[case.slots[:, prefix:].flatten()].contiguous()
    indices = case.slots[:, :prefix].flatten().contiguous()
    out = case.q.new_empty(*case.q.shape[:2], 512)
    qo_indptr, kv_indptr, mask_indptr = indptr * s.q, indptr * prefix, indptr.long() * (s.q * s.ctx)
    flat = mask.flatten()
    return lambda: extend_attention_fwd(
        case.q, new, new[..., :512], out, pool, pool[..., :512], qo_indptr, kv_indptr, indices, flat, True,
        mask_indptr, s.q, 1.0, 1.0, sm_scale=SM_SCALE,
    )  # fmt: skip


def triton_decode(case: Case) -> Callable[[], object]:
    """SGLang's split decode kernel, q = 1 only."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    s, splits = case.shape, 64
    pool = case.pool.view(-1, 1, 576)
    indptr = torch.arange(s.bs + 1, device="cuda", dtype=torch.int32) * s.ctx
    indices = case.slots.flatten().contiguous()
    logits = torch.empty(s.bs, s.h, splits, 512, device="cuda")
    lse = torch.empty(s.bs, s.h, splits, device="cuda")
    num_splits = torch.full((s.bs,), splits, device="cuda", dtype=torch.int32)
    out = case.q.new_empty(s.bs, s.h, 512)
    return lambda: decode_attention_fwd(
        case.q, pool, pool[..., :512], out, indptr, indices, logits, lse, num_splits, splits, SM_SCALE, 1.0, 1.0
    )


def flash_mla(case: Case) -> Callable[[], object]:
    """FlashMLA's dense decode over 64-token pages (it has no other page size), causal."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    s = case.shape
    blocks = (s.ctx + 63) // 64
    table = torch.randperm(case.pool.shape[0] // 64, device="cuda")[: blocks * s.bs].int().view(s.bs, blocks)
    meta, _ = get_mla_metadata()
    q, cache = case.q.view(s.bs, s.q, s.h, 576), case.pool.view(-1, 64, 1, 576)
    return lambda: flash_mla_with_kvcache(
        q, cache, table, case.kv_lens, 512, meta, softmax_scale=SM_SCALE, causal=True, use_legacy=True
    )


def flashinfer(case: Case, backend: str) -> Callable[[], object]:
    """FlashInfer's MLA wrapper at the case's own page size, causal."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    s = case.shape
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.int8, device="cuda"), backend=backend)
    pages = (s.ctx + s.page - 1) // s.page
    indptr = torch.arange(s.bs + 1, device="cuda", dtype=torch.int32)
    indices = (case.slots[:, :: s.page] // s.page).flatten().int().contiguous()
    wrapper.plan(
        indptr * s.q, indptr * pages, indices, case.kv_lens, s.h, 512, 64, s.page, True, SM_SCALE, torch.bfloat16,
        torch.bfloat16,
    )  # fmt: skip
    pool = case.pool.view(-1, s.page, 576)
    q_latent, q_rope = case.q[..., :512].contiguous(), case.q[..., 512:].contiguous()
    latent, rope = pool[..., :512], pool[..., 512:]
    out = torch.empty_like(q_latent)
    return lambda: wrapper.run(q_latent, q_rope, latent, rope, out=out)


def try_time(
    make: Callable[[Case], Callable[[], object]], case: Case, errors: dict[str, str], name: str
) -> float | None:
    """The peer's time, or None with the reason noted: a peer may be absent or refuse the shape."""
    try:
        return time_ms(make(case))
    except Exception as error:
        errors.setdefault(name, f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}")
        torch.cuda.synchronize()
        return None


def peers(case: Case, errors: dict[str, str]) -> dict[str, float | None]:
    """Milliseconds of every peer on this case; `errors` collects why one did not run."""
    bf16 = case.shape.kv_dtype == "bf16"
    stock = triton_decode if case.shape.q == 1 else triton_verify
    run = {
        "triton_ms": stock if bf16 and case.shape.bs * case.shape.h < 200 else None,
        "flashmla_ms": flash_mla if bf16 else None,
        "flashinfer_ms": (lambda c: flashinfer(c, "fa2")) if bf16 else None,
        "flashinfer_fa3_ms": (lambda c: flashinfer(c, "fa3")) if bf16 else None,
    }
    return {name: try_time(make, case, errors, name) if make else None for name, make in run.items()}


def ceilings() -> dict[str, float]:
    """Measured read bandwidth (sum over 4 GB) and bf16 matmul rate, on random data."""
    data = torch.randn(1 << 30, device="cuda")
    read = data.numel() * 4 / time_ms(lambda: data.sum()) / 1e6
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = 2 * 8192**3 / time_ms(lambda: a @ b) / 1e9
    return {"read_gbps": round(read), "matmul_tflops": round(matmul)}


def measure(shapes: list[Shape], with_peers: bool, keep: Callable[[dict], None]) -> dict[str, Any]:
    """The whole report as JSON: hardware, ceilings, and a row a shape. `keep` gets what there is after each shape."""
    top: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "kernel_hash": kernels.source_hash(),
    }
    top |= {"sms": torch.cuda.get_device_properties(0).multi_processor_count, **ceilings()}
    top["workspace_bytes"] = ops.workspace_bytes(torch.device("cuda", torch.cuda.current_device()))
    errors: dict[str, str] = {}
    rows = []
    for shape in shapes:
        case = make_case(shape)
        row = asdict(shape) | {"ours_ms": time_ms(ours(case))}
        row |= peers(case, errors) if with_peers else {}
        floor_ms = max(shape.kv_bytes / top["read_gbps"] / 1e6, shape.flop / top["matmul_tflops"] / 1e9)
        row |= {"gbps": shape.kv_bytes / row["ours_ms"] / 1e6, "tflops": shape.flop / row["ours_ms"] / 1e9}
        row["roofline_percent"] = 100 * floor_ms / row["ours_ms"]
        rows.append(row)
        print(*kernel_page.cells(row), sep=" | ", flush=True)
        del case
        torch.cuda.empty_cache()
        keep(top | {"peers_not_run": errors, "rows": rows})
    return top | {"peers_not_run": errors, "rows": rows}


def main(argv: list[str]) -> int:
    """Runs `bench` or `gpu-report`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.kernels")
    parser.add_argument("verb", choices=("bench", "gpu-report"))
    parser.add_argument("--out", type=Path, default=None, help="folder for the report")
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args(argv)
    alone = args.no_peers or args.verb == "gpu-report"
    if not (require_gpu.found() if alone else require_gpu.can_serve()):
        return 2
    if args.verb == "bench":
        folder = args.out or ROOT / "docs" / "bench"
        folder.mkdir(parents=True, exist_ok=True)

        def keep(report: dict[str, object]) -> None:
            (folder / "kernel.json").write_text(json.dumps(report, indent=1) + "\n")
            (folder / "kernel.md").write_text(kernel_page.markdown(report))

        kernel_page.plot(measure(FULL, not args.no_peers, keep), folder / "kernel.png")
        return 0
    folder = args.out or ROOT / "build"
    folder.mkdir(parents=True, exist_ok=True)
    report = measure(SHORT, False, lambda _: None)
    worst = max(oracle_error(Shape(8, 2, 700, q, kv_dtype=kv)) for q in (1, 9, 33) for kv in ("bf16", "fp8"))
    text = kernel_page.markdown(report) + f"\nLargest relative error against the oracle kernel: {worst:.2e}\n"
    (folder / "gpu-report.md").write_text(text)
    print(text)
    return 0 if worst < 5e-3 else 1


def oracle_error(shape: Shape) -> float:
    """Relative error of the flash kernel's output against the naive kernel's."""
    case = make_case(shape)
    out, _ = ours(case)()
    want, _ = ops.mla_oracle(
        case.q, case.pool, case.req_to_token, case.requests, case.kv_lens, q_len=shape.q, sm_scale=SM_SCALE,
        kv_scale=FP8_SCALE if shape.kv_dtype == "fp8" else 1.0,
    )  # fmt: skip
    return ((out.float() - want.float()).norm() / want.float().norm()).item()
