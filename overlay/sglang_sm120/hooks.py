"""Every function that a patch of the series calls. Patches insert calls; the logic is in the modules behind them.

Imports are local: some hooks run while `sglang` itself is still being imported.
"""

from __future__ import annotations

from collections.abc import Iterable


def before_import() -> None:
    """First statement of `sglang/__init__.py`: make a machine without `sgl_kernel` a CPU engine."""
    from sglang_sm120.cpu import standin

    standin.install_if_needed()


def reads_fp8_kv_on_cpu(attention_backends: Iterable[str]) -> bool:
    """In `KVCacheConfigurator.configure`: whether every backend of this server reads fp8 latents without a GPU."""
    from sglang_sm120.attention import BACKEND_NAME

    return set(attention_backends) == {BACKEND_NAME}
