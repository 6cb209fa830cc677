"""What the backend prepares for a step: in place, on the device, as large as the batch and never as the context."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor import forward_context
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy
from sglang_sm120 import ops
from sglang_sm120.attention import BACKEND_NAME, backend, reference
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

Q_LEN = 5
REQUESTS = 4


def runner(context: int = 64, kv_dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    table = torch.arange(REQUESTS * context, dtype=torch.int32).view(REQUESTS, context)
    pool = torch.zeros(REQUESTS * context, 1, reference.HEAD_DIM).to(kv_dtype)
    return SimpleNamespace(
        device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=table, size=REQUESTS),
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _layer: pool),
        kv_index_translator=None,
        kv_cache_dtype=kv_dtype,
        is_draft_worker=False,
        model_config=SimpleNamespace(num_attention_heads=8),
    )


@pytest.fixture(autouse=True)
def server_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=Q_LEN))
    monkeypatch.setattr(backend, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1))
    monkeypatch.setattr(backend, "prefills_with_full_heads", lambda: False)  # as on a machine without a GPU


def verify_batch(seq_lens: list[int], **spec_info) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(seq_lens),
        seq_lens=torch.tensor(seq_lens),
        req_pool_indices=torch.arange(len(seq_lens)),
        spec_info=SimpleNamespace(draft_token_num=Q_LEN, **spec_info),
    )


def plan(served: backend.Sm120MLABackend, batch: SimpleNamespace) -> backend.Rows:
    served.init_forward_metadata_out_graph(batch)
    served.init_forward_metadata_in_graph(batch)
    return served.forward_metadata


def test_a_verify_refills_lengths_and_words_in_place():
    """A captured graph knows addresses only: the second step must find its numbers where the first one did."""
    served = backend.Sm120MLABackend(runner())
    first = plan(served, verify_batch([7, 9], topk=4))
    where = first.kv_lens.data_ptr(), first.tree_mask.data_ptr()
    assert first.kv_lens.tolist() == [12, 14]
    served.verify_mask.buffer.fill_(True)
    second = plan(served, verify_batch([20, 30], topk=4))
    assert (second.kv_lens.data_ptr(), second.tree_mask.data_ptr()) == where
    assert second.kv_lens.tolist() == [25, 35]
    assert second.tree_mask.tolist() == [[2**Q_LEN - 1]] * (2 * Q_LEN)


def test_what_a_capture_records_decides_the_mask():
    """The words are read where a tree is verified, whoever filled them; a chain is causal and reads none."""
    served = backend.Sm120MLABackend(runner())
    assert plan(served, verify_batch([7], topk=1)).tree_mask is None
    served.tree_words.fill_(3)
    assert plan(served, verify_batch([7], has_tree_words=True)).tree_mask.tolist() == [[3]] * Q_LEN


@pytest.mark.parametrize("bucket", [1, 2, REQUESTS, 2 * REQUESTS])
def test_rows_lengths_and_masks_agree_at_every_bucket(bucket):
    """Padding by data parallelism reaches past the request pool; nothing may then be shorter than the rows."""
    served = backend.Sm120MLABackend(runner())
    served.init_cuda_graph_state(2 * REQUESTS, 2 * REQUESTS * Q_LEN)
    batch = verify_batch([served.get_cuda_graph_seq_len_fill_value()] * bucket, topk=4)
    rows = plan(served, batch)
    assert rows.kv_lens.shape == (bucket,) and rows.q_len == Q_LEN
    assert rows.tree_mask.shape == (bucket * Q_LEN, reference.mask_words(Q_LEN))
    assert (rows.kv_lens == 1 + Q_LEN).all(), "a padded request has the length of its own rows and one more"


def test_nothing_that_is_allocated_grows_with_the_context():
    short, long = (backend.Sm120MLABackend(runner(context)) for context in (64, 4096))
    assert short.verify_mask.buffer.numel() == long.verify_mask.buffer.numel() == REQUESTS * Q_LEN * Q_LEN
    assert short.tree_words.shape == long.tree_words.shape


def prompt_batch(prefix_lens: list[int], new_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(prefix_lens),
        seq_lens=torch.tensor(prefix_lens) + new_tokens,
        extend_seq_lens=torch.full((len(prefix_lens),), new_tokens),
        extend_prefix_lens_cpu=prefix_lens,
    )


def test_keys_of_a_prompt_with_a_cached_prefix_reach_over_all_of_it():
    """FlashInfer's one-shot plan reads `kv_indptr`: left as the first chunk had it, a later one attends to nothing."""
    served, planned = backend.Sm120MLABackend(runner()), []
    buffer = torch.zeros(REQUESTS + 1, dtype=torch.int32)
    served._prefill = SimpleNamespace(kv_indptr=buffer, init_forward_metadata=planned.append)
    served.init_forward_metadata_out_graph(prompt_batch([8192, 0], 10))
    assert buffer.tolist()[:3] == [0, 8202, 8212] and not planned
    first_chunks = prompt_batch([0, 0], 10)
    served.init_forward_metadata_out_graph(first_chunks)
    assert planned == [first_chunks]


