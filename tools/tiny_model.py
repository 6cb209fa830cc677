"""A small Kimi-shaped MLA checkpoint with random weights: real latent sizes, everything else small, fixed seed."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

# Any fixed text will do: it only has to give the byte-level BPE its merges.
TOKENIZER_TEXT = [Path(json.__file__).read_text(), Path(argparse.__file__).read_text()]

MASK_TOKEN_ID = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    """What differs between checkpoints; the MLA latent is always 512 + 64, the heads 8 (one rank of TP 8)."""

    hidden: int
    q_lora: int
    head: int
    experts_hidden: int
    layers: int
    max_context_tokens: int
    dtype: str
    # Times a random query: 1 spreads attention evenly, so that a long context leaves hardly a trace; at 2 a few tokens
    # of 32k get most of it, and an attention that misses some is seen.
    query_gain: float = 1.0


SIZES = {
    "tiny": Size(256, 192, 64, 128, 4, 16_384, "float32"),
    # One TP-8 rank of Kimi K2 with a narrower residual stream and 8 layers, for servers on one GPU.
    "rank": Size(2048, 1536, 128, 512, 8, 262_144, "bfloat16", query_gain=2.0),
}


def rope(max_context_tokens: int) -> dict[str, float | int | str]:
    """Yarn from 4,096 tokens, as Kimi K2 has it."""
    return {
        "rope_type": "yarn",
        "factor": max_context_tokens / 4096,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "rope_theta": 50000.0,
    }


def sglang_keys(parameters: dict[str, float | int | str]) -> dict[str, Any]:
    """Keys that SGLang reads and transformers does not write."""
    scaling = {k: v for k, v in parameters.items() if k not in ("rope_theta", "rope_type")} | {"type": "yarn"}
    return {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": scaling,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def config(size: Size, vocab_size: int) -> DeepseekV3Config:
    """DeepseekV3 as Kimi K2 uses it (latent 512 + rope 64, sigmoid-scored MoE with a shared expert), scaled down."""
    return DeepseekV3Config(
        vocab_size=vocab_size,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        moe_intermediate_size=size.experts_hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        kv_lora_rank=512,
        q_lora_rank=size.q_lora,
        qk_rope_head_dim=64,
        qk_nope_head_dim=size.head,
        v_head_dim=size.head,
        max_position_embeddings=size.max_context_tokens,
        rope_parameters=rope(size.max_context_tokens),
        rope_interleave=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
    )


def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE without a BOS token, trained on standard-library sources; ids above 2 are text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<eos>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TOKENIZER_TEXT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", mask_token="<mask>")


def write(out: Path, *, size: str = "tiny", vocab_size: int = 2048, seed: int = 0) -> Path:
    """Write the checkpoint (safetensors, config, tokenizer) into `out` and return it."""
    shape = SIZES[size]
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = DeepseekV3ForCausalLM(config(shape, vocab_size)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            _fill(parameter, _std(name, parameter.shape[-1], shape.query_gain))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            _fill(buffer, 1.0)
    model.to("cpu", DTYPES[shape.dtype]).save_pretrained(out)
    tokenizer(vocab_size).save_pretrained(out)
    finish_config(out, shape)
    return out


def write_drafter(out: Path, target: Path, *, block_size: int = 16, layers: int = 2, seed: int = 0) -> Path:
    """Write a random DFlash drafter for `target` into `out`: right in shape, its guesses useless, for timing only."""
    base = json.loads((target / "config.json").read_text())
    hidden, heads, head = base["hidden_size"], 4, 128
    features = [0, base["num_hidden_layers"] // 2, base["num_hidden_layers"] - 2]
    drafter = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "num_target_layers": base["num_hidden_layers"],
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": features},
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "vocab_size": base["vocab_size"],
        "max_position_embeddings": base["max_position_embeddings"],
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": base["dtype"],
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(features) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(layers):
        at = f"layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj"):
            shapes[f"{at}self_attn.{name}.weight"] = (heads * head, hidden)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, heads * head)
        shapes |= {f"{at}self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
        shapes |= {f"{at}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}mlp.{name}.weight": (2 * hidden, hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, 2 * hidden)
    torch.manual_seed(seed)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    dtype = DTYPES[base["dtype"]]
    save_file({k: v.to(dtype) for k, v in weights.items()}, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(drafter, indent=2, sort_keys=True) + "\n")
    return out


def _std(name: str, inputs: int, query_gain: float) -> float:
    """Standard deviation of a weight: greedy margins far above bf16 rounding, which random layers would amplify.

    The embedding dominates the residual stream, a layer adds a third of its size, and the logits spread by 2. (A wide
    routing bias, set above, keeps rounding from switching experts.)
    """
    if "embed_tokens" in name:
        return 1.0
    gains = {"o_proj": 0.3, "down_proj": 0.3, "lm_head": 2.0, "q_b_proj": query_gain}
    gain = next((gain for part, gain in gains.items() if part in name), 1.0)
    return gain * inputs**-0.5


@torch.no_grad()
def _fill(tensor: torch.Tensor, std: float) -> None:
    tensor.normal_(0.0, std)


def finish_config(folder: Path, size: Size) -> None:
    """Add to a saved config.json what SGLang reads and transformers does not write."""
    path = folder / "config.json"
    keys = sglang_keys(rope(size.max_context_tokens))
    path.write_text(json.dumps(json.loads(path.read_text()) | keys, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write the checkpoint into")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(write(args.out, size=args.size, seed=args.seed))


if __name__ == "__main__":
    main()
