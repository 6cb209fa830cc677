"""One DDTREE step on SGLang's V2 schema, on top of upstream's DFlash worker (prefill, draft KV, draft graph).

```
 committed token ─► draft block [c, MASK ...] ─► top-K a position ─► tree (Q nodes)
                                                                       │ tokens, prefix + depth, ancestor words
 next draft KV ◄─ hidden states of the path ◄─ walk ◄─ choices ◄─ one target pass over all nodes
                  target KV of the path to the front of the window
```
The window of a request is the Q slots after its committed prefix; tree node i is written to slot i of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.draft_worker_common import build_block_pos_offsets, make_draft_block_spec_info
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask, draft_tp_context
from torch import Tensor

from sglang_sm120 import ops
from sglang_sm120.ddtree import tree as trees
from sglang_sm120.ddtree import verify
from sglang_sm120.ddtree.adaptive import AdaptiveWidth
from sglang_sm120.ddtree.draft import CapturedDrafter, TreeDrafter
from sglang_sm120.ddtree.tree import DraftTree, Path
from sglang_sm120.ddtree.verify import TreeVerifyInput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan


class DDTreeWorker(DFlashWorkerV2):
    """Drafts with upstream's DFlash machinery, proposes a tree instead of a chain, and verifies it in one pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spec = get_spec()
        self.widest = int(spec.speculative_num_draft_tokens)
        self._use_block_size(int(spec.speculative_dflash_block_size))
        self.drafter = TreeDrafter(
            lm_head=unwrap_lora_layer(self.model_runner.model.lm_head),
            block_size=self.block_size,
            topk=int(spec.speculative_ddtree_topk),
            budget=self.widest - 1,
        )
        self.adaptive: AdaptiveWidth | None = None

    def _use_block_size(self, block_size: int) -> None:
        """Upstream has one width for block and verify window; here the block keeps its own."""
        self.block_size = block_size
        self.draft_model.set_block_size(block_size)
        self._block_pos_offsets = build_block_pos_offsets(length=block_size, device=self.device)
        self._draft_block_spec_info = make_draft_block_spec_info(draft_token_num=block_size, device=self.device)

    def _maybe_build_draft_sampler(self) -> CapturedDrafter:
        """Upstream's hook for what ends the draft graph: for us, top-K and the tree."""
        max_batch_size = max(get_exec().graph.cuda_graph_config.decode.bs)
        return CapturedDrafter(self.drafter, max_batch_size, self.device)

    def init_cuda_graphs(self) -> None:
        """Capture the draft block, and with --speculative-ddtree-adaptive every width offered."""
        super().init_cuda_graphs()
        if get_spec().speculative_ddtree_adaptive:
            self.adaptive = AdaptiveWidth(self)

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """A prefill or an idle batch is upstream's; a decode batch is one step of draft, tree, verify and walk."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
        return _Step(self, batch).run(on_publish, grammar_barrier)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings `[B * block, H]` of draft blocks `[B, block]`: the target's, which the drafter borrows."""
        if self._full_embed_gpu is not None:
            embedded = torch.nn.functional.embedding(ids, self._full_embed_gpu)
        else:
            embedded = unwrap_lora_layer(self.model_runner.model.get_input_embeddings())(ids)
        return (embedded * self._noise_embed_scale).flatten(0, 1)

    def move_target_kv(self, sources: Tensor, targets: Tensor, moved: Tensor) -> None:
        """Copy slots `sources [B, n]` of the target's pool to `targets` where `moved`, in every layer."""
        pool = self.model_runner.token_to_kv_pool
        if sources.is_cuda:
            row_bytes = pool.kv_buffer[0][0].nbytes
            ops.move_kv(pool.data_ptrs, row_bytes, sources.flatten(), torch.where(moved, targets, -1).flatten())
        else:
            pool.move_kv_cache(targets[moved], sources[moved])

    def _validate_phase1_sampling_support(self, batch: ScheduleBatch) -> None:
        """Upstream warns here that it will verify a sampling request greedily; the tree walk never does."""

    def prewarm_sampling(self) -> Any:
        """Upstream rehearses the chain's rejection sampling, which is not used."""
        return self.model_runner.prewarm_sampling()


