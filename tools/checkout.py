"""build/checkout: the imported upstream releases and, on branch `series`, one commit per patch.

References of ours live under refs/fork/: `upstream/VERSION` (imported tree, a root commit), `applied` (the tip we last
wrote; what the user has beyond it is the user's), `pending` (the tip we are moving to), `series/VERSION` (the series
where a rebase left or reached that release), `carried/VERSION` (a series that a rebase reached without its user: it can
be made again) and `saved/N` (what we moved away from, kept for the user).
"""

import contextlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from git import Repo

from tools.errors import FORK, ForkError, say
from tools.git import IDENTITY, IMPORT_DATE, init_repo, open_repo, resolve
from tools.project import Project

BRANCH = "series"
_APPLIED = "refs/fork/applied"
_PENDING = "refs/fork/pending"
_COMPILED = (".so", ".pyd")
_UNSHARED = ("RECORD", "WHEEL")
_OPERATIONS = ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD")


class Checkout:
    """The git repository at build/checkout."""

    def __init__(self, project: Project, repo: Repo) -> None:
        self.project = project
        self.repo = repo

    @classmethod
    def open(cls, project: Project) -> "Checkout":
        """Open build/checkout, making it if there is none, and finish a switch that was killed half-way."""
        if not project.checkout.exists():
            scratch = project.tmp / "checkout"
            init_repo(scratch, BRANCH)
            scratch.rename(project.checkout)
        checkout = cls(project, open_repo(project.checkout))
        checkout.repo.git.worktree("prune")
        checkout._recover()
        return checkout

    # -- upstream ------------------------------------------------------------------------------------------------

    def upstream(self, version: str) -> str | None:
        """Commit of an imported release."""
        return resolve(self.repo, f"refs/fork/upstream/{version}")

    def import_wheel(self, version: str, wheel: Path) -> str:
        """Commit holding the sources of `wheel`: every file but compiled extensions, RECORD and WHEEL."""
        return self._import(wheel, version, f"refs/fork/upstream/{version}")

    def tree_of_wheel(self, version: str, wheel: Path) -> str:
        """Git tree of the sources in `wheel`, without keeping a reference to it."""
        reference = "refs/fork/compare"
        commit = self._import(wheel, version, reference)
        self.repo.git.update_ref("-d", reference)
        return self.tree(commit)

    def _import(self, wheel: Path, version: str, reference: str) -> str:
        say(f"import: {wheel.name}")
        with tempfile.TemporaryFile(dir=self.project.tmp) as stream:
            _write_fast_import(stream, wheel, version, reference)
            stream.seek(0)
            self.repo.git.fast_import("--quiet", "--force", istream=stream)
        return self.repo.git.rev_parse(reference)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def head(self) -> str | None:
        """Commit checked out, None before the first apply."""
        return resolve(self.repo, "HEAD")

    @property
    def applied(self) -> str | None:
        """Tip that apply, export or rebase last wrote."""
        return resolve(self.repo, _APPLIED)

    def tree(self, commit: str) -> str:
        """Git tree of a commit."""
        return self.repo.git.rev_parse(f"{commit}^{{tree}}")

    def changed_files(self) -> list[str]:
        """Lines of `git status --porcelain`: uncommitted work."""
        return self.repo.git.status("--porcelain").splitlines() if self.head else []

    def own_commits(self) -> list[str]:
        """`id subject` of commits in HEAD or on the branch that neither apply nor export wrote."""
        tips = [tip for tip in (self.head, resolve(self.repo, f"refs/heads/{BRANCH}")) if tip]
        if not tips:
            return []
        known = [tip for tip in (self.applied,) if tip]
        return self.repo.git.log("--format=%h %s", *tips, "--not", "--glob=refs/fork/upstream", *known).splitlines()

    def operation(self) -> str | None:
        """Name of a git operation the user has not finished."""
        git_dir = Path(self.repo.git_dir)
        return next((name for name in _OPERATIONS if (git_dir / name).exists()), None)

    def require_committed(self) -> None:
        """Raise ForkError while build/checkout holds what no commit does."""
        if operation := self.operation():
            raise ForkError(
                f"build/checkout is in the middle of a git operation ({operation}): finish or abort it first"
            )
        if files := self.changed_files():
            raise ForkError(
                f"build/checkout has uncommitted changes ({_some([line[3:] for line in files])}): "
                "commit them there and run `make export-patches`, "
                f"or drop them with `{FORK} apply --discard`"
            )

    def require_untouched(self) -> None:
        """Raise ForkError when moving HEAD would lose something of the user's."""
        self.require_committed()
        if self.head != self.applied:
            found = _some(self.own_commits()) or "a patch was dropped there"
            raise ForkError(
                f"build/checkout is not at the applied series ({found}): keep that with `make export-patches`, "
                f"or go back with `{FORK} apply --discard`"
            )

    # -- moves ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def scratch_worktree(self, commit: str, *, with_files: bool = False) -> Iterator[Repo]:
        """A temporary worktree at `commit`, so that nothing half-done is ever in build/checkout.

        Without files, its index is full and its folder empty, which is quick: `git am` takes the few files it needs out
        of the index. A cherry-pick needs them all.
        """
        path = self.project.tmp / "worktree"
        self.repo.git.worktree("add", "--quiet", "--detach", "--no-checkout", str(path), commit)
        open_repo(path).git.read_tree("HEAD", *(["-u", "--reset"] if with_files else []))
        try:
            yield open_repo(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)
            self.repo.git.worktree("prune")

    def switch(self, tip: str) -> None:
        """Move branch `series`, and the files, to `tip`. A kill is made good by the next `open`."""
        self.repo.git.update_ref(_PENDING, tip)
        self._finish_switch(tip, force=False)

    def save(self, reason: str) -> None:
        """Keep HEAD, the branch and uncommitted changes under refs/fork/saved/, where git never drops them."""
        branch = resolve(self.repo, f"refs/heads/{BRANCH}")
        uncommitted = self._snapshot(reason) if self.changed_files() else None
        for commit in dict.fromkeys([uncommitted, self.head, branch]):
            if commit and commit != self.applied:
                keep(self.repo, commit, reason)

    def _snapshot(self, message: str) -> str:
        """Commit of all files as they are now, untracked ones too, made without touching the index."""
        with self.repo.git.custom_environment(GIT_INDEX_FILE=str(self.project.tmp / "index")):
            self.repo.git.read_tree("HEAD")
            self.repo.git.add("--all")
            return self.repo.git.commit_tree("-p", "HEAD", "-m", message, self.repo.git.write_tree())

    def kept(self, kind: str) -> list[str]:
        """References to what was kept as `saved` or as `series`."""
        return self.repo.git.for_each_ref("--format=%(refname)", f"refs/fork/{kind}").split()

    def keep_series(self, version: str, tip: str, *, carried: bool = False) -> None:
        """Make refs/fork/series/VERSION `tip`; another series of the user's that it was stays as refs/fork/saved/N.

        `carried` says that the tool made `tip` from another series with no decision of the user's.
        """
        reference = f"refs/fork/series/{version}"
        before = resolve(self.repo, reference)
        if before not in (None, tip) and not self.is_carried(version):
            keep(self.repo, before, f"an earlier series of {version}")
        if carried and before != tip:  # what was the user's before stays the user's
            self.repo.git.update_ref(f"refs/fork/carried/{version}", tip)
        self.repo.git.update_ref(reference, tip)

    def is_carried(self, version: str) -> bool:
        """Whether the kept series of `version` is one that the tool can make again."""
        carried = resolve(self.repo, f"refs/fork/carried/{version}")
        return carried is not None and carried == resolve(self.repo, f"refs/fork/series/{version}")

    def discard(self) -> None:
        """Save what is the user's, then make the working tree clean."""
        self.save("discarded")
        if self.head:
            self.repo.git.reset("--quiet", "--hard")
            self.repo.git.clean("--quiet", "-d", "--force")

    def _finish_switch(self, tip: str, force: bool) -> None:
        self.repo.git.checkout("--quiet", *(["--force"] if force else []), "-B", BRANCH, tip)
        self.repo.git.update_ref(_APPLIED, tip)
        self.repo.git.update_ref("-d", _PENDING)

    def _recover(self) -> None:
        tip = resolve(self.repo, _PENDING)
        if tip is None:
            return
        say("finishing a switch of build/checkout that was interrupted")
        (Path(self.repo.git_dir) / "index.lock").unlink(missing_ok=True)
        if self.changed_files():
            self.save("interrupted")
        self._finish_switch(tip, force=True)


