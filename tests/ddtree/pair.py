"""The trained pair in tests/fixtures, and prompts of text that it was not trained on."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

from tools.train_pair import read_texts

PAIR = Path(__file__).resolve().parents[1] / "fixtures" / "pair"
TARGET, DRAFTER = PAIR / "target", PAIR / "drafter"
FLAGS = ["--dtype", "float32", "--context-length", "2048", "--chunked-prefill-size", "128"]


def ddtree_flags(budget: int, topk: int = 8, *more: str) -> list[str]:
    flags = f"--speculative-algorithm DDTREE --speculative-ddtree-budget {budget} --speculative-ddtree-topk {topk}"
    return [*FLAGS, *flags.split(), "--speculative-draft-model-path", str(DRAFTER), *more]


def dflash_flags(*more: str) -> list[str]:
    return [*FLAGS, "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(DRAFTER), *more]


def held_out_prompts(count: int, lengths: tuple[int, int] = (8, 300), seed: int = 0) -> list[list[int]]:
    """Token ids of `count` excerpts of held-out library files, of random lengths."""
    from transformers import AutoTokenizer

    texts = read_texts(Path(sysconfig.get_path("stdlib")), training=False)
    rng, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(TARGET)
    prompts = []
    while len(prompts) < count:
        text = rng.choice(texts)
        at, length = rng.randrange(len(text)), rng.randint(*lengths)
        ids = tokenizer(text[at : at + 6 * length]).input_ids[:length]
        if len(ids) == length:
            prompts.append(ids)
    return prompts
