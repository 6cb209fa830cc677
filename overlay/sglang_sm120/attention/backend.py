"""`--attention-backend sm120_mla`: absorbed MLA for decode, tree verify, draft extend and extend.

```
ForwardBatch ──> Rows ──────────────────────> attend, once a layer ──> [T, H, 512]
                 kv_lens, q_len, tree mask    the CUDA kernel on a GPU, the PyTorch reference on a CPU
                 once a step, on the device   slots are read straight from req_to_token
ForwardBatch ──> FlashInfer ragged prefill    a GPU's prompts: full heads, faster than absorbed for many rows
```
No index list and no context-sized mask is ever built. What a step prepares is device arithmetic on buffers that keep
their address, so a captured graph repeats it and stays right at every length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import is_in_breakable_cuda_graph
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_sm120 import ops
from sglang_sm120.attention import metrics, reference
from sglang_sm120.attention.select import prefills_with_full_heads

if TYPE_CHECKING:
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.spec_info import SpecInput


@dataclass
class Rows:
    """Query rows of one step.

    `kv_lens [B]` counts the new tokens in; a request asks `q_len` rows, or `qo_indptr [B + 1]` (int32) where requests
    differ. `tree_mask [B * q_len, W]` holds int32 ancestor words; None is causal.
    """

    kv_lens: torch.Tensor
    q_len: int | None = None
    qo_indptr: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None


class Sm120MLABackend(AttentionBackend):
    """Absorbed-MLA attention over the paged latent pool. Page size does not matter: slots are read one by one."""

    needs_cpu_seq_lens = False
    extend_dummy_seqs_capped_by_req_pool = True  # FlashInfer's buffers hold that many requests

    def __init__(self, model_runner: ModelRunner, skip_prefill: bool = False) -> None:
        super().__init__()
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool  # upstream's chunked prefix reads it from here
        self.req_to_token = self.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kv_index_translator = model_runner.kv_index_translator
        self.data_type = self.kv_cache_dtype = model_runner.kv_cache_dtype
        self.forward_metadata: Rows  # of the step being planned or run
        self.num_draft_tokens: int = get_spec().speculative_num_draft_tokens or 0
        self.uses_kernel = self.device != "cpu"
        self._workspace = ops.new_workspace(self.req_to_token.device) if self.uses_kernel else None
        self._heads = model_runner.model_config.num_attention_heads // get_parallel().attn_tp_size
        self._prefill = None if skip_prefill or not prefills_with_full_heads() else _ragged_prefill(model_runner)
        self._max_bs = self.req_to_token_pool.size
        self._verify_kv_lens = torch.zeros(self._max_bs, dtype=torch.int64, device=self.device)
        self._verify_mask: VerifyMask | None = None
        self._tree_words: torch.Tensor | None = None
        if self.num_draft_tokens and not model_runner.is_draft_worker and not skip_prefill:
            self._allocate_tree_masks()

    def _allocate_tree_masks(self) -> None:
        """`q x q` bool cells a request for upstream's tree builders, and the ancestor words that the kernel reads.

        Both hold as many requests as can run, so the draft stage always finds room and no step allocates a mask.
        """
        q_len = self.num_draft_tokens
        cells = tree_mask_numel(TreeMaskMode.QLEN_ONLY, self._max_bs, q_len, 0)
        buffer = torch.zeros(cells, dtype=torch.bool, device=self.device)
        self._verify_mask = VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=self._max_bs)
        words = (self._max_bs * q_len, reference.mask_words(q_len))
        self._tree_words = torch.zeros(words, dtype=torch.int32, device=self.device)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The bool mask that upstream's tree builders fill; None where nothing is verified."""
        return self._verify_mask

    @property
    def tree_words(self) -> torch.Tensor | None:
        """Ancestor words `[max_bs * q, W]` int32 that every tree verify reads; a drafter may write them in place."""
        return self._tree_words

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room for `max_bs` requests before the first capture."""
        if max_bs > self._max_bs:  # data parallelism pads a batch past the request pool
            self._max_bs = max_bs
            self._verify_kv_lens = torch.zeros(max_bs, dtype=torch.int64, device=self.device)
            if self._verify_mask is not None:
                self._allocate_tree_masks()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a padded request: its one token is the padding slot."""
        return 1

    # Upstream's name on the CPU engine, where data-parallel attention pads batches too.
    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Choose the step's rows. Only views are made here: what computes is in `init_forward_metadata_in_graph`."""
        mode = forward_batch.forward_mode
        if mode.is_decode_or_idle():
            self.forward_metadata = Rows(forward_batch.seq_lens, q_len=1)
        elif mode.is_target_verify():
            self.forward_metadata = self._verify_rows(forward_batch)
        elif mode.is_draft_extend_v2():
            window = self.num_draft_tokens
            kv_lens = forward_batch.seq_lens - forward_batch.extend_seq_lens + window
            self.forward_metadata = Rows(kv_lens, q_len=window)
        else:
            ends = forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
            self.forward_metadata = Rows(forward_batch.seq_lens, qo_indptr=torch.nn.functional.pad(ends, (1, 0)))
            self._plan_prompt(forward_batch)
        if not in_capture:
            metrics.note_plan(self._plan(mode.name.lower(), self.forward_metadata.q_len))

    def _plan_prompt(self, forward_batch: ForwardBatch) -> None:
        """Full heads without a cached prefix are planned here; with one, by `init_mha_chunk_metadata` below.

        That plan takes the lengths of one-shot keys (prefix and new tokens) from FlashInfer's `kv_indptr`.
        """
        if self._prefill is None or is_in_breakable_cuda_graph():  # captured prompts take the absorbed path
            return
        if any(forward_batch.extend_prefix_lens_cpu):
            bs = forward_batch.batch_size
            self._prefill.kv_indptr[1 : bs + 1] = forward_batch.seq_lens.cumsum(0)
        else:
            self._prefill.init_forward_metadata(forward_batch)

    def _plan(self, mode: str, q_len: int | None) -> metrics.Plan:
        if not self.uses_kernel:
            return metrics.Plan(mode, "reference", None)
        splits = None if q_len is None else ops.splits(q_len, self._heads, self.req_to_token.device)
        return metrics.Plan(mode, "kernel", splits)

    def _verify_rows(self, forward_batch: ForwardBatch) -> Rows:
        bs, q_len = forward_batch.batch_size, forward_batch.spec_info.draft_token_num
        tree = None
        if self._verifies_tree(forward_batch):
            assert self._tree_words is not None
            tree = self._tree_words[: bs * q_len]
        return Rows(self._verify_kv_lens[:bs], q_len=q_len, tree_mask=tree)

    @staticmethod
    def _verifies_tree(forward_batch: ForwardBatch) -> bool:
        """A drafter that fills the ancestor words says so; of upstream's, only top-k > 1 draws trees."""
        spec_info = forward_batch.spec_info
        return getattr(spec_info, "has_tree_words", False) or getattr(spec_info, "topk", 1) > 1

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Fill a verify's lengths and ancestor words; recorded by a capture."""
        if not forward_batch.forward_mode.is_target_verify():
            return
        rows, spec_info = self.forward_metadata, forward_batch.spec_info
        q_len: int = spec_info.draft_token_num
        torch.add(forward_batch.seq_lens, q_len, out=rows.kv_lens)
        if rows.tree_mask is not None and not getattr(spec_info, "has_tree_words", False):
            assert self._verify_mask is not None
            cells = rows.tree_mask.shape[0] * q_len
            bools = self._verify_mask.buffer[:cells].view(-1, q_len)
            rows.tree_mask.copy_(ops.pack_tree_mask(bools) if self.uses_kernel else reference.pack_mask(bools))

    def update_verify_buffers_to_fill_after_draft(self, spec_info: SpecInput, cuda_graph_bs: int | None) -> None:
        """Nothing: where upstream plans on a stream of its own, that waits for the draft and plans with its tree."""

    def init_mha_chunk_metadata(self, forward_batch: ForwardBatch, disable_flashinfer_ragged: bool = False) -> None:
        """Plan a prompt chunk over its cached prefix with full heads (upstream's chunked-prefix path)."""
        if self._prefill is not None:
            self._prefill.init_mha_chunk_metadata(forward_batch, disable_flashinfer_ragged)

    def forward_extend(
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
        """Absorbed rows as in `forward_decode`; full heads (a prompt on a GPU) go to FlashInfer."""
        if layer.v_head_dim == reference.LATENT_DIM:
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope)
        assert self._prefill is not None
        return self._prefill.forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

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
        heads = layer.tp_q_head_num
        if k is not None and save_kv_cache:
            self._save(layer, forward_batch, k, k_rope)
        if q_rope is not None:
            parts = [q.view(-1, heads, reference.LATENT_DIM), q_rope.view(-1, heads, reference.ROPE_DIM)]
            q = torch.cat(parts, dim=-1)
        out = self._attend(q.reshape(-1, heads, reference.HEAD_DIM), layer, forward_batch.req_pool_indices)
        return out.view(-1, heads * layer.v_head_dim)

    def _attend(self, q: torch.Tensor, layer: RadixAttention, req_pool_indices: torch.Tensor) -> torch.Tensor:
        rows = self.forward_metadata
        options: dict[str, Any] = {"workspace": self._workspace} if self.uses_kernel else {}
        attend = ops.mla_verify if self.uses_kernel else reference.mla_attention
        out, _ = attend(
            q,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.req_to_token,
            req_pool_indices,
            rows.kv_lens,
            q_len=rows.q_len,
            qo_indptr=rows.qo_indptr,
            tree_mask=rows.tree_mask,
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            **options,
        )
        return out

    def _save(
        self, layer: RadixAttention, forward_batch: ForwardBatch, k: torch.Tensor, k_rope: torch.Tensor | None
    ) -> None:
        loc = KVWriteLoc.for_batch(forward_batch)
        if k_rope is None:
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, k)
        elif self.uses_kernel:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, loc, k, k_rope)
        else:  # upstream's two-part write is a Triton kernel
            self.token_to_kv_pool.set_kv_buffer(layer, loc, torch.cat([k, k_rope], dim=-1), k)


def _ragged_prefill(model_runner: ModelRunner) -> FlashInferMLAAttnBackend:
    from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend

    return FlashInferMLAAttnBackend(model_runner)
