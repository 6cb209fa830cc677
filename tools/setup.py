"""Make .venv with what the tools, the tests and the CPU server need: `python3 tools/setup.py`.

Runs on any Python 3, so that one that is too old gets told so instead of a syntax error.
"""

import hashlib
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "setup.stamp")
REQUIREMENTS = [os.path.join(ROOT, "tools", name) for name in ("requirements.txt", "requirements-cpu.txt")]
SUPPORTED = ((3, 11), (3, 12))


def main():
    """Create or bring up to date; a second run with nothing changed returns at once."""
    if sys.version_info[:2] not in SUPPORTED:
        return fail(
            "Python %d.%d is too %s: SGLang's wheels are for 3.11 and 3.12; install one of those and run "
            "`make setup PYTHON=python3.11`"
            % (sys.version_info[:2] + ("old" if sys.version_info < SUPPORTED[0] else "new",))
        )
    wanted = digest()
    if read(STAMP) == wanted:
        return 0
    if not same_python():
        print("setup: making .venv with Python %d.%d" % sys.version_info[:2], flush=True)
        # Ctrl-C reaches venv as well, whose traceback is not for the reader.
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], stderr=subprocess.PIPE)
        if made.returncode != 0:
            sys.stderr.write(made.stderr.decode())
            return fail("cannot make .venv: install Python's venv module (Debian: apt install python3-venv)")
    print("setup: installing %s" % ", ".join(os.path.relpath(path, ROOT) for path in REQUIREMENTS), flush=True)
    command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check"]
    if subprocess.call(command + [word for path in REQUIREMENTS for word in ("-r", path)]) != 0:
        return fail(
            "pip could not install the requirements (its reason is above): correct that and run `make setup` again"
        )
    with open(STAMP, "w") as stamp:
        stamp.write(wanted)
    return 0


def digest():
    """Hash of all that decides what .venv holds."""
    total = hashlib.sha256(sys.version.encode())
    for path in REQUIREMENTS:
        with open(path, "rb") as handle:
            total.update(handle.read())
    return total.hexdigest()


def same_python():
    """Whether .venv works and is of the running Python's version."""
    if not os.path.exists(PYTHON):
        return False
    show = [PYTHON, "-c", "import pip, sys; print(*sys.version_info[:2])"]
    result = subprocess.run(show, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return result.stdout.decode().split() == [str(part) for part in sys.version_info[:2]]


def read(path):
    """Text of a file, None when there is none."""
    if not os.path.exists(path):
        return None
    with open(path) as handle:
        return handle.read()


def fail(message):
    """Print one error line and return the exit code."""
    sys.stderr.write("error: %s\n" % message)
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        fail("interrupted: run the same command again to go on")
        sys.exit(130)
