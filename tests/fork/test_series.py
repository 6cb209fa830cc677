"""Apply, export and check at the pinned release."""

import subprocess
from pathlib import Path

import pytest
from toy import FILES, TABLE, Toy


def test_import_keeps_every_byte_whatever_upstreams_git_files_say(toy: Toy) -> None:
    for name, text in FILES.items():
        assert (toy.checkout / name).read_bytes() == (text if isinstance(text, bytes) else text.encode())
    assert not list(toy.checkout.rglob("*.so")) and not list(toy.checkout.rglob("RECORD"))


def test_lock_records_both_wheels_and_the_runtime_pins(toy: Toy) -> None:
    lock = toy.lock
    assert [wheel["python"] for wheel in lock["upstream"]["wheels"]] == ["cp311", "cp312"]
    assert lock["pins"] == {"torch": "==2.14.1", "torchvision": "", "flashinfer-python": "==0.7.2"}
    assert lock["series"] == {"tree": lock["upstream"]["tree"], "patches": 0}


def test_export_after_apply_is_the_identity(hooked: Toy) -> None:
    before = hooked.state()
    assert len(before["patches"]) == 1
    hooked.ok("apply")
    hooked.ok("export")
    assert hooked.state() == before
    hooked.ok("check")


def test_export_says_what_changed_and_what_was_dropped(hooked: Toy) -> None:
    hooked.commit("sglang/server.py", "    check(port)", "    check(0)", "Zero", "sglang/server.py::serve")
    assert "2 patches; changed: 0002-Zero.patch\n" in hooked.ok("export")
    hooked.git("rebase", "--quiet", "--onto", "HEAD~2", "HEAD~1")
    assert "1 patches; changed: none; dropped: Hook-run\n" in hooked.ok("export")
    assert list(hooked.patches()) == ["0001-Zero.patch"]


def test_apply_is_reproducible_from_patches_alone(hooked: Toy, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = hooked.state()
    (hooked.root / "build").rename(tmp_path_factory.mktemp("gone") / "build")
    hooked.ok("apply")
    assert hooked.state() == before


# What a user may have set in build/checkout itself.
OWN_CONFIGURATION = {
    "core.autocrlf": "true", "diff.noprefix": "true", "diff.suppressBlankEmpty": "true", "format.from": "true",
    "format.headers": "X-Ours: 1", "format.cc": "a@b.invalid", "format.to": "a@b.invalid", "format.notes": "true",
    "format.signOff": "true", "format.subjectPrefix": "OURS", "format.suffix": ".ours",
}  # fmt: skip


def test_users_git_configuration_and_environment_change_nothing(hooked: Toy, tmp_path: Path) -> None:
    before = hooked.state()
    config = tmp_path / "gitconfig"
    config.write_text(
        "[core]\n autocrlf = true\n[diff]\n noprefix = true\n[format]\n signature = x\n[am]\n threeWay = true\n"
    )
    for key, value in OWN_CONFIGURATION.items():
        hooked.git("config", key, value)
    for verb in ("apply", "export", "check"):
        hooked.ok(verb, GIT_CONFIG_GLOBAL=str(config), GIT_DIR=str(tmp_path), GIT_INDEX_FILE=str(tmp_path / "index"))
    hooked.git("config", "core.autocrlf", "false")
    assert hooked.state() == before


def test_check_refuses_a_patch_that_is_not_as_exported(hooked: Toy) -> None:
    (path,) = (hooked.root / "patches").glob("*.patch")
    path.write_bytes(path.read_bytes().replace(b"hooks\n", b"hooks\n", 1) + b"-- \n2.39\n")
    result = hooked.fork("check")
    assert result.returncode == 1 and "does not give the same bytes" in result.stdout


def test_twin_function_gets_no_hook(hooked: Toy) -> None:
    """A hunk whose line number points at the twin applies there with exit code 0; its anchor tells."""
    (path,) = (hooked.root / "patches").glob("*.patch")
    text = path.read_text()
    header = next(line for line in text.splitlines() if line.startswith("@@"))
    path.write_text(text.replace(header, "@@ -6,2 +6,5 @@"))
    message = hooked.error("apply", "--relock")
    assert "Hook-run says Anchor: sglang/engine.py::Engine.run" in message
    assert "land in sglang/engine.py::Engine.prepare" in message


def test_export_refuses_a_wrong_anchor_and_writes_nothing(toy: Toy) -> None:
    before = toy.state()
    toy.commit("sglang/server.py", "    check(port)\n", "    check(port + 1)\n", "Shift", "sglang/server.py::other")
    assert "land in sglang/server.py::serve" in toy.error("export")
    after = toy.state()
    assert {**after, "head": ""} == {**before, "head": ""}


def test_a_patch_that_leaves_no_python_is_named_with_file_line_and_reason(toy: Toy) -> None:
    toy.commit("sglang/server.py", "    return", "    if port\n    return", "Half", "sglang/server.py::serve")
    said = "patch Half: sglang/server.py:3 is not valid Python after the patch (expected ':')"
    assert said in toy.error("export")


def test_crlf_file_is_patched_and_keeps_its_line_ends(toy: Toy) -> None:
    toy.commit(
        "sglang/windows.py", "    return", "    note(base)\r\n    return", "Note path", "sglang/windows.py::path"
    )
    toy.ok("export")
    before = toy.state()
    toy.git("reset", "--quiet", "--hard", "refs/fork/upstream/1.0")
    toy.ok("apply", "--discard")
    assert (
        toy.read("sglang/windows.py") == "def path(name):\r\n    base = name\r\n    note(base)\r\n    return base\r\n"
    )
    assert toy.state() == before


def test_binary_file_is_kept_and_may_not_be_patched(toy: Toy) -> None:
    (toy.checkout / "sglang" / "table.bin").write_bytes(TABLE + b"\0")
    toy.commit("sglang/server.py", "check", "check", "Binary", "sglang/table.bin::<file>")
    toy.ok("export")
    before = toy.state()
    toy.ok("apply")
    assert (toy.checkout / "sglang" / "table.bin").read_bytes() == TABLE + b"\0"
    assert toy.state() == before
    assert "binary in sglang/table.bin" in toy.fork("check").stdout


def test_new_and_non_python_files_are_anchored_as_files(toy: Toy) -> None:
    (toy.checkout / "sglang" / "extra.py").write_text("def f():\n    pass\n")
    toy.git("add", "--force", "sglang/extra.py")
    toy.commit("sglang/.gitignore", "*.bin", "*.bim", "Extra", "sglang/extra.py::<file>", "sglang/.gitignore::<file>")
    toy.ok("export")
    toy.ok("check")


def test_line_at_the_top_of_a_file_is_no_new_file(toy: Toy) -> None:
    toy.commit("sglang/names.py", "X = 0\n", "guard()\nX = 0\n", "Top", "sglang/names.py::<module>")
    toy.ok("export")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("Upstream-Status: Inappropriate [toy]\n", "", "has no Upstream-Status: trailer"),
        ("Upstream-Status: Inappropriate [toy]", "Upstream-Status: perhaps", "starts with none of"),
        ("Drop-When: never\n", "", "has no Drop-When: trailer"),
        ("Test: tests/test_toy.py::test_toy\n", "", "has no Test: trailer"),
        ("Test: tests/test_toy.py::test_toy", "Test: tests/test_toy.py::test_other", "which is not there"),
        ("Test: tests/test_toy.py::test_toy", "Test: tests/gone.py", "which is not there"),
        ("No hook of upstream is there.\n\n", "", "does not say why"),
        (
            "from sglang_sm120 import hooks",
            "from sglang_sm120.attention import run",
            "may call sglang_sm120.hooks only",
        ),
        ("+        hooks.run(size)\n", "+        hooks.run(size)\n" * 29, "adds 31 lines"),
    ],
)
def test_check_names_what_a_patch_lacks(hooked: Toy, old: str, new: str, complaint: str) -> None:
    (path,) = (hooked.root / "patches").glob("*.patch")
    text = path.read_text()
    assert old in text
    text = text.replace(old, new)
    added = sum(line.startswith("+") and not line.startswith("+++") for line in text.splitlines())
    path.write_text(text.replace("+10,5 @@", f"+10,{added + 2} @@"))
    hooked.ok("apply", "--relock")
    result = hooked.fork("check")
    assert result.returncode == 1 and complaint in result.stdout, result.stdout + result.stderr


