"""The findings of `moe-balance` as JSON, as text and as a heat map."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

import torch

from sglang_sm120.moe_balance import cost
from sglang_sm120.moe_balance.recording import Load

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH_PIXELS = 1024
LAYER_PIXELS = 14
MARGIN_PIXELS = 56
LEGEND_PIXELS = 18
HOTTEST = 4.0  # times the layer's mean; hotter looks the same


def findings(
    load: Load, gpu: cost.Gpu, ranks: int, redundant: list[int], weights_per_expert: int | None
) -> dict[str, Any]:
    """All figures. Milliseconds only where the size of an expert is known."""
    steps, _, experts = load.tokens.shape
    for extra in redundant:
        if extra > experts * ranks:
            raise ValueError(
                f"--redundant {extra}: at most {experts * ranks}, a further copy of each of {experts} experts for each "
                f"of --ranks {ranks}"
            )
        if extra < 0 or (experts + extra) % ranks:
            if extra == 0:
                raise ValueError(f"--ranks {ranks}: {experts} experts do not divide by it; --redundant could add some")
            raise ValueError(
                f"--redundant {extra}: {experts} experts and {extra} more do not divide by --ranks {ranks}"
            )
    totals = load.tokens.sum(0)
    read_ms = gpu.read_ms(weights_per_expert) if weights_per_expert else None
    _, judged = cost.halves(load.tokens)
    tp, even_experts = cost.tensor_parallel(judged, ranks, gpu), cost.even_experts(judged, ranks, gpu)
    found: dict[str, Any] = {
        "steps": steps,
        "experts": experts,
        "ranks": ranks,
        "pairs_a_step": load.tokens[:, 0].sum().item() / steps,
        "gpu": str(gpu),
        "tile_tokens": gpu.tile_tokens,
        "knee_tokens": round(gpu.knee_tokens, 1),
        "layers": load.layers,
        "experts_hit_a_step": _rounded((load.tokens > 0).sum(-1).double().mean(0)),
        "expert_max_over_mean": _rounded(cost.imbalance(totals)),
        "tp": _step(tp, even_experts, read_ms),
    }
    if experts % ranks == 0:
        by_rank = cost.by_rank(totals, ranks)
        found["rank_max_over_mean"] = _rounded(cost.imbalance(by_rank))
        found["rank_over_mean"] = _rounded(by_rank.sum(0) / by_rank.sum(0).double().mean())
        found["ep"] = _step(cost.expert_parallel(judged, ranks, gpu), tp, read_ms)
    for extra in redundant:
        placed = cost.rebalanced(load.tokens, ranks, extra)
        found[f"ep_eplb_{extra}"] = _step(cost.expert_parallel(placed, ranks, gpu), tp, read_ms)
    return found | {"tokens": totals.tolist()}


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


def _step(reads: float, even: float, read_ms: float | None) -> dict[str, float]:
    found = {"reads_a_step": round(reads, 3), "over_even": round(reads / even, 3)}
    if read_ms is not None:
        found |= {"ms_a_step": round(reads * read_ms, 6), "lost_ms": round((reads - even) * read_ms, 6)}
    return found


def to_json(found: dict[str, Any]) -> str:
    """One figure or list a line."""
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()) + "\n}\n"


def text(found: dict[str, Any]) -> str:
    """What a reader of a terminal wants to know."""
    hottest = found["expert_max_over_mean"]
    worst = max(range(len(hottest)), key=hottest.__getitem__)
    lines = [
        f"{found['steps']} steps, {len(hottest)} MoE layers of {found['experts']} experts, "
        f"{found['pairs_a_step']:,.1f} token-expert pairs a step and layer",
        f"hottest expert over the layer's mean: {hottest[worst]:.2f} in layer {found['layers'][worst]}, "
        f"{statistics.median(hottest):.2f} in the median layer",
    ]
    if "rank_max_over_mean" in found:
        lines.append(
            f"hottest of {found['ranks']} ranks over their mean: {max(found['rank_max_over_mean']):.2f} in the worst "
            f"layer, {max(found['rank_over_mean']):.2f} all layers together"
        )
    lines += [
        f"modelled (docs/moe-balance.md), not measured: GPUs of {found['gpu']}",
        "routed experts a step in the second half of the steps, less is better, times an even load's:",
    ]
    lines.append(_line("TP, against even experts", found["tp"]))
    for name, step in found.items():
        if name == "ep":
            lines.append(_line("EP as placed, against even ranks", step))
        elif name.startswith("ep_eplb_"):
            lines.append(_line(f"EP, EPLB and {name.removeprefix('ep_eplb_')} redundant experts", step))
    return "\n".join(lines)


def _line(name: str, step: dict[str, float]) -> str:
    line = f"  {name:<40}{step['over_even']:6.3f}x"
    if "ms_a_step" not in step:
        return line
    lost = f"{1 - 1 / step['over_even']:.1%}" if step["over_even"] > 1 else "nothing"
    return f"{line}{step['ms_a_step']:#10.3g} ms, {lost} of it lost to uneven load"


def draw(load: Load) -> Image:
    """Heat map: a line a layer, a column an expert, white the layer's mean, blue less, red more."""
    import numpy as np
    from PIL import Image, ImageDraw

    totals = load.tokens.sum(0)
    heat = (totals / totals.double().mean(-1, keepdim=True)).clamp(max=HOTTEST).numpy()
    cold, hot = np.minimum(heat, 1), (np.maximum(heat, 1) - 1) / (HOTTEST - 1)
    rgb = np.stack([cold, cold - hot, 1 - hot], axis=-1)
    cells = Image.fromarray((255 * rgb).astype(np.uint8))
    width = max(WIDTH_PIXELS, heat.shape[1])
    cells = cells.resize((width, LAYER_PIXELS * heat.shape[0]), Image.Resampling.NEAREST)
    image = Image.new("RGB", (width + MARGIN_PIXELS, cells.height + 2 * LEGEND_PIXELS), "white")
    image.paste(cells, (MARGIN_PIXELS, LEGEND_PIXELS))
    pen = ImageDraw.Draw(image)
    legend = f"tokens of an expert over the layer's mean: blue 0, white 1, red {HOTTEST:g} or more"
    pen.text((MARGIN_PIXELS, 1), legend, "black", font_size=13)
    for line in range(heat.shape[0]):
        pen.text((2, LEGEND_PIXELS - 1 + LAYER_PIXELS * line), f"layer {load.layers[line]}", "black", font_size=12)
    pen.text((MARGIN_PIXELS, cells.height + LEGEND_PIXELS), f"experts 0 to {heat.shape[1] - 1}", "black", font_size=13)
    return image
