"""`sglang-sm120 moe-balance` on a load that is known to be skewed: a random model with a biased router.

    python -m tools.bench_moe --out docs/bench

Writes the checkpoint (64 experts, 8 a token, normal noise on the router's selection bias), serves it, sends random
prompts while the command records, and keeps what it says: moe-balance.{md,json,png}.
"""

from __future__ import annotations

import argparse
import random
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import torch
from transformers import DeepseekV3ForCausalLM

from tools import bench_server, server, tiny_model

BIAS_STD = 0.06
"""Of the selection bias; the random router's scores spread by about 0.08 around 0.5."""
VOCABULARY = 2048
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 16, 100, 32
SERVER_FLAGS = shlex.split(
    "--expert-distribution-recorder-mode stat --max-total-tokens 16384 --context-length 2048 --max-running-requests 32"
)
GPU_FLAGS = [*bench_server.GPU_FLAGS, *bench_server.OURS, "--cuda-graph-backend-decode", "disabled",
             "--mem-fraction-static", "0.1"]  # fmt: skip


def write_model(out: Path) -> Path:
    """A tiny Kimi-shaped checkpoint with 64 experts, some of them much preferred."""
    torch.manual_seed(0)
    config = tiny_model.config(tiny_model.SIZES["tiny"], VOCABULARY)
    config.n_routed_experts, config.num_experts_per_tok = 64, 8
    model = DeepseekV3ForCausalLM(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, BIAS_STD)
    model.to(torch.bfloat16 if torch.cuda.is_available() else torch.float32).save_pretrained(out)
    tiny_model.tokenizer(VOCABULARY).save_pretrained(out)
    tiny_model.finish_config(out, tiny_model.SIZES["tiny"])
    return out


def ask(up: server.Server, rng: random.Random) -> None:
    """Answer a batch of random prompts."""
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]
    up.generate(prompts, NEW_TOKENS)


def keep_busy(up: server.Server, rng: random.Random, until: threading.Event) -> None:
    """Batches until told to stop."""
    while not until.is_set():
        ask(up, rng)


def main() -> int:
    """Serve, record, write; the exit code is that of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="folder for the checkpoint and dumps")
    parser.add_argument("--seconds", type=float, default=8)
    args = parser.parse_args()
    server.exit_on_sigterm()
    dumps, gpu = args.work / "moe-dumps", torch.cuda.is_available()
    for folder in (args.out, dumps):
        folder.mkdir(parents=True, exist_ok=True)
    env = {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(dumps.resolve())}
    model, stop = write_model(args.work / "skewed-moe"), threading.Event()
    defaults = GPU_FLAGS if gpu else server.CPU_FLAGS
    with server.running(model, args.work / "moe.log", SERVER_FLAGS, env, defaults) as up:
        rng = random.Random(0)
        ask(up, rng)  # compiles what prompts need on a GPU, which can take longer than all of the recording
        traffic = threading.Thread(target=keep_busy, args=(up, rng, stop))
        traffic.start()
        command = ["moe-balance", "--url", up.url, "--dump-dir", str(dumps.resolve()), "--seconds", str(args.seconds),
                   "--ranks", "8", "--redundant", "0", "8", "32", "--out", str(args.out / "moe-balance")]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "sglang_sm120.cli", *command], stdout=subprocess.PIPE, text=True, check=False
        )
        stop.set()
        traffic.join()
    where = torch.cuda.get_device_name() if gpu else "the CPU engine"
    (args.out / "moe-balance.md").write_text(page(where, args.seconds, done.stdout))
    print(done.stdout)
    return done.returncode


def page(where: str, seconds: float, said: str) -> str:
    """What the command said, and of what."""
    lines = [
        "# Expert load of a skewed router",
        "",
        f"Served on {where}: a random model of 3 MoE layers, 64 experts, 8 a token, normal noise of {BIAS_STD} on the",
        f"router's selection bias; {REQUESTS} random prompts of {PROMPT_TOKENS} tokens at a time, {NEW_TOKENS} new;",
        f"recorded for {seconds:g} s. One device served it; the layout of 8 ranks is the model's. Made by",
        "`python -m tools.bench_moe`; [how to read it](../moe-balance.md).",
        "",
        "```",
        said.strip(),
        "```",
        "",
        "![layer x expert](moe-balance.png)",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
