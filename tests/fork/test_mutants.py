"""mutants.py is run by hand; that what it takes out is still there is checked here."""

from __future__ import annotations

from mutants import MUTANTS, REPOSITORY


def test_every_guard_stands_in_its_file() -> None:
    assert [
        (file, guard) for file, guard, *_ in MUTANTS if guard not in (REPOSITORY / "tools" / file).read_text()
    ] == []
