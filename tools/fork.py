"""The one command of the fork: `python -m tools.fork VERB`."""

import argparse
import errno
import shlex
import sys
from pathlib import Path

from git import GitCommandError
from packaging.version import InvalidVersion, Version

from tools import kernels, rebase, verbs
from tools.errors import FORK, INTERRUPTED, ForkError, is_full_disk, say
from tools.fetch import fetch, releases
from tools.install import install
from tools.lock import read_lock
from tools.project import PYTHON_TAGS, Project, running_python_tag
from tools.wheel import KernelLibrary, build

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL = "no space left on the disk: free some and run the same command again; nothing was left half-written"


def main(arguments: list[str] | None = None) -> int:
    """Run one verb. Returns the exit code; every failure is one `error:` line on stderr."""
    rebasing = False
    try:
        options = _parser().parse_args(arguments)
        project = Project(options.project.resolve())
        rebasing = options.verb == "rebase"
        with project.exclusive():
            _run(project, options)
    except (ForkError, kernels.KernelError) as error:
        return _fail(str(error))
    except GitCommandError as error:
        stderr = str(error.stderr).strip().removeprefix("stderr: ").strip("' \n")
        if is_full_disk(stderr):
            return _fail(_FULL)
        return _fail(f"`{' '.join(map(str, error.command))[:200]}` failed: {' '.join(stderr.split())}")
    except OSError as error:
        if error.errno in _DISK_FULL:
            return _fail(_FULL)
        return _fail(f"{error.strerror}: {error.filename}: check the path and its permissions")
    except KeyboardInterrupt:
        if rebasing and project.rebase_state.exists():
            return _fail(f"interrupted: go on with `{FORK} rebase --continue`, or `{FORK} rebase --abort`", 130)
        return _fail(INTERRUPTED, 130)
    return 0


def _fail(message: str, code: int = 1) -> int:
    sys.stdout.flush()  # in a pipe, what the message refers to would else come after it
    print(f"error: {message}", file=sys.stderr)
    return code


def _run(project: Project, options: argparse.Namespace) -> None:
    match options.verb:
        case "pin":
            verbs.pin(project, options.version)
        case "fetch":
            lock = read_lock(project.lock)
            for tag in options.python:
                print(project.show(fetch(project, lock, tag)))
        case "apply":
            verbs.apply(project, discard=options.discard, relock=options.relock)
        case "export":
            verbs.export(project)
        case "build":
            for path in build(project, options.python, _kernels(project, options), options.out or project.dist):
                print(f"install it with: {shlex.join(['pip', 'install', project.show(path)])}")
        case "install":
            (wheel,) = build(project, [running_python_tag()], _kernels(project, options), project.dist)
            install(wheel, options.all_requirements)
        case "clean":
            verbs.clean(project, force=options.force)
        case "check":
            verbs.check(project)
        case "rebase":
            _rebase(project, options)
        case "drift":
            rebase.drift(project, options.version)
        case "status":
            verbs.status(project)
        case "bump":
            verbs.bump(project)


def _rebase(project: Project, options: argparse.Namespace) -> None:
    if options.abort:
        rebase.abort(project)
    elif options.resume:
        rebase.resume(project, options.accept, options.drop)
    elif options.version:
        rebase.start(project, options.version, options.accept, options.drop)
    else:
        verbs.refuse_during_rebase(project)
        pinned = read_lock(project.lock).version
        others = [version for version in releases(running_python_tag()) if version != pinned]
        raise ForkError(
            "rebase needs a release, `make rebase TO=VERSION`: the newest that the package index "
            f"offers are, besides the pinned {pinned}, {', '.join(others[:5]) or 'none'}"
        )


