"""A model of what an uneven expert load costs, and upstream's EPLB on the same load.

Time is counted in reads of one expert's weights. An expert with no token costs nothing; with n tokens, the longer of
one read and the products of its full tiles:

    cost(n) = max(1, tile * ceil(n / tile) / knee),    knee = rate * bytes a weight / (2 * bandwidth) tokens

knee, the tokens at which products take as long as the read, depends on the GPU and the weight format and not on the
expert's size. A step waits, layer by layer, for the slowest rank (EP); or every rank does a slice of every expert (TP).
Communication, routing and everything outside the routed experts is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_sm120.moe_balance import RTX_PRO_6000


@dataclass(frozen=True)
class Gpu:
    """Bandwidth and rate that a GPU reaches, the weight format, and tokens a tile of its grouped GEMM."""

    read_gbps: float
    tflops: float
    weight_bytes: float
    tile_tokens: int

    def __str__(self) -> str:
        """What is modelled, for people; the name of the default one."""
        named = " (RTX PRO 6000, assumed)" if (self.read_gbps, self.tflops) == RTX_PRO_6000 else ""
        return f"{self.read_gbps:g} GB/s and {self.tflops:g} TFLOP/s{named}, {self.weight_bytes:g} bytes a weight"

    @property
    def knee_tokens(self) -> float:
        """Tokens an expert above which its products take longer than reading its weights."""
        return self.tflops * 1e3 * self.weight_bytes / (2 * self.read_gbps)

    def cost(self, tokens: Tensor) -> Tensor:
        """Reads of one expert's weights that `tokens` of one expert are worth, same shape, float64."""
        tiles = torch.ceil(tokens.double() / self.tile_tokens)
        return torch.where(tokens > 0, (tiles * self.tile_tokens / self.knee_tokens).clamp(min=1.0), 0.0)

    def read_ms(self, weights: int) -> float:
        """Milliseconds of reading so many weights."""
        return weights * self.weight_bytes / self.read_gbps / 1e6


def imbalance(loads: Tensor) -> Tensor:
    """Largest over mean along the last dimension of `loads [..., n]`: `[...]` float64, 1 is even."""
    return loads.double().amax(-1) / loads.double().mean(-1)


def by_rank(physical: Tensor, ranks: int) -> Tensor:
    """`[..., experts]` summed over each rank's consecutive experts: `[..., ranks]`."""
    return physical.unflatten(-1, (ranks, -1)).sum(-1)


def expert_parallel(physical: Tensor, ranks: int, gpu: Gpu) -> float:
    """EP, reads a step: layer by layer the slowest rank's, for `physical [steps, layers, experts]` tokens."""
    return by_rank(gpu.cost(physical), ranks).amax(-1).sum().item() / len(physical)


def tensor_parallel(tokens: Tensor, ranks: int, gpu: Gpu) -> float:
    """TP, reads a step: every rank does `1 / ranks` of each expert, for `tokens [steps, layers, experts]`.

    Also what EP would take if its ranks were even.
    """
    return gpu.cost(tokens).sum().item() / ranks / len(tokens)


def even_experts(tokens: Tensor, ranks: int, gpu: Gpu) -> float:
    """TP, reads a step, had the `tokens [steps, layers, experts]` of each layer fallen evenly on its experts.

    What is left is reads and tile fill.
    """
    experts, total = tokens.shape[-1], tokens.sum(-1)
    hit = total.clamp(max=experts)
    each = torch.ceil(total / hit.clamp(min=1))
    return (hit * gpu.cost(each)).sum().item() / ranks / len(tokens)


def halves(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Steps of `tokens [steps, ...]` that a placement is fitted to, and that it is judged on; a single step is both."""
    return (tokens, tokens) if len(tokens) == 1 else tokens.split((len(tokens) + 1) // 2)


def rebalanced(tokens: Tensor, ranks: int, redundant: int) -> Tensor:
    """The second of the `halves` under upstream's EPLB with `redundant` more experts, fitted to the first.

    Returns `[steps / 2, layers, experts + redundant]`; a replicated expert's tokens are dealt out one by one.
    """
    from sglang.srt.eplb import eplb_algorithms

    fitted, judged = halves(tokens)
    physical = tokens.shape[-1] + redundant
    _, replicas, counts = eplb_algorithms.rebalance_experts(
        tokens_per_expert=fitted,
        num_physical_experts=physical,
        num_local_physical_experts=physical // ranks,
        num_groups=None,
        num_nodes=1,
        algorithm=eplb_algorithms.compute_algorithm("auto", num_groups=None, num_nodes=1),
    )
    placed = judged.new_zeros((*judged.shape[:2], physical + 1))  # the last one takes what has no replica
    for at in range(replicas.shape[-1]):
        place = replicas[..., at].long()
        share = (judged + at).div(counts, rounding_mode="floor")
        index = torch.where(place >= 0, place, physical).expand_as(judged)
        placed.scatter_add_(-1, index, torch.where(place >= 0, share, 0))
    return placed[..., :physical]
