"""A kill, or a full disk, before each step of each verb: run again, it ends where it would have ended.

Every git command that writes and every rename, removal and folder of ours is one step. The command runs in a forked
child that kills itself, or fails with ENOSPC, just before step N; then the same command runs once more, undisturbed.
"""

import errno
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from git.cmd import Git
from toy import ENGINE, FORK, Toy, copy

from tools import fetch, fork
from tools.project import Project

WRITES = {
    *("add", "am", "checkout", "cherry-pick", "clean", "commit-tree", "fast-import", "init", "read-tree", "reset"),
    *("update-ref", "worktree"),
}
GIT_EXECUTE = Git.execute
STEPS = [(Git, "execute"), (Path, "replace"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir"), (shutil, "rmtree")]


class Counter:
    """Calls `fault` before step `at`."""

    def __init__(self, at: int, fault: Callable[[], None]) -> None:
        self.at, self.fault, self.count = at, fault, 0

    def wrap(self, function: Callable) -> Callable:
        def step(*arguments: Any, **keywords: object) -> object:
            if function is not GIT_EXECUTE or arguments[1][1] in WRITES:
                self.count += 1
                if self.count == self.at:
                    self.fault()
            return function(*arguments, **keywords)

        return step


def run_forked(toy: Toy, arguments: list[str], at: int, fault: Callable[[], None]) -> int:
    """Exit code of a verb run in a child, `fault` striking before step `at`; minus the signal if it was killed."""
    child = os.fork()
    if child == 0:
        output = os.open(os.devnull, os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # pip is a program of its own and keeps nothing of ours half-written; a copy stands in for it.
        fetch._download = lambda project, version, tag: local_download(toy, project, version, tag)
        counter = Counter(at, fault)
        for owner, name in STEPS:
            setattr(owner, name, counter.wrap(getattr(owner, name)))
        os._exit(fork.main(["--project", str(toy.root), *arguments]))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def local_download(toy: Toy, project: Project, version: str, tag: str) -> Path:
    (source,) = toy.index.glob(f"sglang-{version}-{tag}-*.whl")
    folder = project.tmp / f"download-{tag}"
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(source, folder))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_fault() -> None:
    pass


def prepare_apply(toy: Toy) -> None:
    """patches/ has one more patch than the checkout."""
    toy.hook()
    toy.ok("export")
    toy.git("reset", "--quiet", "--hard", "HEAD~1")
    toy.git("update-ref", "refs/fork/applied", "HEAD")


def prepare_fresh_apply(toy: Toy) -> None:
    """As in a fresh clone, but for the downloads."""
    toy.hook()
    toy.ok("export")
    shutil.rmtree(toy.checkout)


def prepare_export(toy: Toy) -> None:
    """One patch exported, replaced by two others in the checkout."""
    toy.hook("First")
    toy.ok("export")
    toy.git("reset", "--quiet", "--hard", "HEAD~1")
    toy.hook("Second")
    toy.commit(
        "sglang/server.py", "    return port", "    guard(port)\n    return port", "Third", "sglang/server.py::serve"
    )


def prepare_rebase(toy: Toy) -> None:
    toy.hook()
    toy.commit(
        "sglang/server.py", "    return port", "    guard(port)\n    return port", "Third", "sglang/server.py::serve"
    )
    toy.ok("export")
    toy.release("1.1", {"sglang/engine.py": ENGINE.replace("class Engine", "class Runner")})


def prepare_abort(toy: Toy) -> None:
    prepare_rebase(toy)
    toy.error("rebase", "1.1")


CASES = {
    "apply": (prepare_apply, ["apply"]),
    "fresh apply": (prepare_fresh_apply, ["apply"]),
    "export": (prepare_export, ["export"]),
    "rebase": (prepare_rebase, ["rebase", "1.1", "--accept", "Hook-run"]),
    "abort": (prepare_abort, ["rebase", "--abort"]),
    "build": (prepare_apply, ["build", "--no-kernels"]),
}


def again(toy: Toy, arguments: list[str]) -> list[str] | None:
    """What a user types after an interruption; None when there is nothing left to do."""
    in_progress = (toy.root / "build" / "rebase.json").exists()
    if arguments[0] != "rebase":
        return arguments
    if arguments[1] == "--abort":
        return arguments if in_progress else None
    if in_progress:
        return ["rebase", "--continue"]
    return None if toy.lock["upstream"]["version"] == arguments[1] else arguments


def result(toy: Toy) -> dict:
    wheels = {path.name: path.read_bytes() for path in (toy.root / "build").glob("dist/*.whl")}
    reports = {path.name: path.read_bytes() for path in (toy.root / "docs").glob("upgrades/*")}
    return {**toy.state(), "wheels": wheels, "reports": reports}


@pytest.mark.parametrize(("fault", "stride"), [(kill, 1), (fill_disk, 4)])
@pytest.mark.parametrize("name", CASES)
def test_interrupted_anywhere_and_run_again(
    pinned: Toy, tmp_path: Path, name: str, fault: Callable[[], None], stride: int
) -> None:
    prepare, arguments = CASES[name]
    start = copy(pinned, tmp_path / "start")
    prepare(start)
    own = start.git("rev-parse", "HEAD") if start.checkout.exists() else None
    whole = copy(start, tmp_path / "whole")
    assert run_forked(whole, arguments, 0, no_fault) == 0
    expected = result(whole)
    shutil.rmtree(tmp_path / "whole")

    for at in itertools.count(1, stride):
        # The same folder each time, so that a linked worktree's paths stay true.
        toy = copy(start, tmp_path / "whole")
        code = run_forked(toy, arguments, at, fault)
        if code == 0:
            break
        assert code == (-signal.SIGKILL if fault is kill else 1), f"step {at}"
        if own:
            exported = toy.lock["series"]["tree"] == toy.git("rev-parse", f"{own}^{{tree}}")
            assert exported or toy.git("for-each-ref", "--contains", own), f"step {at}: a commit was lost"
        if command := again(toy, arguments):
            assert run_forked(toy, command, 0, no_fault) == 0, f"step {at}: running again fails"
            assert not list((toy.root / "build" / "tmp").glob("*")), f"step {at}: scratch files stay"
        assert result(toy) == expected, f"step {at}"
        shutil.rmtree(tmp_path / "whole")
    assert at > 5, f"only {at - 1} steps: the verb did nothing"


def test_switch_killed_inside_git(hooked: Toy) -> None:
    """git itself dies with the index locked and a file half-written."""
    before = hooked.state()
    hooked.git("update-ref", "refs/fork/pending", "HEAD")
    (hooked.checkout / ".git" / "index.lock").write_bytes(b"half")
    (hooked.checkout / "sglang" / "engine.py").write_text(ENGINE[:40])
    assert "finishing a switch" in hooked.ok("apply")
    assert hooked.state() == before


def interrupted(toy: Toy, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a verb that Ctrl-C ends at its first call of git."""
    child = os.fork()
    if child == 0:
        with (toy.root / "stderr").open("w") as handle:
            os.dup2(handle.fileno(), 2)
            sys.stderr = os.fdopen(2, "w", buffering=1)

            def interrupt(*_: object, **__: object) -> None:
                raise KeyboardInterrupt

            Git.execute = interrupt
            os._exit(fork.main(["--project", str(toy.root), *arguments]))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), (toy.root / "stderr").read_text()


def test_sigint_ends_with_one_line(hooked: Toy) -> None:
    said = interrupted(hooked, "apply")
    assert said == (130, "error: interrupted: run the same command again to go on\n")


def test_sigint_in_a_rebase_names_the_commands_that_go_on(hooked: Toy) -> None:
    hooked.release("1.1", {"sglang/engine.py": ENGINE.replace("class Engine", "class Runner")})
    hooked.error("rebase", "1.1")
    code, said = interrupted(hooked, "rebase", "--continue", "--accept", "Hook-run")
    assert code == 130
    assert said == f"error: interrupted: go on with `{FORK} rebase --continue`, or `{FORK} rebase --abort`\n"
