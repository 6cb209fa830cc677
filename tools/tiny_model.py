"""A small Kimi-shaped MLA checkpoint with random weights: real latent sizes, everything else small, fixed seed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

# Any fixed text will do: it only has to give the byte-level BPE its merges.
TOKENIZER_TEXT = [Path(json.__file__).read_text(), Path(argparse.__file__).read_text()]

ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 50000.0,
}
# Keys that SGLang reads and transformers does not write.
SGLANG_KEYS = {
    "rope_theta": ROPE["rope_theta"],
    "rope_scaling": {k: v for k, v in ROPE.items() if k not in ("rope_theta", "rope_type")} | {"type": "yarn"},
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def config(vocab_size: int, layers: int, max_context_tokens: int) -> DeepseekV3Config:
    """DeepseekV3 as Kimi K2 uses it (MLA latent 512 + rope 64, 8 heads as one TP-8 rank, sigmoid MoE), scaled down."""
    return DeepseekV3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=layers,
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
        q_lora_rank=192,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        max_position_embeddings=max_context_tokens,
        rope_parameters=ROPE,
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


def write(
    out: Path, *, layers: int = 4, vocab_size: int = 2048, max_context_tokens: int = 16384, seed: int = 0
) -> Path:
    """Write the checkpoint (float32 safetensors, config, tokenizer) into `out` and return it."""
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(config(vocab_size, layers, max_context_tokens)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Sharper than the initialiser's 0.02, so that greedy margins are far above float32 rounding.
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5 * (2.0 if "lm_head" in name else 1.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    model.save_pretrained(out)
    tokenizer(vocab_size).save_pretrained(out)
    path = out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SGLANG_KEYS, indent=2, sort_keys=True) + "\n")
    return out


def main() -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write the checkpoint into")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(write(args.out, layers=args.layers, seed=args.seed))


if __name__ == "__main__":
    main()
