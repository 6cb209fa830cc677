"""Where things lie in a checkout of this repository, and writes that survive a kill."""

import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.errors import ForkError

DISTRIBUTION = "sglang"
OVERLAY = "sglang_sm120"
PYTHON_TAGS = ("cp311", "cp312")


@dataclass(frozen=True)
class Project:
    """The paths the tools read and write, all below `root`."""

    root: Path

    @property
    def lock(self) -> Path:
        """Pin, trees and revision."""
        return self.root / "upstream.lock"

    def lock_left_at(self, version: str) -> Path:
        """upstream.lock as it was when a rebase left `version`."""
        return self.build / f"upstream-{version}.lock"

    @property
    def patches(self) -> Path:
        """The exported series."""
        return self.root / "patches"

    @property
    def overlay(self) -> Path:
        """Our package."""
        return self.root / "overlay" / OVERLAY

    @property
    def upgrades(self) -> Path:
        """One report per rebase."""
        return self.root / "docs" / "upgrades"

    @property
    def build(self) -> Path:
        """Everything that can be made again."""
        return self.root / "build"

    @property
    def cache(self) -> Path:
        """Verified upstream wheels."""
        return self.build / "cache"

    @property
    def checkout(self) -> Path:
        """Git repository: the imported upstream tree and one commit per patch."""
        return self.build / "checkout"

    @property
    def rebase(self) -> Path:
        """Worktree in which a rebase stops for its user."""
        return self.build / "rebase"

    @property
    def rebase_state(self) -> Path:
        """Exists while a rebase is in progress."""
        return self.build / "rebase.json"

    @property
    def dist(self) -> Path:
        """Our wheels."""
        return self.build / "dist"

    @property
    def tmp(self) -> Path:
        """Scratch of the running command; emptied when the next one starts."""
        return self.build / "tmp"

    def show(self, path: Path) -> str:
        """`path` as the user would type it from the root."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    @property
    def held(self) -> Path:
        """What a running command holds, and nobody removes."""
        return self.build / ".lock"

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold build/.lock and start with an empty scratch folder.

        Raises:
            ForkError: another command of this project is running.
        """
        self.build.mkdir(parents=True, exist_ok=True)
        with self.held.open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ForkError("another fork command is running in this project: wait for it to end") from None
            shutil.rmtree(self.tmp, ignore_errors=True)
            self.tmp.mkdir()
            try:
                yield
            finally:
                shutil.rmtree(self.tmp, ignore_errors=True)


def running_python_tag() -> str:
    """Wheel tag of the running Python, for example cp311."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: a reader sees the old bytes or the new ones, also after a kill or a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # One fixed name: what a kill leaves is overwritten, and renamed, by the next run.
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
