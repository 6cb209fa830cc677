"""The memory arithmetic of docs/serving.md: `python -m tools.serving_memory` prints its tables.

Arithmetic from model configurations, not a measurement. What it assumes is in `CONTEXT_GIB`, `WORK_GIB` and `DRAFTER`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

GIB = 2**30
LATENT_VALUES = 512 + 64
BF16_BYTES, FP8_BYTES = 2, 1
INT4_BYTES = 0.5 + 2.5 / 128  # groups of 128 with a scale and a zero point
# Assumed, a GPU: what CUDA and NCCL take before the server counts free memory; graphs and activations of the recipes.
CONTEXT_GIB, WORK_GIB = 1.0, 2.0
GPUS_GIB = {"RTX PRO 6000": 95.6, "RTX 5090": 31.8, "A100": 79.2, "L40S": 44.7}
CONTEXTS = (131_072, 185_000, 262_144)


@dataclass(frozen=True)
class Model:
    """What of config.json decides memory; every routed expert has gate, up and down projection."""

    name: str
    layers: int
    dense_layers: int
    hidden: int
    dense_hidden: int
    experts: int
    expert_hidden: int
    shared_experts: int
    heads: int
    q_lora: int | None
    nope: int
    value: int
    vocab: int
    expert_bytes: float = BF16_BYTES  # a weight of a routed expert, with its share of scales
    vision: int = 0  # weights

    @property
    def expert_weights(self) -> int:
        """Weights of all routed experts."""
        return (self.layers - self.dense_layers) * self.experts * 3 * self.hidden * self.expert_hidden

    @property
    def replicated_weights(self) -> int:
        """Weights that every tensor-parallel rank holds whole: projections into the latents, and routers."""
        latents = self.layers * self.hidden * ((self.q_lora or 0) + LATENT_VALUES)
        return latents + (self.layers - self.dense_layers) * self.hidden * self.experts

    @property
    def divided_weights(self) -> int:
        """Weights that tensor parallelism divides, without the routed experts'."""
        query = (self.q_lora or self.hidden) * self.heads * (self.nope + 64)
        attention = query + 512 * self.heads * (self.nope + self.value) + self.heads * self.value * self.hidden
        shared = 3 * self.hidden * self.expert_hidden * self.shared_experts * (self.layers - self.dense_layers)
        dense = 3 * self.hidden * self.dense_hidden * self.dense_layers
        return self.layers * attention + shared + dense + 2 * self.vocab * self.hidden + self.vision

    def weights_gib(self, ranks: int, byte: float = BF16_BYTES) -> float:
        """Weights a GPU under tensor parallelism; all but the routed experts take `byte` bytes each."""
        rest = byte * (self.divided_weights / ranks + self.replicated_weights)
        return (self.expert_bytes * self.expert_weights / ranks + rest) / GIB

    def latent_kib(self, byte: int) -> float:
        """KV a token, on every GPU: tensor parallelism divides heads, and the latent has none."""
        return self.layers * LATENT_VALUES * byte / 1024


@dataclass(frozen=True)
class Drafter:
    """A DFlash drafter, divided by tensor parallelism: bf16 weights and KV."""

    weights_gb: float
    layers: int
    kv_heads: int
    head: int

    def kib(self, ranks: int) -> float:
        """KV a token, a GPU."""
        return self.layers * 2 * math.ceil(self.kv_heads / ranks) * self.head * BF16_BYTES / 1024

    def gib(self, tokens: int, ranks: int) -> float:
        """Weights and KV a GPU."""
        return (self.weights_gb * 1e9 / ranks + self.kib(ranks) * 1024 * tokens) / GIB


KIMI = Model("Kimi K2.x", 61, 1, 7168, 18432, 384, 2048, 1, 64, 1536, 128, 128, 163_840, 0.5 + 2 / 32, 465_000_000)
DEEPSEEK_V3 = Model("DeepSeek V3.x", 61, 3, 7168, 18432, 256, 2048, 1, 128, 1536, 128, 128, 129_280, INT4_BYTES)
GLM_FLASH = Model("GLM-4.7-Flash", 47, 1, 2048, 10240, 64, 1536, 1, 20, 768, 192, 256, 154_880, FP8_BYTES)
GLM_FLASH_BF16 = replace(GLM_FLASH, expert_bytes=BF16_BYTES)
GLM_FLASH_INT4 = replace(GLM_FLASH, expert_bytes=INT4_BYTES)
V2_LITE = Model("DeepSeek-V2-Lite", 27, 1, 2048, 10944, 64, 1408, 2, 16, None, 128, 128, 102_400)
DRAFTER = Drafter(3.0, 5, 8, 128)


def static_fraction(gpu_gib: float, static_gib: float) -> float:
    """The least `--mem-fraction-static` for weights and pools of that size, in hundredths."""
    return math.ceil(100 * static_gib / (gpu_gib - CONTEXT_GIB)) / 100


