"""The import-time hook (patch 0001): a machine without sgl_kernel is a CPU engine, and says what it cannot do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "SGLANG_USE_CPU_ENGINE"}
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, env=env)


def test_import_selects_the_cpu_engine():
    done = run(
        "import sglang; from sglang.srt.utils import is_cpu; import sglang.srt.mem_cache.memory_pool; print(is_cpu())"
    )
    assert done.stdout.split()[-1:] == ["True"], done.stderr


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
