"""`--attention-backend sm120_mla`: absorbed MLA for decode, tree verify, draft extend and extend.

```
ForwardBatch --> Rows (kv_lens, qo offsets, tree mask)  --> mla_attention (reference, or the kernel on a GPU)
                  planned once a step, on the device          once a layer, straight from req_to_token
```
A request's slots are read from `req_to_token` by the attention itself: no index list and no context-sized mask exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang_sm120.attention import metrics, reference

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass
class Rows:
    """Query rows of one step: `kv_lens [B]`, `qo_indptr [B + 1]`, both int32, and ancestor words `[T, W]` or None (causal)."""

    kv_lens: torch.Tensor
    qo_indptr: torch.Tensor
    tree_mask: torch.Tensor | None = None


class Sm120MLABackend(AttentionBackend):
    """Absorbed-MLA attention over the paged latent pool. Page size does not matter: slots are read one by one."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: ModelRunner, skip_prefill: bool = False) -> None:
        super().__init__()
        self.device = model_runner.device
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.data_type = self.kv_cache_dtype = model_runner.kv_cache_dtype
        self.forward_metadata: Rows | None = None
        self.num_draft_tokens: int = get_spec().speculative_num_draft_tokens or 0
        self._verify_mask: VerifyMask | None = None
        if self.num_draft_tokens and not model_runner.is_draft_worker and not skip_prefill:
            self._verify_mask = self._new_verify_mask(model_runner.req_to_token_pool.size)

    def _new_verify_mask(self, max_bs: int) -> VerifyMask:
        """`q x q` cells a request, for as many requests as can run: the draft stage always finds room."""
        cells = tree_mask_numel(TreeMaskMode.QLEN_ONLY, max_bs, self.num_draft_tokens, 0)
        buffer = torch.zeros(cells, dtype=torch.bool, device=self.device)
        return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=max_bs)

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._verify_mask

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        metrics.count_step(mode.name.lower(), "reference")
        seq_lens = forward_batch.seq_lens.to(torch.int32)
        if mode.is_decode_or_idle():
            self.forward_metadata = Rows(seq_lens, self._uniform_indptr(seq_lens, 1))
        elif mode.is_target_verify():
            q_len = self.num_draft_tokens
            self.forward_metadata = Rows(
                seq_lens + q_len, self._uniform_indptr(seq_lens, q_len), self._tree_mask(forward_batch, q_len)
            )
        elif mode.is_draft_extend_v2():
            q_len = self.num_draft_tokens
            kv_lens = seq_lens - forward_batch.extend_seq_lens.to(torch.int32) + q_len
            self.forward_metadata = Rows(kv_lens, self._uniform_indptr(seq_lens, q_len))
        else:
            lens = forward_batch.extend_seq_lens.to(torch.int32)
            self.forward_metadata = Rows(seq_lens, torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)))

    @staticmethod
    def _uniform_indptr(seq_lens: torch.Tensor, q_len: int) -> torch.Tensor:
        return torch.arange(seq_lens.shape[0] + 1, device=seq_lens.device, dtype=torch.int32) * q_len

    @staticmethod
    def _tree_mask(forward_batch: ForwardBatch, q_len: int) -> torch.Tensor | None:
        """Ancestor words `[B * q, W]` from the draft's mask: ready-made words (int32), or `q x q` bool cells a request."""
        mask = forward_batch.spec_info.custom_mask
        if mask is None or mask.dtype == torch.int32:
            return mask
        rows = forward_batch.batch_size * q_len
        return reference.pack_mask(mask.view(torch.bool)[: rows * q_len].view(rows, q_len))

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`q [T, H, 512]` and `q_rope [T, H, 64]` (or q with both, 576) over the pool: `[T, H * 512]`."""
        if k is not None and save_kv_cache:
            self._save(layer, forward_batch, k, k_rope)
        if q_rope is not None:
            q = torch.cat(
                [
                    q.view(-1, layer.tp_q_head_num, reference.LATENT_DIM),
                    q_rope.view(-1, layer.tp_q_head_num, reference.ROPE_DIM),
                ],
                dim=-1,
            )
        rows = self.forward_metadata
        out, _ = reference.mla_attention(
            q.view(-1, layer.tp_q_head_num, reference.HEAD_DIM),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.req_to_token,
            forward_batch.req_pool_indices,
            rows.kv_lens,
            rows.qo_indptr,
            sm_scale=layer.scaling,
            tree_mask=rows.tree_mask,
            logit_cap=layer.logit_cap,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    # The rows already say which tokens are asked, so an extend is a decode with more rows.
    forward_extend = forward_decode

    def _save(
        self, layer: RadixAttention, forward_batch: ForwardBatch, k: torch.Tensor, k_rope: torch.Tensor | None
    ) -> None:
        loc = KVWriteLoc.for_batch(forward_batch)
        if k_rope is None:
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, k)
        elif k.is_cuda:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, loc, k, k_rope)
        else:  # upstream's two-part write is a Triton kernel
            self.token_to_kv_pool.set_kv_buffer(layer, loc, torch.cat([k, k_rope], dim=-1), k)

    def support_triton(self) -> bool:
        return self.device != "cpu"
