"""The Triton kernels: run by the interpreter, and compiled for every GPU that the wheel serves.

kernel_cases.py runs in a process of its own: Triton's interpreter has to be chosen before Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_sm120.ddtree import tree as trees

from tools.kernels import MAX_SHARED_BYTES

CASES = Path(__file__).with_name("kernel_cases.py")


def test_the_triton_kernels_are_the_torch_functions():
    pytest.importorskip("triton")
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", str(CASES), "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(command, env=os.environ | interpret, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout
    assert "4 passed" in result.stdout, result.stdout


POINTERS = {torch.int64: "*i64", torch.int32: "*i32", torch.float32: "*fp32"}


class CompiledOnly:
    """In the place of a kernel: compiles each call of it for one GPU, and launches nothing."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel, self.capability = kernel, capability
        self.compiled: list[Any] = []

    def __getitem__(self, _grid: tuple[int, ...]) -> Any:
        return self.compile

    def compile(self, *args: Any, num_warps: int, **constants: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        signature = {
            name: POINTERS[arg.dtype] if isinstance(arg, torch.Tensor) else "i32"
            for name, arg in zip(names, args, strict=False)
        }
        indices = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(self.kernel, signature | dict.fromkeys(constants, "constexpr"), indices)
        target = GPUTarget("cuda", self.capability, 32)
        self.compiled.append(triton.compile(source, target=target, options={"num_warps": num_warps}))


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120, 121])
@pytest.mark.parametrize("width", [1, 33, 129])
def test_the_triton_kernels_compile_for_every_gpu(monkeypatch, capability, width):
    pytest.importorskip("triton")
    from sglang_sm120.ddtree import kernels

    replaced = {
        name: CompiledOnly(getattr(kernels, name), capability) for name in ("_build", "_open", "_stage", "_walk")
    }
    for name, kernel in replaced.items():
        monkeypatch.setattr(kernels, name, kernel)
    batch, depth, topk = 2, 7, 8
    lengths, ids = torch.full((batch,), 5), torch.zeros(batch, depth, topk, dtype=torch.int64)
    table, choices = torch.zeros(8, 512, dtype=torch.int32), torch.zeros(batch, width, dtype=torch.int64)
    tree = kernels.build_trees(lengths, ids, torch.zeros(ids.shape), trees.empty_trees(batch, width, "cpu"))
    kernels.open_window(lengths, lengths, lengths, table, width=width, block=depth + 1, mask_token=0)
    kernels.stage(tree, lengths, tree.words.flatten(0, 1), tree.parents.flatten())
    kernels.walk(choices, tree.parents, choices, choices, lengths, min(depth, width - 1))
    for kernel in replaced.values():
        (compiled,) = kernel.compiled
        assert f".target sm_{capability}" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= MAX_SHARED_BYTES