def tokens_left(gpu_gib: float, taken_gib: float, kib_a_token: float) -> int:
    """Thousands of tokens that fit into what is left of a GPU."""
    return int((gpu_gib - CONTEXT_GIB - WORK_GIB - taken_gib) * GIB / 1024 / kib_a_token / 1000)


def kv_rows() -> list[str]:
    """KV of contexts, a line a model."""
    rows = []
    for model in (KIMI, DEEPSEEK_V3, GLM_FLASH, V2_LITE):
        each = [model.latent_kib(byte) for byte in (BF16_BYTES, FP8_BYTES)]
        sizes = [" / ".join(f"{kib * tokens * 1024 / GIB:.1f}" for kib in each) for tokens in CONTEXTS]
        rows.append(f"| {model.name} | {model.layers} | {each[0]:.1f} / {each[1]:.1f} | {' | '.join(sizes)} |")
    return rows


def kimi_rows(gpu: str = "RTX PRO 6000", ranks: int = 8) -> list[str]:
    """Kimi with its drafter: a column a context and KV format."""
    weights, memory = KIMI.weights_gib(ranks), GPUS_GIB[gpu]
    cases = [(tokens, KIMI.latent_kib(byte)) for tokens in CONTEXTS[1:] for byte in (BF16_BYTES, FP8_BYTES)]
    kv = [tokens * kib * 1024 / GIB for tokens, kib in cases]
    drafter = [DRAFTER.gib(tokens, ranks) for tokens, _ in cases]
    static = [weights + a + b for a, b in zip(kv, drafter, strict=True)]
    rest = CONTEXT_GIB + WORK_GIB
    left = [
        f"{memory - rest - taken:.1f}: {tokens_left(memory, taken, kib + DRAFTER.kib(ranks))}k"
        for taken, (_, kib) in zip(static, cases, strict=True)
    ]
    return [
        _row("weights", [weights] * 4),
        _row("latent KV", kv),
        _row("drafter", drafter),
        _row("CUDA, NCCL, graphs, activations", [rest] * 4),
        _row(f"sum, of {memory}", [taken + rest for taken in static]),
        f"| left for more tokens | {' | '.join(left)} |",
        f"| `--mem-fraction-static`, at least | {' | '.join(f'{static_fraction(memory, x):.2f}' for x in static)} |",
    ]


def other_rows() -> list[str]:
    """Weights and room of the other recipes, a line a model, format and machine."""
    cases = [
        (DEEPSEEK_V3, "4-bit experts", BF16_BYTES, 4, "RTX PRO 6000"),
        (KIMI, "int4 experts", BF16_BYTES, 8, "A100"),
        (V2_LITE, "bf16", BF16_BYTES, 2, "RTX 5090"),
        (GLM_FLASH, "8-bit", FP8_BYTES, 2, "RTX 5090"),
        (GLM_FLASH_BF16, "bf16", BF16_BYTES, 1, "RTX PRO 6000"),
        (GLM_FLASH_INT4, "4-bit experts", BF16_BYTES, 1, "RTX 5090"),
        (replace(V2_LITE, expert_bytes=FP8_BYTES), "8-bit", FP8_BYTES, 1, "RTX 5090"),
        (GLM_FLASH, "8-bit", FP8_BYTES, 1, "L40S"),
    ]
    rows = []
    for model, form, byte, ranks, gpu in cases:
        weights, memory = model.weights_gib(ranks, byte), GPUS_GIB[gpu]
        left = memory - CONTEXT_GIB - WORK_GIB - weights
        tokens = [f"{tokens_left(memory, weights, model.latent_kib(kv))}k" for kv in (BF16_BYTES, FP8_BYTES)]
        room = f"{left:.1f} | {' / '.join(tokens)}" if left > 0 else "none | does not fit"
        rows.append(f"| {ranks}x {gpu} ({memory}) | {model.name}, {form} | {weights:.1f} | {room} |")
    return rows


def _row(name: str, values: list[float]) -> str:
    return f"| {name} | {' | '.join(f'{value:.1f}' for value in values)} |"


def main() -> None:
    """Print the page's tables."""
    sizes = " | ".join(f"{tokens:,} tokens" for tokens in CONTEXTS)
    tables = {
        f"| latent KV, GiB bf16 / fp8 | layers | KiB a token | {sizes} |": kv_rows(),
        "| Kimi K2.x on 8x RTX PRO 6000, GiB a GPU | 185k bf16 | 185k fp8 | 256k bf16 | 256k fp8 |": kimi_rows(),
        "| machine (GiB a GPU) | model | weights a GPU, GiB | left for KV, GiB | tokens bf16 / fp8 |": other_rows(),
    }
    for header, rows in tables.items():
        print(header, "|---" * (header.count("|") - 1) + "|", *rows, "", sep="\n")


if __name__ == "__main__":
    main()
