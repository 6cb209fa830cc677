"""The patch series: read, apply exactly, export, and what each patch must say about itself."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from git import GitCommandError, Repo
from unidiff import PatchSet

from tools.anchors import anchors_of
from tools.errors import ForkError, is_full_disk
from tools.git import commits_between
from tools.project import OVERLAY, Project, write_atomic

MAX_SERIES_ADDED = 150
MAX_PATCH_ADDED = 30
STATUSES = ("Pending", "Submitted", "Accepted", "Backport", "Denied", "Inappropriate")
_TRAILERS = ("Upstream-Status", "Drop-When", "Anchor", "Test")
_NUMBERED = re.compile(r"(\d{4})-(.+)\.patch")
_FORMAT = (
    *("-U1", "--no-numbered", "--zero-commit", "--no-signature", "--full-index", "--no-stat", "--no-renames"),
    *("--no-thread", "--no-attach", "--no-cover-letter", "--no-base", "--no-color", "--binary"),
    *("--no-add-header", "--no-notes"),
)
_AM = (
    *("--quiet", "--no-3way", "--keep-cr", "--keep-non-patch", "--no-scissors", "--quoted-cr=nowarn"),
    *("--committer-date-is-author-date", "--patch-format=mbox", "--no-gpg-sign"),
)


@dataclass(frozen=True)
class Patch:
    """One commit of the series. Line counts are those of its -U1 diff."""

    slug: str
    commit: str
    subject: str
    why: str
    trailers: Mapping[str, Sequence[str]]
    anchors: tuple[str, ...]
    added: int
    quoted: int
    binary: tuple[str, ...]
    added_lines: tuple[str, ...]

    @property
    def declared(self) -> tuple[str, ...]:
        """Its `Anchor:` trailers."""
        return tuple(sorted(self.trailers.get("Anchor", ())))

    def anchor_problem(self) -> str | None:
        """Where the patch lands and should not, None when it lands as declared."""
        if self.anchors == self.declared:
            return None
        says = f"says Anchor: {', '.join(self.declared)}" if self.declared else "has no Anchor: trailer"
        return f"patch {self.slug} {says}, but its lines land in {', '.join(self.anchors)}"


def patch_files(project: Project) -> list[Path]:
    """patches/*.patch in order.

    Raises:
        ForkError: a number is missing, doubled or malformed, so a patch was lost or added by hand.
    """
    files = sorted(project.patches.glob("*.patch"))
    for number, path in enumerate(files, start=1):
        match = _NUMBERED.fullmatch(path.name)
        if match is None or int(match[1]) != number:
            raise ForkError(
                f"patches/{path.name} is where number {number:04d} should be: a patch is missing or misnamed, "
                "restore patches/ with git"
            )
    return files


def slug_of(path: Path) -> str:
    """`0003-some-subject.patch` -> `some-subject`."""
    return path.name[5:].removesuffix(".patch")


def apply_series(worktree: Repo, files: Sequence[Path]) -> str:
    """`git am` each file on the worktree's HEAD, exactly: no 3-way, no fuzz. Returns the tip.

    Raises:
        ForkError: a patch does not apply; the text names it and the place.
    """
    for path in files:
        try:
            worktree.git.am(*_AM, str(path))
        except GitCommandError as error:
            if is_full_disk(str(error.stderr)):
                raise
            places = re.findall(r"error: (?:patch failed: )?(.+)", str(error.stderr))
            raise ForkError(
                f"patches/{path.name} does not apply exactly ({places[0] if places else 'no usable patch in it'}): "
                "restore patches/ and upstream.lock with git, or carry the series to another release with "
                "`make rebase TO=VERSION`"
            ) from None
    return worktree.git.rev_parse("HEAD")


def format_series(project: Project, repo: Repo, base: str, tip: str) -> dict[str, bytes]:
    """Patch file name -> text of every commit in `base..tip`.

    Raises:
        ForkError: a commit changes nothing, so git would leave it out without a word.
    """
    commits = commits_between(repo, base, tip)
    folder = project.tmp / "format-patch"
    repo.git.format_patch(*_FORMAT, "--output-directory", str(folder), f"{base}..{tip}")
    texts = {path.name: path.read_bytes() for path in sorted(folder.glob("*.patch"))}
    for path in folder.glob("*.patch"):
        path.unlink()
    if len(texts) != len(commits) or not all(texts.values()):
        raise ForkError(
            "a commit in build/checkout changes nothing, which no patch can hold: drop it with `git rebase -i`"
        )
    return texts


def describe_series(repo: Repo, base: str, texts: Mapping[str, bytes], tip: str) -> list[Patch]:
    """What each commit of `base..tip` is, in order. `texts` are its patch files, by which the slugs are known."""
    commits = commits_between(repo, base, tip)
    return [describe(repo, commit, slug_of(Path(name))) for commit, name in zip(commits, sorted(texts), strict=True)]


def describe(repo: Repo, commit: str, slug: str) -> Patch:
    """What one commit of the series is.

    Raises:
        ForkError: it leaves a file that is not Python any more.
    """
    subject, _, body = repo.git.log("-1", "--format=%B", commit).partition("\n")
    trailers: dict[str, list[str]] = {}
    for line in repo.git.log("-1", "--format=%(trailers:only,unfold)", commit).splitlines():
        key, _, value = line.partition(": ")
        trailers.setdefault(key, []).append(value.strip())
    paragraph = body.strip().split("\n\n")[0].replace("\n", " ")
    diff = PatchSet(repo.git.diff_tree("-p", "-U1", "--full-index", "--no-renames", "--no-commit-id", commit))
    try:
        anchors = tuple(anchors_of(repo, commit))
    except ForkError as error:
        raise ForkError(f"patch {slug}: {error}") from None
    lines = [line for file in diff for hunk in file for line in hunk]
    return Patch(
        slug=slug,
        commit=commit,
        subject=subject,
        why="" if any(paragraph.startswith(f"{key}:") for key in _TRAILERS) else paragraph,
        trailers=trailers,
        anchors=anchors,
        added=sum(line.is_added for line in lines),
        quoted=sum(line.is_context or line.is_removed for line in lines),
        binary=tuple(file.path for file in diff if file.is_binary_file),
        added_lines=tuple(line.value.strip() for line in lines if line.is_added),
    )


def problems(project: Project, patches: Sequence[Patch]) -> list[str]:
    """What is wrong with the series besides its anchors: trailers, tests, sizes, what it calls."""
    found = [text for patch in patches for text in _patch_problems(project, patch)]
    added, quoted = sum(patch.added for patch in patches), sum(patch.quoted for patch in patches)
    if added >= MAX_SERIES_ADDED:
        found.append(f"the series adds {added} lines, the limit is {MAX_SERIES_ADDED - 1}: move logic into overlay/")
    if patches and quoted >= added:
        found.append(
            f"the series quotes {quoted} lines of upstream for {added} added: add lines rather than rewrite them"
        )
    return found


def _patch_problems(project: Project, patch: Patch) -> list[str]:
    found = [f"has no {key}: trailer" for key in _TRAILERS if not patch.trailers.get(key)]
    found += [f"is binary in {path}: keep binary files in overlay/" for path in patch.binary]
    if not patch.why:
        found.append("does not say why: its message needs a paragraph on why no lower rung did")
    found += [
        f"has Upstream-Status: {value}, which starts with none of {', '.join(STATUSES)}"
        for value in patch.trailers.get("Upstream-Status", ())
        if not value.startswith(STATUSES)
    ]
    found += [
        f"names the test {test}, which is not there"
        for test in patch.trailers.get("Test", ())
        if not _exists(project, test)
    ]
    if patch.added > MAX_PATCH_ADDED:
        found.append(f"adds {patch.added} lines, the limit is {MAX_PATCH_ADDED}: move logic into overlay/")
    found += [
        f"calls {line!r}: patches may call {OVERLAY}.hooks only"
        for line in patch.added_lines
        if _reaches_past_hooks(line)
    ]
    return [f"patch {patch.slug} {text}" for text in found]


def _reaches_past_hooks(line: str) -> bool:
    allowed = line.replace(f"{OVERLAY}.hooks", "").replace(f"from {OVERLAY} import hooks", "")
    return not line.startswith("#") and OVERLAY in allowed


def _exists(project: Project, test: str) -> bool:
    path, _, name = test.partition("::")
    file = project.root / path
    function = name.rpartition("::")[2].partition("[")[0]
    return file.is_file() and (not function or f"def {function}(" in file.read_text())


def write_series(project: Project, texts: Mapping[str, bytes], index: str) -> None:
    """Make patches/ hold exactly `texts` and the index. Each file is replaced whole; running it again finishes it."""
    for name, text in texts.items():
        write_atomic(project.patches / name, text)
    for path in project.patches.glob("*.patch"):
        if path.name not in texts:
            path.unlink()
    write_atomic(project.patches / "README.md", index.encode())


def index_text(version: str, patches: Sequence[Patch]) -> str:
    """patches/README.md."""
    lines = [
        "# The patch series",
        "",
        f"On SGLang {version}. Generated by `make export-patches`; the text comes from the patches' own messages.",
        "How to change a patch: [docs/fork.md](../docs/fork.md).",
        "",
        "| patch | status | target | why | drop when |",
        "|---|---|---|---|---|",
    ]
    for number, patch in enumerate(patches, start=1):
        cells = [
            f"[{number:04d}-{patch.slug}]({number:04d}-{patch.slug}.patch)",
            " ".join(patch.trailers.get("Upstream-Status", ["-"])),
            "<br>".join(f"`{anchor}`" for anchor in patch.anchors),
            patch.why,
            " ".join(patch.trailers.get("Drop-When", ["-"])),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if not patches:
        lines.append("| none yet | | | | |")
    return "\n".join(lines) + "\n"
