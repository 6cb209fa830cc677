"""Where a patch lands, by syntax rather than by line number.

Git finds the place of a hunk by its context lines, and two functions can share those: a hook then lands in the twin
with exit code 0. So every line that a patch adds or removes is mapped to `path::qualname`, and the patch declares in
its `Anchor:` trailers where that should be.
"""

import ast
from collections import Counter
from collections.abc import Iterable

from git import Repo
from unidiff import PatchedFile, PatchSet

from tools.errors import ForkError
from tools.git import file_at

MODULE = "<module>"
FILE = "<file>"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def scopes(source: bytes, path: str) -> list[tuple[int, int, str]]:
    """(first line, last line, qualname) of every class and function, decorators included, outer ones first.

    A qualname that occurs again in the same file gets `#2`, `#3`, ... so that twins by name stay apart.

    Raises:
        ForkError: `source` does not parse.
    """
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        line, what = getattr(error, "lineno", None), getattr(error, "msg", error)
        place = f"{path}:{line}" if line else path  # a null byte has no line
        raise ForkError(f"{place} is not valid Python after the patch ({what}): correct the patch") from None
    found: list[tuple[int, int, str]] = []
    seen: Counter[str] = Counter()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, _SCOPES):
                visit(child, prefix)
                continue
            name = f"{prefix}{child.name}"
            seen[name] += 1
            if seen[name] > 1:
                name = f"{name}#{seen[name]}"
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            found.append((first, child.end_lineno or child.lineno, name))
            visit(child, f"{name}.")

    visit(module, "")
    return found


def anchors_of(repo: Repo, commit: str) -> list[str]:
    """Sorted `path::qualname` of all lines that `commit` adds or removes.

    Lines outside any class or function belong to `path::<module>`; a new, removed, binary or non-Python file is
    `path::<file>`. Blank lines and comments are not code and are not mapped, unless the file has no other change.
    """
    diff = repo.git.diff_tree("-p", "-U0", "--full-index", "--no-renames", "--no-commit-id", commit)
    anchors: set[str] = set()
    for file in PatchSet(diff):
        # Not file.is_added_file: at -U0 that is also true of lines inserted at the top.
        whole = "/dev/null" in (file.source_file, file.target_file) or file.is_binary_file
        if whole or not file.path.endswith(".py"):
            anchors.add(f"{file.path}::{FILE}")
        else:
            anchors |= {f"{file.path}::{name}" for name in _qualnames(repo, commit, file)}
    return sorted(anchors)


def missing_anchors(repo: Repo, commit: str, anchors: Iterable[str]) -> list[str]:
    """Those of `anchors` whose file, class or function is not in the tree of `commit`."""
    missing = []
    for anchor in anchors:
        path, _, name = anchor.partition("::")
        source = file_at(repo, commit, path)
        if source is None or name not in {MODULE, FILE, *(scope for _, _, scope in scopes(source, path))}:
            missing.append(anchor)
    return missing


def _qualnames(repo: Repo, commit: str, file: PatchedFile) -> set[str]:
    lines = [line for hunk in file for line in hunk if line.is_added or line.is_removed]
    code = [line for line in lines if line.value.strip() and not line.value.lstrip().startswith("#")]
    before = scopes(file_at(repo, f"{commit}^", file.path) or b"", file.path)
    after = scopes(file_at(repo, commit, file.path) or b"", file.path)
    return {
        _innermost(after, line.target_line_no) if line.is_added else _innermost(before, line.source_line_no)
        for line in code or lines
    }


def _innermost(ranges: list[tuple[int, int, str]], line: int | None) -> str:
    inside = [name for first, last, name in ranges if line is not None and first <= line <= last]
    return inside[-1] if inside else MODULE
