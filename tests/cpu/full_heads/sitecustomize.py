"""Put on PYTHONPATH, this sends prompts through full heads on the CPU engine, as a GPU with FlashInfer does.

Upstream's planner and runner, our backend and the model's code are the real ones; FlashInfer's ragged wrapper and
three Triton kernels are replaced by PyTorch. `SHORT_KEYS=1` breaks it on purpose: the keys of a prompt then end where
the plan of its first chunk left them.
"""

from __future__ import annotations

import os

import torch
from sglang_sm120 import plugin
from sglang_sm120.attention import select

select.prefills_with_full_heads = lambda: True
_create_backend = plugin._create_backend


class RaggedWrapper:
    """`BatchPrefillWithRaggedKVCacheWrapper`: what was planned is what is attended to."""

    def __init__(self, *_args, **_kwargs) -> None:
        pass

    def begin_forward(self, qo_indptr, kv_indptr, causal=True, **_kwargs) -> None:
        self.qo, self.kv, self.causal = qo_indptr.tolist(), kv_indptr.tolist(), causal

    def forward_return_lse(self, q, k, v, causal, sm_scale, logits_soft_cap):
        assert not logits_soft_cap
        out, lse = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_full(q.shape[:2], -torch.inf)
        for b in range(len(self.qo) - 1):
            rows, keys = slice(*self.qo[b : b + 2]), slice(*self.kv[b : b + 2])
            n, m = rows.stop - rows.start, keys.stop - keys.start
            scores = torch.einsum("qhd,khd->qhk", q[rows], k[keys]) * sm_scale
            if causal:
                visible = torch.arange(m)[None] <= torch.arange(n)[:, None] + m - n
                scores = scores.masked_fill(~visible[:, None], -torch.inf)
            if m:
                lse[rows] = scores.logsumexp(-1)
                out[rows] = torch.einsum("qhk,khd->qhd", (scores - lse[rows][..., None]).exp().nan_to_num(0), v[keys])
        return out, lse

    def forward(self, *args, **kwargs):
        return self.forward_return_lse(*args, **kwargs)[0]


def _prefill(model_runner):
    """Upstream's backend as far as a prompt uses it, without the buffers that only a GPU can hold."""
    from sglang.srt.layers.attention import flashinfer_mla_backend as upstream

    upstream.BatchPrefillWithRaggedKVCacheWrapper = RaggedWrapper
    served = object.__new__(upstream.FlashInferMLAAttnBackend)
    rows = model_runner.req_to_token_pool.size + 1
    served.kv_indptr, served.qo_indptr = (torch.zeros(rows, dtype=torch.int32) for _ in range(2))
    served.token_to_kv_pool = model_runner.token_to_kv_pool
    served.kv_index_translator = model_runner.kv_index_translator
    served.workspace_buffer, served.fmha_backend, served.enable_chunk_kv = None, "auto", True
    served.prefill_wrapper_ragged, served.prefill_wrapper_paged = RaggedWrapper(), None
    served.indices_updater_prefill = upstream.FlashInferMLAIndicesUpdaterPrefill(model_runner, served)
    served.mha_chunk_kv_cache = upstream.FlashInferMhaChunkKVRunner(model_runner, served)
    if os.environ.get("SHORT_KEYS"):
        served.kv_indptr = torch.zeros(0, dtype=torch.int32)  # what our backend writes is lost
    return served


def _replace_kernels(model_runner) -> None:
    from sglang.srt.layers.attention import merge_state
    from sglang.srt.model_executor import forward_batch_deepseek_mha_mixin as chunks

    table = model_runner.req_to_token_pool.req_to_token

    def gather(requests, starts, lengths, out):
        parts = [table[r, s : s + n] for r, s, n in zip(requests.tolist(), starts, lengths.tolist(), strict=True)]
        out.copy_(torch.cat(parts))

    def pack_read_stream(_plan, *, req_pool_indices, seq_lens, indptr, out, **_kwargs):
        gather(req_pool_indices, [0] * len(seq_lens), seq_lens, out)

    def launch(_table, requests, starts, lengths, _cumulative, out, _width):
        gather(requests, starts.tolist(), lengths, out)

    def merge(a, lse_a, b, lse_b, out, lse):
        torch.logaddexp(lse_a, lse_b, out=lse)
        out.copy_(a * (lse_a - lse).exp()[..., None] + b * (lse_b - lse).exp()[..., None])

    model_runner.kv_index_translator.pack_read_stream = pack_read_stream
    chunks.create_chunked_prefix_cache_kv_indices = type("Kernel", (), {"__getitem__": lambda *_: launch})()
    merge_state.merge_state = merge


def _create_with_full_heads(model_runner):
    from sglang_sm120.attention import backend

    backend._ragged_prefill = _prefill
    _replace_kernels(model_runner)
    return _create_backend(model_runner)


plugin._create_backend = _create_with_full_heads
