"""`sglang-sm120 moe-balance` on a load that is known to be skewed: a random model with a biased router.

    python -m tools.bench_moe --out docs/bench

Writes the checkpoint (64 experts, 8 a token, normal noise on the router's selection bias), serves it, sends random
prompts while the command records, once long ones and once short ones with longer answers, and keeps what it says:
moe-balance.md, moe-balance-{prompts,answers}.{json,png}.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import shlex
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import torch
from transformers import DeepseekV3ForCausalLM

from tools import bench_run, server, tiny_model

# On a GPU, widths for which every kernel is made; heads as long as real ones in either case.
SIZE = (
    dataclasses.replace(tiny_model.SIZES["rank"], layers=4, experts_hidden=128)
    if torch.cuda.is_available()
    else dataclasses.replace(tiny_model.SIZES["tiny"], head=128)
)
LOGIT_STD = 0.32
"""Of a token's router logits; their sigmoids, the scores, spread by 0.08 around 0.5."""
BIAS_STD = 0.06
"""Of the selection bias, which is added to the scores."""

SERVER_FLAGS = shlex.split(
    "--expert-distribution-recorder-mode stat --expert-distribution-recorder-buffer-size -1 "  # of any number of steps
    "--max-total-tokens 16384 --context-length 2048 --max-running-requests 32"
)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Requests sent together, tokens of each prompt and of each answer."""

    requests: int
    prompt_tokens: int
    new_tokens: int


# Without a GPU a step of 8,000 tokens takes longer than the recording.
LOADS = {"prompts": Traffic(8, 1000 if torch.cuda.is_available() else 500, 1), "answers": Traffic(16, 10, 100)}
GPU_FLAGS = [*bench_run.GPU_FLAGS, *bench_run.OURS, "--cuda-graph-backend-decode", "disabled",
             "--mem-fraction-static", "0.1"]  # fmt: skip


@torch.no_grad()
def write_model(out: Path) -> Path:
    """A small Kimi-shaped checkpoint with 64 experts, some of them much preferred."""
    torch.manual_seed(0)
    config = tiny_model.config(SIZE)
    config.n_routed_experts, config.num_experts_per_tok = 64, 8
    model = DeepseekV3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.normal_(0.0, LOGIT_STD * SIZE.hidden**-0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, BIAS_STD)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return tiny_model.save(model.to(dtype), out, SIZE)


def ask(up: server.Server, load: Traffic, rng: random.Random) -> None:
    """Answer a batch of random prompts."""
    prompts = [
        [rng.randrange(3, tiny_model.VOCABULARY) for _ in range(load.prompt_tokens)] for _ in range(load.requests)
    ]
    up.generate(prompts, load.new_tokens)


def record(up: server.Server, load: Traffic, seconds: float, dumps: Path, out: Path) -> str:
    """What the command says of a load that goes on as long as it records. Raises CalledProcessError if it fails."""
    rng, stop = random.Random(0), threading.Event()

    def keep_busy() -> None:
        with suppress(ConnectionError):  # the server may end first
            while not stop.is_set():
                ask(up, load, rng)

    ask(up, load, rng)  # compiles what it needs on a GPU, which can take longer than all of the recording
    traffic = threading.Thread(target=keep_busy, daemon=True)
    traffic.start()
    command = ["moe-balance", "--url", up.url, "--dump-dir", str(dumps.resolve()), "--seconds", str(seconds),
               "--ranks", "8", "--redundant", "0", "8", "32", "--out", str(out)]  # fmt: skip
    said = subprocess.run(
        [sys.executable, "-m", "sglang_sm120.cli", *command], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    stop.set()
    traffic.join(60)
    print(said, flush=True)
    return said.partition("written:")[0].strip()


def main() -> None:
    """Serve, record, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="folder for the checkpoint and dumps")
    parser.add_argument("--seconds", type=float, default=8, help="of each of the two recordings")
    args = parser.parse_args()
    dumps, gpu = args.work / "moe-dumps", torch.cuda.is_available()
    for folder in (args.out, dumps):
        folder.mkdir(parents=True, exist_ok=True)
    env = {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(dumps.resolve())}
    model, defaults = write_model(args.work / "skewed-moe"), GPU_FLAGS if gpu else server.CPU_FLAGS
    with server.running(model, args.work / "moe.log", SERVER_FLAGS, env, defaults) as up:
        said = {
            name: record(up, load, args.seconds, dumps, args.out / f"moe-balance-{name}")
            for name, load in LOADS.items()
        }
    where = torch.cuda.get_device_name() if gpu else "the CPU engine"
    (args.out / "moe-balance.md").write_text(page(where, args.seconds, said))


def page(where: str, seconds: float, said: dict[str, str]) -> str:
    """What the command said, and of what."""
    lines = [
        "# Expert load of a skewed router",
        "",
        f"Served on {where}: a random model of 3 MoE layers, 64 experts, 8 a token, normal noise of {BIAS_STD} on the",
        f"router's selection bias; recorded for {seconds:g} s a load. One device served it; the layout of 8 ranks and",
        "the GPU are the model's. Made by `python -m tools.bench_moe`; [how to read it](../moe-balance.md).",
    ]
    for name, load in LOADS.items():
        about = (
            f"{load.requests} requests at a time, prompts of {load.prompt_tokens} random tokens, {load.new_tokens} new."
        )
        picture = f"![layer x expert](moe-balance-{name}.png)"
        lines += ["", f"## {name.capitalize()}", "", about, "", "```", said[name], "```", "", picture]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    server.exit_on_signals()
    main()
