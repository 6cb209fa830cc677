"""torch.library ops over the C ABI of `lib/libsm120_mla.so` (`kernels/include/sm120_mla.h`), loaded with ctypes.

The library links no torch, so one file serves every torch release. Ops launch on the caller's current stream, allocate
nothing that outlives the call, never synchronise, and may be captured in a CUDA graph: a captured launch is right for
any lengths.

`SGLANG_SM120_CHECK_SLOTS=1` also checks every slot against the pool (this synchronises; not under capture).
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
from pathlib import Path
from typing import Any

import torch

from sglang_sm120.attention.reference import HEAD_DIM, LATENT_DIM, mask_words

MAX_BATCH = 16384
MAX_HEADS = 128
ABI = 3
LIBRARY_PATH = Path(__file__).parent / "lib" / "libsm120_mla.so"
# What the built kernels run on; bulk copies on 9.0 and 12.x, plain asynchronous copies on 8.x.
KERNEL_MAJORS = (8, 9, 12)
KV_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)


class _Params(ctypes.Structure):
    """`struct sm120_mla_params`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "kv", "req_to_token", "req_pool_indices", "kv_lens", "qo_indptr")),
        *((name, ctypes.c_void_p) for name in ("tree_mask", "out", "lse", "workspace")),
        *((name, ctypes.c_int64) for name in ("kv_stride_bytes", "req_to_token_stride")),
        *(
            (name, ctypes.c_int32)
            for name in ("req_pool_indices_stride", "kv_lens_stride", "batch", "q_len", "total_q", "heads")
        ),
        *((name, ctypes.c_int32) for name in ("mask_words", "kv_is_fp8", "num_sms", "early_launch")),
        *((name, ctypes.c_float) for name in ("sm_scale", "kv_scale", "logit_cap")),
    ]


def available() -> bool:
    """Whether the kernels can run here: the library is built and a CUDA device is present."""
    return LIBRARY_PATH.exists() and torch.cuda.is_available()


@functools.cache
def library_targets() -> list[str]:
    """GPU architectures in the library, e.g. `sm_120a`, from the compiler's notes in it; empty where there is none."""
    if not LIBRARY_PATH.exists():
        return []
    return sorted({name.decode() for name in re.findall(rb"-arch (sm_\w+) ", LIBRARY_PATH.read_bytes())})


def library_problem(capability: tuple[int, int]) -> str | None:
    """Why the library cannot serve on a GPU of that compute capability, and what to do; None if it can."""
    major, minor = capability
    if major not in KERNEL_MAJORS:
        return f"the GPU is sm_{major}{minor}, kernels are for sm_80 to sm_90, sm_120, sm_121: choose another backend"
    if not LIBRARY_PATH.exists():
        return "this wheel was built without kernels: build it where nvcc is found (`make wheel`)"
    try:
        _library()
    except (RuntimeError, OSError, AttributeError) as error:
        return f"the kernel library does not load ({error}): build the wheel again (`make wheel`)"
    if any(_runs_on(target, capability) for target in library_targets()):
        return None
    wanted = f"sm_{major}{minor}" + "a" * (major == 12)
    return f"the kernels are not built for this GPU, sm_{major}{minor}: build the wheel with ARCHS={wanted} before make"


