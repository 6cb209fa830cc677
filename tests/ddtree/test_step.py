"""One step of the worker around made-up models: it reads nothing back, and writes where a graph replay will read."""

from __future__ import annotations

import contextlib
import dataclasses
import types

import pytest
import torch

pytest.importorskip("sglang", reason="the patched sglang is not installed here: run `make install`")
from sglang_sm120.ddtree import tree as trees
from sglang_sm120.ddtree import worker as module
from sglang_sm120.ddtree.draft import TreeDrafter
from sglang_sm120.ddtree.worker import DDTreeWorker, TreeVerifyInput

REQUESTS, BLOCK, WIDTH, HIDDEN, VOCAB, TOPK = 3, 4, 9, 8, 50, 5


def on(device: str, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def sampling_of(device: str, temperature: float):
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    is_greedy = temperature == 0
    return SamplingBatchInfo(
        temperatures=torch.full((REQUESTS, 1), temperature or 1.0, device=device),
        top_ps=torch.full((REQUESTS,), 0.9, device=device),
        top_ks=torch.full((REQUESTS,), 1 if is_greedy else 20, device=device),
        min_ps=torch.zeros(REQUESTS, device=device),
        is_all_greedy=is_greedy,
        is_any_greedy=is_greedy,
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=True,
        vocab_size=VOCAB,
        device=device,
        logit_bias=None if is_greedy else on(device, REQUESTS, VOCAB, dtype=torch.float32),
    )


def made_up_worker(device: str, width: int = WIDTH, graph: bool = False) -> DDTreeWorker:
    """A worker whose two models answer with zeros of the right shapes, the target for `width` nodes a request."""
    worker = object.__new__(DDTreeWorker)
    rows = REQUESTS * width
    head = types.SimpleNamespace(
        weight=on(device, VOCAB, HIDDEN, dtype=torch.float32), org_vocab_size=VOCAB, quant_method=None
    )
    plan = types.SimpleNamespace(bind=lambda *_args, **_kwargs: None)
    answer = types.SimpleNamespace(
        next_token_logits=on(device, rows, VOCAB, dtype=torch.float32),
        hidden_states=on(device, rows, HIDDEN, dtype=torch.float32),
    )
    drafted = types.SimpleNamespace(hidden_states=on(device, REQUESTS * BLOCK, HIDDEN, dtype=torch.float32))
    vars(worker).update(
        device=device,
        block_size=BLOCK,
        widest=WIDTH,
        adaptive=None,
        settler=None,
        use_compact_draft_cache=False,
        _mask_token_id=VOCAB - 1,
        _draft_block_spec_info=None,
        _draft_sampler=None,
        _target_logits_processor=None,
        _block_pos_offsets=torch.arange(BLOCK, device=device),
        _tp_sync=types.SimpleNamespace(sync=lambda _site, values: values),
        _append_target_hidden_to_draft_kv_by_loc=lambda **_: None,
        embed=lambda ids: on(device, ids.numel(), HIDDEN, dtype=torch.float32),
        draft_parallel_layout=None,
        parents=on(device, rows, dtype=torch.int32),
        drafter=TreeDrafter(head, BLOCK, TOPK, WIDTH - 1),
        _move_target_kv=lambda _path: None,  # on a GPU one op
        draft_model_runner=types.SimpleNamespace(
            kv_index_translator=None,
            forward=lambda _batch: types.SimpleNamespace(can_run_graph=False, logits_output=drafted),
        ),
        _target_worker=types.SimpleNamespace(
            model_runner=types.SimpleNamespace(
                req_to_token_pool=types.SimpleNamespace(req_to_token=on(device, 8, 100, dtype=torch.int32)),
                kv_index_translator=types.SimpleNamespace(plan=lambda **_: plan),
                attn_backend=types.SimpleNamespace(tree_words=on(device, rows, 1, dtype=torch.int32)),
                sampler=upstreams_sampler(),
            ),
            forward_batch_generation=lambda **_: types.SimpleNamespace(logits_output=answer, can_run_cuda_graph=graph),
        ),
    )
    return worker


def upstreams_sampler() -> types.SimpleNamespace:
    from sglang.srt.layers.sampler import Sampler

    return types.SimpleNamespace(_sample_from_probs=lambda *args: Sampler._sample_from_probs(None, *args))


def batch_of(device: str, temperature: float = 0.0, **more) -> types.SimpleNamespace:
    """As overlap scheduling on a GPU hands it over: of lengths the host knows a bound."""
    given = {
        "spec_info": types.SimpleNamespace(
            bonus_tokens=on(device, REQUESTS), nxt_kv_lens_cpu=torch.full((REQUESTS,), 40, dtype=torch.int32)
        ),
        "seq_lens": on(device, REQUESTS),
        "seq_lens_cpu": None,
        "seq_lens_sum": None,
        "req_pool_indices": on(device, REQUESTS),
        "has_grammar": False,
        "return_logprob": True,
        "top_logprobs_nums": [2] * REQUESTS,
        "token_ids_logprobs": None,
        "sampling_info": sampling_of(device, temperature),
        "spec_algorithm": None,
        "can_run_decode_cuda_graph": False,
        "reqs": [],
    }
    return types.SimpleNamespace(**given | more)


@pytest.fixture
def surroundings(monkeypatch):
    """What a step needs of upstream on a machine without a GPU."""
    from sglang.srt.layers import sampler
    from sglang.srt.models import dflash

    in_torch = types.SimpleNamespace(kernel=types.SimpleNamespace(sampling_backend="pytorch"))
    monkeypatch.setattr(sampler, "get_exec", lambda: in_torch)
    monkeypatch.setattr(dflash, "get_parallel", lambda: types.SimpleNamespace(tp_size=1))
    monkeypatch.setattr(module, "draft_tp_context", lambda _layout: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch, "get_device_module", lambda _: types.SimpleNamespace(current_stream=lambda: None))
    monkeypatch.setattr(module, "ForwardBatch", types.SimpleNamespace)
    monkeypatch.setattr(TreeVerifyInput, "prepare_for_verify", lambda *_: (None, False))
    return monkeypatch


def opened(roots: torch.Tensor, *_tensors: torch.Tensor, width: int, block: int, mask_token: int) -> trees.Window:
    """The shapes that the Triton kernel gives; the version for the CPU makes its arange there."""
    return trees.Window(*(on(roots.device.type, len(roots), columns) for columns in (width, block, block)))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_step_reads_nothing_back_from_the_device(surroundings, temperature):
    """Tensors of the meta device have no data: `.item()`, a mask as index, a copy to or from the host, all raise."""
    surroundings.setattr(trees, "open_window", opened)
    worker, batch, published = made_up_worker("meta"), batch_of("meta", temperature), []
    result = module._Step(worker, batch).run(published.append, None)
    assert published[0] is result.new_seq_lens and result.new_seq_lens.is_meta
    assert result.speculative_num_draft_tokens == WIDTH, "what metrics count as drafted"
    assert result.next_token_ids.shape == (REQUESTS * BLOCK,) and result.speculative_output_stride == BLOCK
    assert result.logits_output.next_token_logprobs.shape == (REQUESTS, BLOCK)
    assert (batch.seq_lens_cpu, batch.seq_lens_sum) == (None, None), "what the scheduler knows of lengths is its own"


@pytest.mark.parametrize(
    "reading", [lambda x: x[0].item(), lambda x: x.tolist(), lambda x: x[x > 0], lambda x: x.cpu()]
)
def test_a_device_without_data_tells_of_every_reading(reading):
    with pytest.raises((RuntimeError, NotImplementedError)):
        reading(on("meta", 3))


def test_every_step_writes_where_a_replay_reads(surroundings):
    """Positions by depth, tokens and words arrive at the addresses of the capture, whatever tensors carried them."""
    from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry

    captured = build_decode_registry(
        device=torch.device("cpu"), max_bs=REQUESTS + 1, max_num_token=(REQUESTS + 1) * WIDTH,
        seq_len_fill_value=1, cache_loc_dtype=torch.int64, share_pool=False,
    )  # fmt: skip

    def load(verify_input: TreeVerifyInput, batch: types.SimpleNamespace, _worker: object):
        forward_batch = types.SimpleNamespace(
            input_ids=verify_input.draft_token, positions=verify_input.positions, out_cache_loc=batch.out_cache_loc,
            seq_lens=batch.seq_lens, req_pool_indices=batch.req_pool_indices,
        )  # fmt: skip
        captured.fill_from(
            forward_batch, raw_bs=REQUESTS, padded_bs=REQUESTS + 1,
            raw_num_tokens=REQUESTS * WIDTH, padded_num_tokens=(REQUESTS + 1) * WIDTH,
        )  # fmt: skip
        return forward_batch, True

    surroundings.setattr(TreeVerifyInput, "prepare_for_verify", load)
    worker = made_up_worker("cpu")
    read = {name: captured.get_slot(name).buffer for name in ("positions", "input_ids", "out_cache_loc")}
    read["words"], read["parents"] = worker._target_worker.model_runner.attn_backend.tree_words, worker.parents
    addresses = {name: memory.data_ptr() for name, memory in read.items()}
    for seed in range(3):
        torch.manual_seed(seed)
        batch = batch_of("cpu", seq_lens=torch.randint(5, 40, (REQUESTS,)))
        step = module._Step(worker, batch)
        log_probs, ids = torch.randn(REQUESTS, BLOCK - 1, VOCAB).log_softmax(-1).topk(TOPK)
        tree = trees.build_trees(step.roots, ids, log_probs, WIDTH - 1)
        step._verify(tree)
        expected = {
            "positions": (batch.seq_lens[:, None] + tree.depths).flatten(),
            "input_ids": tree.tokens.flatten(),
            "out_cache_loc": step.slots.flatten(),
            "words": tree.words.flatten(0, 1),
            "parents": tree.parents.flatten(),
        }
        for name, values in expected.items():
            assert torch.equal(read[name][: len(values)], values), name
        assert not read["out_cache_loc"][REQUESTS * WIDTH :].any(), "what pads a batch is settled in the padding slot"
        now = captured.get_slot("positions").buffer.data_ptr()
        assert now == addresses["positions"] and worker.parents.data_ptr() == addresses["parents"]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampling_info": None},
        {"has_grammar": True},
        {"sampling_info": sampling_of("cpu", 0.7)},
        {"sampling_info": dataclasses.replace(sampling_of("cpu", 0.0), logit_bias=torch.ones(REQUESTS, VOCAB))},
        {"sampling_info": dataclasses.replace(sampling_of("cpu", 0.0), has_custom_logit_processor=True)},
    ],
    ids=["greedy", "nothing asked", "grammar", "sampling", "bias", "processor"],
)
def test_the_tail_of_the_graph_settles_plain_greedy_steps_alone(surroundings, changes, graph, request):
    """And only if a graph ran: else what the tail holds is an earlier step's."""
    worker, batch = made_up_worker("cpu", graph=graph), batch_of("cpu", return_logprob=False, **changes)
    armed, settled = [], []
    nodes = on("cpu", REQUESTS, WIDTH)
    roots_alone = trees.walk(nodes, nodes - 1, nodes, nodes, nodes[:, 0], BLOCK - 1)
    worker.settler = types.SimpleNamespace(
        arm=lambda is_armed: armed.append(is_armed) or is_armed,
        path=lambda *sizes: settled.append(sizes) or roots_alone,
    )
    surroundings.setattr(module._Step, "_choices", lambda step, *_: on("cpu", REQUESTS * WIDTH))
    surroundings.setattr(module.GrammarTree, "from_device", lambda *_: None)
    module._Step(worker, batch).run(None, None)
    is_plain = request.node.callspec.id.split("-")[0] in ("greedy", "nothing asked")
    assert armed == [is_plain]
    assert settled == ([(REQUESTS, WIDTH)] if is_plain and graph else [])