class _Step:
    """The state of one decode step."""

    def __init__(self, worker: DDTreeWorker, batch: ScheduleBatch) -> None:
        self.worker, self.batch = worker, batch
        self.runner = worker.model_runner
        self.block = worker.block_size
        self.width = worker.widest if worker.adaptive is None else worker.adaptive.choose(batch)
        self.roots = batch.spec_info.bonus_tokens.view(-1)
        self.prefix_lens = batch.seq_lens
        self.bs = len(batch.seq_lens)
        batch.seq_lens.record_stream(torch.get_device_module(worker.device).current_stream())

    def run(self, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        self.slots, self.plan = self._window()
        tree = self._draft() if self.width > 1 else trees.lone_roots(self.roots)
        grammar = GrammarTree.from_device(*trees.links(tree), tree.tokens) if self.batch.has_grammar else None
        output, positions = self._verify(tree)
        logits = output.logits_output
        choices = self._choices(logits, positions, grammar, grammar_barrier)
        path = trees.walk(tree, choices.view(self.bs, self.width), min(self.block, self.width) - 1)
        new_seq_lens = self.prefix_lens + path.commit_lens.to(self.prefix_lens.dtype)
        self._move_path_to_front(path)
        if self.worker.adaptive is not None:
            self.worker.adaptive.record(path, self.width)
        if self.batch.return_logprob:
            first_node = torch.arange(self.bs, device=choices.device)[:, None] * self.width
            compute_spec_logprobs(self.batch, logits, choices, accept_index=path.nodes + first_node)
        if on_publish is not None:
            on_publish(new_seq_lens)
        self._append_draft_kv(logits.hidden_states, path)
        logits.hidden_states = None
        return GenerationBatchResult(
            logits_output=logits,
            next_token_ids=path.tokens.flatten(),
            accept_lens=path.commit_lens,
            can_run_cuda_graph=output.can_run_cuda_graph,
            next_draft_input=self.worker._make_next_draft_input_decode(
                bonus_tokens=path.bonus, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=self.width,
            speculative_output_stride=path.tokens.shape[1],
            new_seq_lens=new_seq_lens,
        )

    def _window(self) -> tuple[Tensor, KVLocPlan]:
        """Slots `[B, Q]` of the verify window, from the rows that the scheduler over-allocated, and their plan."""
        slots = assign_extend_cache_locs_func(
            req_pool_indices=self.batch.req_pool_indices,
            req_to_token=self.runner.req_to_token_pool.req_to_token,
            start_offset=self.prefix_lens,
            end_offset=self.prefix_lens + self.width,
            batch_size=self.bs,
            draft_token_num=self.width,
            device=self.worker.device,
        )
        plan = self.runner.kv_index_translator.plan(
            req_pool_indices=self.batch.req_pool_indices,
            seq_lens=self.prefix_lens,
            seq_lens_cpu=self._host_seq_lens(),
            write_virtual=slots,
            read_extent=self.width,
        )
        return slots.view(self.bs, self.width), plan

    def _host_seq_lens(self) -> Tensor:
        """Committed lengths on the host where the backends read them, else an upper bound that needs no copy."""
        if self.batch.seq_lens_cpu is not None:
            return self.batch.seq_lens_cpu
        return self.batch.spec_info.nxt_kv_lens_cpu

    def _draft(self) -> DraftTree:
        """Run the drafter on [committed token, MASK, ...] and build the trees."""
        worker, block = self.worker, self.block
        ids = torch.full((self.bs, block), int(worker._mask_token_id), dtype=torch.int64, device=worker.device)
        ids[:, 0] = self.roots
        host_lens = (self._host_seq_lens() + block).to(torch.int32)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=self.bs,
            input_ids=ids.flatten(),
            req_pool_indices=self.batch.req_pool_indices,
            seq_lens=self.prefix_lens,
            out_cache_loc=self.slots[:, :block].flatten(),
            seq_lens_sum=int(host_lens.sum()),
            seq_lens_cpu=host_lens,
            positions=(self.prefix_lens[:, None] + worker._block_pos_offsets).flatten(),
            input_embeds=worker.embed(ids),
            spec_algorithm=self.batch.spec_algorithm,
            spec_info=worker._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=self.bs * block,
            can_run_decode_cuda_graph=self.batch.can_run_decode_cuda_graph,
        )
        self.plan.bind(forward_batch, worker.draft_model_runner.kv_index_translator, cols=slice(0, block))
        with torch.inference_mode(), draft_tp_context(worker.draft_parallel_layout):
            output = worker.draft_model_runner.forward(forward_batch)
            if output.can_run_graph and worker._draft_sampler is not None:
                tree = worker._draft_sampler.trees(self.bs)
            else:
                tree = worker.drafter.build(output.logits_output.hidden_states, self.roots)
        return tree.first(self.width)

    def _verify(self, tree: DraftTree) -> tuple[Any, Tensor]:
        """One target pass over all nodes; siblings share the position of their depth."""
        batch = self.batch
        positions = (self.prefix_lens[:, None] + tree.depths).flatten()
        # The backend reads the mask from this buffer, also in a graph replay.
        rows = self.runner.attn_backend.tree_words[: self.bs * self.width, : tree.words.shape[2]]
        rows.copy_(tree.words.flatten(0, 1))
        verify_input = TreeVerifyInput(
            draft_token=tree.tokens.flatten(),
            positions=positions,
            draft_token_num=self.width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=self.plan,
        )
        batch.out_cache_loc = self.slots.flatten()
        host_lens, host_sum = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu = self._host_seq_lens() + self.width
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.worker.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = host_lens, host_sum
        output = self.worker.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        return output, positions

    def _choices(self, logits_output: Any, positions: Tensor, grammar: GrammarTree | None, barrier: Any) -> Tensor:
        """`[B * Q]` the target's token after every node, the same on all ranks."""
        worker, sampling = self.worker, self.batch.sampling_info
        processor = worker._target_logits_processor
        if processor is not None and processor.is_deferred_shard(logits_output.next_token_logits):
            logits_output.next_token_logits = processor.finish_deferred_gather(logits_output.next_token_logits)
        logits = logits_output.next_token_logits
        mask = None
        if grammar is not None:
            mask = build_grammar_vocab_mask(
                reqs=self.batch.reqs, tree=grammar, sampling_info=sampling, device=logits.device, barrier=barrier
            )
        if sampling is not None:
            verify.adjust_logits(logits, sampling, self.width)
        if mask is not None:
            mask.apply(logits)
        choices = verify.choose(logits, positions, sampling, self.runner.sampler, self.width)
        is_greedy = sampling is None or sampling.is_all_greedy
        site = SpecTpSyncSite.DFLASH_ACCEPT_GREEDY if is_greedy else SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
        return worker._tp_sync.sync(site, choices)

    def _move_path_to_front(self, path: Path) -> None:
        """Bring the target KV of the path to the first slots of the window, where the next step looks for it."""
        sources = self.slots.gather(1, path.nodes)
        targets = self.slots[:, : path.nodes.shape[1]]
        inside = torch.arange(path.nodes.shape[1], device=sources.device) < path.commit_lens[:, None]
        moved = inside & (sources != targets)
        self.worker.move_target_kv(sources, targets, moved)

    def _append_draft_kv(self, hidden: Tensor, path: Path) -> None:
        """Give the drafter the hidden states of the committed tokens, at chain positions."""
        worker, block = self.worker, path.nodes.shape[1]
        rows = path.nodes + torch.arange(self.bs, device=path.nodes.device)[:, None] * self.width
        slots = worker._draft_write_ids(self.plan).view(self.bs, self.width)[:, :block].contiguous()
        worker._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden[rows.flatten()],
            cache_loc=slots.flatten(),
            cache_loc_2d=slots,
            positions=(self.prefix_lens[:, None] + worker._block_pos_offsets[:block]).flatten(),
            commit_lens=path.commit_lens,
        )
