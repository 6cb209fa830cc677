"""Each ends with one `error:` line that says what to do, and with nothing of the user's lost."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from toy import FILES, FORK, TOOLS_ROOT, Toy, copy


def forget_cache(toy: Toy) -> None:
    for wheel in (toy.root / "build" / "cache").iterdir():
        wheel.unlink()


def this_wheel(toy: Toy, folder: Path) -> Path:
    (path,) = folder.glob(f"*-cp{sys.version_info.major}{sys.version_info.minor}-*.whl")
    return path


def saved_text(toy: Toy, path: str) -> list[str]:
    references = toy.git("for-each-ref", "--format=%(refname)", "refs/fork/saved").split()
    return [toy.git("show", f"{reference}:{path}") for reference in references]


def test_wrong_sha256_from_the_index(toy: Toy) -> None:
    forget_cache(toy)
    wheel = this_wheel(toy, toy.index)
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    message = toy.error("fetch")
    assert "wrong sha256" in message and "upstream.lock" in message
    assert not list((toy.root / "build" / "cache").iterdir())


def test_wrong_sha256_in_the_cache(toy: Toy) -> None:
    wheel = this_wheel(toy, toy.root / "build" / "cache")
    wheel.write_bytes(b"short")
    assert f"wrong sha256 for build/cache/{wheel.name}" in toy.error("fetch")
    assert wheel.name in toy.error("build", "--no-kernels")
    wheel.unlink()
    toy.ok("fetch")


def test_cached_wheel_needs_no_index(toy: Toy) -> None:
    for wheel in toy.index.iterdir():
        wheel.unlink()
    toy.ok("fetch", "--python", "all")


def test_no_network(toy: Toy) -> None:
    forget_cache(toy)
    message = toy.error("fetch", PIP_NO_INDEX="", PIP_FIND_LINKS="", PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert "cannot reach the package index" in message and "check the network" in message


def test_missing_wheel_for_this_python(toy: Toy) -> None:
    message = toy.error("fetch", "--python", "3.13")
    assert "no sglang 1.0 wheel for Python 3.13 (it has 3.11, 3.12)" in message and "make setup PYTHON=" in message


def test_release_without_a_wheel_for_every_python(toy: Toy) -> None:
    before = toy.state()
    toy.release("1.1", pythons=("cp311",))
    assert "cp312" in toy.error("rebase", "1.1")
    assert toy.state() == before


def test_unknown_version(toy: Toy) -> None:
    before = toy.state()
    assert "unknown version 9.9: the newest that the package index offers for cp311 are 1.0" in toy.error(
        "rebase", "9.9"
    )
    assert toy.state() == before


def test_wheels_with_different_sources_are_refused(toy: Toy) -> None:
    toy.release("1.1", pythons=("cp311",))
    toy.release("1.1", {"sglang/server.py": "x = 1\n"}, pythons=("cp312",))
    assert "different sources" in toy.error("rebase", "1.1")


def test_sources_that_are_not_the_locked_tree_are_refused(toy: Toy) -> None:
    lock = toy.root / "upstream.lock"
    lock.write_text(lock.read_text().replace(toy.lock["upstream"]["tree"], "0" * 40, 1))
    assert "upstream.lock says 0000" in toy.error("apply")


@pytest.mark.parametrize("text", ["[upstream", "", "[upstream]\nversion = '1.0'\n"])
def test_damaged_lock(toy: Toy, text: str) -> None:
    (toy.root / "upstream.lock").write_text(text)
    assert "upstream.lock is damaged" in toy.error("apply")


def test_lock_with_its_version_spelt_otherwise_than_its_wheels(toy: Toy) -> None:
    lock = toy.root / "upstream.lock"
    lock.write_text(lock.read_text().replace('version = "1.0"', 'version = "v1.0"'))
    assert "version 'v1.0' is not that of sglang-1.0-cp311-" in toy.error("check")


def test_missing_lock(toy: Toy) -> None:
    (toy.root / "upstream.lock").unlink()
    assert "upstream.lock is missing" in toy.error("apply")


def test_pin_does_not_replace_a_lock(toy: Toy) -> None:
    assert "make rebase TO=1.0" in toy.error("pin", "1.0")


def test_patch_that_does_not_apply(hooked: Toy) -> None:
    before = hooked.state()
    (path,) = (hooked.root / "patches").glob("*.patch")
    original = path.read_bytes()
    path.write_bytes(original.replace(b" size = len(batch)\n", b" size = max(batch)\n"))
    message = hooked.error("apply")
    assert f"patches/{path.name} does not apply exactly (sglang/engine.py:10" in message
    path.write_bytes(original.replace(b" size = len(batch)\n", b"  size = len(batch)\n"))
    assert "does not apply exactly" in hooked.error("apply"), "white space must match too"
    path.write_bytes(b"no patch\n")
    assert "does not apply exactly" in hooked.error("apply")
    path.write_bytes(original)
    assert hooked.state() == before


def test_patch_edited_lost_or_added_by_hand(hooked: Toy) -> None:
    before = hooked.state()
    (path,) = (hooked.root / "patches").glob("*.patch")
    original = path.read_bytes()
    path.write_bytes(original.replace(b"hooks.run(size)", b"hooks.run(None)"))
    assert "upstream.lock says" in hooked.error("apply")
    assert "upstream.lock says otherwise" in hooked.fork("check").stdout
    path.unlink()
    assert "upstream.lock says 1 patches" in hooked.error("apply")
    (path.parent / "0002-Hook-run.patch").write_bytes(original)
    assert "a patch is missing or misnamed" in hooked.error("apply")
    (path.parent / "0002-Hook-run.patch").rename(path)
    assert hooked.state() == before


@pytest.mark.parametrize("verb", [("apply",), ("rebase", "1.1"), ("clean",)])
def test_dirty_checkout(hooked: Toy, verb: tuple[str, ...]) -> None:
    server = hooked.checkout / "sglang" / "server.py"
    server.write_text("mine\n")
    message = hooked.error(*verb)
    assert "uncommitted changes (sglang/server.py)" in message and "apply --discard" in message
    assert server.read_text() == "mine\n"


@pytest.mark.parametrize("verb", [("apply",), ("rebase", "1.1"), ("clean",)])
def test_diverged_checkout(hooked: Toy, verb: tuple[str, ...]) -> None:
    hooked.commit("sglang/server.py", "    check(port)", "    check(0)", "Mine", "sglang/server.py::serve")
    head = hooked.git("rev-parse", "HEAD")
    message = hooked.error(*verb)
    assert "Mine" in message and "make export-patches" in message
    assert hooked.git("rev-parse", "HEAD") == head


def test_patch_dropped_in_the_checkout(hooked: Toy) -> None:
    hooked.git("reset", "--quiet", "--hard", "HEAD~1")
    assert "a patch was dropped there" in hooked.error("apply")
    assert "export: 0 patches; changed: none; dropped: Hook-run" in hooked.ok("export")
    assert hooked.patches() == {} and hooked.lock["series"]["patches"] == 0


def test_export_of_a_dirty_checkout_or_a_merge(hooked: Toy) -> None:
    before = hooked.state()
    (hooked.checkout / "new.py").write_text("mine\n")
    assert "uncommitted changes (new.py" in hooked.error("export")
    (hooked.checkout / "new.py").unlink()
    hooked.git("checkout", "--quiet", "-b", "side", "HEAD~1")
    hooked.commit("sglang/server.py", "    check(port)", "    check(0)", "Side", "sglang/server.py::serve")
    hooked.git("merge", "--quiet", "--no-edit", "series")
    assert "is a merge" in hooked.error("export")
    hooked.git("checkout", "--quiet", "series")
    assert hooked.state() == before


def test_export_of_an_empty_commit_or_of_another_base(hooked: Toy) -> None:
    hooked.git("commit", "--quiet", "--allow-empty", "-m", "Nothing")
    assert "changes nothing" in hooked.error("export")
    hooked.git("reset", "--quiet", "--hard", "HEAD~1")
    hooked.git("checkout", "--quiet", "--orphan", "other")
    hooked.git("commit", "--quiet", "-m", "Root")
    assert "not based on the pinned release" in hooked.error("export")


def test_git_operation_in_progress(hooked: Toy) -> None:
    (hooked.checkout / ".git" / "rebase-merge").mkdir()
    for verb in ("apply", "export"):
        assert "middle of a git operation" in hooked.error(verb)


def test_discard_keeps_commits_and_uncommitted_work(hooked: Toy) -> None:
    before = hooked.state()
    hooked.commit("sglang/server.py", "    check(port)", "    check(0)", "Mine", "sglang/server.py::serve")
    (hooked.checkout / "sglang" / "server.py").write_text("edited\n")
    (hooked.checkout / "mine.py").write_text("untracked\n")
    assert "refs/fork/saved/" in hooked.ok("apply", "--discard")
    assert hooked.state() == before
    assert any("check(0)" in text for text in saved_text(hooked, "sglang/server.py"))
    assert "edited" in saved_text(hooked, "sglang/server.py")
    refused = hooked.error("clean")
    assert "work that is nowhere else (refs/fork/saved/1, refs/fork/saved/2)" in refused
    written = "".join(path.read_text() for path in written_out(hooked))
    assert [folder.name for folder in sorted((hooked.root / "kept" / "saved").iterdir())] == ["1", "2"]
    assert "+edited" in written and "+untracked" in written and "Subject: [PATCH 2/3] Mine" in written
    assert "untracked" in [
        hooked.git("show", f"{reference}:mine.py")
        for reference in hooked.git("for-each-ref", "--format=%(refname)", "refs/fork/saved").split()
        if hooked.git("ls-tree", "--name-only", reference, "mine.py")
    ]


def test_what_is_saved_never_takes_the_place_of_what_was(hooked: Toy) -> None:
    for text in ("first", "second"):
        (hooked.checkout / "mine.py").write_text(f"{text}\n")
        hooked.ok("apply", "--discard")
    hooked.git("update-ref", "-d", "refs/fork/saved/1")
    (hooked.checkout / "mine.py").write_text("third\n")
    hooked.ok("apply", "--discard")
    assert saved_text(hooked, "mine.py") == ["second", "third"]


def written_out(toy: Toy) -> list[Path]:
    """Patches that the commands give which a refused `clean` prints."""
    for command in toy.fork("clean").stdout.splitlines():
        toy.git(*command.split()[1:], at=toy.root)
    return sorted((toy.root / "kept").rglob("*.patch"))


def test_clean_keeps_a_series_that_was_never_committed(hooked: Toy) -> None:
    (path,) = (hooked.root / "patches").glob("*.patch")
    before = path.read_bytes()
    hooked.release("1.1", {"sglang/engine.py": "# moved\n" + FILES["sglang/engine.py"]})
    hooked.ok("rebase", "1.1")
    assert path.read_bytes() != before
    refused = hooked.error("clean")
    assert "nowhere else (refs/fork/series/1.0)" in refused and f"`{FORK} clean --force`" in refused
    (written,) = written_out(hooked)
    assert [line for line in written.read_bytes().splitlines() if line.startswith(b"+")] == [
        line for line in before.splitlines() if line.startswith(b"+")
    ]
    hooked.git("init", "--quiet", at=hooked.root)
    after = path.read_bytes()
    for text in (before, after):  # of an old commit, too, git has it
        path.write_bytes(text)
        hooked.git("add", "patches", at=hooked.root)
        hooked.git("commit", "--quiet", "-m", "Patches", at=hooked.root)
    hooked.ok("clean")
    assert not hooked.checkout.exists()


def test_clean_leaves_no_trace_of_what_a_rebase_can_make_again(hooked: Toy) -> None:
    """There and back, and away once more with another patch: no user touched 1.1's series."""
    hooked.release("1.1", {"sglang/engine.py": "# moved\n" + FILES["sglang/engine.py"]})
    for version in ("1.1", "1.0"):
        hooked.ok("rebase", version)
    hooked.commit("sglang/server.py", "    check(port)", "    check(0)", "Mine", "sglang/server.py::serve")
    hooked.ok("export")
    for version in ("1.1", "1.0"):
        hooked.ok("rebase", version)
    assert "nowhere else (refs/fork/saved/1)" in hooked.error("clean"), "the exported series before Mine is the user's"
    hooked.git("update-ref", "-d", "refs/fork/saved/1")
    hooked.ok("clean")
    assert not hooked.checkout.exists()


