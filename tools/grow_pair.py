"""The trained pair at the size of a large model: the same tokens, the cost of a real step.

    python -m tools.grow_pair OUT

Every width of the pair in tests/fixtures is padded with zeros to that of one tensor-parallel rank (of 8) of a
Kimi-shaped model, and layers that add nothing follow the trained ones. A zero changes no sum; norms are rescaled for
the zeros among their inputs, queries for the softmax scale of longer heads. Only rounding differs, so acceptance is the
pair's own while a step costs what its shapes cost.

The pair was trained on windows of 256 tokens and writes noise past them, which no drafter foresees. So that it can be
timed at any context, some tokens are made such that text pays no attention to them (`FILLERS`): what follows any number
of them is as likely as at the start of a prompt, while attention reads them all.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.pair import PAIR

FEATURES = 3
# The bytes 0xf5 to 0xff, which no UTF-8 text has.
FILLERS = range(179, 190)
# Two hidden dimensions among the zeros tell text from filler; the rest of the model never sees nor changes them. Text
# has the first one, too small to count in a norm, and its queries get -FILLER_LOGIT from it where a key has the second.
TEXT_MARK, FILLER_MARK = 2.0**-7, 2.0**14
FILLER_LOGIT = 60.0
# Root mean squares on held-out text of what enters each trained layer, and of its queries before their norm.
HIDDEN_RMS, QUERY_RMS = (0.09, 19.0, 23.0, 26.0), 2.7
# Yarn reaches this many times its 4,096 tokens; the pair's own 32 times end before 185k tokens.
YARN_FACTOR = 64.0


def grow(out: Path, *, growth: int = 16, layers: int = 16, head: int = 128) -> Path:
    """Write `out/target` and `out/drafter`, hidden size `growth` times the pair's, and return `out`.

    growth: 2 or more. layers: of the target. head: values of a head without rope, and of its output; more than the
    pair's 16. A pair of this shape that is whole is left as it is.
    """
    shape, done = {"growth": growth, "layers": layers, "head": head, "fillers": [*FILLERS]}, out / "grown.json"
    if done.exists() and json.loads(done.read_text()) == shape:
        return out
    done.unlink(missing_ok=True)
    configs = {name: json.loads((PAIR / name / "config.json").read_text()) for name in ("target", "drafter")}
    for name in configs:
        (out / name).mkdir(parents=True, exist_ok=True)
    target = _grown_target(load_file(PAIR / "target" / "model.safetensors"), configs["target"], growth, layers, head)
    _save(out / "target", target, _target_config(configs["target"], growth, layers, head))
    for path in (PAIR / "target").glob("*token*"):
        shutil.copy(path, out / "target")
    drafter = _grown_drafter(load_file(PAIR / "drafter" / "model.safetensors"), configs["drafter"], growth)
    config = _scaled(configs["drafter"], growth, "hidden_size", "intermediate_size")
    config |= {"num_target_layers": layers, "max_position_embeddings": int(4096 * YARN_FACTOR)}
    _save(out / "drafter", drafter, config)
    done.write_text(json.dumps(shape))
    return out


def _target_config(config: dict, growth: int, layers: int, head: int) -> dict:
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank")
    longer = {"max_position_embeddings": int(4096 * YARN_FACTOR), "num_hidden_layers": layers}
    heads = {"qk_nope_head_dim": head, "v_head_dim": head, "qk_head_dim": head + config["qk_rope_head_dim"]}
    rope = {key: config[key] | {"factor": YARN_FACTOR} for key in ("rope_parameters", "rope_scaling")}
    return _scaled(config, growth, *names) | longer | heads | rope


def _scaled(config: dict, growth: int, *names: str) -> dict:
    return config | {name: growth * config[name] for name in names} | {"rms_norm_eps": config["rms_norm_eps"] / growth}


def _grown_target(weights: dict[str, Tensor], config: dict, growth: int, layers: int, head: int) -> dict[str, Tensor]:
    heads, nope, rope = (config[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    yarn = [0.1 * math.log(factor) + 1 for factor in (config["rope_scaling"]["factor"], YARN_FACTOR)]
    query_scale = math.sqrt((head + rope) / (nope + rope)) * (yarn[0] / yarn[1]) ** 2

    def grown(name: str, weight: Tensor) -> Tensor:
        if name.endswith("q_b_proj.weight"):
            parts = weight.view(heads, nope + rope, -1).split([nope, rope], dim=1)
            weight = torch.cat([_pad(parts[0], 1, head), parts[1]], dim=1).flatten(0, 1) * query_scale
            return _pad(weight, 1, growth * weight.shape[1])
        if name.endswith("kv_b_proj.weight"):
            parts = weight.view(heads, 2, nope, -1)
            return _pad(parts, 2, head).flatten(0, 2)
        if name.endswith("o_proj.weight"):
            columns = _pad(weight.view(len(weight), heads, -1), 2, head).flatten(1)
            return _pad(columns, 0, growth * len(columns))
        if name.endswith(("kv_a_layernorm.weight", "e_score_correction_bias")):
            return weight
        if name.endswith(("lm_head.weight", "embed_tokens.weight", "kv_a_proj_with_mqa.weight", "mlp.gate.weight")):
            return _pad(weight, 1, growth * weight.shape[1])
        return _pad_all(weight, growth)

    result = {name: grown(name, weight) for name, weight in weights.items()}
    _ignore_filler(result, weights, growth, head, yarn[1] ** 2 * (head + rope) ** -0.5)
    last = max(int(name.split(".")[2]) for name in weights if ".layers." in name)
    generator = torch.Generator().manual_seed(0)
    idle = {}
    for name, weight in result.items():
        if f".layers.{last}." in name:
            silent = name.endswith(("o_proj.weight", "down_proj.weight"))
            random = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
            idle[name] = weight if weight.dim() == 1 else torch.zeros_like(weight) if silent else random.to(weight)
    for layer in range(last + 1, layers):
        result |= {name.replace(f".layers.{last}.", f".layers.{layer}."): weight for name, weight in idle.items()}
    return result


def _ignore_filler(grown: dict[str, Tensor], trained: dict[str, Tensor], growth: int, head: int, scale: float) -> None:
    """Give filler a key that no text has, and every query of text a weight against it.

    grown, trained: all weights. head: grown values of a head without rope. scale: what queries get before the softmax.
    """
    embedding = grown["model.embed_tokens.weight"]
    text_mark = trained["model.embed_tokens.weight"].shape[1]
    embedding[:, text_mark] = TEXT_MARK
    embedding[[*FILLERS]] = 0.0
    embedding[[*FILLERS], text_mark + 1] = FILLER_MARK
    for layer, rms in enumerate(HIDDEN_RMS):
        at, norm = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.input_layernorm.weight"
        gain, rank = trained[at + "kv_a_layernorm.weight"].float(), len(trained[at + "q_a_proj.weight"])
        latent = len(gain)
        basis = torch.linalg.qr(gain[:, None] * trained[at + "kv_a_proj_with_mqa.weight"][:latent].float()).Q
        apart = torch.ones(latent) - basis @ basis.sum(0)  # a direction that latents of text have no part in
        apart /= apart.norm()
        grown[norm][text_mark], grown[norm][text_mark + 1] = rms / TEXT_MARK / 100, 1.0
        grown[at + "kv_a_proj_with_mqa.weight"][:latent, text_mark + 1] = apart / gain
        grown[at + "q_a_proj.weight"][rank, text_mark] = 1.0
        grown[at + "q_a_layernorm.weight"][rank] = 1.0
        # Of the first value of each head that the trained one has not.
        key, query = math.sqrt(latent) / (apart / gain).norm(), growth / 100 / QUERY_RMS
        keys, queries = grown[at + "kv_b_proj.weight"], grown[at + "q_b_proj.weight"]
        heads = len(keys) // (2 * head)
        trained_head = len(trained[at + "kv_b_proj.weight"]) // (2 * heads)
        keys.view(heads, 2, head, latent)[:, 0, trained_head] = apart
        queries.view(heads, -1, growth * rank)[:, trained_head, rank] = -FILLER_LOGIT / (scale * key * query)


def _grown_drafter(weights: dict[str, Tensor], config: dict, growth: int) -> dict[str, Tensor]:
    def grown(name: str, weight: Tensor) -> Tensor:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return weight
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            return _pad(weight, 1, growth * weight.shape[1])
        if name.endswith("o_proj.weight"):
            return _pad(weight, 0, growth * len(weight))
        if name == "fc.weight":
            blocks = weight.view(len(weight), FEATURES, -1)
            return _pad(_pad(blocks, 2, growth * blocks.shape[2]).flatten(1), 0, growth * len(weight))
        return _pad_all(weight, growth)

    assert len(config["dflash_config"]["target_layer_ids"]) == FEATURES
    return {name: grown(name, weight) for name, weight in weights.items()}


def _pad_all(weight: Tensor, growth: int) -> Tensor:
    """All dimensions `growth` times as large; a norm's weight makes up for the zeros that its mean now takes in."""
    if weight.dim() == 1:
        weight = weight * growth**-0.5
    for dim in range(weight.dim()):
        weight = _pad(weight, dim, growth * weight.shape[dim])
    return weight


def _pad(weight: Tensor, dim: int, size: int) -> Tensor:
    padding = list(weight.shape)
    padding[dim] = size - padding[dim]
    return torch.cat([weight, weight.new_zeros(padding)], dim=dim)


def _save(folder: Path, weights: dict[str, Tensor], config: dict) -> None:
    tensors = {name: weight.contiguous().clone() for name, weight in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Write one grown pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write target/ and drafter/ into")
    parser.add_argument("--layers", type=int, default=16, help="layers of the target")
    args = parser.parse_args()
    print(grow(args.out, layers=args.layers))


if __name__ == "__main__":
    main()
