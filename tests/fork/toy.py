"""A toy upstream: small wheels in a folder that pip uses as its index, and the real command line driven on them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# tests/fork/mutants.py points this at a copy of tools/ with one guard removed.
TOOLS_ROOT = Path(os.environ.get("FORK_TOOLS", Path(__file__).parents[2]))
sys.path.insert(0, str(TOOLS_ROOT))

from wheel.wheelfile import WheelFile  # noqa: E402

from tools import fork  # noqa: E402
from tools.errors import FORK  # noqa: E402

TARGETS = set(re.findall(r"^([a-z0-9-]+):", (Path(__file__).parents[2] / "Makefile").read_text(), re.MULTILINE))

ENGINE = '''\
"""Toy engine."""


class Engine:
    def prepare(self, batch):
        size = len(batch)
        return size

    def run(self, batch):
        size = len(batch)
        return size
'''
HOOK = """\
        # sm120: observe the batch
        from sglang_sm120 import hooks
        hooks.run(size)
"""
TABLE = bytes(range(256)) + b"\r\n\n\r"
FILES: Mapping[str, str | bytes] = {
    "sglang/__init__.py": "",
    "sglang/engine.py": ENGINE,
    "sglang/server.py": "def serve(port):\n    check(port)\n    return port\n",
    "sglang/windows.py": "def path(name):\r\n    base = name\r\n    return base\r\n",
    "sglang/names.py": "X = 0\nA = 1,\nB = 2,\nC = 3,\nD = 4,\nY = 0\n",
    "sglang/version.py": "ID = '$Id$'\n",
    "sglang/table.bin": TABLE,
    "sglang/.gitignore": "*.bin\nengine.py\n",
    "sglang/.gitattributes": "* text=auto eol=crlf\n*.py ident\n",
}
METADATA = """\
Metadata-Version: 2.4
Name: sglang
Version: {version}
License-File: LICENSE
Requires-Dist: torch==2.14.1
Requires-Dist: torchvision
Requires-Dist: flashinfer_python[cu13]==0.7.2

