"""Git through GitPython, with nothing of the user's or the machine's configuration in it."""

import hashlib
import os
from pathlib import Path

from git import Actor, Git, GitCommandError, InvalidGitRepositoryError, Repo

from tools.errors import ForkError

IDENTITY = Actor("sglang-sm120", "fork@sglang-sm120.invalid")
IMPORT_DATE = "946684800 +0000"

# Set for every call, above whatever .git/config says: each of these can change a tree, a patch text or a merge.
_CONFIG = {
    "am.threeWay": "false",
    "apply.ignoreWhitespace": "no",
    "apply.whitespace": "nowarn",
    "commit.gpgSign": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.fileMode": "true",
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "core.quotePath": "false",
    "diff.algorithm": "myers",
    "diff.indentHeuristic": "true",
    "diff.mnemonicPrefix": "false",
    "diff.noprefix": "false",
    "diff.orderFile": "/dev/null",
    "diff.renameLimit": "20000",
    "diff.suppressBlankEmpty": "false",
    "format.encodeEmailHeaders": "true",
    "format.from": "false",
    "format.signOff": "false",
    "format.subjectPrefix": "PATCH",
    "format.suffix": ".patch",
    "gc.auto": "0",
    "i18n.commitEncoding": "UTF-8",
    "i18n.logOutputEncoding": "UTF-8",
    "maintenance.auto": "false",
    "merge.conflictStyle": "zdiff3",
    "merge.renameLimit": "20000",
    "rerere.enabled": "false",
    "user.name": str(IDENTITY.name),
    "user.email": str(IDENTITY.email),
}


def hermetic_environment() -> dict[str, str]:
    """Environment variables for git: no outside configuration, fixed identity, C locale."""
    environment = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_EDITOR": "false",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CONFIG_COUNT": str(len(_CONFIG)),
        "LC_ALL": "C",
        "TZ": "UTC",
    }
    for index, (key, value) in enumerate(_CONFIG.items()):
        environment[f"GIT_CONFIG_KEY_{index}"] = key
        environment[f"GIT_CONFIG_VALUE_{index}"] = value
    return environment


def open_repo(path: Path) -> Repo:
    """The repository at `path`, its git calls hermetic."""
    _shed_environment()
    repo = Repo(path)
    repo.git.update_environment(**hermetic_environment())
    return repo


def init_repo(path: Path, branch: str) -> Repo:
    """A new repository whose attributes make git keep every byte as it is."""
    _shed_environment()
    path.mkdir(parents=True)
    git = Git(path)
    git.update_environment(**hermetic_environment())
    git.init("--quiet", "--template=", f"--initial-branch={branch}")
    info = path / ".git" / "info"
    info.mkdir(exist_ok=True)
    # info/attributes outranks any .gitattributes that upstream may ship.
    (info / "attributes").write_text(
        "* -text -ident !filter !diff !merge !working-tree-encoding !export-ignore !export-subst\n"
    )
    (info / "exclude").write_text("__pycache__/\n*.pyc\n")
    return open_repo(path)


def resolve(repo: Repo, revision: str) -> str | None:
    """Object id of `revision`, or None when there is none."""
    try:
        return repo.git.rev_parse("--verify", "--quiet", revision)
    except GitCommandError:
        return None


def commits_between(repo: Repo, base: str, tip: str) -> list[str]:
    """Commits of `base..tip`, oldest first.

    Raises:
        ForkError: the history is not one line on top of `base`, so it is no patch series.
    """
    if repo.git.merge_base(base, tip, with_exceptions=False) != resolve(repo, base):
        raise ForkError(f"build/checkout is not based on the pinned release ({base[:12]}): `git rebase` it onto that")
    if merges := repo.git.rev_list("--merges", f"{base}..{tip}").split():
        raise ForkError(
            f"commit {merges[0][:12]} is a merge, which no patch can hold: `git rebase` to a linear history"
        )
    return repo.git.rev_list("--reverse", f"{base}..{tip}").split()


def file_at(repo: Repo, commit: str, path: str) -> bytes | None:
    """Bytes of `path` in `commit`, or None when it is not there."""
    if resolve(repo, f"{commit}:{path}") is None:
        return None
    return repo.git.cat_file("blob", f"{commit}:{path}", stdout_as_string=False, strip_newline_in_stdout=False)


def blob_id(data: bytes) -> str:
    """The id that git gives to a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def committed_blobs(root: Path, path: str) -> set[str]:
    """Ids of all that commits of the repository at `root` have below `path`; none where there is no repository."""
    try:
        repo = open_repo(root)
    except InvalidGitRepositoryError:
        return set()
    return {line.split()[0] for line in repo.git.rev_list("--objects", "--all", "--", path).splitlines()}


def _shed_environment() -> None:
    """Remove GIT_* variables (set inside a git hook, for one): they would point git at another repository."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        del os.environ[name]
