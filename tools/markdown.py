"""Tables of the pages that tools write."""

from __future__ import annotations

from collections.abc import Iterable


def table(head: str, rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a Markdown table; `head` holds the names of its columns with ` | ` between them."""
    return [f"| {head} |", "|---" * (head.count("|") + 1) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def number(value: float | None, digits: int) -> str:
    """A figure with so many decimals, `-` where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"
