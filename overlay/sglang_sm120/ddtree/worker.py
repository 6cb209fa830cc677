"""One DDTREE step on SGLang's V2 schema, on top of upstream's DFlash worker (prefill, draft KV, draft graph).

```
 window ─► draft block [c, MASK ...] ─► top-K a position ─► tree (Q nodes)          draft graph
                                                             │ tokens, prefix + depth, ancestor words
 next draft KV ◄─ hidden states of the path ◄─ walk ◄─ choices ◄─ one target pass   target graph, its tail included
                  target KV of the path to the front of the window
```
The window of a request is the Q slots after its committed prefix; tree node i is written to slot i of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
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
from sglang_sm120.ddtree.settle import CapturedSettler
from sglang_sm120.ddtree.tree import DraftTree, Path, Window
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
        self.settler: CapturedSettler | None = None

    def _use_block_size(self, block_size: int) -> None:
        """Upstream has one width for block and verify window; here the block keeps its own."""
        self.block_size = block_size
        self.draft_model.set_block_size(block_size)
        self._block_pos_offsets = build_block_pos_offsets(length=block_size, device=self.device)
        self._draft_block_spec_info = make_draft_block_spec_info(draft_token_num=block_size, device=self.device)

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """Upstream's pools, and the parents of the trees in flight. The target's graph is captured after this."""
        super().alloc_memory_pool(*args, **kwargs)
        batch_sizes = [self.model_runner.req_to_token_pool.size, *(get_exec().graph.cuda_graph_config.decode.bs or ())]
        self.parents = torch.full((max(batch_sizes) * self.widest,), -1, dtype=torch.int32, device=self.device)
        if self.device != "cpu" and get_parallel().tp_size == 1:
            self.settler = CapturedSettler(self)

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
            if self.adaptive is not None:
                self.adaptive.interrupt()
            return super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
        return _Step(self, batch).run(on_publish, grammar_barrier)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings `[B * block, H]` of draft blocks `[B, block]`: the target's, which the drafter borrows."""
        if self._full_embed_gpu is not None:
            embedded = torch.nn.functional.embedding(ids, self._full_embed_gpu)
        else:
            embedded = unwrap_lora_layer(self.model_runner.model.get_input_embeddings())(ids)
        if self._noise_embed_scale != 1.0:
            embedded = embedded * self._noise_embed_scale
        return embedded.flatten(0, 1)

    def settle(
        self,
        tokens: Tensor,
        choices: Tensor,
        slots: Tensor,
        prefix_lens: Tensor,
        hidden: Tensor,
        is_live: Tensor | None = None,
    ) -> Path:
        """Walk the trees that were staged, and leave both models' KV as the next step expects it.

        tokens, choices, slots: `[B, Q]`. prefix_lens: `[B]`. hidden: `[>= B * Q, K * H]` of the target.
        """
        batch, width = tokens.shape
        parents = self.parents[: batch * width].view(batch, width)
        path = trees.walk(tokens, parents, choices, slots, prefix_lens, min(self.block_size, width) - 1, is_live)
        if width > 1:  # a root's KV is in its place
            self._move_target_kv(path)
        self._append_draft_kv(path, slots, prefix_lens, hidden)
        return path

    def _move_target_kv(self, path: Path) -> None:
        """Bring the target KV of the path to the first slots of the window, where the next step looks for it."""
        pool = self.model_runner.token_to_kv_pool
        if path.sources.is_cuda:
            row_bytes = pool.kv_buffer[0][0].nbytes
            ops.move_kv(pool.data_ptrs, row_bytes, path.sources, path.targets)
        else:
            moved = path.targets >= 0
            pool.move_kv_cache(path.targets[moved], path.sources[moved])

    def _append_draft_kv(self, path: Path, slots: Tensor, prefix_lens: Tensor, hidden: Tensor) -> None:
        """Give the drafter the hidden states of the committed tokens, at chain positions.

        Both pools name slots alike, as nothing translates them (--enable-unified-memory is refused).
        """
        length = path.nodes.shape[1]
        front = slots[:, :length].contiguous()
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden[path.rows.flatten()],
            cache_loc=front.flatten(),
            cache_loc_2d=front,
            positions=(prefix_lens[:, None] + self._block_pos_offsets[:length]).flatten(),
            commit_lens=path.commit_lens,
        )

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
        self.width = worker.widest if worker.adaptive is None else worker.adaptive.choose(batch)
        self.roots = batch.spec_info.bonus_tokens.view(-1)
        self.prefix_lens = batch.seq_lens
        self.bs = len(batch.seq_lens)
        batch.seq_lens.record_stream(torch.get_device_module(worker.device).current_stream())
        self.window: Window = trees.open_window(
            self.roots,
            self.prefix_lens,
            batch.req_pool_indices,
            self.runner.req_to_token_pool.req_to_token,
            width=self.width,
            block=worker.block_size,
            mask_token=int(worker._mask_token_id),
        )
        self.plan = self.runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=self.prefix_lens,
            seq_lens_cpu=self._host_seq_lens(),
            write_virtual=self.window.slots.flatten(),
            read_extent=self.width,
        )

    @property
    def slots(self) -> Tensor:
        """`[B, Q]` int64 slots of the window."""
        return self.window.slots

    def run(self, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        """Draft, verify, settle; `on_publish` is told the new lengths."""
        drafted = self._draft() if self.width > 1 else trees.lone_roots(self.roots)
        tree = drafted.first(self.width)
        grammar = GrammarTree.from_device(*trees.links(tree), tree.tokens) if self.batch.has_grammar else None
        settler = self.worker.settler
        is_armed = settler is not None and settler.arm(self._is_plain_greedy())
        tokens, output, positions = self._verify(tree)
        logits = output.logits_output
        if settler is not None and is_armed and output.can_run_cuda_graph:
            path = settler.path(self.bs, self.width)
        else:
            choices = self._choices(logits, positions, grammar, grammar_barrier).view(self.bs, self.width)
            path = self.worker.settle(tokens, choices, self.slots, self.prefix_lens, logits.hidden_states)
        logits.hidden_states = None
        if self.worker.adaptive is not None:
            self.worker.adaptive.record(path, drafted, self.width)
        if self.batch.return_logprob:
            self._log_probabilities(logits, path)
        if on_publish is not None:
            on_publish(path.ends)
        return GenerationBatchResult(
            logits_output=logits,
            next_token_ids=path.tokens.flatten(),
            accept_lens=path.commit_lens,
            can_run_cuda_graph=output.can_run_cuda_graph,
            next_draft_input=self.worker._make_next_draft_input_decode(bonus_tokens=path.bonus, new_seq_lens=path.ends),
            speculative_num_draft_tokens=self.width,
            speculative_output_stride=path.tokens.shape[1],
            new_seq_lens=path.ends,
        )

    def _host_seq_lens(self) -> Tensor:
        """Committed lengths on the host where the backends read them, else an upper bound that needs no copy."""
        if self.batch.seq_lens_cpu is not None:
            return self.batch.seq_lens_cpu
        return self.batch.spec_info.nxt_kv_lens_cpu

    def _is_plain_greedy(self) -> bool:
        """Whether the argmax of the logits as they leave the target is every request's choice."""
        sampling = self.batch.sampling_info
        if self.batch.has_grammar:
            return False
        if sampling is None:
            return True
        return sampling.is_all_greedy and sampling.logit_bias is None and not sampling.has_custom_logit_processor

    def _draft(self) -> DraftTree:
        """Run the drafter on [committed token, MASK, ...] and build the trees, all of the widest width."""
        worker, block = self.worker, self.worker.block_size
        lens, host_lens, plan = self._draft_context()
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=self.bs,
            input_ids=self.window.block_ids.flatten(),
            req_pool_indices=self.batch.req_pool_indices,
            seq_lens=lens,
            out_cache_loc=self.slots[:, :block].flatten(),
            seq_lens_sum=int(host_lens.sum()),
            seq_lens_cpu=host_lens,
            positions=self.window.block_positions.flatten(),
            input_embeds=worker.embed(self.window.block_ids),
            spec_algorithm=self.batch.spec_algorithm,
            spec_info=worker._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=self.bs * block,
            can_run_decode_cuda_graph=self.batch.can_run_decode_cuda_graph,
        )
        plan.bind(forward_batch, worker.draft_model_runner.kv_index_translator, cols=slice(0, block))
        with torch.inference_mode(), draft_tp_context(worker.draft_parallel_layout):
            output = worker.draft_model_runner.forward(forward_batch)
            if output.can_run_graph and worker._draft_sampler is not None:
                return worker._draft_sampler.trees(self.bs)
            return worker.drafter.build(output.logits_output.hidden_states, self.roots)

    def _draft_context(self) -> tuple[Tensor, Tensor, KVLocPlan]:
        """What the drafter reads: lengths on device and host (an upper bound, block included), and the plan.

        All of the context, or with --speculative-draft-window-size its last tokens through rows of the drafter's own.
        """
        worker, block = self.worker, self.worker.block_size
        if not worker.use_compact_draft_cache:
            return self.prefix_lens, (self._host_seq_lens() + block).to(torch.int32), self.plan
        worker._ensure_draft_block_buffers(self.bs)
        lens = worker._compute_compact_draft_seq_lens(self.prefix_lens)
        worker._rebuild_compact_draft_cache(
            req_pool_indices=self.batch.req_pool_indices,
            prefix_lens=self.prefix_lens,
            draft_prefix_lens=lens,
            verify_out_cache_loc_2d=self.slots[:, :block].contiguous(),
            bs=self.bs,
            block_size=block,
        )
        host_lens = torch.empty(self.bs, dtype=torch.int32)
        worker._compute_compact_draft_seq_lens_host(self._host_seq_lens(), out=host_lens)
        host_lens += block
        reader = worker.draft_model_runner.kv_index_translator
        return lens, host_lens, self.plan.reads_from(reader, seq_lens=lens, seq_lens_cpu=host_lens, read_extent=block)

    def _verify(self, tree: DraftTree) -> tuple[Tensor, Any, Tensor]:
        """One target pass over all nodes, siblings at their depth's position: token ids `[B, Q]`, output, positions.

        The backend reads the mask from the words that `stage` fills, also in a graph replay.
        """
        batch = self.batch
        tokens, positions = trees.stage(
            tree, self.prefix_lens, self.runner.attn_backend.tree_words, self.worker.parents
        )
        verify_input = TreeVerifyInput(
            draft_token=tokens,
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
        return tokens.view(self.bs, self.width), output, positions

    def _choices(self, logits_output: Any, positions: Tensor, grammar: GrammarTree | None, barrier: Any) -> Tensor:
        """`[B * Q]` the target's token after every node, the same on all ranks."""
        worker, sampling = self.worker, self.batch.sampling_info
        logits_output.next_token_logits = logits = self._full_logits(logits_output.next_token_logits)
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

    def _full_logits(self, logits: Tensor) -> Tensor:
        """Logits over the whole vocabulary: upstream leaves a rank's share where it expects a chain's argmax."""
        processor = self.worker._target_logits_processor
        if processor is not None and processor.is_deferred_shard(logits):
            return processor.finish_deferred_gather(logits)
        return logits

    def _log_probabilities(self, logits_output: Any, path: Path) -> None:
        """Log-probabilities of what the path committed; only the first `commit_lens` columns are read."""
        inside = torch.arange(path.rows.shape[1], device=path.rows.device) < path.commit_lens[:, None]
        choices = torch.zeros(self.bs * self.width + 1, dtype=torch.int64, device=path.tokens.device)
        choices[torch.where(inside, path.rows, -1)] = path.tokens
        compute_spec_logprobs(self.batch, logits_output, choices, accept_index=path.rows)
