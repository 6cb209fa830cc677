"""The import-time hook (patch 0001): a machine without sgl_kernel is a CPU engine, and says what it cannot do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from sglang_sm120.cpu import standin

WITHOUT_CUDA = pytest.mark.skipif(standin.is_for_gpus(), reason="upstream's CUDA packages are here, by `make serve`")


def run(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("SGLANG_USE_CPU_ENGINE", "CUDA_VISIBLE_DEVICES")}
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, env=env)


@WITHOUT_CUDA
def test_import_selects_the_cpu_engine():
    done = run(
        "import sglang; from sglang.srt.utils import is_cpu; import sglang.srt.mem_cache.memory_pool; print(is_cpu())"
    )
    assert done.stdout.split()[-1:] == ["True"], done.stderr


# A GPU that is there unless it is hidden, as torch sees it.
GPU = "import os, torch; torch.cuda.is_available = lambda: os.environ.get('CUDA_VISIBLE_DEVICES') != ''; "
IMPORTS = "import sglang; from sglang.srt.utils import is_cpu, is_cuda; import sglang.srt.mem_cache.memory_pool; "


@WITHOUT_CUDA
def test_a_gpu_is_hidden_from_the_cpu_engine():
    done = run(f"{GPU}{IMPORTS}print(is_cpu(), is_cuda())")
    assert done.stdout.split()[-2:] == ["True", "False"], done.stderr


@pytest.mark.parametrize(("asked", "real"), [("0", "True"), ("1", "False")])
def test_the_cpu_engine_can_be_asked_for_beside_kernels_for_gpus(tmp_path, asked, real):
    (tmp_path / "sgl_kernel.py").write_text("REAL = True\n")
    (tmp_path / "sglang_kernel-0.4.10.dist-info").mkdir()
    (tmp_path / "sglang_kernel-0.4.10.dist-info" / "METADATA").write_text("Name: sglang-kernel\nVersion: 0.4.10\n")
    done = run(
        f"import os, sys; sys.path.insert(0, {str(tmp_path)!r}); os.environ['SGLANG_USE_CPU_ENGINE'] = '{asked}'; "
        "import sglang, sgl_kernel; print(sgl_kernel.REAL is True)"
    )
    assert done.stdout.split()[-1:] == [real], done.stderr


@WITHOUT_CUDA
@pytest.mark.parametrize("engine", ["0", "1"])
def test_without_a_kernel_there_is_no_other_engine(engine):
    code = f"import os; os.environ['SGLANG_USE_CPU_ENGINE'] = '{engine}'; {IMPORTS}print(is_cpu(), is_cuda())"
    assert run(code).stdout.split()[-2:] == ["True", "False"]


def test_a_stub_of_the_users_is_left_alone():
    done = run("import sys, types; sys.modules['sgl_kernel'] = stub = types.ModuleType('sgl_kernel'); import sglang, "
               "sgl_kernel; print(sgl_kernel is stub)")  # fmt: skip
    assert done.stdout.split()[-1:] == ["True"], done.stderr


@WITHOUT_CUDA
def test_missing_kernel_names_itself_when_called():
    done = run("import sglang, sgl_kernel; sgl_kernel.fast_topk_v2()")
    assert done.returncode != 0
    assert "sgl_kernel.fast_topk_v2 is not implemented on the CPU engine" in done.stderr


def test_an_installed_sgl_kernel_wins(tmp_path):
    (tmp_path / "sgl_kernel.py").write_text("REAL = True\n")
    done = run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import os, sglang, sgl_kernel; "
        "print(sgl_kernel.REAL, os.environ.get('SGLANG_USE_CPU_ENGINE'))"
    )
    assert done.stdout.split()[-2:] == ["True", "None"], done.stderr


@pytest.mark.parametrize("backend", ["sm120_mla"])
def test_plain_attention_models_are_refused(backend, tmp_path):
    """A model without a latent gets one clear line, not a shape error at the first prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tools import server, tiny_model

    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=300
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tiny_model.tokenizer(300).save_pretrained(tmp_path / "llama")
    with (
        pytest.raises(
            RuntimeError, match="--attention-backend sm120_mla cannot serve this: the model has no MLA latent"
        ),
        server.running(
            tmp_path / "llama", tmp_path / "log", ["--attention-backend", backend, "--context-length", "2048"]
        ),
    ):
        pass
