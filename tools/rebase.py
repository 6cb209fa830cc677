"""Carry the series from the pinned release to another one, patch by patch, and stop wherever a human must look.

Each patch is cherry-picked between two imported trees in build/rebase, without rerere and without fuzz, and its
result is compared with what it was. Nothing outside build/ changes until every patch is through; then the report,
patches/ and upstream.lock are written, in that order, and build/checkout moves.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from git import Actor, Commit, GitCommandError, Repo
from packaging.version import Version
from unidiff import PatchSet

from tools.anchors import anchors_of, missing_anchors
from tools.checkout import Checkout, keep
from tools.errors import FORK, ForkError, say
from tools.fetch import releases
from tools.git import IDENTITY, open_repo
from tools.lock import Lock, read_lock, write_lock
from tools.project import Project, running_python_tag, write_atomic
from tools.series import Patch, describe, describe_series, index_text, patch_files, slug_of, write_series
from tools.verbs import (
    applied_exactly,
    apply,
    canonical_series,
    import_pinned,
    pin_release,
    refuse_during_rebase,
    requirement_problems,
)

CLEAN = "clean"
MOVED = "moved"
PARTLY = "partly absorbed"
CONFLICT = "conflict"
ABSORBED = "absorbed"
GONE = "target gone"
BROKEN = "broken"
_WRITTEN = "upstream.lock patches docs/upgrades"
_COMMAND = f"`{FORK} rebase --continue"
_NEXT_STEP = {
    MOVED: f"accept that with {_COMMAND} --accept {{slug}}`, or move the lines in build/rebase and {_COMMAND}`",
    PARTLY: f"accept what is left with {_COMMAND} --accept {{slug}}`, or correct build/rebase and {_COMMAND}`",
    CONFLICT: f"resolve it in build/rebase, then {_COMMAND}`",
    ABSORBED: f"take it out of the series with {_COMMAND} --drop {{slug}}`",
    GONE: f"put the change where it belongs now in build/rebase, then {_COMMAND}`, or {_COMMAND} --drop {{slug}}`",
    BROKEN: f"correct build/rebase, then {_COMMAND}`",
}


@dataclass(frozen=True)
class Outcome:
    """What became of one patch. `tree` is the git tree with it, None when git could not merge it."""

    status: str
    detail: str = ""
    tree: str | None = None


@dataclass
class State:
    """A rebase in progress, kept in build/rebase.json.

    Attributes:
        old: lock document the series comes from.
        new: lock document of the new release; its series part is filled in at the end.
        old_base, old_tip, new_base: commits in build/checkout.
        tip: the series so far on the new release.
        todo: (slug, commit) still to carry. The first one is the stopped one.
        results: (slug, result) of the patches that are through.
        accept, drop: slugs the user decided on.
        stopped: why the user has to look, while they have to.
        finishing: all patches are through and the results are being written.
    """

    old: dict
    new: dict
    old_base: str
    old_tip: str
    new_base: str
    tip: str
    todo: list[tuple[str, str]]
    results: list[tuple[str, str]]
    accept: list[str]
    drop: list[str]
    stopped: Outcome | None = None
    finishing: bool = False

    @property
    def title(self) -> str:
        """`0.5.22-to-0.5.23`."""
        return f"{self.old['upstream']['version']}-to-{self.new['upstream']['version']}"

    @property
    def total(self) -> int:
        """Patches before."""
        return len(self.todo) + len(self.results)

    @property
    def by_machine(self) -> bool:
        """Whether nothing in the series so far is the user's decision or resolution: it can be made again."""
        return all(result == CLEAN for _, result in self.results)

    def save(self, path: Path) -> None:
        """Write build/rebase.json atomically."""
        write_atomic(path, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> "State":
        """Read build/rebase.json. Raises ForkError when no rebase is in progress."""
        if not path.exists():
            raise ForkError("no rebase is in progress: begin one with `make rebase TO=VERSION`")
        fields = json.loads(path.read_text())
        if fields["stopped"]:
            fields["stopped"] = Outcome(**fields["stopped"])
        return cls(**fields)


def start(project: Project, version: str, accept: Sequence[str], drop: Sequence[str]) -> None:
    """Begin carrying the series to `version` and go as far as possible.

    Raises:
        ForkError: at the first patch that needs a human, or when there is no such release.
    """
    refuse_during_rebase(project)
    old = read_lock(project.lock)
    if Version(version) == Version(old.version):
        raise ForkError(f"the series is on sglang {old.version} already")
    checkout = Checkout.open(project)
    checkout.require_untouched()
    new = pin_release(project, checkout, version)
    apply(project)
    old_base, new_base = import_pinned(project, checkout, old), import_pinned(project, checkout, new)
    tip = checkout.repo.git.rev_parse("HEAD")
    commits = checkout.repo.git.rev_list("--reverse", f"{old_base}..{tip}").split()
    slugs = [slug_of(path) for path in patch_files(project)]
    state = State(
        old=old.to_dict(),
        new=new.to_dict(),
        old_base=old_base,
        old_tip=tip,
        new_base=new_base,
        tip=new_base,
        todo=list(zip(slugs, commits, strict=True)),
        results=[],
        accept=[],
        drop=[],
    )
    _decide(state, accept, drop)
    shutil.rmtree(project.rebase, ignore_errors=True)
    state.save(project.rebase_state)
    _carry_on(project, checkout, state, None)


def resume(project: Project, accept: Sequence[str], drop: Sequence[str]) -> None:
    """Take the user's resolution of, or decision on, the stopped patch and go on. Also resumes after a kill.

    Raises:
        ForkError: at the next patch that needs a human, or at the same one.
    """
    state = State.load(project.rebase_state)
    checkout = Checkout.open(project)
    _decide(state, accept, drop)
    resolution = None
    if state.stopped and state.todo[0][0] not in state.drop:
        resolution = _resolution(_worktree(project, checkout, state.tip), state)
    _carry_on(project, checkout, state, resolution)


def abort(project: Project) -> None:
    """Give the rebase up. What the user did in build/rebase is kept as refs/fork/saved/N."""
    state = State.load(project.rebase_state)
    if state.finishing:
        raise ForkError(f"every patch is through and the results are being written: end it with {_COMMAND}`")
    checkout = Checkout.open(project)
    if state.stopped and project.rebase.exists():
        worktree = open_repo(project.rebase)
        worktree.git.add("--all")
        tree, head = worktree.git.write_tree(), worktree.git.rev_parse("HEAD")
        if not state.by_machine or head != state.tip or tree != _stopped_tree(checkout, state):
            keep(checkout.repo, _commit(worktree, state.todo[0][1], tree, head), "rebase given up")
    _close(project, checkout)
    say(f"rebase {state.title} given up; patches/ and upstream.lock are as they were")


def _stopped_tree(checkout: Checkout, state: State) -> str:
    """Git tree of all files as git left them when it stopped, conflict markers among them, made once more."""
    slug, commit = state.todo[0]
    with checkout.scratch_worktree(state.tip, with_files=True) as worktree:
        carry(worktree, describe(worktree, commit, slug))
        worktree.git.add("--all")
        return worktree.git.write_tree()


def drift(project: Project, version: str | None) -> None:
    """Try the series on a release, the newest by default, and print how each patch fares. Moves nothing.

    A patch that cannot be merged is left out, and the next ones are tried without it.

    Raises:
        ForkError: counts the patches that need a human.
    """
    lock = read_lock(project.lock)
    if version is None:
        version = releases(running_python_tag())[0]
        say(f"{version} is the newest release{' and is the pinned one' if version == lock.version else ''}")
    checkout = Checkout.open(project)
    base = import_pinned(project, checkout, lock)
    files = patch_files(project)
    tip, _ = applied_exactly(project, checkout, base, files)
    pinned = Version(version) == Version(lock.version)
    new = lock if pinned else pin_release(project, checkout, version)
    new_base = import_pinned(project, checkout, new)
    patches = describe_series(checkout.repo, base, {path.name: b"" for path in files}, tip)
    failing = 0
    with checkout.scratch_worktree(new_base, with_files=True) as worktree:
        for number, patch in enumerate(patches, start=1):
            outcome = carry(worktree, patch)
            failing += outcome.status != CLEAN
            kept = _commit(worktree, patch.commit, outcome.tree, "HEAD") if outcome.tree else "HEAD"
            worktree.git.reset("--quiet", "--hard", kept)
            detail = f": {outcome.detail}" if outcome.detail else ""
            print(f"{number}/{len(patches)} {patch.slug}: {outcome.status}{detail}")
    if failing:
        raise ForkError(
            f"{failing} of {len(patches)} patches need work on sglang {new.version}: `make rebase TO={new.version}`"
        )
    say(f"all {len(patches)} patches of sglang {lock.version} carry to {new.version}")


def carry(worktree: Repo, patch: Patch) -> Outcome:
    """Cherry-pick one patch onto the worktree's HEAD without committing, and judge the result.

    The index and the files keep the result, conflict markers among them.
    """
    before = missing_anchors(worktree, f"{patch.commit}^", patch.declared)
    gone = [anchor for anchor in missing_anchors(worktree, "HEAD", patch.declared) if anchor not in before]
    try:
        worktree.git.cherry_pick("--no-commit", patch.commit)
    except GitCommandError:
        places = ", ".join(_conflicts(worktree))
        if not places:
            raise
        if gone:
            return Outcome(GONE, f"{', '.join(gone)}{_hint(worktree, gone)}, git gives up at {places}")
        return Outcome(CONFLICT, places)
    return judge(worktree, patch, by_hand=False)


def judge(worktree: Repo, patch: Patch, *, by_hand: bool) -> Outcome:
    """Compare what the index changes, and where, with what the patch did before.

    `by_hand` says that a human wrote the result: other lines than before are then meant.
    """
    tree = worktree.git.write_tree()
    if tree == worktree.git.rev_parse("HEAD^{tree}"):
        return Outcome(ABSORBED, "upstream does all of it", tree)
    commit = _commit(worktree, patch.commit, tree, "HEAD")
    try:
        anchors = anchors_of(worktree, commit)
    except ForkError as error:
        return Outcome(BROKEN, str(error), tree)
    if tuple(anchors) != patch.declared:
        return Outcome(MOVED, f"{', '.join(patch.declared)} -> {', '.join(anchors)}", tree)
    lost = _changed_lines(worktree, patch.commit) - _changed_lines(worktree, commit)
    if lost and not by_hand:
        return Outcome(PARTLY, f"upstream does {lost.total()} of its lines", tree)
    return Outcome(CLEAN, "resolved by hand" if by_hand else "", tree)


def _carry_on(project: Project, checkout: Checkout, state: State, resolution: Outcome | None) -> None:
    """Carry what is left, `resolution` being the outcome of the first patch, and finish. State is saved per patch."""
    worktree = _worktree(project, checkout, state.tip)
    while state.todo:
        slug, commit = state.todo[0]
        if slug in state.drop:
            result = f"dropped{f' ({state.stopped.status})' if state.stopped else ''}"
        else:
            patch = describe(worktree, commit, slug)
            if resolution is None:
                worktree.git.reset("--quiet", "--hard", state.tip)
            outcome = resolution or carry(worktree, patch)
            accepted = outcome.status in (MOVED, PARTLY) and slug in state.accept
            if outcome.status != CLEAN and not accepted:
                state.stopped = outcome
                state.save(project.rebase_state)
                raise ForkError(
                    f"patch {slug}: {outcome.status}: {outcome.detail}: {_NEXT_STEP[outcome.status].format(slug=slug)}"
                )
            state.tip = _commit(worktree, commit, outcome.tree, state.tip, reanchor=accepted)
            result = _result(state.stopped, outcome)
        say(f"{len(state.results) + 1}/{state.total} {slug}: {result}")
        state.todo.pop(0)
        state.results.append((slug, result))
        state.stopped = resolution = None
        worktree.git.reset("--quiet", "--hard", state.tip)
        state.save(project.rebase_state)
    _finish(project, checkout, state)


def _result(stopped: Outcome | None, outcome: Outcome) -> str:
    words = [f"{stopped.status} at {stopped.detail}"] if stopped and stopped.status in (CONFLICT, GONE) else []
    words.append(f"{outcome.status}, accepted" if outcome.status != CLEAN else CLEAN)
    return ", ".join(words) + (f": {outcome.detail}" if outcome.detail else "")


def _resolution(worktree: Repo, state: State) -> Outcome:
    """The outcome of the stopped patch from what is in build/rebase now."""
    slug, commit = state.todo[0]
    deleted = [path for path, stages in _unmerged(worktree) if "2" not in stages]
    if deleted:
        raise ForkError(
            f"{deleted[0]} is not in the new release: put the change where it belongs now, `git rm {deleted[0]}` in "
            f"build/rebase, then {_COMMAND}`, or {_COMMAND} --drop {slug}`"
        )
    if places := list(_markers(worktree, [path for path, _ in _unmerged(worktree)])):
        raise ForkError(
            f"{', '.join(places)} still has conflict markers: resolve them in build/rebase, then {_COMMAND}`"
        )
    if worktree.git.rev_parse("HEAD") != state.tip:
        keep(worktree, "HEAD", f"commits made in build/rebase become part of {slug}")
        worktree.git.reset("--quiet", "--soft", state.tip)
    worktree.git.add("--all")
    patch = describe(worktree, commit, slug)
    untouched = state.stopped is not None and worktree.git.write_tree() == state.stopped.tree
    return judge(worktree, patch, by_hand=not untouched)


def _finish(project: Project, checkout: Checkout, state: State) -> None:
    """Prove the carried series, then write report, patches and lock, and move build/checkout. Safe to run again."""
    old, new = Lock.from_dict(state.old), Lock.from_dict(state.new)
    if not state.finishing:
        untouched = checkout.head == state.old_tip == checkout.applied and not checkout.changed_files()
        if not untouched or read_lock(project.lock) != old:
            raise ForkError(
                "build/checkout or upstream.lock changed since the rebase began: "
                f"give it up with `{FORK} rebase --abort`, keep the change with `make export-patches`, and begin again"
            )
    texts, patches, tip = canonical_series(project, checkout, state.new_base, state.tip)
    dropped = [slug for slug, _ in state.results if slug in state.drop]
    if len(texts) != old.patch_count - len(dropped):
        raise ForkError(
            f"{old.patch_count} patches before, {len(dropped)} dropped, but {len(texts)} after: a patch was lost, "
            f"`{FORK} rebase --abort` and report this"
        )
    new = replace(new, series_tree=checkout.tree(tip), patch_count=len(texts))
    ranges = f"{state.old_base}..{state.old_tip}", f"{state.new_base}..{tip}"
    range_diff = checkout.repo.git.range_diff("--no-color", *ranges) if texts else ""
    state.finishing = True
    state.save(project.rebase_state)
    checkout.keep_series(old.version, state.old_tip)
    checkout.keep_series(new.version, tip, carried=state.by_machine)
    write_lock(project.lock_left_at(old.version), old)
    report = project.upgrades / f"{state.title}.md"
    write_atomic(report, _report(old, new, state.results, dropped, range_diff).encode())
    write_series(project, texts, index_text(new.version, patches))
    write_lock(project.lock, new)
    checkout.switch(tip)
    _close(project, checkout)
    say(f"sglang {new.version}: {len(texts)} patches, {len(dropped)} dropped; report in {project.show(report)}")
    pins = requirement_problems(project, new)
    for problem in pins:
        say(f"problem: {problem}")
    say(
        f"next: {'correct these pins, then ' if pins else ''}`make install && make test-all`, then commit {_WRITTEN}; "
        f"to go back: {_way_back(project, old.version)}"
    )


def _way_back(project: Project, version: str) -> str:
    """The command that restores lock and series as the rebase found them, committed or not.

    Applying comes first: it refuses where what has been done since would be lost. The report stays.
    """
    commands = (
        "make apply-patches",
        f"cp {project.show(project.lock_left_at(version))} {project.show(project.lock)}",
        f"git -C {project.show(project.checkout)} reset --quiet --hard refs/fork/series/{version}",
        "make export-patches",
    )
    return f"`{' && '.join(commands)}`"


def _report(old: Lock, new: Lock, results: Sequence[tuple[str, str]], dropped: Sequence[str], range_diff: str) -> str:
    lines = [
        f"# sglang {old.version} to {new.version}",
        "",
        f"{old.patch_count} patches before, {len(dropped)} dropped, {new.patch_count} after. Written by `make rebase`.",
        "",
        "| | upstream tree | series tree |",
        "|---|---|---|",
        f"| {old.version} | `{old.upstream_tree}` | `{old.series_tree}` |",
        f"| {new.version} | `{new.upstream_tree}` | `{new.series_tree}` |",
        "",
        "| patch | result |",
        "|---|---|",
        *(f"| {slug} | {result} |" for slug, result in results),
        "",
        "## range-diff",
        "",
        "```",
        *(line.rstrip() for line in range_diff.splitlines()),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _decide(state: State, accept: Sequence[str], drop: Sequence[str]) -> None:
    """Add the user's decisions to the state."""
    left = [slug for slug, _ in state.todo]
    for slug in (*accept, *drop):
        if slug not in left:
            raise ForkError(f"no patch {slug!r} is left to carry: the ones left are {', '.join(left) or 'none'}")
    state.accept += accept
    state.drop += drop


def _worktree(project: Project, checkout: Checkout, tip: str) -> Repo:
    """build/rebase, made if need be."""
    if not project.rebase.exists():
        checkout.repo.git.worktree("prune")
        checkout.repo.git.worktree("add", "--quiet", "--detach", str(project.rebase), tip)
    return open_repo(project.rebase)


def _close(project: Project, checkout: Checkout) -> None:
    shutil.rmtree(project.rebase, ignore_errors=True)
    checkout.repo.git.worktree("prune")
    project.rebase_state.unlink()


def _commit(repo: Repo, original: str, tree: str | None, parent: str, *, reanchor: bool = False) -> str:
    """Commit `tree` with author, date and message of `original`; with `reanchor`, its Anchor: trailers made true."""
    name, email, date, message = repo.git.log("-1", "--date=raw", "--format=%an%n%ae%n%ad%n%B", original).split("\n", 3)

    def create(text: str) -> str:
        commit = Commit.create_from_tree(
            repo,
            repo.tree(tree),
            text.rstrip("\n") + "\n",
            [repo.commit(parent)],
            author=Actor(name, email),
            committer=IDENTITY,
            author_date=date,
            commit_date=date,
        )
        return commit.hexsha

    commit = create(message)
    if reanchor:
        anchors = "\n".join(f"Anchor: {anchor}" for anchor in anchors_of(repo, commit))
        rest = re.sub(r"^Anchor: .*\n?", "", message, flags=re.MULTILINE).rstrip("\n")
        commit = create(f"{rest}\n{anchors}\n")
    return commit


def _changed_lines(repo: Repo, commit: str) -> Counter[str]:
    """The lines `commit` adds and removes, sign first."""
    diff = PatchSet(repo.git.diff_tree("-p", "-U0", "--no-renames", "--no-commit-id", commit))
    return Counter(str(line) for file in diff for hunk in file for line in hunk)


def _unmerged(repo: Repo) -> list[tuple[str, set[str]]]:
    """(path, stages present) of every conflicted file."""
    stages: dict[str, set[str]] = {}
    for line in repo.git.ls_files("--unmerged").splitlines():
        numbers, path = line.split("\t", 1)
        stages.setdefault(path, set()).add(numbers.split()[2])
    return list(stages.items())


def _conflicts(repo: Repo) -> Iterator[str]:
    """`file:line` of every conflict, or that the file is not in the new release."""
    for path, stages in _unmerged(repo):
        if "2" not in stages:
            yield f"{path} (not in the new release)"
        else:
            yield from _markers(repo, [path]) or [path]


def _markers(repo: Repo, paths: Sequence[str]) -> list[str]:
    found = []
    for path in paths:
        file = Path(repo.working_dir) / path
        lines = file.read_bytes().splitlines() if file.exists() else []
        found += [f"{path}:{number}" for number, line in enumerate(lines, 1) if line.startswith(b"<<<<<<< ")]
    return found


def _hint(repo: Repo, gone: Sequence[str]) -> str:
    """Where something of the same name is defined now."""
    names = {anchor.rpartition("::")[2].rpartition(".")[2] for anchor in gone} - {"<module>", "<file>"}
    if not names:
        return ""
    pattern = rf"^\s*(async def|def|class) ({'|'.join(sorted(map(re.escape, names)))})\b"
    found = repo.git.grep("-nE", pattern, "HEAD", "--", "*.py", with_exceptions=False).splitlines()[:3]
    places = [":".join(line.split(":")[1:3]) for line in found]
    return f" (that name is now at {', '.join(places)})" if places else ""
