"""The committed pages of docs/bench are those of the committed results, but for ddtree.md, of an earlier bench."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools import bench_accept, defrag_page, e2e_page, kernel_page, server_page, soak

DOCS = Path(__file__).resolve().parents[2] / "docs" / "bench"
PAGES: dict[str, Callable[[Any], str]] = {
    "accept": bench_accept.markdown,
    "bench-e2e": lambda document: e2e_page.markdown(document, e2e_page.compared(document["cells"])),
    "defrag": lambda results: defrag_page.markdown(results, "defrag"),
    "kernel": kernel_page.markdown,
    "server": server_page.markdown,
    "soak": lambda report: soak.markdown(soak.Report(**report), 20),
}


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_that_of_the_committed_results(name):
    assert (DOCS / f"{name}.md").read_text() == PAGES[name](json.loads((DOCS / f"{name}.json").read_text()))