def test_upstream_finds_the_pools_through_the_backend():
    """Prompts over a prefix that does not fit one chunk read both pools from the backend of the forward context."""
    at = runner()
    with forward_context.forward_context(
        forward_context.ForwardContext(attn_backend=backend.Sm120MLABackend(at)),
        forward_batch=SimpleNamespace(moe_num_token_non_padded=None),
    ):
        assert forward_context.get_req_to_token_pool() is at.req_to_token_pool
        assert forward_context.get_token_to_kv_pool() is at.token_to_kv_pool


def test_planning_a_verify_reads_nothing_on_the_host():
    """Fake tensors have no values: whoever asks for one (.item, .tolist, a data-dependent shape) fails."""
    served = backend.Sm120MLABackend(runner())
    assert not served.needs_cpu_seq_lens
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch = verify_batch([7, 9], topk=4)
        with pytest.raises(DataDependentOutputException):
            batch.seq_lens.sum().item()
        plan(served, batch)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_kernel_gets_the_pool_itself(monkeypatch, kv_dtype):
    """No conversion of the pool: the kernel reads the latents where and as they lie, whatever else the pool holds."""
    seen = []

    def kernel(q, kv_pool, *args, **_):
        seen.append(kv_pool)
        return q.new_zeros(*q.shape[:2], reference.LATENT_DIM), None

    monkeypatch.setattr(ops, "mla_verify", kernel)
    at = runner(kv_dtype=kv_dtype)
    served = backend.Sm120MLABackend(at)
    served.uses_kernel = True
    batch = verify_batch([7, 9], topk=1)
    served.forward_metadata = backend.Rows(torch.tensor([12, 14]), q_len=Q_LEN)
    layer = SimpleNamespace(layer_id=0, scaling=1.0, logit_cap=0.0)
    served._attend(torch.zeros(2 * Q_LEN, 8, reference.HEAD_DIM), layer, batch.req_pool_indices)
    assert seen[0] is at.token_to_kv_pool.get_key_buffer(0) and seen[0].dtype == kv_dtype


def test_wrappers_of_the_backend_may_call_it_as_they_call_flashinfers():
    """A server with another decode backend plans prompts through upstream's wrapper."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    planned = []
    ours = backend.Sm120MLABackend.__new__(backend.Sm120MLABackend)
    ours._prefill = SimpleNamespace(init_mha_chunk_metadata=lambda *given: planned.append(given))
    wrapper = SimpleNamespace(prefill_backend=ours)
    HybridAttnBackend.init_mha_chunk_metadata(wrapper, "batch", False)
    assert planned == [("batch", False)]


def test_a_captured_prompt_is_not_planned_for_full_heads(monkeypatch: pytest.MonkeyPatch):
    ours = backend.Sm120MLABackend.__new__(backend.Sm120MLABackend)
    ours._prefill = SimpleNamespace(init_forward_metadata=lambda batch: planned.append(batch))
    batch = SimpleNamespace(extend_prefix_lens_cpu=[0])
    planned: list[SimpleNamespace] = []
    ours._plan_prompt(batch)
    monkeypatch.setattr(backend, "is_in_breakable_cuda_graph", lambda: True)
    ours._plan_prompt(batch)
    assert planned == [batch]


def batch_of(mode: str, seq_lens: list[int], new_tokens: list[int] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=ForwardMode[mode],
        batch_size=len(seq_lens),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
        req_pool_indices=torch.arange(len(seq_lens)),
        extend_seq_lens=None if new_tokens is None else torch.tensor(new_tokens),
        extend_prefix_lens_cpu=[0] * len(seq_lens),
        spec_info=SimpleNamespace(draft_token_num=Q_LEN, topk=4),
    )


# Mode, lengths, new tokens; the lengths of KV and of the rows that come of them.
BATCHES = [
    ("DECODE", [7, 9], None, [7, 9], [1, 1]),
    ("IDLE", [], None, [], []),
    ("EXTEND", [7, 9, 30], [7, 2, 30], [7, 9, 30], [7, 2, 30]),
    ("MIXED", [30, 9], [4, 1], [30, 9], [4, 1]),
    ("TARGET_VERIFY", [7, 9], None, [12, 14], [Q_LEN] * 2),
    ("TARGET_VERIFY", [], None, [], []),
    ("DRAFT_EXTEND_V2", [12, 9], [3, 1], [14, 13], [Q_LEN] * 2),
]


@pytest.mark.parametrize(("mode", "seq_lens", "new_tokens", "kv_lens", "q_lens"), BATCHES)
def test_rows_of_every_mode(mode, seq_lens, new_tokens, kv_lens, q_lens):
    """As many as the kernel's arguments may have, in the order of the queries; a rank may be idle."""
    rows = plan(backend.Sm120MLABackend(runner()), batch_of(mode, seq_lens, new_tokens))
    assert rows.kv_lens.tolist() == kv_lens
    if rows.qo_indptr is not None:
        assert rows.qo_indptr.tolist() == [sum(q_lens[:n]) for n in range(len(q_lens) + 1)]
    else:
        assert all(rows.q_len == q_len for q_len in q_lens)
    ops._check_batch(sum(q_lens), torch.arange(len(seq_lens)), rows.kv_lens, rows.q_len, rows.qo_indptr)
    if rows.tree_mask is not None:
        ops._check_mask(rows.tree_mask, sum(q_lens), rows.q_len)


