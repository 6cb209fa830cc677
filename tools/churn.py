"""Upstream's own row pool, allocators and prefix cache, driven without a model: arrivals, prefill, decode or verify.

Used by the property tests and by `tools/defrag_pool.py`. Nothing of the memory management is imitated:
`alloc_for_extend`, `alloc_for_decode`, `alloc_for_spec_decode`, `checkpoint_kv_cache` and `release_kv_cache` are
upstream's. The KV written for a token is a hash of all tokens up to it, so shared prefixes have equal KV, and any slot
that goes astray shows.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang_sm120.kvdefrag.census import Runs
    from sglang_sm120.kvdefrag.compactor import Survey

HASH_PRIME = 16_777_213  # below 2^24: every hash is exact in float32
LAYERS = 2


@lru_cache(maxsize=1)
def publish_context() -> None:
    """Give this process the server configuration that upstream's functions read."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    runtime_context.publish(
        ServerArgs(model_path="none", device="cpu", attention_backend="torch_native"), role="scheduler"
    )
    # Only so that upstream accepts what speculation allocated ahead when a request ends.
    runtime_context.get_context().override("churn", speculative_algorithm="DFLASH")


def prefix_hashes(tokens: list[int], before: int = 0) -> list[int]:
    """Running hash of a token list, one value a token, continued from `before`."""
    hashes = []
    for token in tokens:
        before = (before * 31 + token + 7) % HASH_PRIME
        hashes.append(before)
    return hashes


@dataclass
class Cost:
    """CPU seconds of upstream's allocation and release calls, and how many scheduler steps they served."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """by what was called: prefill, cache, check, step, release"""
    steps: int = 0

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time of the block."""
        begin = time.thread_time()
        yield
        self.seconds[what] += time.thread_time() - begin