def _runs_on(target: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU takes code for `target`: that of a lower minor number too, unless an `a` ties it to one GPU."""
    digits = target.removeprefix("sm_").removesuffix("a")
    major, minor = int(digits[:-1]), int(digits[-1])
    if target.endswith("a"):
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def _is_cut_short(path: Path) -> bool:
    """Whether an ELF file ends before its table of sections does: the process would not survive to load it."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return False  # which the loader says itself
    (table,) = struct.unpack_from("<Q", header, 0x28)
    size, count = struct.unpack_from("<HH", header, 0x3A)
    return path.stat().st_size < table + size * count


@functools.cache
def _library() -> ctypes.CDLL:
    if not LIBRARY_PATH.exists():
        raise RuntimeError(f"{LIBRARY_PATH} is missing: build it with `make kernels`")
    if _is_cut_short(LIBRARY_PATH):
        raise RuntimeError(f"{LIBRARY_PATH} is cut short: run `make kernels`")
    library = ctypes.CDLL(str(LIBRARY_PATH))
    if library.sm120_mla_abi() != ABI:
        raise RuntimeError(
            f"{LIBRARY_PATH} has ABI {library.sm120_mla_abi()}, this package needs {ABI}: run `make kernels`"
        )
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    library.sm120_mla_workspace_bytes.restype = ctypes.c_size_t
    library.sm120_mla_workspace_bytes.argtypes = [i32, i32]
    library.sm120_mla_splits.argtypes = [i32, i32, i32]
    library.sm120_mla_verify.argtypes = [ctypes.POINTER(_Params), pointer]
    library.sm120_mla_oracle.argtypes = [ctypes.POINTER(_Params), pointer, i64, pointer]
    library.sm120_move_kv.argtypes = [pointer, i32, pointer, pointer, i32, i32, i32, pointer]
    library.sm120_pack_tree_mask.argtypes = [pointer, pointer, i32, i32, pointer]
    return library


def _launch(name: str, device: torch.device, *args: object) -> None:
    """Calls a launcher of the library on the device's current stream."""
    with torch.cuda.device(device):
        status = getattr(_library(), name)(*args, torch.cuda.current_stream(device).cuda_stream)
    if status:
        raise RuntimeError(f"{name}: CUDA error {status} ({torch.cuda.cudart().cudaGetErrorString(status)})")


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def splits(q_len: int, heads: int, device: torch.device) -> int:
    """Blocks among which `mla_verify` divides a long context for `q_len` new tokens a request; short ones use fewer."""
    return _library().sm120_mla_splits(q_len, heads, _num_sms(device))


def workspace_bytes(device: torch.device) -> int:
    """Bytes that `mla_verify` needs here, whatever the batch, context and q: 4 partial results of 48 rows per SM."""
    return _library().sm120_mla_workspace_bytes(_num_sms(device), MAX_BATCH)


def new_workspace(device: torch.device) -> torch.Tensor:
    """A workspace for `mla_verify`; launches that may run at the same time need one each. Contents never matter."""
    return torch.empty(workspace_bytes(device), dtype=torch.uint8, device=device)


@functools.cache
def _stream_workspace(device: torch.device, stream: int) -> torch.Tensor:
    return new_workspace(device)


def mla_verify(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    q_len: int | None = None,
    qo_indptr: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    sm_scale: float,
    kv_scale: float = 1.0,
    logit_cap: float = 0.0,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed MLA of each request's last query tokens over its whole paged latent KV.

    Args:
        q: `[T, H, 576]` bf16, contiguous, latent part first; H is 1 to 128.
        kv_pool: `[slots, 576]` or `[slots, 1, 576]`, bf16 or fp8_e4m3 with per-tensor `kv_scale`. Any page size:
            slots are looked up one by one.
        req_to_token: `[max_requests, max_context]` int32 slot of each token.
        req_pool_indices: `[B]` int32 or int64, each request's row in `req_to_token`.
        kv_lens: `[B]` int32 or int64 tokens of KV, the new ones included; 0 marks a padded request.
        q_len: new tokens of every request (T = B * q_len). Exactly one of `q_len` and `qo_indptr` is given.
        qo_indptr: `[B + 1]` int32 row offsets of ragged requests.
        tree_mask: `[T, ceil(q / 32)]` int32 or uint32 ancestor words (bit j: the row sees new token j); None is causal.
        sm_scale: factor of the logits, before `logit_cap * tanh(logit / logit_cap)` where `logit_cap` > 0.
        workspace: from `new_workspace`; by default one is kept per device and stream.
        out, lse: where to write; allocated if absent.

    Returns:
        out `[T, H, 512]` bf16 and the natural-log log-sum-exp `[T, H]` float32. Rows that see nothing, rows of padded
        requests and rows past the batch give 0 and -inf.

    Raises:
        ValueError: an argument's shape, dtype, device or stride is not as above; the message names it.
    """
    if workspace is None:
        workspace = _stream_workspace(q.device, torch.cuda.current_stream(q.device).cuda_stream)
    if out is None:
        out = q.new_empty((*q.shape[:2], LATENT_DIM))
    if lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    torch.ops.sglang_sm120.mla_verify(
        q, kv_pool, req_to_token, req_pool_indices, kv_lens, q_len, qo_indptr, tree_mask, workspace,
        sm_scale, kv_scale, logit_cap, out, lse,
    )  # fmt: skip
    return out, lse


def mla_oracle(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    q_len: int | None = None,
    qo_indptr: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    sm_scale: float,
    kv_scale: float = 1.0,
    logit_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_verify` by the naive kernel: a block per row, the whole score row in memory. For tests; it synchronises."""
    out = q.new_empty((*q.shape[:2], LATENT_DIM))
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    params = _params(
        q, kv_pool, req_to_token, req_pool_indices, kv_lens, q_len, qo_indptr, tree_mask, None,
        sm_scale, kv_scale, logit_cap, out, lse,
    )  # fmt: skip
    max_kv_len = max(1, int(kv_lens.max()))
    scores = torch.empty(q.shape[0] * q.shape[1] * max_kv_len, dtype=torch.float32, device=q.device)
    _launch("sm120_mla_oracle", q.device, ctypes.byref(params), scores.data_ptr(), max_kv_len)
    return out, lse


def move_kv(pool_pointers: torch.Tensor, row_bytes: int, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Moves slots `src[i]` to `dst[i]` in every layer's pool by one launch, as if all were read before any is written.

    Args:
        pool_pointers: `[layers]` uint64 or int64 on the device, base address of each layer's contiguous pool.
        row_bytes: bytes of one slot, a multiple of 16.
        src, dst: `[n]` int64 slots, n up to `move_kv_max_rows()`. The two may overlap; `dst[i] < 0` skips entry i.
            Or `[lists, n]`, up to 65,535 such lists, of which none touches another's slots.
    """
    torch.ops.sglang_sm120.move_kv(pool_pointers, row_bytes, src, dst)


def move_kv_max_rows() -> int:
    """Most slots that one `move_kv` takes."""
    return _library().sm120_move_kv_max_rows()


def pack_tree_mask(mask: torch.Tensor) -> torch.Tensor:
    """Packs bool visibility `[..., q]` to int32 words `[..., ceil(q / 32)]`: bit j of word w = new token 32 w + j."""
    return torch.ops.sglang_sm120.pack_tree_mask(mask)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _int32_stride(name: str, tensor: torch.Tensor) -> int:
    """Stride in int32 units of a contiguous int32 or (little-endian) int64 vector."""
    _expect(tensor.dtype in (torch.int32, torch.int64), f"{name} is {tensor.dtype}; it must be int32 or int64")
    _expect(tensor.is_contiguous(), f"{name} must be contiguous")
    return tensor.element_size() // 4


def _params(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    q_len: int | None,
    qo_indptr: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    workspace: torch.Tensor | None,
    sm_scale: float,
    kv_scale: float,
    logit_cap: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> _Params:
    """Checks every argument against what the kernel assumes and packs them."""
    rows, batch = q.shape[0], kv_lens.shape[0]
    tensors = {
        "q": q, "kv_pool": kv_pool, "req_to_token": req_to_token, "req_pool_indices": req_pool_indices,
        "kv_lens": kv_lens, "qo_indptr": qo_indptr, "tree_mask": tree_mask, "workspace": workspace,
        "out": out, "lse": lse,
    }  # fmt: skip
    for name, tensor in tensors.items():
        if tensor is not None:
            _expect(tensor.device == q.device, f"{name} is on {tensor.device}, q on {q.device}")
    _check_rows(q, out, lse)
    _check_kv(kv_pool, req_to_token)
    _check_batch(rows, req_pool_indices, kv_lens, q_len, qo_indptr)
    if tree_mask is not None:
        _check_mask(tree_mask, rows if q_len is None else batch * q_len, q_len)
    if workspace is not None:
        _expect(
            workspace.numel() * workspace.element_size() >= workspace_bytes(q.device)
            and workspace.data_ptr() % 16 == 0,
            f"workspace must have {workspace_bytes(q.device)} bytes, aligned to 16: use ops.new_workspace",
        )
    if os.environ.get("SGLANG_SM120_CHECK_SLOTS") == "1":
        _check_slots(kv_pool.shape[0], req_to_token, req_pool_indices, kv_lens)
    addresses = {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
    return _Params(
        kv=addresses.pop("kv_pool"),
        **addresses,
        kv_stride_bytes=kv_pool.stride(0) * kv_pool.element_size(),
        req_to_token_stride=req_to_token.stride(0),
        req_pool_indices_stride=_int32_stride("req_pool_indices", req_pool_indices),
        kv_lens_stride=_int32_stride("kv_lens", kv_lens),
        batch=batch,
        q_len=q_len or 0,
        total_q=rows,
        heads=q.shape[1],
        mask_words=0 if tree_mask is None else tree_mask.shape[1],
        kv_is_fp8=kv_pool.dtype == torch.float8_e4m3fn,
        num_sms=_num_sms(q.device),
        early_launch=torch.cuda.get_device_capability(q.device) >= (9, 0),
        sm_scale=sm_scale,
        kv_scale=kv_scale,
        logit_cap=logit_cap,
    )


def _check_rows(q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Queries, and what is written for them."""
    _expect(q.dtype == torch.bfloat16, f"q is {q.dtype}; it must be bfloat16")
    _expect(q.dim() == 3 and q.shape[2] == HEAD_DIM, f"q is {list(q.shape)}; it must be [T, H, {HEAD_DIM}]")
    _expect(1 <= q.shape[1] <= MAX_HEADS, f"q has {q.shape[1]} heads; 1 to {MAX_HEADS} are supported")
    for name, tensor in (("q", q), ("out", out), ("lse", lse)):
        _expect(tensor.is_contiguous(), f"{name} must be contiguous, its strides are {tensor.stride()}")
    _expect(q.data_ptr() % 4 == 0 and out.data_ptr() % 8 == 0, "q and out must be aligned to 4 and 8 bytes")
    _expect(
        out.dtype == torch.bfloat16 and out.shape == (*q.shape[:2], LATENT_DIM),
        f"out is {out.dtype} {list(out.shape)}; it must be bfloat16 {[*q.shape[:2], LATENT_DIM]}",
    )
    _expect(
        lse.dtype == torch.float32 and lse.shape == q.shape[:2],
        f"lse is {lse.dtype} {list(lse.shape)}; it must be float32 {list(q.shape[:2])}",
    )


def _check_kv(kv_pool: torch.Tensor, req_to_token: torch.Tensor) -> None:
    _expect(kv_pool.dtype in KV_DTYPES, f"kv_pool is {kv_pool.dtype}; it must be bfloat16 or float8_e4m3fn")
    _expect(
        kv_pool.shape[-1] == HEAD_DIM and kv_pool.numel() == kv_pool.shape[0] * HEAD_DIM and kv_pool.stride(-1) == 1,
        f"kv_pool is {list(kv_pool.shape)} with strides {kv_pool.stride()}; it must be rows of {HEAD_DIM} values",
    )
    _expect(
        kv_pool.data_ptr() % 16 == 0 and kv_pool.stride(0) * kv_pool.element_size() % 16 == 0,
        "kv_pool rows must start at multiples of 16 bytes",
    )
    _expect(
        req_to_token.dtype == torch.int32 and req_to_token.dim() == 2 and req_to_token.stride(1) == 1,
        f"req_to_token is {req_to_token.dtype} {list(req_to_token.shape)}; it must be int32 [requests, context]",
    )


def _check_batch(
    rows: int, req_pool_indices: torch.Tensor, kv_lens: torch.Tensor, q_len: int | None, qo_indptr: torch.Tensor | None
) -> None:
    """The requests, and how the `rows` of q are theirs."""
    batch = kv_lens.shape[0]
    _expect(batch <= MAX_BATCH, f"kv_lens has {batch} requests; at most {MAX_BATCH} are supported")
    _expect(req_pool_indices.shape == kv_lens.shape, "req_pool_indices and kv_lens must have one entry per request")
    _expect((q_len is None) != (qo_indptr is None), "give exactly one of q_len and qo_indptr")
    if q_len is not None:
        _expect(q_len > 0 and rows >= batch * q_len, f"q has {rows} rows for {batch} requests of q_len {q_len}")
    elif qo_indptr is not None:
        _expect(
            qo_indptr.dtype == torch.int32 and qo_indptr.is_contiguous() and qo_indptr.shape == (batch + 1,),
            f"qo_indptr is {qo_indptr.dtype} {list(qo_indptr.shape)}; it must be int32 [{batch + 1}]",
        )
        _expect(batch > 0 or rows == 0, f"q has {rows} rows, but kv_lens names no request")


def _check_mask(tree_mask: torch.Tensor, rows: int, q_len: int | None) -> None:
    """Ancestor words for `rows` rows."""
    _expect(
        tree_mask.dtype in (torch.int32, torch.uint32) and tree_mask.dim() == 2 and tree_mask.is_contiguous(),
        f"tree_mask is {tree_mask.dtype} {list(tree_mask.shape)}; it must be contiguous int32 or uint32 [T, W]",
    )
    words = tree_mask.shape[1]
    _expect(tree_mask.shape[0] >= rows, "tree_mask has fewer rows than q")
    _expect(q_len is None or words >= mask_words(q_len), f"tree_mask has {words} words for q_len {q_len}")


def _check_slots(slots: int, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, kv_lens: torch.Tensor) -> None:
    """Raises if any slot a request would read lies outside the pool."""
    for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), kv_lens.tolist(), strict=True)):
        _expect(0 <= row < req_to_token.shape[0], f"req_pool_indices[{b}] is {row}, outside req_to_token")
        _expect(0 <= length <= req_to_token.shape[1], f"kv_lens[{b}] is {length}, outside req_to_token")
        used = req_to_token[row, :length]
        bad = ((used < 0) | (used >= slots)).nonzero()
        if bad.numel():
            at = int(bad[0])
            raise ValueError(f"request {b} token {at} has slot {int(used[at])}, outside the pool of {slots}")


