"""The verbs that work at the pinned release: pin, apply, export, check, status, bump."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tools.checkout import Checkout
from tools.errors import FORK, ForkError, say
from tools.fetch import fetch, fetch_release
from tools.git import blob_id, committed_blobs
from tools.lock import Lock, read_lock, write_lock
from tools.project import PYTHON_TAGS, Project, running_python_tag
from tools.series import (
    Patch,
    apply_series,
    describe_series,
    format_series,
    index_text,
    patch_files,
    problems,
    slug_of,
    write_series,
)

# Requirements that upstream's kernels and model code depend on by exact behaviour; the lock records what it asks for.
_PINNED = ("torch", "torchvision", "triton", "transformers", "sglang-kernel", "flashinfer-python")


def pin_release(project: Project, checkout: Checkout, version: str) -> Lock:
    """Fetch every wheel of a release and return the lock that pins it, with an empty series.

    Its version is the wheels' own: an index takes 0.5.22.0 for 0.5.22.

    Raises:
        ForkError: the wheels do not hold the same sources.
    """
    wheels = tuple(fetch_release(project, version, tag) for tag in PYTHON_TAGS)
    version = wheels[0].version
    first, *others = (project.cache / wheel.filename for wheel in wheels)
    tree = checkout.tree(checkout.import_wheel(version, first))
    for other in others:
        if (found := checkout.tree_of_wheel(version, other)) != tree:
            raise ForkError(
                f"{other.name} and {first.name} hold different sources (trees {found[:12]}, {tree[:12]}): "
                "one patch series cannot serve both, report it upstream"
            )
    return Lock(
        version=version,
        wheels=wheels,
        upstream_tree=tree,
        series_tree=tree,
        patch_count=0,
        revision=1,
        pins=_runtime_pins(first),
    )


def pin(project: Project, version: str) -> None:
    """Write the first upstream.lock."""
    if project.lock.exists():
        raise ForkError(
            f"upstream.lock exists: move to {version} with `make rebase TO={version}`, which carries the patches"
        )
    lock = pin_release(project, Checkout.open(project), version)
    write_lock(project.lock, lock)
    say(f"pinned sglang {lock.version}")


def import_pinned(project: Project, checkout: Checkout, lock: Lock) -> str:
    """Commit of the pinned release, imported if need be, its tree compared with the lock."""
    commit = checkout.upstream(lock.version)
    if commit is None or checkout.tree(commit) != lock.upstream_tree:
        wheel = lock.wheels[0]
        tag = (
            running_python_tag() if any(running_python_tag() == other.python for other in lock.wheels) else wheel.python
        )
        commit = checkout.import_wheel(lock.version, fetch(project, lock, tag))
    if (tree := checkout.tree(commit)) != lock.upstream_tree:
        raise ForkError(
            f"the sources of sglang {lock.version} have git tree {tree}, upstream.lock says {lock.upstream_tree}: "
            "restore upstream.lock with git"
        )
    return commit


def apply(project: Project, *, discard: bool = False, relock: bool = False) -> None:
    """Bring build/checkout to the pinned release plus patches/, exactly."""
    refuse_during_rebase(project)
    lock = read_lock(project.lock)
    checkout = Checkout.open(project)
    base = import_pinned(project, checkout, lock)
    if not discard:
        checkout.require_untouched()
    files = patch_files(project)
    say(f"apply: {len(files)} patches on sglang {lock.version}")
    tip, tree = applied_exactly(project, checkout, base, files)
    if tree != lock.series_tree or len(files) != lock.patch_count:
        if not relock:
            raise ForkError(
                f"patches/ ({len(files)} patches) gives tree {tree}, upstream.lock says {lock.patch_count} patches and "
                f"{lock.series_tree}: a patch was edited, lost or added outside the tool; restore patches/ and "
                "upstream.lock with git, or accept patches/ as it is with "
                f"`{FORK} apply --relock`"
            )
        write_lock(project.lock, replace(lock, series_tree=tree, patch_count=len(files)))
    if discard:
        checkout.discard()
    checkout.switch(tip)
    say(f"build/checkout is at {tip[:12]}, tree {tree}")


def applied_exactly(project: Project, checkout: Checkout, base: str, files: Sequence[Path]) -> tuple[str, str]:
    """(tip, tree) of `files` applied to `base` in a scratch worktree, every anchor checked."""
    with checkout.scratch_worktree(base) as worktree:
        tip = apply_series(worktree, files)
    texts = {path.name: path.read_bytes() for path in files}
    check_anchors(describe_series(checkout.repo, base, texts, tip))
    return tip, checkout.tree(tip)


def check_anchors(patches: Sequence[Patch]) -> None:
    """Raise ForkError when a patch lands anywhere but where it says."""
    moved = [text for patch in patches if (text := patch.anchor_problem())]
    if moved:
        raise ForkError(
            "; ".join(moved) + ": correct the patch, or, if that is where it belongs, its trailers "
            "(`git commit --amend` in build/checkout; docs/fork.md, Change a patch, lists them)"
        )


def export(project: Project) -> None:
    """Write the commits of build/checkout to patches/, and the lock after them."""
    refuse_during_rebase(project)
    lock = read_lock(project.lock)
    checkout = Checkout.open(project)
    base = import_pinned(project, checkout, lock)
    checkout.require_committed()
    if checkout.head is None:
        raise ForkError("build/checkout is empty: run `make apply-patches` first")
    before = {path.name: path.read_bytes() for path in project.patches.glob("*.patch")}
    texts, patches, tip = canonical_series(project, checkout, base, checkout.head)
    for warning in problems(project, patches):
        say(f"warning: {warning}")
    write_series(project, texts, index_text(lock.version, patches))
    write_lock(project.lock, replace(lock, series_tree=checkout.tree(tip), patch_count=len(texts)))
    checkout.switch(tip)
    changed = [name for name, text in texts.items() if text not in before.values()]  # a new number is no change
    dropped = sorted({slug_of(Path(name)) for name in before} - {patch.slug for patch in patches})
    told = f"; dropped: {', '.join(dropped)}" if dropped else ""
    say(f"export: {len(texts)} patches; changed: {', '.join(changed) or 'none'}{told}")


def canonical_series(
    project: Project, checkout: Checkout, base: str, tip: str
) -> tuple[dict[str, bytes], list[Patch], str]:
    """Patch texts of `base..tip`, their descriptions, and the tip that applying those texts gives.

    Raises:
        ForkError: an anchor is wrong, or the texts would not give the same tree back.
    """
    texts = format_series(project, checkout.repo, base, tip)
    patches = describe_series(checkout.repo, base, texts, tip)
    check_anchors(patches)
    folder = project.tmp / "canonical"
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    with checkout.scratch_worktree(base) as worktree:
        applied = apply_series(worktree, sorted(folder.glob("*.patch")))
    if checkout.tree(applied) != checkout.tree(tip) or format_series(project, checkout.repo, base, applied) != texts:
        raise ForkError(
            "the exported patches do not give the commits back (unusual line endings or message?): simplify them"
        )
    return texts, patches, applied


def check(project: Project) -> None:
    """Everything that must hold for the committed lock, patches and index, without touching build/checkout's files.

    Raises:
        ForkError: counts the problems, which are printed before it.
    """
    lock = read_lock(project.lock)
    checkout = Checkout.open(project)
    base = import_pinned(project, checkout, lock)
    for wheel in lock.wheels:
        if (project.cache / wheel.filename).exists():
            tree = checkout.tree_of_wheel(lock.version, fetch(project, lock, wheel.python))
            if tree != lock.upstream_tree:
                raise ForkError(f"{wheel.filename} has source tree {tree}, upstream.lock says {lock.upstream_tree}")
    files = patch_files(project)
    tip, tree = applied_exactly(project, checkout, base, files)
    texts = {path.name: path.read_bytes() for path in files}
    patches = describe_series(checkout.repo, base, texts, tip)
    found = problems(project, patches)
    if tree != lock.series_tree or len(files) != lock.patch_count:
        found.append(f"patches/ gives tree {tree} with {len(files)} patches, upstream.lock says otherwise")
    if format_series(project, checkout.repo, base, tip) != texts:
        found.append("exporting patches/ does not give the same bytes: run `make export-patches`")
    index = project.patches / "README.md"
    if not index.exists() or index.read_text() != index_text(lock.version, patches):
        found.append("patches/README.md is stale: run `make export-patches`")
    found += requirement_problems(project, lock)
    for problem in found:
        print(f"problem: {problem}")
    if found:
        raise ForkError(f"{len(found)} problem{'s' * (len(found) > 1)} in the series: see above")
    say(f"check: {len(files)} patches on sglang {lock.version} are exact, anchored and exported")
    try:
        checkout.require_untouched()
    except ForkError as work_in_progress:
        say(f"note: {work_in_progress}")


def status(project: Project) -> None:
    """Print pin, series, checkout and cache."""
    lock = read_lock(project.lock)
    print(f"sglang        {lock.version}, our version {lock.fork_version}")
    print(f"series        {lock.patch_count} patches, tree {lock.series_tree}")
    for wheel in lock.wheels:
        where = "in build/cache" if (project.cache / wheel.filename).exists() else "not fetched"
        print(f"wheel {wheel.python}   {where}")
    for name, specifier in lock.pins.items():
        print(f"pin           {name} {specifier or '(any)'}")
    if not project.checkout.exists():
        print("checkout      none: run `make apply-patches`")
        return
    checkout = Checkout.open(project)
    state = "as applied" if checkout.head == checkout.applied else f"own commits: {len(checkout.own_commits())}"
    print(f"checkout      {state}, uncommitted files: {len(checkout.changed_files())}")
    if project.rebase_state.exists():
        print(f"rebase        in progress: `{FORK} rebase --continue` or `{FORK} rebase --abort`")


def bump(project: Project) -> None:
    """Raise our revision by one, for a new wheel of the same upstream release."""
    lock = read_lock(project.lock)
    lock = replace(lock, revision=lock.revision + 1)
    write_lock(project.lock, lock)
    say(f"our version is now {lock.fork_version}")


def clean(project: Project, *, force: bool) -> None:
    """Empty build/, unless work of the user's in it would be lost."""
    if project.checkout.exists() and not force:
        refuse_during_rebase(project)
        checkout = Checkout.open(project)
        checkout.require_untouched()
        if kept := [*checkout.kept("saved"), *_uncommitted_series(project, checkout)]:
            for reference in kept:
                folder = f"../../kept/{reference.removeprefix('refs/fork/')}"
                print(f"git -C build/checkout format-patch -o {folder} {reference} --not --glob=refs/fork/upstream")
            raise ForkError(
                f"build/checkout keeps work that is nowhere else ({', '.join(kept)}): write it to folders with the "
                f"commands above; `{FORK} clean --force` then, or to lose it"
            )
    for path in project.build.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != project.held:
            path.unlink()