@pytest.mark.parametrize("temperature, site", [(0.0, "DFLASH_ACCEPT_GREEDY"), (0.7, "DFLASH_ACCEPT_SAMPLE")])
def test_all_ranks_follow_the_choices_of_the_first(surroundings, temperature, site):
    """Each draws for itself; paths would part, and with them the KV."""
    worker, asked = made_up_worker("cpu"), []
    of_the_first = torch.full((REQUESTS * WIDTH,), 7)
    worker._tp_sync.sync = lambda where, _own: asked.append(where.name) or of_the_first
    result = module._Step(worker, batch_of("cpu", temperature)).run(None, None)
    assert asked == [site]
    assert result.next_token_ids.view(REQUESTS, -1)[:, 0].tolist() == [7] * REQUESTS


@pytest.mark.parametrize("width", [BLOCK, WIDTH - 2])
def test_the_policy_hears_of_the_width_that_ran_and_of_the_whole_draft(surroundings, width):
    heard = []
    worker = made_up_worker("cpu", width)
    worker.adaptive = types.SimpleNamespace(choose=lambda _: width, record=lambda *what: heard.append(what))
    result = module._Step(worker, batch_of("cpu")).run(None, None)
    ((path, drafted, told),) = heard
    assert told == result.speculative_num_draft_tokens == width
    assert drafted.width == WIDTH and len(path.nodes) == REQUESTS


def test_what_runs_between_two_steps_is_not_part_of_the_second_ones_time(monkeypatch):
    interrupted = []
    monkeypatch.setattr(module.DFlashWorkerV2, "forward_batch_generation", lambda *_: "a prompt's answer")
    worker = made_up_worker("cpu")
    worker.adaptive = types.SimpleNamespace(interrupt=lambda: interrupted.append(True))
    mode = types.SimpleNamespace(is_extend=lambda: True, is_idle=lambda: False)
    batch = types.SimpleNamespace(forward_mode=mode, is_extend_in_batch=True)
    assert worker.forward_batch_generation(batch) == "a prompt's answer" and interrupted