def _kernels(project: Project, options: argparse.Namespace) -> KernelLibrary | None:
    """Compile the kernels the options ask for, None when they ask for none."""
    if options.no_kernels:
        say("kernels: left out, as asked")
        return None
    try:
        kernels.find_nvcc()
    except kernels.KernelError as error:
        if options.kernels_if_nvcc:
            say(f"kernels: left out ({error})")
            return None
        raise ForkError(f"{error}; or build without CUDA kernels: `make wheel WHEEL_FLAGS=--no-kernels`") from None
    library = kernels.build_for_release(options.archs, project.build / "kernels")
    return KernelLibrary(library, kernels.source_hash(), tuple(options.archs))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fork", description="Pin, patch, build and rebase sglang. VERB --help has the options."
    )
    here = Path(__file__).parent.parent
    parser.add_argument("--project", type=Path, default=here, metavar="DIR", help="root of the fork (default: here)")
    verb = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(name: str, what: str) -> argparse.ArgumentParser:
        return verb.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")

    pin = add("pin", "write the first upstream.lock")
    pin.add_argument("version", type=_release, metavar="VERSION", help="upstream release, for example 0.5.23")

    fetch_parser = add("fetch", "download and verify the pinned upstream wheel")
    _add_python(fetch_parser)

    apply = add("apply", "bring build/checkout to the pinned release plus patches/")
    apply.add_argument(
        "--discard", action="store_true", help="give up changes made in build/checkout (kept as refs/fork/saved)"
    )
    apply.add_argument(
        "--relock", action="store_true", help="accept patches/ as it is and write its tree to upstream.lock"
    )

    add("export", "write the commits of build/checkout to patches/ and upstream.lock")
    build_parser = add("build", "build the patched wheel into build/dist")
    _add_python(build_parser)
    _add_kernels(build_parser)
    build_parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the wheels (default: build/dist)")

    install_parser = add("install", "build the wheel and install it into the running environment")
    _add_kernels(install_parser)
    install_parser.add_argument(
        "--all-requirements", action="store_true", help="install upstream's CUDA requirements too"
    )

    clean = add("clean", "empty build/")
    clean.add_argument("--force", action="store_true", help="also when that loses work in build/checkout")

    add("check", "check lock, patches, anchors, trailers, sizes and index")
    rebase_parser = add("rebase", "carry the series to another upstream release")
    what = rebase_parser.add_mutually_exclusive_group()
    what.add_argument(
        "version", type=_release, nargs="?", metavar="VERSION", help="upstream release, for example 0.5.22"
    )
    what.add_argument("--continue", dest="resume", action="store_true", help="go on after a stop or a kill")
    what.add_argument("--abort", action="store_true", help="give the rebase up")
    rebase_parser.add_argument(
        "--accept", action="append", default=[], metavar="SLUG", help="take a moved patch as it is"
    )
    rebase_parser.add_argument(
        "--drop", action="append", default=[], metavar="SLUG", help="leave a patch out from here on"
    )

    drift = add("drift", "try the series on another release and report, moving nothing")
    drift.add_argument(
        "version", type=_release, nargs="?", metavar="VERSION", help="upstream release (default: the newest)"
    )

    add("status", "show pin, series, checkout and cache")
    add("bump", "raise our revision N in the version +sm120.N")
    return parser


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--no-kernels", action="store_true", help="leave the CUDA kernels out")
    group.add_argument("--kernels-if-nvcc", action="store_true", help="leave them out when there is no nvcc")
    parser.add_argument(
        "--archs",
        nargs="+",
        default=kernels.wanted_archs(),
        metavar="sm_XX",
        help=f"GPUs to compile for (default: $ARCHS, now {' '.join(kernels.wanted_archs())})",
    )


def _add_python(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python",
        type=_python_tags,
        default=[running_python_tag()],
        metavar="X.Y|all",
        help="Python the wheel is for (default: the running one)",
    )


def _release(text: str) -> str:
    """`v0.5.022` -> `0.5.22`. How many zeros end it, the wheel's name says."""
    try:
        return str(Version(text))
    except InvalidVersion:
        raise ForkError(f"{text!r} is no release number: give one such as 0.5.22") from None


def _python_tags(text: str) -> list[str]:
    return list(PYTHON_TAGS) if text == "all" else [f"cp{text.replace('.', '')}"]


if __name__ == "__main__":
    sys.exit(main())