def test_clean_keeps_what_a_user_decided_in_a_rebase(hooked: Toy) -> None:
    hooked.release("1.1", {"sglang/engine.py": FILES["sglang/engine.py"].replace("class Engine", "class Runner")})
    hooked.ok("rebase", "1.1", "--accept", "Hook-run")
    hooked.ok("rebase", "1.0", "--accept", "Hook-run")
    assert "nowhere else (refs/fork/series/1.1)" in hooked.error("clean")


def test_another_command_is_running(toy: Toy) -> None:
    with (toy.root / "build" / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert "another fork command is running" in toy.error("apply")


def test_build_says_how_to_go_without_kernels(toy: Toy) -> None:
    message = toy.error("build", PATH=str(Path(sys.executable).parent) + ":/usr/bin:/bin", CUDA_HOME="")
    assert "`make wheel WHEEL_FLAGS=--no-kernels`" in message
    assert not (toy.root / "build" / "dist").exists()


def test_no_overlay(toy: Toy) -> None:
    for path in (toy.root / "overlay" / "sglang_sm120").iterdir():
        path.unlink()
    assert "overlay/sglang_sm120 has no files" in toy.error("build", "--no-kernels")


@pytest.mark.parametrize(("version", "word"), [((3, 10, 9), "old"), ((3, 6, 1), "old"), ((3, 14, 0), "new")])
def test_python_too_old_or_too_new(version: tuple[int, ...], word: str) -> None:
    script = str(TOOLS_ROOT / "tools" / "setup.py")
    code = f"import runpy, sys; sys.version_info = {version!r}; runpy.run_path({script!r}, run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert (
        f"error: Python {version[0]}.{version[1]} is too {word}" in result.stderr
        and "make setup PYTHON=" in result.stderr
    )


