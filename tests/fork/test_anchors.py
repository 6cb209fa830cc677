"""The map from lines to qualnames, against the compiler's own."""

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import TOOLS_ROOT  # noqa: F401  (puts tools/ on the path)

from tools.anchors import MODULE, _innermost, scopes
from tools.errors import ForkError

NAMES = st.sampled_from(["run", "step", "Engine"])


@st.composite
def bodies(draw: st.DrawFn, depth: int = 3) -> list[str]:
    """Lines of a block: statements and, nested, functions, classes and branches, some with decorators."""
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["pass", "def", "async def", "class", "if"])) if depth else "pass"
        if kind == "pass":
            lines.append("value()")
            continue
        head = {"if": "if value():", "class": "class {}:"}.get(kind, f"{kind} {{}}(self):").format(draw(NAMES))
        if kind != "if" and draw(st.booleans()):
            lines.append("@value")
        lines += [head, *(f"    {line}" for line in draw(bodies(depth - 1)))]
    return lines


def compiled_qualnames(code: types.CodeType) -> dict[int, str]:
    """Line of each call of `value()` as a statement -> qualname of the code object that holds it."""
    found = {}
    for start, _, line in code.co_lines():
        if start and line:
            found[line] = code.co_qualname
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= compiled_qualnames(constant)
    return found


@given(bodies())
def test_statements_map_to_the_code_object_that_runs_them(lines: list[str]) -> None:
    source = "\n".join(lines) + "\n"
    ranges = scopes(source.encode(), "x.py")
    oracle = compiled_qualnames(compile(source, "x.py", "exec"))
    for number, text in enumerate(lines, start=1):
        if text.strip() == "value()":
            expected = oracle[number].replace(".<locals>", "")
            found = _innermost(ranges, number)
            unnumbered = ".".join(part.partition("#")[0] for part in found.split("."))
            assert unnumbered == expected or (found, expected) == (MODULE, "<module>")


@given(bodies())
def test_scopes_of_one_name_stay_apart(lines: list[str]) -> None:
    names = [name for _, _, name in scopes(("\n".join(lines) + "\n").encode(), "x.py")]
    assert len(set(names)) == len(names)


def test_decorators_belong_to_their_function() -> None:
    ranges = scopes(b"@cache\n@trace\ndef f():\n    pass\n\nx = 1\n", "x.py")
    assert [_innermost(ranges, line) for line in range(1, 7)] == ["f", "f", "f", "f", MODULE, MODULE]


@pytest.mark.parametrize(("source", "place"), [(b"\ndef f(:\n", r"x\.py:2"), (b"\0", r"x\.py")])
def test_source_that_does_not_parse_is_an_error_that_names_the_place(source: bytes, place: str) -> None:
    with pytest.raises(ForkError, match=f"^{place} is not valid Python"):
        scopes(source, "x.py")