@dataclass
class World:
    """A pool of `size` tokens serving up to `max_requests` requests of up to `max_context` tokens.

    `verify_block` > 0 speculates: each step reserves two blocks a request ahead and commits 1 to `verify_block` tokens.
    `extent_tokens` > 0 puts tier 0 in.
    """

    size: int
    page_size: int = 1
    max_requests: int = 8
    max_context: int = 512
    verify_block: int = 0
    extent_tokens: int = 0
    device: str = "cpu"
    seed: int = 0
    with_kv: bool = True
    running: list = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)

    def __post_init__(self) -> None:
        """Build the pools, empty."""
        publish_context()
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang_sm120.kvdefrag import extents

        self.random = Random(self.seed)
        self.pools = [
            MLATokenToKVPool(
                size=self.size if self.with_kv else self.page_size,
                page_size=self.page_size,
                dtype=torch.float32,
                kv_lora_rank=2,
                qk_rope_head_dim=2,
                layer_num=LAYERS,
                device=self.device,
                enable_memory_saver=False,
            )
            for _ in ("target", "draft")
        ]
        self.rows = ReqToTokenPool(self.max_requests, self.max_context + 4 * self.page_size, self.device, False)
        options = {"dtype": torch.float32, "device": self.device, "kvcache": self.pools[0], "need_sort": False}
        if self.page_size == 1:
            self.allocator = TokenToKVPoolAllocator(self.size, **options)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(self.size, self.page_size, **options)
            # Upstream asks whether the machine has a GPU, not where this pool lies.
            self.allocator.use_triton_kernels &= self.device != "cpu"
        self.allocator = extents.replace_allocator(self.allocator, self.rows, self.extent_tokens)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=self.page_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend="python",
            )
        )
        self.count = self.retractions = self.cached_tokens = 0

    # -- what happens to requests --

    def arrive(self, tokens: list[int], new_tokens: int) -> bool:
        """Prefill a new request if a row and its tokens are to be had; whether it was."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache import allocation, common
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang_sm120.kvdefrag import extents

        need = len(tokens) + 2 * self.page_size
        if not self.rows.free_slots or need > self.allocator.available_size() + self.tree.evictable_size():
            return False
        req = Req(str(self.count), "", array("q", tokens), SamplingParams(max_new_tokens=new_tokens))
        self.count += 1
        req.init_next_round_input(self.tree)
        req.lock = self.tree.lock(req.last_node)
        if need - req.prefix_len > self.allocator.available_size() + self.tree.evictable_size():
            self.tree.unlock(req.lock)
            return False
        req.extend_end = len(tokens)
        batch = self._batch([req], [len(tokens)], req.extend_end - req.prefix_len)
        batch.prefix_lens, batch.extend_lens = [req.prefix_len], [batch.extend_num_tokens]
        with self.cost.timed("prefill"):
            extents.alloc_for_extend(allocation.alloc_for_extend, batch)
        self.cached_tokens += req.prefix_len
        self._write(req, req.prefix_len, len(tokens))
        with self.cost.timed("cache"):
            common.checkpoint_kv_cache(req, self.tree)
        self.running = [*self.running, req]
        return True

    def step(self) -> None:
        """One decode or verify step of all running requests, retracting if it must; those that are done finish."""
        self.allocate_step()
        self.accept_step()

    def allocate_step(self) -> None:
        """The first half of a step: slots for all running requests, retracting if it must."""
        self.cost.steps += 1
        while self.running and not self._has_room():
            self.retract(self.running[-1])
        if self.running:
            self._alloc_verify() if self.verify_block else self._alloc_decode()

    def accept_step(self) -> None:
        """The second half: new tokens; requests that are done finish."""
        for req in self.running:
            before = req.kv.kv_committed_len - (0 if self.verify_block else 1)
            wanted = req.sampling_params.max_new_tokens - len(req.output_ids)
            commit = min(self.random.randint(1, self.verify_block or 1), wanted)
            req.output_ids.extend(self.random.randrange(50) for _ in range(commit))
            req.refresh_fill_ids()
            req.kv.kv_committed_len = before + commit
            self._write(req, before, before + commit)
        for req in [r for r in self.running if len(r.output_ids) >= r.sampling_params.max_new_tokens]:
            self.finish(req)

    def finish(self, req: Any, *, cached: bool = True) -> None:
        """End a request; `cached`: its KV goes to the prefix cache, else (abort, retraction) it is freed."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache import common

        self.running = [r for r in self.running if r is not req]
        if cached:
            req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        self.allocator.free_group_begin()
        with self.cost.timed("release"):
            common.release_kv_cache(req, self.tree, checkpoint=cached)
            self.allocator.free_group_end()

    def retract(self, req: Any) -> None:
        """Free all that a running request holds outside the prefix cache."""
        self.retractions += 1
        self.finish(req, cached=False)

    def evict(self, tokens: int) -> None:
        """Drop at least so many cached tokens, if they are not in use."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=tokens))

    # -- compaction --

    def scheduler(self, draft_pools: Sequence[Any] = (), **flags: Any) -> SimpleNamespace:
        """As much of upstream's scheduler as compaction touches, over this pool; `flags` are of the server's."""
        from sglang_sm120.kvdefrag import serving

        for req in self.running:
            req.beam_group = None
        arguments = dict.fromkeys(serving.HOLDERS_ELSEWHERE, False) | {
            "disaggregation_mode": "null", "pp_size": 1, "tp_size": 1, "dcp_size": 1, "kv_canary": "none",
        }  # fmt: skip
        runners = [SimpleNamespace(token_to_kv_pool=pool) for pool in draft_pools]
        return SimpleNamespace(
            server_args=SimpleNamespace(**arguments | flags),
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.rows,
            tree_cache=self.tree,
            invariant_checker=SimpleNamespace(_requests_owning_rows=lambda: self.running),
            draft_worker=SimpleNamespace(_draft_model_runners=lambda: runners),
            result_queue=deque(),
            process_batch_result=lambda *_: None,
            is_fully_idle=lambda: True,
            device=self.device,
            last_batch="last",
        )

    def survey(self) -> Survey:
        """Who owns what, as the compactor sees it."""
        from sglang_sm120.kvdefrag.compactor import Holders, Survey

        kvs = [req.kv for req in self.running]
        return Survey.take(Holders(kvs, self.rows.req_to_token, self.tree, self.allocator))

    def owners(self) -> list[int]:
        """The pool as `kv_map.draw` wants it."""
        from sglang_sm120.kvdefrag import kv_map

        survey = self.survey()
        return kv_map.owners(survey.owner, len(survey.lengths)).tolist()

    def survey_runs(self) -> Runs:
        """Runs of all running requests' rows, without taking anybody's extents back."""
        from sglang_sm120.kvdefrag import census

        table, page = self.rows.req_to_token, self.page_size
        rows = [table[r.kv.req_pool_idx, : r.kv.kv_allocated_len : page] // page for r in self.running]
        counts = census.run_counts(rows, self.device)
        return census.Runs(sum(len(row) for row in rows), int(counts.sum()))

    def compact(self, window: int, budget_units: int, at_stage: Callable[[str], None] = lambda _: None) -> int:
        """One pass of compaction over both pools; the gaps it closed."""
        from sglang_sm120.kvdefrag import compactor, planner

        survey = self.survey()
        moves = planner.plan(survey, window, budget_units)
        if moves is None:
            return 0
        pools = [compactor.Pool(pool.kv_buffer, self.page_size) for pool in self.pools if self.with_kv]
        compactor.commit(survey, moves, pools, at_stage)
        return moves.gaps_closed

    # -- how --

    def _batch(self, reqs: list, seq_lens: list[int], extend_tokens: int = 0) -> SimpleNamespace:
        lens = torch.tensor(seq_lens)
        indices = [r.kv.req_pool_idx or 0 for r in reqs]
        return SimpleNamespace(
            reqs=reqs, tree_cache=self.tree, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator,
            device=self.device, extend_num_tokens=extend_tokens, seq_lens=lens.to(self.device), seq_lens_cpu=lens,
            req_pool_indices=torch.tensor(indices, device=self.device), req_pool_indices_cpu=torch.tensor(indices),
            hisparse_coordinator=None, maybe_evict_swa=lambda: None, is_dllm=lambda: False,
            model_config=SimpleNamespace(is_encoder_decoder=False),
        )  # fmt: skip

    def _alloc_decode(self) -> None:
        from sglang.srt.mem_cache import allocation
        from sglang_sm120.kvdefrag import extents

        batch = self._batch(self.running, [r.kv.kv_allocated_len for r in self.running])
        with self.cost.timed("step"):
            extents.alloc_for_decode(allocation.alloc_for_decode, batch, 1)

    def _verify_lens(self) -> tuple[list[int], list[int], int]:
        from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens

        return page_aligned_decode_alloc_lens(self.running, reserve=2 * self.verify_block, page_size=self.page_size)

    def _alloc_verify(self) -> None:
        from sglang.srt.mem_cache import allocation
        from sglang_sm120.cpu.ops import assign_req_to_token_pool_cpu
        from sglang_sm120.kvdefrag import extents

        # Upstream's is a Triton kernel, which the CPU does not have.
        allocation.assign_req_to_token_pool_func = assign_req_to_token_pool_cpu
        now, then, needed = self._verify_lens()
        batch = self._batch(self.running, now)
        now_cpu, then_cpu = torch.tensor(now), torch.tensor(then)
        lens = {
            "cur_kv_lens": now_cpu.to(self.device), "cur_kv_lens_cpu": now_cpu,
            "nxt_kv_lens": then_cpu.to(self.device), "nxt_kv_lens_cpu": then_cpu,
        }  # fmt: skip
        with self.cost.timed("step"):
            extents.alloc_for_spec_decode(
                allocation.alloc_for_spec_decode, self.tree, self.rows, reqs=self.running, batch=batch,
                req_pool_indices=batch.req_pool_indices, num_needed_tokens=needed, **lens,
            )  # fmt: skip

    def _has_room(self) -> bool:
        """Upstream's check before a step, which evicts what the step will allocate."""
        tokens = self._step_tokens()
        with self.cost.timed("check"):
            return self.allocator.check_decode_capacity(num_tokens=tokens, tree_cache=self.tree)

    def _step_tokens(self) -> int:
        if self.verify_block:
            return self._verify_lens()[2] + (self.page_size > 1) * self.page_size * len(self.running)
        return self.page_size * len(self.running)

    # -- KV --

    def expected(self, req: Any, begin: int, end: int) -> torch.Tensor:
        """Hashes `[end - begin]` float32 of a request's tokens."""
        hashes = req.__dict__.setdefault("kv_hashes", [])
        ids = req.full_untruncated_fill_ids
        hashes += prefix_hashes(ids[len(hashes) : end], hashes[-1] if hashes else 0)
        return torch.tensor(hashes[begin:end], dtype=torch.float32, device=self.device)

    def _write(self, req: Any, begin: int, end: int) -> None:
        if not self.with_kv:
            return
        slots = self.rows.req_to_token[req.kv.req_pool_idx, begin:end].long()
        for number, buffer in self.buffers():
            buffer[slots] = (self.expected(req, begin, end) + number).view(-1, 1, 1)

    def buffers(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Every layer of both pools, numbered."""
        yield from enumerate(buffer for pool in self.pools for buffer in pool.kv_buffer)
