"""Reference bundles: inputs and float64 answers of the verify kernel's cases, the same for every test language.

    python tests/kernels/bundles.py OUT_DIR      # one NAME.safetensors a case, and manifest.json

The manifest gives each case's shapes, seed, scales and tolerances; everything else follows from the seed. Scales and
tolerances are in the bundle as well, so that bundle_check.cpp reads no other format.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from reference import HEAD_DIM, mla_reference, pack_words, random_tree
from safetensors.numpy import save_file

MAX_RELATIVE_ERROR = 5e-3  # of bf16 outputs: inputs and probabilities are rounded to 8 bits
MAX_LSE_ERROR = 1e-3


@dataclass(frozen=True)
class BundleCase:
    """`q_lens` new tokens a request; equal ones are asked as a uniform batch."""

    name: str
    seed: int
    heads: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    tree: bool = True
    fp8: bool = False
    logit_cap: float = 0.0
    sm_scale: float = 192**-0.5
    max_relative_error: float = MAX_RELATIVE_ERROR
    max_lse_error: float = MAX_LSE_ERROR


CASES = [
    BundleCase("decode", 1, 8, (1, 1, 1), (1, 17, 700)),
    BundleCase("chain", 2, 8, (9, 9), (300, 9), tree=False),
    BundleCase("tree", 3, 8, (33, 33, 33), (500, 33, 64)),
    BundleCase("tree_wide", 4, 16, (65,), (260,)),
    BundleCase("padded", 5, 12, (9, 9, 9), (0, 120, 0)),
    BundleCase("fp8", 6, 8, (9, 9), (333, 50), fp8=True),
    BundleCase("soft_cap", 7, 20, (5,), (400,), logit_cap=30.0),
    BundleCase("ragged", 8, 8, (5, 40, 1), (5, 300, 90), tree=False),
    BundleCase("many_heads", 9, 128, (3,), (150,)),
]
# Every instance of the kernel: 8 to 48 rows, both KV types; several requests to a block, odd numbers of tiles.
INSTANCES = [
    BundleCase(f"{8 * q}_rows{'_fp8' if fp8 else ''}", 20 + q, 8, (q, q, q), (300, q, 133), fp8=fp8)
    for q in range(1, 7)
    for fp8 in (False, True)
]


def make(case: BundleCase) -> dict[str, np.ndarray]:
    """Inputs (bf16 and fp8 as raw uint16 / uint8 bits) and expected float32 out and lse."""
    rng = np.random.default_rng(case.seed)
    batch, total = len(case.q_lens), sum(case.kv_lens)
    slots = total + 37
    kv_scale = 1 / 16 if case.fp8 else 1.0
    kv = torch.from_numpy(rng.standard_normal((slots, HEAD_DIM)) / kv_scale)
    kv = kv.to(torch.float8_e4m3fn if case.fp8 else torch.bfloat16)
    q = torch.from_numpy(rng.standard_normal((sum(case.q_lens), case.heads, HEAD_DIM))).to(torch.bfloat16)
    requests = rng.permutation(batch + 2)[:batch].astype(np.int32)
    table = np.full((batch + 2, max(*case.kv_lens, 1) + 5), 2**30, dtype=np.int32)
    order, taken = rng.permutation(slots), 0
    for row, length in zip(requests, case.kv_lens, strict=True):
        table[row, :length] = order[taken : taken + length]
        taken += length
    visible = np.zeros((sum(case.q_lens), max(case.q_lens)), dtype=bool)
    indptr = np.concatenate([[0], np.cumsum(case.q_lens)]).astype(np.int32)
    for b, q_len in enumerate(case.q_lens):
        own = random_tree(q_len, rng) if case.tree else np.tri(q_len, dtype=bool)
        visible[indptr[b] : indptr[b + 1], :q_len] = own
    lens = np.array(case.kv_lens, dtype=np.int32)
    out, lse = mla_reference(
        q.double().numpy(), kv.double().numpy(), table, requests, lens, indptr, visible,
        sm_scale=case.sm_scale, kv_scale=kv_scale, logit_cap=case.logit_cap,
    )  # fmt: skip
    raw = torch.uint8 if case.fp8 else torch.uint16
    return {
        "q": q.view(torch.uint16).numpy(), "kv": kv.view(raw).numpy(), "req_to_token": table,
        "req_pool_indices": requests, "kv_lens": lens, "qo_indptr": indptr, "tree_mask": pack_words(visible),
        "kv_scale": np.float32([kv_scale]), "out": out.astype(np.float32), "lse": lse.astype(np.float32),
        **{name: np.float32([getattr(case, name)])
           for name in ("sm_scale", "logit_cap", "max_relative_error", "max_lse_error")},
    }  # fmt: skip


def write(folder: Path, cases: list[BundleCase] = CASES) -> list[Path]:
    """The bundles' paths, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{case.name}.safetensors" for case in cases]
    for case, path in zip(cases, paths, strict=True):
        save_file(make(case), str(path))
    (folder / "manifest.json").write_text(json.dumps([asdict(case) for case in cases], indent=1) + "\n")
    return paths


if __name__ == "__main__":
    write(Path(sys.argv[1]))
