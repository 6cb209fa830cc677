"""What the checkpoints made here have in common: Kimi K2's rope, a byte-level BPE, the configs that SGLang reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Rope = dict[str, float | int | str]


def rope(max_context_tokens: int) -> Rope:
    """Yarn from 4,096 tokens, as Kimi K2 has it; transformers' `rope_parameters`."""
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


def finish_config(folder: Path, parameters: Rope, **more: Any) -> None:
    """Add to a saved config.json what SGLang reads and transformers does not write, and `more`."""
    path = folder / "config.json"
    scaling = {k: v for k, v in parameters.items() if k not in ("rope_theta", "rope_type")} | {"type": "yarn"}
    keys = {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": scaling,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | keys | more, indent=2, sort_keys=True) + "\n")


def byte_level_bpe(texts: Sequence[str], vocab_size: int, special_tokens: list[str]) -> Tokenizer:
    """Byte-level BPE trained on the texts; the special tokens have the first ids."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def dflash_config(
    target: dict[str, Any],
    *,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: list[int],
    intermediate_size: int,
    layers: int,
    heads: int,
    head: int,
) -> dict[str, Any]:
    """config.json of a DFlash checkpoint for the model whose config.json is `target`, but for its dtype."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": target_layer_ids},
        "num_target_layers": target["num_hidden_layers"],
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "max_position_embeddings": target["max_position_embeddings"],
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