def _uncommitted_series(project: Project, checkout: Checkout) -> list[str]:
    """References to series of rebases with a patch that is neither in patches/ nor in a commit of this repository.

    What a rebase carried without its user is left out: it can be made again from the series that it left.
    """
    known = committed_blobs(project.root, "patches") | {blob_id(p.read_bytes()) for p in patch_files(project)}
    found = []
    for reference in checkout.kept("series"):
        version = reference.rpartition("/")[2]
        if checkout.is_carried(version):
            continue
        base = f"refs/fork/upstream/{version}"
        texts = format_series(project, checkout.repo, base, reference).values()
        if not known.issuperset(map(blob_id, texts)):
            found.append(reference)
    return found


def refuse_during_rebase(project: Project) -> None:
    """Raise ForkError while a rebase waits for its user: patches/ must not change under it."""
    if project.rebase_state.exists():
        raise ForkError(
            "a rebase is in progress in build/rebase: finish it with "
            f"`{FORK} rebase --continue` or drop it with `{FORK} rebase --abort`"
        )


def _runtime_pins(wheel: Path) -> dict[str, str]:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata = Metadata.from_email(archive.read(name), validate=False)
    requirements = [Requirement(str(requirement)) for requirement in metadata.requires_dist or ()]
    asked = {str(canonicalize_name(requirement.name)): str(requirement.specifier) for requirement in requirements}
    return {name: asked[name] for name in _PINNED if name in asked}


def requirement_problems(project: Project, lock: Lock) -> list[str]:
    """Pins in tools/requirements-cpu.txt that contradict what upstream's metadata asks for."""
    file = project.root / "tools" / "requirements-cpu.txt"
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        if not (text := line.partition("#")[0].strip()) or text.startswith("-"):
            continue
        requirement = Requirement(text)
        pinned = [spec.version for spec in requirement.specifier if spec.operator == "=="]
        asked = lock.pins.get(canonicalize_name(requirement.name))
        if asked and pinned and not SpecifierSet(asked).contains(pinned[0]):
            found.append(
                f"tools/requirements-cpu.txt has {text}, sglang {lock.version} asks for {requirement.name}{asked}"
            )
    return found
