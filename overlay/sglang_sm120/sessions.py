"""Streaming sessions under speculation: the next turn takes over only KV that was written.

What a verify step adds to an answer ends with one token whose KV the step after it writes. Upstream takes for granted
that there was one. There was none if a prefill came between, if the answer's last token was known to be the last, or
without overlap scheduling; the next turn then read whatever lay in that slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def register() -> None:
    """Put it around the end of a turn."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req"
    HookRegistry.register(target, keep_written_kv, HookType.AROUND)


def keep_written_kv(original: Callable[..., bool], sessions: Any, request: Any) -> bool:
    """As upstream's, but what the session keeps ends where the request's own count of written KV does.

    The next turn prefills the rest: a token, which an overlapped step may have written.
    """
    record = request.kv
    written = record.kv_committed_len
    is_kept = original(sessions, request)
    if is_kept:
        record.kv_committed_len = min(record.kv_committed_len, written)
    return is_kept
