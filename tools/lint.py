"""`make lint` and `make format`: every check of the sources that runs none of them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_TREES = ("tools", "overlay", "tests")
RUFF_CONFIG = ("--config", "tools/ruff.toml")
# Next to the interpreter, where pip puts it: the package has no module to run.
CLANG_FORMAT = str(Path(sys.executable).with_name("clang-format"))


def kernel_sources() -> list[str]:
    """Every C++ and CUDA source below kernels/, relative to the root."""
    sources = (path for ending in ("h", "cuh", "cu") for path in (ROOT / "kernels").rglob(f"*.{ending}"))
    return sorted(str(path.relative_to(ROOT)) for path in sources)


def checks() -> dict[str, list[str]]:
    """Name and command of each check; a command exits with 0 when there is nothing to say."""
    return {
        "ruff check": [sys.executable, "-m", "ruff", "check", *RUFF_CONFIG, *PYTHON_TREES],
        "ruff format": [sys.executable, "-m", "ruff", "format", "--check", *RUFF_CONFIG, *PYTHON_TREES],
        "mypy": [sys.executable, "-m", "mypy", "--config-file", "tools/mypy.ini"],
        "clang-format": [CLANG_FORMAT, "--dry-run", "-Werror", *kernel_sources()],
    }


def formatters() -> dict[str, list[str]]:
    """Name and command of what puts the format right."""
    return {
        "ruff format": [sys.executable, "-m", "ruff", "format", *RUFF_CONFIG, *PYTHON_TREES],
        "clang-format": [CLANG_FORMAT, "-i", *kernel_sources()],
    }


def run(commands: dict[str, list[str]]) -> int:
    """Run all commands, also after one has failed; return how many failed."""
    failed = []
    for name, command in commands.items():
        print(f"lint: {name}", flush=True)
        # Ctrl-C reaches the check as well: its traceback is not for the reader, who gets our line.
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
        print(done.stderr, end="", file=sys.stderr, flush=True)
        if done.returncode != 0:
            failed.append(name)
    if failed:
        print(f"error: {', '.join(failed)} failed (see above)", file=sys.stderr)
    return len(failed)


def main() -> None:
    """Check, or with --fix format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fix", action="store_true", help="format the sources instead of checking them")
    sys.exit(1 if run(formatters() if parser.parse_args().fix else checks()) else 0)


if __name__ == "__main__":
    main()
