"""What a running server chose: one log line when it is ready, and the same facts in `/server_info` for the doctor."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import attention_backends, get_parallel, get_server_args

from sglang_sm120.attention import select

STATE_KEY = "sm120"
logger = logging.getLogger(__name__)


def facts(scheduler: Any) -> dict[str, str]:
    """What decides speed and results in this process, by name, in the order of the log line."""
    runner = scheduler.tp_worker.model_runner
    prefill, decode = attention_backends()
    backend = decode if prefill == decode else f"{prefill} for prompts, {decode} for decode"
    buckets = " ".join(map(str, runner.decode_cuda_graph_capture_bs))
    return {
        "GPU": _device_name(runner.device),
        "attention": f"{backend} ({select.reason(get_server_args(), runner.model_config, decode)})",
        "KV": str(runner.kv_cache_dtype).removeprefix("torch."),
        "page size": str(scheduler.page_size),
        "graph buckets": buckets or "none",
        "free memory": f"{scheduler.startup_available_gpu_memory_gb:.1f} GB",
    }


def _device_name(device: str) -> str:
    if device == "cpu":
        return "none (CPU engine)"
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{gpu.name} sm_{gpu.major}{gpu.minor}"


def log_ready(_result: None, scheduler: Any) -> None:
    """After `Scheduler.init_model_worker`: weights, pools and graphs are there."""
    if get_parallel().tp_rank == 0:
        logger.info("sm120: %s", ", ".join(f"{name} {value}" for name, value in facts(scheduler).items()))


def add_to_state(output: Any, controller: Any, _request: Any) -> None:
    """After `get_internal_state`: the facts and the hooks that are in force, under `STATE_KEY`."""
    hooks = {"hooks": ", ".join(sorted(HookRegistry._patched))}
    output.internal_state[STATE_KEY] = facts(controller.scheduler) | hooks