INTERRUPT = "import os, signal, time; os.kill(os.{}(), signal.SIGINT); time.sleep(0.1); raise KeyboardInterrupt"


def interrupted(folder: Path, stand_in: str, *command: str) -> tuple[int, str]:
    """Exit code and stderr of Python with `command`, where the module `stand_in`, or its process, gets Ctrl-C."""
    process = "getppid" if stand_in in ("ruff", "venv") else "getpid"  # those run in a process of their own
    (folder / f"{stand_in}.py").write_text(INTERRUPT.format(process))
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # as in a terminal, wherever the tests run
    done = subprocess.run(
        [sys.executable, *command],
        cwd=TOOLS_ROOT,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=heeded,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("stand_in", "command"),
    [("torch", "require_gpu"), ("torch", "kernels bench"), ("git", "fork check"), ("ruff", "lint")],
)
def test_ctrl_c_is_one_line_during_imports_too(stand_in: str, command: str, tmp_path: Path) -> None:
    said = interrupted(tmp_path, stand_in, "-m", *f"tools.{command}".split())
    assert said == (130, "error: interrupted: run the same command again to go on\n")


def test_ctrl_c_in_setup_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    for name in ("setup.py", "requirements.txt", "requirements-cpu.txt"):
        shutil.copy(TOOLS_ROOT / "tools" / name, tmp_path / "tools")
    said = interrupted(tmp_path, "venv", str(tmp_path / "tools" / "setup.py"))
    assert said == (130, "error: interrupted: run the same command again to go on\n")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("free_bytes", [0, 20_000, 60_000])
@pytest.mark.parametrize("verb", [("export",), ("apply", "--discard"), ("build", "--no-kernels"), ("fetch",)])
def test_full_disk(hooked: Toy, small_disk: Path, verb: tuple[str, ...], free_bytes: int) -> None:
    """The verb says that the disk is full, loses nothing, and works once there is room."""
    (hooked.root / "overlay" / "sglang_sm120" / "data.bin").write_bytes(os.urandom(200_000))
    if verb[0] in ("apply", "export"):
        hooked.commit("sglang/server.py", "    check(port)", "    check(0)", "Mine", "sglang/server.py::serve")
    toy = copy(hooked, small_disk)
    before = toy.state()
    if verb[0] == "fetch":
        forget_cache(toy)
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        filler.write(bytes(shutil.disk_usage(small_disk).free - free_bytes))
    result = toy.fork(*verb)
    assert result.returncode != 0 or free_bytes, "a full disk must be noticed"
    if result.returncode != 0:
        assert "no space left" in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr
        assert not list((toy.root / "build").glob("dist/*.whl"))
    (small_disk / "filler").unlink()
    assert toy.git("for-each-ref", "--contains", before["head"])
    toy.ok(*verb)
    hooked.ok(*verb)
    assert toy.state() == hooked.state()
