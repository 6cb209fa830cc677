"""Which backend SGLang picks, with a mocked GPU where the choice depends on one; and what is refused, by flag."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.arg_groups import cuda_graph_hook
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.resolution_hooks import run_hook
from sglang.srt.configs import KimiLinearConfig
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, Phase, with_phase
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang_sm120 import ops
from sglang_sm120.attention import select
from transformers import PretrainedConfig


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Pretend that the first GPU has the given capability and that the kernels are built."""

    def pretend(capability: tuple[int, int], built: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(ops, "LIBRARY_PATH", SimpleNamespace(exists=lambda: built))
        monkeypatch.setattr(ops, "_library", lambda: None)
        monkeypatch.setattr(ops, "library_targets", lambda: ["sm_80", "sm_90", "sm_120a", "sm_121a"])

    return pretend


def kimi(**changes):
    config = changes.get("hf_config", PretrainedConfig())
    return SimpleNamespace(
        **{
            "num_attention_heads": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "hf_config": config,
            "hf_text_config": config,
            "dtype": torch.bfloat16,
            "sliding_window_size": None,
            "linear_attn_registry_result": None,
        }
        | changes
    )


def args(**changes):
    return SimpleNamespace(
        **{
            "tp_size": 1,
            "attn_dp_size": 1,
            "dcp_size": 1,
            "attn_cp_size": 1,
            "enable_two_batch_overlap": False,
            "enable_pdmux": False,
            "cuda_graph_config": CudaGraphConfig(),
            "enable_unified_memory": False,
            "enable_deterministic_inference": False,
            "kv_cache_dtype": "auto",
            "device": "cuda",
            "flashinfer_mla_disable_ragged": False,
            "speculative_algorithm": None,
            "speculative_draft_attention_backend": None,
        }
        | changes
    )


FULL_PREFILL = with_phase(CudaGraphConfig(), Phase.PREFILL, backend=Backend.FULL)


def upstream_default(*_):
    return "upstream's choice"


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_rtx_blackwell_with_an_mla_model_gets_ours(gpu, capability):
    gpu(capability)
    assert select.default_backend(upstream_default, args(), True, kimi()) == "sm120_mla"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (10, 3), (11, 0)])
def test_other_gpus_keep_upstreams_choice(gpu, capability):
    gpu(capability)
    assert select.default_backend(upstream_default, args(), True, kimi()) == "upstream's choice"


def test_models_without_a_latent_keep_upstreams_choice(gpu):
    gpu((12, 0))
    assert select.default_backend(upstream_default, args(), False, kimi()) == "upstream's choice"


def test_what_we_would_refuse_is_not_chosen(gpu):
    gpu((12, 0))
    assert select.default_backend(upstream_default, args(dcp_size=2), True, kimi()) == "upstream's choice"
    gpu((12, 0), built=False)
    assert select.default_backend(upstream_default, args(), True, kimi()) == "upstream's choice"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dcp_size": 4}, "--dcp-size 4"),
        ({"attn_cp_size": 2}, "--attn-cp-size 2"),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"enable_deterministic_inference": True}, "--enable-deterministic-inference"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2"),
        ({"kv_cache_dtype": "fp4_e2m1"}, "--kv-cache-dtype fp4_e2m1"),
        ({"flashinfer_mla_disable_ragged": True}, "--flashinfer-mla-disable-ragged"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM"),
        ({"speculative_algorithm": "DSPARK"}, "--speculative-algorithm DSPARK"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"cuda_graph_config": FULL_PREFILL}, "--cuda-graph-backend-prefill full"),
        ({"speculative_algorithm": "eagle"}, "--speculative-draft-attention-backend triton"),
    ],
)
def test_refusals_name_the_flag(gpu, changes, named):
    gpu((12, 0))
    reasons = select.refusals(args(**changes), kimi())
    assert len(reasons) == 1 and named in reasons[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_lora_rank": 256}, "latent of 256 + 64"),
        ({"kv_lora_rank": None}, "no MLA latent"),
        ({"hf_config": PretrainedConfig(index_topk=2048)}, "sparse attention"),
        ({"hf_text_config": PretrainedConfig(index_topk=2048)}, "sparse attention"),
        ({"sliding_window_size": 128}, "sliding-window"),
        ({"hf_config": PretrainedConfig(llama_4_scaling={"beta": 0.1})}, "llama_4_scaling"),
        ({"hf_text_config": PretrainedConfig(llama_4_scaling={"beta": 0.1})}, "llama_4_scaling"),
        ({"dtype": torch.float16}, "--dtype"),
        ({"hf_config": KimiLinearConfig()}, "linear attention"),
    ],
)
def test_refusals_say_what_the_model_has(gpu, changes, said):
    gpu((12, 0))
    reasons = select.refusals(args(), kimi(**changes))
    assert len(reasons) == 1 and said in reasons[0]


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (11, 0)])
def test_gpus_without_kernels_are_refused(gpu, capability):
    gpu(capability)
    assert any("the GPU is sm_" in reason for reason in select.refusals(args(), kimi()))


