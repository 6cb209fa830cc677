"""Paged-KV defragmentation: a census, extents (tier 0) and online compaction (tier 1). See docs/kvdefrag.md."""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang_sm120.kvdefrag.settings import COMPACT, TREE_CORE, Settings, When

logger = logging.getLogger(__name__)


def register() -> None:
    """Hook what the environment asks for into upstream; with nothing asked, upstream stays as it is.

    Exits on a bad variable: upstream would only log an exception here, and then serve without the whole plugin.
    """
    try:
        settings = Settings.from_environment()
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if settings.extent_tokens:
        _register_extents(settings.extent_tokens)
    if settings.compact is not When.OFF:
        _register_compaction(settings)


def _register_extents(extent_tokens: int) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_sm120.kvdefrag import extents

    def replace(allocator: Any, *_args: Any, req_to_token_pool: Any, **_kwargs: Any) -> Any:
        return extents.replace_allocator(allocator, req_to_token_pool, extent_tokens)

    configurator = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    HookRegistry.register(f"{configurator}._build_token_to_kv_pool_allocator", replace, HookType.AFTER)
    for name in ("alloc_for_extend", "alloc_for_decode", "alloc_for_spec_decode"):
        HookRegistry.register(f"sglang.srt.mem_cache.allocation.{name}", getattr(extents, name), HookType.AROUND)


def _register_compaction(settings: Settings) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_sm120.kvdefrag import serving

    if TREE_CORE not in os.environ:
        os.environ[TREE_CORE] = "python"
        logger.info("%s=%s: the prefix cache uses the Python tree core.", COMPACT, settings.compact.value)
    hooks = serving.Hooks(settings)
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.get_next_batch_to_run", hooks.before_next_batch, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.on_idle", hooks.on_idle, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.set_internal_state", hooks.set_internal_state, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.get_internal_state", hooks.get_internal_state, HookType.AFTER)
