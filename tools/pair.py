"""The trained pair of tests/fixtures, and the text that it was trained on and that it was not.

Text: this Python's own standard library, sources and docstrings. Every 16th file, chosen by a hash of its path, is kept
out of training on every machine. `tools/train_pair.py` makes the pair.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from pathlib import Path

PAIR = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "pair"
TARGET, DRAFTER = PAIR / "target", PAIR / "drafter"
DDTREE_FLAGS = ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(DRAFTER)]
_STDLIB = Path(sysconfig.get_path("stdlib"))
_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "encodings", "pydoc_data", "lib2to3", "__pycache__"}


def texts(*, training: bool) -> list[str]:
    """The training files as text, or the held-out ones: Python sources that people wrote, in a fixed order."""
    paths = sorted((path.relative_to(_STDLIB) for path in _STDLIB.rglob("*.py")), key=Path.as_posix)
    chosen = (p for p in paths if not _SKIPPED_FOLDERS & set(p.parts) and _is_held_out(p) != training)
    return [(_STDLIB / path).read_text("utf-8", "replace") for path in chosen]


def _is_held_out(path: Path) -> bool:
    return hashlib.sha256(path.as_posix().encode()).digest()[0] % 16 == 0


def held_out_tokens(target: Path = TARGET) -> list[int]:
    """All held-out text as one list of token ids."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)("".join(texts(training=False))).input_ids


def held_out_prompts(count: int, lengths: tuple[int, int], seed: int = 0) -> list[list[int]]:
    """Token ids of `count` excerpts of held-out files; lengths in tokens, ends included."""
    from transformers import AutoTokenizer

    files, rng, tokenizer = texts(training=False), random.Random(seed), AutoTokenizer.from_pretrained(TARGET)
    prompts: list[list[int]] = []
    while len(prompts) < count:
        text = rng.choice(files)
        at, length = rng.randrange(len(text)), rng.randint(*lengths)
        ids = tokenizer(text[at : at + 6 * length]).input_ids[:length]
        if len(ids) == length:
            prompts.append(ids)
    return prompts
