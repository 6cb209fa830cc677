"""Fixtures shared by all test folders."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random Kimi-shaped checkpoint of `make demo`, made once a session."""
    from tools import tiny_model as maker

    return maker.write(tmp_path_factory.mktemp("tiny-mla"))
