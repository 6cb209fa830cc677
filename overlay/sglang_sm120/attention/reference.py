"""Absorbed MLA with a tree mask in plain PyTorch: the oracle of the kernels, and what runs where there is no kernel.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in absorbed form: all heads share one latent row a token,
512 values that are both key and value followed by 64 rope values that are key only. Query rows of a request are its
last tokens; a tree mask (DDTree, arXiv 2604.12989) says which of the request's own new tokens a row may see.
"""

from __future__ import annotations

import torch

LATENT_DIM = 512
ROPE_DIM = 64
HEAD_DIM = LATENT_DIM + ROPE_DIM
MASK_WORD_BITS = 32


def mask_words(q_len: int) -> int:
    """Number of uint32 words that hold one bit for each of `q_len` new tokens."""
    return -(-q_len // MASK_WORD_BITS)


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """Pack bool visibility `[..., q]` to ancestor words `[..., ceil(q / 32)]` int32 (bit j, word w: token 32 w + j)."""
    q_len = mask.shape[-1]
    words = mask_words(q_len)
    padded = torch.nn.functional.pad(mask.to(torch.int64), (0, words * MASK_WORD_BITS - q_len))
    bits = torch.arange(MASK_WORD_BITS, device=mask.device, dtype=torch.int64)
    return (padded.unflatten(-1, (words, MASK_WORD_BITS)) << bits).sum(-1).to(torch.uint32).view(torch.int32)


def unpack_mask(words: torch.Tensor, q_len: int) -> torch.Tensor:
    """Inverse of `pack_mask`: int32 or uint32 words `[..., W]` to bool `[..., q_len]`."""
    bits = torch.arange(MASK_WORD_BITS, device=words.device, dtype=torch.int32)
    return ((words.view(torch.int32).unsqueeze(-1) >> bits) & 1).flatten(-2)[..., :q_len].bool()


def mla_attention(
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
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's last rows over its whole latent KV.

    Args:
        q: `[T, H, 576]`, latent part first. Row t of request b is its new token `t - qo_indptr[b]`.
        kv_pool: `[slots, 576]` or `[slots, 1, 576]`, any float dtype (fp8 is multiplied by `kv_scale`).
        req_to_token: `[max_requests, max_context]` int32 slot of each token.
        req_pool_indices: `[B]` row of each request in `req_to_token`.
        kv_lens: `[B]` tokens in the KV of each request, its new ones included. 0 marks a padded request.
        q_len: new tokens of every request. Exactly one of `q_len` and `qo_indptr` is given, as for `ops.mla_verify`.
        qo_indptr: `[B + 1]` row offsets of ragged requests.
        tree_mask: `[T, W]` ancestor words over the request's own new tokens; None is causal.
        logit_cap: `cap * tanh(logit / cap)` where > 0.
        compute_dtype: float64 makes this the oracle.

    Returns:
        out `[T, H, 512]` in q's dtype and the natural-log log-sum-exp `[T, H]` in float32 (float64 in the oracle).
        Rows that see nothing give 0 and -inf.
    """
    rows, heads, _ = q.shape
    out = q.new_zeros((rows, heads, LATENT_DIM))
    lse_dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
    lse = torch.full((rows, heads), float("-inf"), dtype=lse_dtype, device=q.device)
    pool = kv_pool.view(kv_pool.shape[0], HEAD_DIM)
    if qo_indptr is not None:
        offsets = qo_indptr.tolist()
    else:
        assert q_len is not None
        offsets = [q_len * b for b in range(len(kv_lens) + 1)]
    for b, kv_len in enumerate(kv_lens.tolist()):
        begin, end = offsets[b], offsets[b + 1]
        rows_len = min(end - begin, kv_len)
        if rows_len == 0:
            continue
        slots = req_to_token[req_pool_indices[b], :kv_len].long()
        kv = pool[slots].to(compute_dtype)
        if kv_scale != 1.0:
            kv = kv * kv_scale
        visible = _visible(
            kv_len, rows_len, None if tree_mask is None else tree_mask[begin : begin + rows_len], q.device
        )
        query = q[begin : begin + rows_len].to(compute_dtype)
        logits = torch.matmul(query.reshape(rows_len * heads, HEAD_DIM), kv.T).view(rows_len, heads, kv_len) * sm_scale
        if logit_cap > 0:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        logits.masked_fill_(~visible[:, None, :], float("-inf"))
        row_lse = torch.logsumexp(logits, dim=-1)
        lse[begin : begin + rows_len] = row_lse.to(lse_dtype)
        weights = torch.exp(logits - row_lse[..., None]).nan_to_num_(0.0)
        values = torch.matmul(weights.view(rows_len * heads, kv_len), kv[:, :LATENT_DIM])
        out[begin : begin + rows_len] = values.view(rows_len, heads, LATENT_DIM).to(q.dtype)
    return out, lse


def _visible(kv_len: int, q_len: int, tree_mask: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """`[q_len, kv_len]` bool: the prefix, then the ancestors (or, without a tree, the tokens up to the row's own)."""
    visible = torch.ones((q_len, kv_len), dtype=torch.bool, device=device)
    causal = torch.ones((q_len, q_len), dtype=torch.bool, device=device).tril_()
    visible[:, kv_len - q_len :] = causal if tree_mask is None else unpack_mask(tree_mask, q_len)
    return visible
