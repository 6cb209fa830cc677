"""The patched wheel: upstream's wheel with the patched tree, the overlay and the kernels, byte for byte repeatable."""

import configparser
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from git import Repo
from packaging.metadata import Metadata
from wheel.wheelfile import WheelFile

from tools.checkout import Checkout, is_source
from tools.errors import ForkError, say
from tools.fetch import fetch, file_sha256
from tools.lock import Lock, read_lock
from tools.project import DISTRIBUTION, OVERLAY, Project
from tools.series import patch_files, slug_of
from tools.verbs import apply, import_pinned

ENTRY_POINTS = {
    "console_scripts": {"sglang-sm120": f"{OVERLAY}.cli:main"},
    "sglang.srt.plugins": {"sm120": f"{OVERLAY}.plugin:register"},
}
PROVENANCE = "PROVENANCE.json"
# Zip entries carry a time; 2020-01-01 00:00 UTC in both forms, the second read by the wheel library for RECORD.
_TIME = (2020, 1, 1, 0, 0, 0)
_TIME_UNIX_S = 1577836800
_SKIPPED_FOLDERS = {"__pycache__", "lib"}

Entries = dict[str, tuple[bool, bytes]]
"""Name in the wheel -> (executable, content)."""


@dataclass(frozen=True)
class KernelLibrary:
    """The compiled kernels that go into a wheel, the hash of their sources, and the GPUs they run on."""

    path: Path
    source_hash: str
    archs: tuple[str, ...]


def build(project: Project, python_tags: list[str], kernels: KernelLibrary | None, out: Path) -> list[Path]:
    """Build one wheel for each Python into `out` and return their paths. A wheel that is up to date is left alone.

    Raises:
        ForkError: build/checkout holds something that patches/ does not, or a download failed.
    """
    lock = read_lock(project.lock)
    checkout = Checkout.open(project)
    if checkout.head is None or checkout.changed_files() or checkout.tree(checkout.head) != lock.series_tree:
        apply(project)
    base = import_pinned(project, checkout, lock)
    overlay = _overlay(project)
    provenance = _provenance(project, lock, overlay, kernels)
    wheels = []
    for tag in python_tags:
        upstream = fetch(project, lock, tag)
        target = out / upstream.name.replace(f"-{lock.version}-", f"-{lock.fork_version}-", 1)
        if target.exists() and read_provenance(target) == provenance:
            say(f"build: {project.show(target)} is up to date")
        else:
            say(f"build: {project.show(target)}")
            entries = _patched(project, checkout.repo, lock) | _compiled(upstream) | overlay
            if kernels:
                entries[f"{OVERLAY}/lib/{kernels.path.name}"] = (True, kernels.path.read_bytes())
            changed = checkout.repo.git.diff("--name-only", "--no-renames", base, "HEAD").splitlines()
            _finish_metadata(entries, lock, upstream, changed)
            entries[_dist_info(lock) + PROVENANCE] = (False, provenance)
            _write(target, entries)
        say(f"build: sha256 {file_sha256(target)}")
        wheels.append(target)
    return wheels


def _dist_info(lock: Lock) -> str:
    return f"{DISTRIBUTION}-{lock.fork_version}.dist-info/"


def _patched(project: Project, repo: Repo, lock: Lock) -> Entries:
    """The tree of HEAD, its dist-info under our version."""
    old = f"{DISTRIBUTION}-{lock.version}.dist-info/"
    entries: Entries = {}
    with tempfile.TemporaryFile(dir=project.tmp) as stream:
        repo.git.archive("--format=tar", "HEAD", output_stream=stream)
        stream.seek(0)
        with tarfile.open(fileobj=stream) as archive:
            for member in archive:
                if content := archive.extractfile(member):
                    name = member.name
                    if name.startswith(old):
                        name = _dist_info(lock) + name.removeprefix(old)
                    entries[name] = (bool(member.mode & stat.S_IXUSR), content.read())
    return entries


def _compiled(upstream: Path) -> Entries:
    """Upstream's compiled extensions for one Python."""
    with zipfile.ZipFile(upstream) as archive:
        names = [name for name in archive.namelist() if not is_source(name) and ".dist-info/" not in name]
        return {name: (True, archive.read(name)) for name in names}


def _overlay(project: Project) -> Entries:
    """overlay/sglang_sm120 as it is on disk, less caches and locally built kernels."""
    entries: Entries = {}
    for path in sorted(project.overlay.rglob("*")):
        relative = path.relative_to(project.overlay)
        if path.is_file() and path.suffix != ".pyc" and not _SKIPPED_FOLDERS & set(relative.parts):
            entries[f"{OVERLAY}/{relative.as_posix()}"] = (False, path.read_bytes())
    if not entries:
        raise ForkError(f"{project.show(project.overlay)} has no files: restore it with git")
    return entries