def _mla_verify_cuda(*args: Any) -> None:
    params = _params(*args)
    _launch("sm120_mla_verify", args[0].device, ctypes.byref(params))


def _move_kv_cuda(pool_pointers: torch.Tensor, row_bytes: int, src: torch.Tensor, dst: torch.Tensor) -> None:
    _expect(
        pool_pointers.dtype in (torch.uint64, torch.int64), f"pool_pointers is {pool_pointers.dtype}; it must be uint64"
    )
    _expect(row_bytes > 0 and row_bytes % 16 == 0, f"row_bytes is {row_bytes}; it must be a positive multiple of 16")
    for name, slots in (("src", src), ("dst", dst)):
        _expect(
            slots.dtype == torch.int64 and slots.is_contiguous() and slots.dim() in (1, 2),
            f"{name} is {slots.dtype} {list(slots.shape)}; it must be contiguous int64, [n] or [lists, n]",
        )
        _expect(
            slots.device == pool_pointers.device,
            f"{name} is on {slots.device}, pool_pointers on {pool_pointers.device}",
        )
    _expect(src.shape == dst.shape, f"src is {list(src.shape)}, dst {list(dst.shape)}")
    lists, count = src.shape if src.dim() == 2 else (1, src.numel())
    _expect(count <= move_kv_max_rows(), f"{count} slots in one list; at most {move_kv_max_rows()} are supported")
    _expect(lists <= 65_535, f"{lists} lists in one move; at most 65,535 are supported")
    _launch(
        "sm120_move_kv", src.device, pool_pointers.data_ptr(), pool_pointers.numel(), src.data_ptr(), dst.data_ptr(),
        lists, count, row_bytes,
    )  # fmt: skip


