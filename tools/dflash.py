"""DFlash's draft model in PyTorch, to train and to look at; SGLang serves its checkpoints with a model of its own.

A block of [committed token, MASK, ...] attends, without causality inside the block, to keys and values projected from
the target's hidden states of all earlier positions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

BLOCK_SIZE = 8
TARGET_LAYER_IDS = [0, 1, 2]


class Attention(nn.Module):
    """Block queries over projected target features and the block itself."""

    def __init__(self, hidden: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(head_dim, eps=1e-6)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, x_rope: Tensor, context_rope: Tensor, visible: Tensor) -> Tensor:
        """x [B, Q, H] after attention over context and block; `visible` is [Q, T + Q]."""
        q = rotate(self.q_norm(self._split(self.q_proj(x))), x_rope)
        own = rotate(self.k_norm(self._split(self.k_proj(x))), x_rope)
        past = rotate(self.k_norm(self._split(self.k_proj(context))), context_rope)
        v = torch.cat([self._split(self.v_proj(context)), self._split(self.v_proj(x))], dim=2)
        out = F.scaled_dot_product_attention(q, torch.cat([past, own], dim=2), v, attn_mask=visible)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.input_layernorm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.self_attn = Attention(hidden, config["num_attention_heads"], config["head_dim"])
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.mlp = Mlp(hidden, config["intermediate_size"])

    def forward(self, x: Tensor, *attention: Tensor) -> Tensor:
        """x [B, Q, H] through the layer; the rest goes to `Attention`."""
        x = x + self.self_attn(self.input_layernorm(x), *attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """DFlash's draft model, for training: parameter names are those of its checkpoints."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, features = config["hidden_size"], len(config["dflash_config"]["target_layer_ids"])
        self.config = config
        self.fc = nn.Linear(features * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])

    def forward(self, noise: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states of draft blocks.

        noise: [B, A * block, H] embeddings of [committed, MASK, ...] for A blocks. features: [B, T, K * H] hidden
        states of the target. anchors: [A] positions of the committed tokens. A block sees earlier features and itself.
        """
        block, head_dim, theta = (self.config[k] for k in ("block_size", "head_dim", "rope_theta"))
        context = self.hidden_norm(self.fc(features))
        times = torch.arange(features.shape[1])
        positions = (anchors[:, None] + torch.arange(block)).flatten()
        owners = torch.arange(len(anchors)).repeat_interleave(block)
        visible = torch.cat([times < anchors[owners][:, None], owners[:, None] == owners], dim=1)
        ropes = (rope_table(positions, head_dim, theta), rope_table(times, head_dim, theta))
        for layer in self.layers:
            noise = layer(noise, context, *ropes, visible)
        return self.norm(noise)


def rope_table(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """[2, T, head_dim]: cosines and sines, half-split layout."""
    angles = positions[:, None] / theta ** (torch.arange(0, head_dim, 2) / head_dim)
    return torch.stack([angles.cos(), angles.sin()]).repeat(1, 1, 2)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Apply `rope_table` to [B, heads, T, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * table[0] + torch.cat([-second, first], dim=-1) * table[1]


@torch.no_grad()
def target_features(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenated hidden states after each captured layer [B, T, K * H], and the logits [B, T, V]."""
    out = model(ids, output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[i + 1] for i in TARGET_LAYER_IDS], dim=-1), out.logits


def block_embeddings(embed: nn.Module, ids: Tensor, anchors: Tensor, mask_id: int) -> Tensor:
    """Embeddings [B, A * block, H] of [committed, MASK, ...] at every anchor."""
    blocks = torch.full((len(ids), len(anchors), BLOCK_SIZE), mask_id)
    blocks[:, :, 0] = ids[:, anchors]
    return embed(blocks.flatten(1)).detach()


def draft_logits(drafter: Drafter, model: Any, ids: Tensor, anchors: Tensor, features: Tensor) -> Tensor:
    """[B, A, block - 1, V]: predictions for the positions after each anchor."""
    mask_id = drafter.config["dflash_config"]["mask_token_id"]
    hidden = drafter(block_embeddings(model.model.embed_tokens, ids, anchors, mask_id), features, anchors)
    return model.lm_head(hidden.unflatten(1, (len(anchors), BLOCK_SIZE))[:, :, 1:])


def load(folder: Path) -> Drafter:
    """The drafter of a checkpoint, in float32."""
    drafter = Drafter(json.loads((folder / "config.json").read_text()))
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    return drafter.float()


def save(drafter: Drafter, folder: Path, dtype: torch.dtype) -> None:
    """Write the checkpoint: weights in `dtype`, and config."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: weight.to(dtype).contiguous() for name, weight in drafter.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(drafter.config, indent=2, sort_keys=True) + "\n")