def _finish_metadata(entries: Entries, lock: Lock, upstream: Path, changed: list[str]) -> None:
    """Rewrite the dist-info in `entries`: version, licence files, entry points, top level, WHEEL."""
    info = _dist_info(lock)
    metadata = entries[info + "METADATA"][1]
    headers, separator, description = metadata.partition(b"\n\n")
    headers = headers.replace(f"\nVersion: {lock.version}\n".encode(), f"\nVersion: {lock.fork_version}\n".encode(), 1)
    headers = headers.replace(b"\nLicense-File: LICENSE\n", b"\nLicense-File: LICENSE\nLicense-File: NOTICE\n", 1)
    metadata = headers + separator + description
    written = Metadata.from_email(metadata, validate=False)
    if str(written.version) != lock.fork_version or "NOTICE" not in (written.license_files or ()):
        raise ForkError(
            f"METADATA of {upstream.name} has another form than expected: adapt tools/wheel.py to this release"
        )
    entries[info + "METADATA"] = (False, metadata)
    entries[info + "licenses/NOTICE"] = (False, _notice(lock, changed).encode())
    entries[info + "entry_points.txt"] = (False, _entry_points(entries[info + "entry_points.txt"][1].decode()).encode())
    entries[info + "top_level.txt"] = (False, f"{DISTRIBUTION}\n{OVERLAY}\n".encode())
    with zipfile.ZipFile(upstream) as archive:
        wheel = archive.read(f"{DISTRIBUTION}-{lock.version}.dist-info/WHEEL").decode()
    lines = ["Generator: sglang-sm120" if line.startswith("Generator:") else line for line in wheel.splitlines()]
    entries[info + "WHEEL"] = (False, ("\n".join(lines) + "\n").encode())


def _entry_points(upstream: str) -> str:
    """Upstream's entry points and ours, sorted."""
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # names are case-sensitive
    parser.read_string(upstream)
    parser.read_dict(ENTRY_POINTS)
    merged = configparser.ConfigParser(delimiters=("=",))
    merged.optionxform = str  # type: ignore[assignment, method-assign]
    merged.read_dict({section: dict(sorted(parser[section].items())) for section in sorted(parser.sections())})
    text = io.StringIO()
    merged.write(text)
    return text.getvalue().rstrip("\n") + "\n"


def _notice(lock: Lock, changed: list[str]) -> str:
    lines = [
        f"sglang {lock.fork_version}",
        f"A modified distribution of SGLang {lock.version} (https://github.com/sgl-project/sglang),",
        "licensed under the Apache License, Version 2.0; see LICENSE. Upstream's notices are kept in its files.",
        "",
        f"Added: {OVERLAY}/ (sglang-sm120, Apache License 2.0).",
        "Changed by the patches listed in PROVENANCE.json:",
        *(f"  {path}" for path in changed),
    ]
    return "\n".join(lines) + "\n"


def _provenance(project: Project, lock: Lock, overlay: Entries, kernels: KernelLibrary | None) -> bytes:
    """PROVENANCE.json: all that a wheel is made from, so that equal provenance means an equal wheel."""
    overlay_hash = hashlib.sha256()
    for name, (_, content) in overlay.items():
        overlay_hash.update(f"{name}\0{len(content)}\0".encode() + content)
    facts = {
        "version": lock.fork_version,
        "lock": lock.to_dict(),
        "patches": [{"slug": slug_of(path), "sha256": file_sha256(path)} for path in patch_files(project)],
        "overlay_sha256": overlay_hash.hexdigest(),
        "builder_sha256": file_sha256(Path(__file__)),
        "kernels": kernels
        and {
            "library": kernels.path.name,
            "library_sha256": file_sha256(kernels.path),
            "source_hash": kernels.source_hash,
            "archs": kernels.archs,
        },
    }
    return (json.dumps(facts, indent=2, sort_keys=True) + "\n").encode()


def read_provenance(wheel: Path) -> bytes | None:
    """PROVENANCE.json of a wheel of ours, None when it has none or is damaged."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return next(
                (archive.read(name) for name in archive.namelist() if name.endswith(f".dist-info/{PROVENANCE}")), None
            )
    except zipfile.BadZipFile:
        return None


def _write(target: Path, entries: Entries) -> None:
    """Write a wheel beside `target`, RECORD included, and rename it into place."""
    os.environ["SOURCE_DATE_EPOCH"] = str(_TIME_UNIX_S)
    partial = target.parent / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    wheel = WheelFile(partial / target.name, "w")
    try:
        # Installers want the dist-info last; RECORD is written on closing.
        for name in sorted(entries, key=lambda name: (".dist-info/" in name, name)):
            executable, content = entries[name]
            info = zipfile.ZipInfo(name, _TIME)
            info.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(info, content)
        wheel.close()
    except OSError:
        wheel.fp = None  # or else its destructor writes again and complains again
        raise
    (partial / target.name).replace(target)
    shutil.rmtree(partial)
