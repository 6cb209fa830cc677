"""Install the patched wheel into the running environment, and check what is there."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tools.errors import ForkError, say
from tools.project import DISTRIBUTION
from tools.wheel import PROVENANCE, read_provenance


def install(wheel: Path, with_requirements: bool) -> None:
    """`pip install` a wheel unless this very build is installed.

    `with_requirements` lets pip bring everything upstream asks for, some dozens of CUDA packages; without it, what
    tools/requirements-cpu.txt lists has to do.

    Raises:
        ForkError: pip failed, or what is installed contradicts itself.
    """
    if _installed_provenance() == read_provenance(wheel):
        say(f"install: {wheel.name} is installed")
    else:
        say(f"install: {wheel.name}")
        # Two builds can have one version, at which pip alone would not replace the first.
        _pip("install", "--no-deps", "--force-reinstall", str(wheel))
    if with_requirements:
        _pip("install", str(wheel))
    if conflicts := _conflicts(with_requirements):
        raise ForkError(f"installed packages contradict each other: {'; '.join(conflicts)}: run `make setup` again")


def _installed_provenance() -> bytes | None:
    try:
        text = distribution(DISTRIBUTION).read_text(PROVENANCE)
    except PackageNotFoundError:
        return None
    return text.encode() if text else None


def _conflicts(with_requirements: bool) -> list[str]:
    """Lines of `pip check`, less the CUDA packages that a CPU install leaves out on purpose."""
    result = subprocess.run([sys.executable, "-m", "pip", "check"], stdout=subprocess.PIPE, text=True, check=False)
    lines = [] if result.returncode == 0 else result.stdout.splitlines()
    left_out = f"{DISTRIBUTION} "
    return [
        line for line in lines if with_requirements or not (line.startswith(left_out) and "is not installed" in line)
    ]


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, check=False).returncode != 0:
        raise ForkError(f"`pip {' '.join(arguments)}` failed (its reason is above): correct that and run again")