def keep(repo: Repo, commit: str, reason: str) -> None:
    """Give `commit` a reference refs/fork/saved/N and tell the user."""
    names = repo.git.for_each_ref("--format=%(refname:lstrip=3)", "refs/fork/saved").split()
    reference = f"refs/fork/saved/{max(map(int, names), default=0) + 1}"
    repo.git.update_ref(reference, commit)
    say(f"{reason}: {commit[:12]} stays in build/checkout as {reference}")


def _write_fast_import(stream: BinaryIO, wheel: Path, version: str, reference: str) -> None:
    message = f"sglang {version}\n".encode()
    stream.write(f"reset {reference}\ncommit {reference}\n".encode())
    stream.write(f"committer {IDENTITY.name} <{IDENTITY.email}> {IMPORT_DATE}\n".encode())
    stream.write(b"data %d\n%s" % (len(message), message))
    with zipfile.ZipFile(wheel) as archive:
        for entry in sorted(archive.infolist(), key=lambda entry: entry.filename):
            if entry.is_dir() or not is_source(entry.filename):
                continue
            data = archive.read(entry)
            mode = "100755" if entry.external_attr >> 16 & 0o100 else "100644"
            stream.write(f"M {mode} inline {entry.filename}\ndata {len(data)}\n".encode())
            stream.write(data)
            stream.write(b"\n")


def is_source(name: str) -> bool:
    """Whether a wheel entry is part of the imported tree."""
    folder, _, base = name.rpartition("/")
    return not name.endswith(_COMPILED) and not (folder.endswith(".dist-info") and base in _UNSHARED)


def _some(items: list[str]) -> str:
    """The first three, and how many more there are."""
    shown = ", ".join(items[:3])
    return shown if len(items) <= 3 else f"{shown} and {len(items) - 3} more"
