"""Every function that a patch of the series calls. Patches insert calls; the logic is in the modules behind them.

Imports are local: some hooks run while `sglang` itself is still being imported.
"""

from __future__ import annotations


def before_import() -> None:
    """First statement of `sglang/__init__.py`: make a machine without `sgl_kernel` a CPU engine."""
    from sglang_sm120.cpu import standin

    standin.install_if_missing()
