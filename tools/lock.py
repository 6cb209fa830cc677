"""upstream.lock: the one place that says which release, which trees and which revision this is."""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from packaging.utils import parse_wheel_filename

from tools.errors import FORK, ForkError
from tools.project import write_atomic

_HEADER = "# Written by `python -m tools.fork`; change it with its verbs (pin, export, rebase, bump), not by hand.\n"


@dataclass(frozen=True)
class LockedWheel:
    """One upstream wheel. `python` is its tag (cp311), `sha256` of the file, hex."""

    python: str
    filename: str
    sha256: str

    @property
    def version(self) -> str:
        """The release as its file name spells it. Raises ValueError when that is no wheel's name."""
        return str(parse_wheel_filename(self.filename)[1])


@dataclass(frozen=True)
class Lock:
    """Contents of upstream.lock.

    Attributes:
        version: upstream release.
        wheels: one entry per Python.
        upstream_tree: git tree of the imported sources, the same for every wheel.
        series_tree: git tree after the last patch.
        patch_count: number of patches in the series.
        revision: N of the wheel's local version `+sm120.N`.
        pins: runtime requirement -> version specifier, from the wheel's own metadata, not patched by us.
    """

    version: str
    wheels: tuple[LockedWheel, ...]
    upstream_tree: str
    series_tree: str
    patch_count: int
    revision: int
    pins: Mapping[str, str]

    def __post_init__(self) -> None:
        """Raise ValueError when a wheel is of another release, or of the same one spelt in another way."""
        for wheel in self.wheels:
            if wheel.version != self.version:
                raise ValueError(f"version {self.version!r} is not that of {wheel.filename}")

    @property
    def fork_version(self) -> str:
        """Version of our wheel."""
        return f"{self.version}+sm120.{self.revision}"

    def wheel_for(self, python_tag: str) -> LockedWheel:
        """The wheel of one Python.

        Raises:
            ForkError: this release is not pinned for that Python.
        """
        for wheel in self.wheels:
            if wheel.python == python_tag:
                return wheel
        has = ", ".join(_dotted(wheel.python) for wheel in self.wheels)
        raise ForkError(
            f"upstream.lock has no sglang {self.version} wheel for Python {_dotted(python_tag)} (it has {has}): "
            f"use one of those, for example `make setup PYTHON=python{_dotted(self.wheels[0].python)}`"
        )

    def to_dict(self) -> dict:
        """The TOML document."""
        return {
            "upstream": {
                "version": self.version,
                "tree": self.upstream_tree,
                "wheels": [dataclasses.asdict(wheel) for wheel in self.wheels],
            },
            "series": {"tree": self.series_tree, "patches": self.patch_count},
            "fork": {"revision": self.revision},
            "pins": dict(sorted(self.pins.items())),
        }

    @classmethod
    def from_dict(cls, data: Mapping) -> "Lock":
        """Inverse of `to_dict`. Raises KeyError, TypeError or ValueError when something is missing or wrong."""
        upstream = data["upstream"]
        return cls(
            version=upstream["version"],
            wheels=tuple(LockedWheel(**wheel) for wheel in upstream["wheels"]),
            upstream_tree=upstream["tree"],
            series_tree=data["series"]["tree"],
            patch_count=data["series"]["patches"],
            revision=data["fork"]["revision"],
            pins=data["pins"],
        )


def read_lock(path: Path) -> Lock:
    """Parse upstream.lock.

    Raises:
        ForkError: it is missing or damaged.
    """
    restore = "restore it with `git checkout upstream.lock`"
    try:
        return Lock.from_dict(tomllib.loads(path.read_text()))
    except FileNotFoundError:
        raise ForkError(f"{path.name} is missing: {restore}, or start one with `{FORK} pin VERSION`") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ForkError(f"{path.name} is damaged ({error}): {restore}") from None


def write_lock(path: Path, lock: Lock) -> None:
    """Replace upstream.lock atomically."""
    write_atomic(path, (_HEADER + tomli_w.dumps(lock.to_dict())).encode())


def _dotted(python_tag: str) -> str:
    return f"{python_tag[2]}.{python_tag[3:]}"
