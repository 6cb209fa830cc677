"""An importable `sgl_kernel` for machines that have none.

Upstream imports names from `sgl_kernel` at module level on its CPU engine even where the plain PyTorch path calls none
of them. The stand-in hands out `sglang_sm120.cpu.ops` where we implement the name in PyTorch, and otherwise a function
that says what is missing once it is called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAME = "sgl_kernel"
CUDA_BUILD = "sglang-kernel"  # the distribution that holds it for GPUs
ENGINE = "SGLANG_USE_CPU_ENGINE"  # upstream's own switch


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
    """Finds the stand-in and nothing else."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == NAME else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def is_needed() -> bool:
    """Whether only the CPU engine can run here.

    That is where `sgl_kernel` is not installed, without which nothing can be served on a GPU, and where the CPU engine
    is asked for and the one that is installed needs a GPU.
    """
    if is_installed():
        return True
    if NAME in sys.modules:
        return False
    return importlib.util.find_spec(NAME) is None or (os.environ.get(ENGINE) == "1" and is_for_gpus())


def install_if_needed() -> bool:
    """Provide `sgl_kernel`, select upstream's CPU engine and hide the GPUs; say whether that was done.

    torch need not be imported, and must not have looked for GPUs.
    """
    if is_installed() or not is_needed():
        return False
    os.environ[ENGINE] = "1"
    # Upstream asks what the machine has, not what it is to run on, and imports kernels for it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Upstream compiles small functions with a dynamic batch; on a CPU that recompiles for minutes and gains nothing.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    sys.meta_path.insert(0, _Finder())
    return True


def is_for_gpus() -> bool:
    """Whether the `sgl_kernel` that is installed is CUDA's build."""
    try:
        importlib.metadata.distribution(CUDA_BUILD)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def is_installed() -> bool:
    """Whether the stand-in serves this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)
