"""Toy forks to drive."""

from pathlib import Path

import pytest
from toy import Toy, copy


@pytest.fixture(scope="session")
def pinned(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A toy fork at release 1.0 with an empty series. Copied for each test."""
    root = tmp_path_factory.mktemp("toy")
    toy = Toy(root / "fork", root / "index")
    toy.release("1.0")
    for path, text in {
        "overlay/sglang_sm120/__init__.py": "",
        "overlay/sglang_sm120/hooks.py": "def run(size):\n    pass\n",
        "tests/test_toy.py": "def test_toy():\n    pass\n",
    }.items():
        file = toy.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    toy.ok("pin", "1.0")
    toy.ok("apply")
    toy.ok("export")
    return toy


@pytest.fixture
def toy(pinned: Toy, tmp_path: Path) -> Toy:
    """A private copy of the pinned toy fork."""
    return copy(pinned, tmp_path)


@pytest.fixture
def hooked(toy: Toy) -> Toy:
    """A toy fork with one patch, exported."""
    toy.hook()
    toy.ok("export")
    return toy