def _packed_like(mask: torch.Tensor) -> torch.Tensor:
    return mask.new_empty((*mask.shape[:-1], mask_words(mask.shape[-1])), dtype=torch.int32)


def _pack_tree_mask_cuda(mask: torch.Tensor) -> torch.Tensor:
    _expect(mask.dtype in (torch.bool, torch.uint8), f"mask is {mask.dtype}; it must be bool")
    mask = mask.contiguous()
    words = _packed_like(mask)
    rows = mask.numel() // max(mask.shape[-1], 1)
    _launch("sm120_pack_tree_mask", mask.device, mask.data_ptr(), words.data_ptr(), rows, mask.shape[-1])
    return words


_OPS = torch.library.Library("sglang_sm120", "DEF")
_OPS.define(
    "mla_verify(Tensor q, Tensor kv_pool, Tensor req_to_token, Tensor req_pool_indices, Tensor kv_lens, int? q_len, "
    "Tensor? qo_indptr, Tensor? tree_mask, Tensor(a!) workspace, float sm_scale, float kv_scale, float logit_cap, "
    "Tensor(b!) out, Tensor(c!) lse) -> ()"
)
_OPS.define("move_kv(Tensor pool_pointers, int row_bytes, Tensor src, Tensor dst) -> ()")
_OPS.define("pack_tree_mask(Tensor mask) -> Tensor")
_OPS.impl("mla_verify", _mla_verify_cuda, "CUDA")
_OPS.impl("move_kv", _move_kv_cuda, "CUDA")
_OPS.impl("pack_tree_mask", _pack_tree_mask_cuda, "CUDA")
torch.library.register_fake("sglang_sm120::mla_verify", lambda *args: None, lib=_OPS)
torch.library.register_fake("sglang_sm120::move_kv", lambda *args: None, lib=_OPS)
torch.library.register_fake("sglang_sm120::pack_tree_mask", _packed_like, lib=_OPS)