def test_what_the_layer_says_reaches_the_attention(monkeypatch: pytest.MonkeyPatch):
    """Latent before rope in a query, the layer's factor and cap; keys are written only if they are to be."""
    told = {}

    def attend(q, *_, **options):
        told.update(options, q=q)
        return q.new_zeros(*q.shape[:2], reference.LATENT_DIM), None

    monkeypatch.setattr(reference, "mla_attention", attend)
    served = backend.Sm120MLABackend(runner())
    served.forward_metadata = backend.Rows(torch.tensor([7, 9]), q_len=1)
    layer = SimpleNamespace(layer_id=0, scaling=0.25, logit_cap=30.0, tp_q_head_num=8, v_head_dim=reference.LATENT_DIM)
    latent, rope = torch.ones(2, 8, reference.LATENT_DIM), torch.full((2, 8, reference.ROPE_DIM), 2.0)
    batch = SimpleNamespace(req_pool_indices=torch.arange(2))
    out = served.forward_decode(latent, latent, latent, layer, batch, save_kv_cache=False, q_rope=rope)
    assert out.shape == (2, 8 * reference.LATENT_DIM)
    assert torch.equal(told["q"], torch.cat([latent, rope], dim=-1))
    assert (told["sm_scale"], told["logit_cap"]) == (0.25, 30.0)


def test_the_plan_says_what_runs_and_a_capture_plans_nothing(monkeypatch: pytest.MonkeyPatch):
    """Heads are those of the rank: as many splits as the kernel will take."""
    noted, asked = [], []
    monkeypatch.setattr(backend, "get_parallel", lambda: SimpleNamespace(attn_tp_size=4))
    monkeypatch.setattr(backend.metrics, "note_plan", noted.append)
    monkeypatch.setattr(ops, "splits", lambda *what: asked.append(what[:2]) or 47)
    served = backend.Sm120MLABackend(runner())
    served.uses_kernel = True
    served.init_forward_metadata_out_graph(verify_batch([7, 9], topk=4), in_capture=True)
    assert noted == [], "a capture is no step"
    served.init_forward_metadata_out_graph(verify_batch([7, 9], topk=4))
    served.init_forward_metadata_out_graph(batch_of("EXTEND", [7], [7]))
    assert noted == [("target_verify", "kernel", 47), ("extend", "kernel", None)]
    assert asked == [(Q_LEN, 2)], "8 heads of the model over 4 ranks"


def test_upstreams_plan_stream_finds_nothing_to_correct():
    """It asks every backend that verifies; upstream's base class raises NotImplementedError."""
    served = backend.Sm120MLABackend(runner())
    before = plan(served, verify_batch([7], topk=4)).tree_mask.clone()
    served.update_verify_buffers_to_fill_after_draft(None, None)
    assert torch.equal(served.forward_metadata.tree_mask, before)


def test_only_what_runs_is_declared():
    """To upstream, which picks features by such lists and flags."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.models.deepseek_common import attention_backend_handler, utils
    from sglang.srt.plugins import load_plugins

    load_plugins()
    served = backend.Sm120MLABackend
    for granted in (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS,
        attention_backend_handler.MHA_ONE_SHOT_SUPPORTED_BACKENDS,
        utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS,
    ):
        assert granted.count(BACKEND_NAME) == 1, "without it prompts are slow, and no token tells"
    for refused in ("DRAFT_ATTENTION", "DETERMINISTIC_ATTENTION"):
        assert BACKEND_NAME not in getattr(choices, f"{refused}_BACKEND_CHOICES")
    assert BACKEND_NAME not in choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND
    for flag in ("supports_ragged_verify_graph", "supports_full_cuda_graph_chunked_prefix",
                 "supports_draft_extend_metadata_staging", "supports_prefill_cuda_graph_max_context_size",
                 "use_captured_forward_metadata_for_breakable_cuda_graph"):  # fmt: skip
        assert getattr(served, flag) is False
    assert resolve_dflash_verify_mask_policy(served.__new__(served)) == ("Sm120MLABackend", False)
