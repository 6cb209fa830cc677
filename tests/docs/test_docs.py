"""What the pages say: links lead somewhere, flags exist, recipes start and fit."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang_sm120.attention import select
from sglang_sm120.ddtree import algorithm
from transformers import PretrainedConfig

from tools import serving_memory as memory

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SERVING = (ROOT / "docs" / "serving.md").read_text()
BLOCK = re.compile(r"^```\n(.*?)^```", re.M | re.S)
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.M | re.S)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
# Machine, model and format of each recipe of serving.md, in its order.
MACHINES = [
    ("RTX PRO 6000", memory.KIMI),
    ("RTX PRO 6000", memory.KIMI),
    ("RTX PRO 6000", memory.DEEPSEEK_V3),
    ("RTX 5090", memory.V2_LITE),
    ("RTX PRO 6000", memory.GLM_FLASH_BF16),
    ("RTX 5090", memory.GLM_FLASH_INT4),
    ("A100", memory.KIMI),
]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    load_plugins()
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


def recipes(text: str) -> list[list[str]]:
    """The server's flags of each `make serve` in code blocks, as the Makefile gives them."""
    commands = [line for block in BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    found = []
    for words in (shlex.split(line, comments=True) for line in commands if "make serve " in line):
        given = dict(word.split("=", 1) for word in words if "=" in word)
        served = ["--attention-backend", "sm120_mla", "--model-path", given["MODEL"]]
        found.append(served + shlex.split(given.get("SERVE_FLAGS", "--tp 8")))
    return found


def kimi() -> SimpleNamespace:
    config = PretrainedConfig()
    return SimpleNamespace(
        num_attention_heads=64, kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.bfloat16, hf_config=config,
        hf_text_config=config, linear_attn_registry_result=None,
    )  # fmt: skip


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for target in (target for target in targets if not target.startswith("http")):
        path, _, anchor = target.partition("#")
        to = page.parent / path if path else page
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_table_is_broken_by_an_empty_line(page):
    assert not re.search(r"\|\n\n\|.*\n(?!\|[-:| ]+\n)", page.read_text()), "the rows after it have no header"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


def test_every_flag_exists(parser):
    """In upstream's server as our plugin leaves it, or in our sources."""
    sources = [path.read_text() for folder in ("tools", "overlay") for path in (ROOT / folder).rglob("*.py")]
    known = set(parser._option_string_actions) | {flag for text in sources for flag in FLAG.findall(text)}
    for page in PAGES:
        unknown = {flag for flag in FLAG.findall(page.read_text()) if flag not in known and flag != "--tp"}
        assert not unknown, f"{page}: {unknown}"


def test_every_make_target_tool_and_test_exists():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    tools = {f"tools.{path.stem}" for path in (ROOT / "tools").glob("*.py")}
    tests = list((ROOT / "tests").rglob("test_*.py"))
    named = {path.stem for path in tests} | {n for t in tests for n in re.findall(r"def (test_\w+)", t.read_text())}
    for page in PAGES:
        code = "\n".join(CODE.findall(page.read_text()))
        assert set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", code)) <= targets, page
        assert set(re.findall(r"python -m (tools\.\w+)", code)) <= tools, page
        assert set(re.findall(r"(?<![.\w])test_\w+", code)) <= named, page


@pytest.mark.parametrize("word", ["MLA", "drafter", "verifies", "chain", "tree"])
def test_the_readme_explains_its_words_where_they_first_come(word):
    first = next(text for text in (ROOT / "README.md").read_text().split("\n\n")[1:] if word[:5] in text)
    assert f"*{word}*" in first


def test_recipes_start(parser):
    """Upstream parses them, and neither our backend nor DDTREE refuses them."""
    found = [*recipes(SERVING), *recipes((ROOT / "README.md").read_text())]
    assert len(found) == len(MACHINES) + 2
    for words in found:
        args = parser.parse_args(words)
        assert select.refusals(args, kimi()) == []
        if args.speculative_algorithm == "DDTREE":
            algorithm.refuse_unsupported(args)


def test_a_recipe_that_ddtree_refuses_would_be_seen(parser):
    (words,) = (words for words in recipes(SERVING) if "DDTREE" in words)
    with pytest.raises(ValueError, match="--speculative-num-draft-tokens does not work"):
        algorithm.refuse_unsupported(parser.parse_args([*words, "--speculative-num-draft-tokens", "8"]))


def test_recipes_fit_their_machines(parser):
    """One request of the longest context, in the share that `--mem-fraction-static` gives, with room to work."""
    for words, (gpu, model) in zip(recipes(SERVING), MACHINES, strict=True):
        args = parser.parse_args(words)
        byte = memory.FP8_BYTES if args.kv_cache_dtype == "fp8_e4m3" else memory.BF16_BYTES
        taken = model.weights_gib(args.tp_size) + model.latent_kib(byte) * args.context_length / 2**20
        if args.speculative_draft_model_path:
            taken += memory.DRAFTER.gib(args.context_length, args.tp_size)
        free = memory.GPUS_GIB[gpu] - memory.CONTEXT_GIB
        assert taken <= args.mem_fraction_static * free <= free - memory.WORK_GIB, (words, taken / free)


def test_tables_are_those_of_the_arithmetic():
    for row in (*memory.kv_rows(), *memory.kimi_rows(), *memory.other_rows()):
        assert row in SERVING, row


def test_what_the_page_says_of_one_card():
    """Its least shares, and that on one 5090 the other formats do not fit, or hardly."""
    assert round(memory.GLM_FLASH.expert_weights / 1e9, 1) == 27.8
    assert round((memory.GLM_FLASH.divided_weights + memory.GLM_FLASH.replicated_weights) / 1e9, 1) == 2.2
    kv = memory.GLM_FLASH.latent_kib(memory.BF16_BYTES) * 131_072 / 2**20
    for gpu, model, least in (
        ("RTX PRO 6000", memory.GLM_FLASH_BF16, 0.66),
        ("RTX 5090", memory.GLM_FLASH_INT4, 0.79),
    ):
        assert memory.static_fraction(memory.GPUS_GIB[gpu], model.weights_gib(1) + kv) == least
    eight_bit = memory.GLM_FLASH.weights_gib(1, memory.FP8_BYTES)
    assert memory.tokens_left(memory.GPUS_GIB["RTX 5090"], eight_bit, memory.GLM_FLASH.latent_kib(2)) == 18
    assert memory.V2_LITE.weights_gib(1) > memory.GPUS_GIB["RTX 5090"] - memory.CONTEXT_GIB - memory.WORK_GIB


@pytest.mark.parametrize(
    ("model", "billions"), [(memory.DEEPSEEK_V3, 671.0), (memory.V2_LITE, 15.7), (memory.KIMI, 1026.9)]
)
def test_weights_are_those_of_the_published_models(model, billions):
    """DeepSeek's papers give 671 B and 15.7 B; Kimi K2's config with its vision tower gives 1.03 T."""
    found = model.expert_weights + model.divided_weights + model.replicated_weights
    assert found / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_gpu_holds_its_share():
    one, eight = memory.KIMI.weights_gib(1), memory.KIMI.weights_gib(8)
    whole = memory.BF16_BYTES * memory.KIMI.replicated_weights / memory.GIB
    assert 8 * (eight - whole) == pytest.approx(one - whole)
    assert memory.KIMI.latent_kib(memory.BF16_BYTES) * 1024 == 61 * 1152
    assert memory.static_fraction(101.0, 90.001) == 0.91
