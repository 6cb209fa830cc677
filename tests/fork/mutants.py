"""Remove each guard in turn and see its test fail: `python tests/fork/mutants.py [WORD]`.

A guard is a piece of tools/ that only matters when something goes wrong. Each entry takes one out of a copy of tools/
and runs the tests that are there for it on that copy; a mutant that survives means a test that cannot fail.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# (file, guard, what replaces it, tests that must fail)
MUTANTS = [
    ("anchors.py", "return inside[-1] if inside else MODULE", "return MODULE", "statements_map"),
    ("anchors.py", 'name = f"{name}#{seen[name]}"', "pass", "stay_apart"),
    ("anchors.py", 'f"{path}:{line}" if line else path', "path", "leaves_no_python or names_the_place"),
    ("anchors.py", "*(decorator.lineno for decorator in child.decorator_list)", "", "decorators_belong"),
    ("checkout.py", "if files := self.changed_files():", "if files := []:", "dirty_checkout"),
    ("checkout.py", "if self.head != self.applied:", "if False:", "diverged_checkout or dropped_in_the_checkout"),
    ("checkout.py", "if operation := self.operation():", "if operation := None:", "operation_in_progress"),
    ("checkout.py", "before not in (None, tip) and", "before is Ellipsis and", "another_rebase_left"),
    ("checkout.py", 'self.save("discarded")', "pass", "discard_keeps"),
    ("checkout.py", "        checkout._recover()\n", "", "inside_git"),
    ("checkout.py", "self.repo.git.update_ref(_PENDING, tip)", "pass", "interrupted_anywhere"),
    (
        "checkout.py",
        "unlink(missing_ok=True)\n        if self.changed_files",
        "exists()\n        if self.changed_files",
        "inside_git",
    ),
    ("fetch.py", "if actual != wheel.sha256:", "if False:", "wrong_sha256"),
    ("fetch.py", "if _NETWORK.search(stderr):", "if False:", "no_network"),
    ("fetch.py", "if offered := re.search", "if offered := None and re.search", "unknown_version"),
    ("fork.py", "except OSError as error:", "except ZeroDivisionError as error:", "full_disk or fill_disk"),
    ("fork.py", "if is_full_disk(stderr):", "if False:", "full_disk"),
    ("fork.py", "    sys.stdout.flush()", "    pass", "in_a_pipe"),
    ("fork.py", "except KeyboardInterrupt:", "except ZeroDivisionError:", "sigint"),
    ("fork.py", "if rebasing and", "if False and", "sigint_in_a_rebase"),
    ("__init__.py", "sys.excepthook = _report", "", "imports_too"),
    ("checkout.py", "and not self.is_carried(version)", "", "no_trace_of_what"),
    ("rebase.py", ", carried=state.by_machine", ", carried=True", "user_decided_in_a_rebase"),
    ("rebase.py", " or tree != _stopped_tree(checkout, state)", "", "abort_keeps_an_edited"),
    ("rebase.py", "not state.by_machine or head", "head", "resolved_before_the_stop"),
    ("git.py", '"diff.noprefix": "false",', "", "users_git_configuration"),
    ("git.py", '(info / "attributes").write_text', "len", "keeps_every_byte"),
    (
        "git.py",
        'if merges := repo.git.rev_list("--merges"',
        'if merges := "" and repo.git.rev_list("--merges"',
        "or_a_merge",
    ),
    ("git.py", "with_exceptions=False) != resolve(repo, base):", "with_exceptions=False) is None:", "another_base"),
    ("git.py", "        del os.environ[name]", "        pass", "users_git_configuration"),
    (
        "lock.py",
        'raise ForkError(\n            f"upstream.lock has no',
        'return self.wheels[0]\n        raise ForkError(\n            f"upstream.lock has no',
        "missing_wheel",
    ),
    ("lock.py", "ValueError, KeyError", "UnicodeDecodeError", "damaged_lock"),
    ("lock.py", "if wheel.version != self.version:", "if False:", "spelt_otherwise"),
    ("project.py", "except BlockingIOError:", "except ZeroDivisionError:", "another_command"),
    (
        "rebase.py",
        "if tuple(anchors) != patch.declared:",
        "if False:",
        "twin_function_is_noticed or moved_function or renamed_upstream",
    ),
    ("rebase.py", 'if tree == worktree.git.rev_parse("HEAD^{tree}"):', "if False:", "absorbed_patch_is_dropped"),
    ("rebase.py", "if lost and not by_hand:", "if False:", "within_one_function"),
    ("rebase.py", "if gone:\n", "if False:\n", "another_file_is_gone or deleted_target"),
    ("rebase.py", "new = lock if pinned else", "new =", "needs_no_download"),
    ("rebase.py", "    if deleted:\n", "    if False:\n", "deleted_target"),
    ("rebase.py", "if places := list(_markers", "if places := [] and list(_markers", "reindented"),
    ("rebase.py", "if len(texts) != old.patch_count - len(dropped):", "if False:", "count_is_conserved"),
    ("rebase.py", "return Outcome(BROKEN, str(error), tree)", "anchors = patch.declared", "no_python_any_more"),
    ("rebase.py", "if not untouched or read_lock", "if False and read_lock", "changed_during_the_rebase"),
    ("rebase.py", "if slug not in left:", "if False:", "wrong_slug"),
    ("rebase.py", '"make apply-patches",', "", "going_back_refuses"),
    ("rebase.py", "    write_lock(project.lock_left_at(old.version), old)\n", "", "how_to_go_back"),
    ("rebase.py", "    state.finishing = True\n", "", "interrupted_anywhere and rebase"),
    ("series.py", '"--keep-cr", ', "", "crlf"),
    ("series.py", "if match is None or int(match[1]) != number:", "if False:", "lost_or_added"),
    ("series.py", "or not all(texts.values())", "", "empty_commit"),
    ("series.py", "if is_full_disk(str(error.stderr)):", "if False:", "full_disk"),
    ("series.py", "if added >= MAX_SERIES_ADDED:", "if False:", "150_lines"),
    ("series.py", "if patches and quoted >= added:", "if False:", "quotes_more"),
    ("series.py", "if patch.added > MAX_PATCH_ADDED:", "if False:", "what_a_patch_lacks"),
    ("series.py", "is binary in {path}", "{path}", "binary_file_is_kept"),
    ("series.py", "if _reaches_past_hooks(line)", "if False", "what_a_patch_lacks"),
    (
        "series.py",
        "        if path.name not in texts:\n            path.unlink()\n",
        "        pass\n",
        "dropped_in_the_checkout",
    ),
    ("verbs.py", "check_anchors(describe_series(checkout.repo, base, texts, tip))", "pass", "twin_function_gets"),
    ("verbs.py", "check_anchors(patches)", "pass", "refuses_a_wrong_anchor"),
    (
        "verbs.py",
        "if tree != lock.series_tree or len(files) != lock.patch_count:\n        if not relock",
        "if False:\n        if not relock",
        "by_hand",
    ),
    ("verbs.py", "if format_series(project, checkout.repo, base, tip) != texts:", "if False:", "not_as_exported"),
    (
        "verbs.py",
        "(tree := checkout.tree(commit)) != lock.upstream_tree",
        "(tree := '') is None",
        "not_the_locked_tree",
    ),
    (
        "verbs.py",
        "checkout.tree_of_wheel(version, other)) != tree",
        "checkout.tree_of_wheel(version, other)) is None",
        "different_sources",
    ),
    ("verbs.py", "version = wheels[0].version", "pass", "spelt_in_many_ways"),
    (
        "verbs.py",
        "        checkout.require_untouched()\n    except ForkError as work",
        "        pass\n    except ForkError as work",
        "what_is_not_exported",
    ),
    ("verbs.py", "if text not in before.values()", "", "what_was_dropped"),
    ("verbs.py", "if project.rebase_state.exists():", "if False:", "wait_for_the_rebase"),
    ("verbs.py", '[*checkout.kept("saved"), *', "[*", "discard_keeps"),
    ("verbs.py", ", *_uncommitted_series(project, checkout)]", "]", "never_committed"),
    ("git.py", '"--objects", "--all"', '"--objects", "HEAD^..HEAD"', "never_committed"),
    ("setup.py", "except KeyboardInterrupt:", "except ZeroDivisionError:", "ctrl_c_in_setup"),
    ("wheel.py", 'os.environ["SOURCE_DATE_EPOCH"] = str(_TIME_UNIX_S)', "pass", "two_builds"),
    (
        "wheel.py",
        "if target.exists() and read_provenance(target) == provenance:",
        "if target.exists():",
        "when_and_only_when",
    ),
    ("wheel.py", "        wheel.fp = None  #", "        pass  #", "full_disk"),
]


def survives(file: str, guard: str, replacement: str, tests: str) -> bool:
    """Whether the tests pass although the guard is gone."""
    with tempfile.TemporaryDirectory() as folder:
        tools = Path(folder) / "tools"
        shutil.copytree(REPOSITORY / "tools", tools, ignore=shutil.ignore_patterns("__pycache__"))
        text = (tools / file).read_text()
        if guard not in text:
            raise SystemExit(f"error: {file} has no {guard!r} any more: update tests/fork/mutants.py")
        (tools / file).write_text(text.replace(guard, replacement))
        tests_folder = str(REPOSITORY / "tests" / "fork")
        # The conftest above imports tools/, and the tests would then find the whole ones.
        options = ["-x", "-q", "-p", "no:cacheprovider", "--confcutdir", tests_folder]
        command = [sys.executable, "-m", "pytest", *options, tests_folder]
        environment = {**os.environ, "FORK_TOOLS": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        result = subprocess.run([*command, "-k", tests], env=environment, capture_output=True, text=True, check=False)
        if result.returncode not in (0, 1):
            raise SystemExit(f"error: pytest could not run {tests!r}: {result.stdout[-500:]}")
        return result.returncode == 0


def main() -> int:
    """Try the mutants whose file, guard or tests contain WORD. Returns 1 when one survives."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [mutant for mutant in MUTANTS if word in " ".join(mutant)]
    survivors = 0
    for number, mutant in enumerate(chosen, start=1):
        alive = survives(*mutant)
        survivors += alive
        guard = " ".join(mutant[1].split())
        print(
            f"{number}/{len(chosen)} {'SURVIVES' if alive else 'killed'}: {mutant[0]}: {guard[:70]} ({mutant[3]})",
            flush=True,
        )
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
