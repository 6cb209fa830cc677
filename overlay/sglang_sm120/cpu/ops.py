"""PyTorch versions of the `sgl_kernel` functions that the CPU engine calls, under upstream's names and signatures."""

from sglang_sm120.cpu.speculative import (
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
)

__all__ = ["assign_extend_cache_locs_cpu", "assign_req_to_token_pool_cpu", "copy_all_layer_kv_cache_cpu"]
