"""Upstream wheels: pip downloads them, their sha256 decides."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

from tools.errors import ForkError, is_full_disk, say
from tools.lock import Lock, LockedWheel
from tools.project import DISTRIBUTION, Project

# Upstream builds on the newest manylinux; pip takes a wheel for any glibc in this list.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(40, 16, -1)]
_NETWORK = re.compile(
    r"Retrying \(|NewConnectionError|Failed to establish|Name or service not known|ConnectionError|timed out|ProxyError"
)


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def fetch(project: Project, lock: Lock, python_tag: str) -> Path:
    """The pinned wheel of one Python, from build/cache or else from the package index, its sha256 verified.

    Raises:
        ForkError: no such wheel is pinned, the file cannot be had, or it is not the one that was pinned.
    """
    wheel = lock.wheel_for(python_tag)
    cached = project.cache / wheel.filename
    if cached.exists():
        _verify(project, cached, wheel, "delete that file and run `make fetch` again")
        return cached
    downloaded = _download(project, lock.version, python_tag)
    _verify(project, downloaded, wheel, "the index serves another file than the pinned one, so nothing was kept")
    return _keep(project, downloaded)


def fetch_release(project: Project, version: str, python_tag: str) -> LockedWheel:
    """Download a release that is not pinned yet and return the entry that would pin it."""
    path = _keep(project, _download(project, version, python_tag))
    return LockedWheel(python=python_tag, filename=path.name, sha256=file_sha256(path))


def releases(python_tag: str) -> list[str]:
    """The releases the package index offers for one Python, newest first."""
    text = _pip(python_tag, None, "index", "versions", DISTRIBUTION, stdout=subprocess.PIPE)
    offered = re.search(r"^Available versions: (.+)$", text, re.MULTILINE)
    if offered is None:  # pip calls that command experimental
        raise ForkError("this pip does not list releases: name one (`make drift VERSION=...`, `make rebase TO=...`)")
    return offered.group(1).split(", ")


def _verify(project: Project, path: Path, wheel: LockedWheel, what_to_do: str) -> None:
    actual = file_sha256(path)
    if actual != wheel.sha256:
        raise ForkError(
            f"wrong sha256 for {project.show(path)}: it is {actual}, upstream.lock says {wheel.sha256}: {what_to_do}"
        )


def _keep(project: Project, path: Path) -> Path:
    project.cache.mkdir(parents=True, exist_ok=True)
    target = project.cache / path.name
    return path.replace(target)


def _download(project: Project, version: str, python_tag: str) -> Path:
    """Download one wheel into the scratch folder."""
    say(f"fetch: sglang {version} for {python_tag}")
    folder = project.tmp / f"download-{python_tag}"
    _pip(python_tag, version, "download", f"{DISTRIBUTION}=={version}", "--no-deps", "--dest", str(folder))
    (wheel,) = folder.glob("*.whl")
    return wheel


def _pip(python_tag: str, version: str | None, *words: str, stdout: int | None = None) -> str:
    """Run pip, as the user configured it, on the wheels for one Python. Returns its output if `stdout` is a pipe.

    Raises:
        ForkError: pip failed; the text says why, of `version` or else of the newest release.
    """
    command = [sys.executable, "-m", "pip", *words, "--disable-pip-version-check", "--retries", "2"]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--abi", python_tag]
    command += ["--python-version", python_tag.removeprefix("cp")]
    command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        raise ForkError(_explain(result.stderr, version, python_tag))
    return result.stdout or ""


def _explain(stderr: str, version: str | None, python_tag: str) -> str:
    wanted = f"sglang {version or '(newest)'} for {python_tag} on x86_64 Linux"
    if is_full_disk(stderr):
        return f"no space left on the disk while downloading {wanted}: free some and run the same command again"
    if _NETWORK.search(stderr):
        return f"cannot reach the package index for {wanted}: check the network or pip's index settings, then run again"
    if offered := re.search(r"\(from versions: ([^)]*)\)", stderr):
        versions = offered.group(1)
        if versions == "none":
            return f"the package index has no wheel of {wanted}: check the version and the Python"
        latest = ", ".join(versions.split(", ")[-5:])
        return f"unknown version {version}: the newest that the package index offers for {python_tag} are {latest}"
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")] or stderr.splitlines()[-1:]
    return f"pip could not download {wanted}: {' '.join(errors) or 'it gave no reason'}"
