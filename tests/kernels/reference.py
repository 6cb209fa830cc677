"""Absorbed MLA with a tree mask in numpy float64: what the oracle and the flash kernel must meet."""

from __future__ import annotations

import numpy as np

LATENT_DIM = 512
HEAD_DIM = 576


def mla_reference(
    q: np.ndarray,
    kv: np.ndarray,
    req_to_token: np.ndarray,
    req_pool_indices: np.ndarray,
    kv_lens: np.ndarray,
    qo_indptr: np.ndarray,
    visible: np.ndarray | None,
    *,
    sm_scale: float,
    kv_scale: float = 1.0,
    logit_cap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of each request's new tokens over its KV.

    Args:
        q: `[T, H, 576]`.
        kv: `[slots, 576]`; a stored unit is worth `kv_scale`.
        req_to_token: `[max_requests, max_context]` slot ids; row `req_pool_indices[b]` is request b's.
        kv_lens: `[B]` tokens, the new ones included. If fewer than its query rows, the last rows see nothing.
        qo_indptr: `[B + 1]` row offsets.
        visible: `[T, q]` bool over the request's own new tokens, or None for causal. The prefix is always visible.

    Returns:
        float64 out `[T, H, 512]` and natural-log log-sum-exp `[T, H]`; 0 and -inf where nothing is visible.
    """
    rows, heads, _ = q.shape
    out = np.zeros((rows, heads, LATENT_DIM))
    lse = np.full((rows, heads), -np.inf)
    for b, kv_len in enumerate(kv_lens):
        begin, end = qo_indptr[b], qo_indptr[b + 1]
        new = min(end - begin, kv_len)
        tokens = kv[req_to_token[req_pool_indices[b], :kv_len]].astype(np.float64) * kv_scale
        for i in range(new):
            seen = np.ones(kv_len, dtype=bool)
            seen[kv_len - new :] = np.arange(new) <= i if visible is None else visible[begin + i, :new]
            if not seen.any():
                continue
            logits = q[begin + i].astype(np.float64) @ tokens[seen].T * sm_scale
            if logit_cap > 0:
                logits = logit_cap * np.tanh(logits / logit_cap)
            peak = logits.max(axis=1, keepdims=True)
            weights = np.exp(logits - peak)
            total = weights.sum(axis=1, keepdims=True)
            lse[begin + i] = (peak + np.log(total))[:, 0]
            out[begin + i] = weights / total @ tokens[seen, :LATENT_DIM]
    return out, lse


def random_tree(q_len: int, rng: np.random.Generator) -> np.ndarray:
    """`[q, q]` bool ancestor matrix (itself included) of a random tree rooted at node 0."""
    visible = np.eye(q_len, dtype=bool)
    for node in range(1, q_len):
        visible[node] |= visible[rng.integers(0, node)]
    return visible


def pack_words(visible: np.ndarray) -> np.ndarray:
    """`[T, q]` bool to `[T, ceil(q / 32)]` uint32, bit j of word w = column 32 w + j."""
    words = -(-visible.shape[1] // 32)
    padded = np.zeros((visible.shape[0], words * 32), dtype=np.uint64)
    padded[:, : visible.shape[1]] = visible
    return (padded.reshape(-1, words, 32) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)