Toy upstream.
"""
ENTRY_POINTS = "[console_scripts]\nsglang = sglang.cli:main\nKillAll_sglang = sglang.cli:kill\n"


@dataclass
class Toy:
    """A fork of the toy upstream: its root, and the folder that serves as package index."""

    root: Path
    index: Path

    @property
    def checkout(self) -> Path:
        return self.root / "build" / "checkout"

    @property
    def rebase(self) -> Path:
        return self.root / "build" / "rebase"

    @property
    def lock(self) -> dict:
        return tomllib.loads((self.root / "upstream.lock").read_text())

    def release(
        self,
        version: str,
        changes: Mapping[str, str | bytes | None] | None = None,
        pythons: tuple[str, ...] = ("cp311", "cp312"),
    ) -> None:
        """Publish a release: FILES with `changes` (None deletes), one wheel per Python, each with its own extension."""
        files = {name: text for name, text in {**FILES, **(changes or {})}.items() if text is not None}
        self.index.mkdir(parents=True, exist_ok=True)
        for python in pythons:
            info = f"sglang-{version}.dist-info"
            tag = f"{python}-{python}-manylinux_2_34_x86_64"
            extension = f"sglang/_ext.cpython-{python[2:]}-x86_64-linux-gnu.so"
            metadata = {
                f"{info}/METADATA": METADATA.format(version=version),
                f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: toy\nRoot-Is-Purelib: false\nTag: {tag}\n",
                f"{info}/entry_points.txt": ENTRY_POINTS,
                f"{info}/top_level.txt": "sglang\n",
                f"{info}/licenses/LICENSE": "Apache\n",
            }
            with WheelFile(self.index / f"sglang-{version}-{tag}.whl", "w") as wheel:
                for name, text in {**files, extension: f"\x7fELF {python}", **metadata}.items():
                    wheel.writestr(name, text)

    def environment(self) -> dict[str, str]:
        ours = ("PIP_", "GIT_", "PYTHONUNBUFFERED")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index), "PIP_CONFIG_FILE": os.devnull}
        return {**clean, **pip, "PYTHONPATH": str(TOOLS_ROOT)}

    def fork(
        self, *arguments: str, stderr: int = subprocess.PIPE, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m tools.fork` as a user would."""
        command = [sys.executable, "-m", "tools.fork", "--project", str(self.root), *arguments]
        return subprocess.run(
            command,
            cwd=TOOLS_ROOT,
            env={**self.environment(), **environment},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            check=False,
        )

    def ok(self, *arguments: str, **environment: str) -> str:
        """Run a verb that must succeed; its output."""
        result = self.fork(*arguments, **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        assert_typable(result.stdout)
        return result.stdout

    def error(self, *arguments: str, **environment: str) -> str:
        """Run a verb that must fail with exactly one `error:` line; that line."""
        result = self.fork(*arguments, **environment)
        assert result.returncode == 1, result.stdout + result.stderr
        lines = result.stderr.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
        assert_typable(lines[0])
        return lines[0]

    def git(self, *arguments: str, at: Path | None = None) -> str:
        identity = ["-c", "user.name=Ann", "-c", "user.email=ann@example.com", "-c", "core.excludesFile=/dev/null"]
        result = subprocess.run(
            ["git", *identity, *arguments], cwd=at or self.checkout, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout.rstrip("\n")

    def read(self, name: str) -> str:
        return (self.checkout / name).read_bytes().decode()

    def commit(self, path: str, old: str, new: str, subject: str, *anchors: str) -> None:
        """Commit in build/checkout, as a user does, replacing the last `old` in a file."""
        head, found, tail = self.read(path).rpartition(old)
        assert found
        (self.checkout / path).write_bytes((head + new + tail).encode())
        trailers = ["Upstream-Status: Inappropriate [toy]", "Drop-When: never", "Test: tests/test_toy.py::test_toy"]
        trailers += [f"Anchor: {anchor}" for anchor in anchors]
        self.git(
            "commit",
            "--quiet",
            "--all",
            "-m",
            subject,
            "-m",
            "No hook of upstream is there.",
            "-m",
            "\n".join(trailers),
        )

    def hook(self, subject: str = "Hook run") -> None:
        """The patch most tests use: a hook in Engine.run, whose twin is Engine.prepare."""
        self.commit(
            "sglang/engine.py",
            "        return size\n",
            HOOK + "        return size\n",
            subject,
            "sglang/engine.py::Engine.run",
        )

    def patches(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self.root / "patches").glob("*.patch"))}

    def state(self) -> dict:
        """All that a verb may change and a kill must not damage."""
        return {
            "lock": (self.root / "upstream.lock").read_bytes(),
            "patches": self.patches(),
            "index": (self.root / "patches" / "README.md").read_bytes(),
            "head": self.git("rev-parse", "HEAD"),
            "branch": self.git("symbolic-ref", "HEAD"),
            "status": self.git("status", "--porcelain"),
        }


def assert_typable(said: str) -> None:
    """Every command that a message prints can be typed at the root: the verb and its options exist, or the target."""
    for command in (part for quoted in re.findall("`([^`]+)`", said) for part in quoted.split(" && ")):
        words = shlex.split(command.replace("VERSION", "1.0"))
        if command.startswith(FORK):
            fork._parser().parse_args(words[len(FORK.split()) :])
        elif words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= TARGETS, command
        else:
            assert words[0] in ("cp", "git", "pip", ".venv/bin/pip"), command


def copy(toy: Toy, folder: Path) -> Toy:
    for source in (toy.root, toy.index):
        shutil.copytree(source, folder / source.name, symlinks=True)
    return Toy(folder / toy.root.name, folder / toy.index.name)