def test_check_refuses_a_series_that_quotes_more_than_it_adds(toy: Toy) -> None:
    toy.commit("sglang/server.py", "    check(port)\n", "    check(port + 1)\n", "Shift", "sglang/server.py::serve")
    toy.ok("export")
    assert "quotes 3 lines of upstream for 1 added" in toy.fork("check").stdout


def test_check_refuses_a_series_of_150_lines(toy: Toy) -> None:
    for number in range(6):
        block = "".join(f"    note({number}, {line})\n" for line in range(25))
        toy.commit(
            "sglang/server.py",
            "    return port\n",
            f"{block}    return port\n",
            f"Note {number}",
            "sglang/server.py::serve",
        )
    toy.ok("export")
    assert "the series adds 150 lines" in toy.fork("check").stdout


def test_check_notes_what_is_not_exported(hooked: Toy) -> None:
    assert "note:" not in hooked.ok("check")
    hooked.commit("sglang/server.py", "    check(port)", "    check(0)", "Mine", "sglang/server.py::serve")
    last = hooked.ok("check").splitlines()[-1]
    assert "note: build/checkout" in last and " Mine)" in last and "make export-patches" in last


def test_check_refuses_a_stale_index_and_a_contradicting_requirement(hooked: Toy) -> None:
    (hooked.root / "patches" / "README.md").write_text("old\n")
    (hooked.root / "tools").mkdir()
    (hooked.root / "tools" / "requirements-cpu.txt").write_text("# pins\ntorch==2.0.0  # old\ntorchvision==0.1\n")
    result = hooked.fork("check")
    assert "README.md is stale" in result.stdout
    assert "torch==2.0.0" in result.stdout and "torchvision" not in result.stdout
    assert "2 problems" in result.stderr


def test_in_a_pipe_the_problems_stand_above_the_line_that_counts_them(hooked: Toy) -> None:
    (hooked.root / "patches" / "README.md").write_text("old\n")
    *_, problem, last = hooked.fork("check", stderr=subprocess.STDOUT).stdout.splitlines()
    assert "problem: patches/README.md is stale" in problem
    assert last == "error: 1 problem in the series: see above"