def test_a_wheel_without_kernels_says_so(gpu):
    gpu((9, 0), built=False)
    assert any("built without kernels" in reason for reason in select.refusals(args(), kimi()))


@pytest.mark.parametrize(
    ("sizes", "refused"), [({}, True), ({"tp_size": 2}, False), ({"tp_size": 8, "attn_dp_size": 8}, True)]
)
def test_more_heads_a_rank_than_the_kernels_take_are_refused(gpu, sizes, refused):
    """Data-parallel attention divides requests and no heads."""
    gpu((12, 0))
    reasons = select.refusals(args(**sizes), kimi(num_attention_heads=256))
    assert bool(reasons) == refused and all("256 heads a rank" in reason for reason in reasons)


def test_a_model_without_heads_is_told_of_its_latent(gpu):
    """Mamba on upstream's backend: the line at start asks the same rules, and may not end the server."""
    gpu((12, 0))
    (refusal,) = select.refusals(args(), kimi(num_attention_heads=None, kv_lora_rank=None))
    assert "no MLA latent" in refusal


def test_the_cpu_engine_needs_no_kernels():
    assert select.refusals(args(device="cpu"), kimi(dtype=torch.float32)) == []


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative_algorithm": "DFLASH"},
        {"speculative_algorithm": "DDTREE"},
        {"speculative_algorithm": "EAGLE", "speculative_draft_attention_backend": "triton"},
    ],
)
def test_speculation_that_the_backend_serves_is_not_refused(gpu, flags):
    gpu((12, 0))
    assert select.refusals(args(**flags), kimi()) == []


@pytest.mark.parametrize(
    ("backend", "full_heads", "asked", "left"),
    [
        ("sm120_mla", True, False, "disabled"),
        ("sm120_mla", True, True, "breakable"),
        ("sm120_mla", False, False, "breakable"),
        ("triton", True, False, "breakable"),
    ],
)
def test_prompts_with_full_heads_are_not_captured_unless_asked(monkeypatch, backend, full_heads, asked, left):
    """By upstream's own resolution step: inside a prefill graph prompts would take the absorbed path."""
    monkeypatch.setattr(select, "prefills_with_full_heads", lambda: full_heads)
    given = ServerArgs(model_path="none", device="cuda", attention_backend=backend)
    graphs = CudaGraphConfig()
    graphs.prefill.backend = Backend.BREAKABLE
    declare_resolution(given, "test", cuda_graph_config=graphs)
    given._cuda_graph_config_locked = {(Phase.PREFILL, "backend")} if asked else set()
    monkeypatch.setattr(cuda_graph_hook, "model_config_of", lambda _: SimpleNamespace(hf_config=kimi_architecture()))
    load_plugins()
    run_hook(cuda_graph_hook.disable_prefill_cuda_graph_for_deepseek_trtllm_mla, given)
    assert resolving_view(given).cuda_graph_config.prefill.backend == left


@pytest.mark.parametrize(("prefill", "decode"), [("triton", "sm120_mla"), ("sm120_mla", "fa3")])
def test_a_checkpoints_scale_of_kv_is_refused_beside_a_backend_that_may_divide_by_it(prefill, decode):
    """The scale as upstream loads it: one latent row written by both backends would have two meanings."""
    load_plugins()
    create = ATTENTION_BACKENDS["sm120_mla"]
    phase, other = ("prefill", prefill) if decode == "sm120_mla" else ("decode", decode)
    with pytest.raises(
        ValueError, match=f"--{phase}-attention-backend {other} .* k_scale 0.5 of /weights, and sm120_mla"
    ):
        create(scaled_runner(0.5, prefill, decode))


@pytest.mark.parametrize(
    ("k_scale", "prefill"), [(0.5, "sm120_mla"), (0.5, "flashinfer"), (1.0, "triton"), (-1.0, "triton")]
)
def test_a_scale_that_nobody_divides_by_is_no_trouble(k_scale, prefill):
    """-1 is upstream's mark of a checkpoint without one."""
    select.refuse_scaled_kv(scaled_runner(k_scale, prefill, "sm120_mla"))


def scaled_runner(k_scale: float, prefill: str, decode: str) -> SimpleNamespace:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Module())
    method = BaseKVCacheMethod(quant_config=None)
    method.create_weights(model[1])
    model[1].k_scale.fill_(k_scale)
    model[1].v_scale.fill_(k_scale)
    method.process_weights_after_loading(model[1])
    return SimpleNamespace(
        model=model,
        model_config=SimpleNamespace(model_path="/weights"),
        prefill_attention_backend_str=prefill,
        decode_attention_backend_str=decode,
    )


def kimi_architecture():
    return SimpleNamespace(architectures=["DeepseekV3ForCausalLM"])
