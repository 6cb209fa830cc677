"""An importable `sgl_kernel` for machines that have none.

Upstream imports names from `sgl_kernel` at module level on its CPU engine even where the plain PyTorch path calls none
of them. The stand-in hands out `sglang_sm120.cpu.ops` where we implement the name in PyTorch, and otherwise a function
that says what is missing once it is called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAME = "sgl_kernel"


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        from sglang_sm120.cpu import ops

        return getattr(ops, name, None) or _missing(name)


def _missing(name: str) -> Callable[..., Any]:
    def call(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(
            f"sgl_kernel.{name} is not implemented on the CPU engine. Turn the feature that needs it off, "
            "or install sglang-kernel (on a GPU) and start again."
        )

    call.__name__ = name
    return call


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last on `sys.meta_path`, so an installed `sgl_kernel` always wins."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == NAME else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install_if_missing() -> bool:
    """Select upstream's CPU engine and provide `sgl_kernel` if it is not installed; say whether that was done.

    Without `sgl_kernel` nothing can be served on a GPU, so its absence is the whole test; torch need not be imported.
    """
    if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
        return False
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # Upstream compiles small functions with a dynamic batch; on a CPU that recompiles for minutes and gains nothing.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    sys.meta_path.append(_Finder())
    return True


def is_installed() -> bool:
    """Whether the stand-in serves this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)
