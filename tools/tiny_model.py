"""A small Kimi-shaped MLA checkpoint with random weights: real latent sizes, everything else small, fixed seed."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

from tools import checkpoints, dflash

# Any fixed text will do: it only has to give the byte-level BPE its merges.
TOKENIZER_TEXT = [Path(json.__file__).read_text(), Path(argparse.__file__).read_text()]

VOCABULARY = 2048
MASK_TOKEN_ID = 2  # text has the ids above it
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


def config(size: Size) -> DeepseekV3Config:
    """DeepseekV3 as Kimi K2 uses it (latent 512 + rope 64, sigmoid-scored MoE with a shared expert), scaled down."""
    return DeepseekV3Config(
        vocab_size=VOCABULARY,
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
        rope_parameters=checkpoints.rope(size.max_context_tokens),
        rope_interleave=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
    )


def tokenizer(vocab_size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Byte-level BPE without a BOS token, trained on standard-library sources; ids above 2 are text."""
    bpe = checkpoints.byte_level_bpe(TOKENIZER_TEXT, vocab_size, ["<pad>", "<eos>", "<mask>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", mask_token="<mask>")


def write(out: Path, *, size: str = "tiny") -> Path:
    """Write the checkpoint (safetensors, config, tokenizer) into `out` and return it."""
    shape = SIZES[size]
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = DeepseekV3ForCausalLM(config(shape)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            _fill(parameter, _std(name, parameter.shape[-1], shape.query_gain))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            _fill(buffer, 1.0)
    return save(model.to("cpu", DTYPES[shape.dtype]), out, shape)


def save(model: DeepseekV3ForCausalLM, out: Path, size: Size) -> Path:
    """Write a model of that size, with the tokenizer, as a checkpoint that servers load; the folder."""
    model.save_pretrained(out)
    tokenizer().save_pretrained(out)
    checkpoints.finish_config(out, checkpoints.rope(size.max_context_tokens))
    return out


def write_drafter(out: Path, target: Path, *, block_size: int) -> Path:
    """Write a random DFlash drafter for `target` into `out`: right in shape, its guesses useless, for timing only."""
    base = json.loads((target / "config.json").read_text())
    config = checkpoints.dflash_config(
        base,
        block_size=block_size,
        mask_token_id=MASK_TOKEN_ID,
        target_layer_ids=[0, base["num_hidden_layers"] // 2, base["num_hidden_layers"] - 2],
        intermediate_size=2 * base["hidden_size"],
        layers=2,
        heads=4,
        head=128,
    )
    torch.manual_seed(0)
    drafter = dflash.Drafter(config | {"dtype": base["dtype"]})
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            _fill(parameter, parameter.shape[-1] ** -0.5)
    dflash.save(drafter, out, DTYPES[base["dtype"]])
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
