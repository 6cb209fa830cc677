"""The series carried to another release: every way a patch can fare."""

import json
import re
import subprocess

import pytest
from toy import ENGINE, FILES, FORK, HOOK, Toy

RUN = "    def run(self, batch):\n        size = len(batch)\n        return size\n"
SERVER = FILES["sglang/server.py"]
HOOKED_RUN = RUN.replace("        return size\n", HOOK + "        return size\n")
TWIN = """\
    def warm(self, batch):
        size = len(batch)
        return size

    def run(self, batch):
        return [1]
"""


def guard_port(toy: Toy, subject: str = "Guard port") -> None:
    toy.commit(
        "sglang/server.py", "    return port", "    guard(port)\n    return port", subject, "sglang/server.py::serve"
    )


def report(toy: Toy, name: str = "1.0-to-1.1") -> str:
    return (toy.root / "docs" / "upgrades" / f"{name}.md").read_text()


def test_clean_there_and_back_gives_the_first_state(hooked: Toy) -> None:
    before = hooked.state()
    hooked.release("1.1", {"sglang/engine.py": '"""Later."""\n\nimport os\n' + ENGINE, "sglang/new.py": "x = 1\n"})
    assert "1/1 Hook-run: clean" in hooked.ok("rebase", "1.1")
    assert hooked.read("sglang/engine.py").endswith(HOOKED_RUN)
    assert hooked.lock["upstream"]["version"] == "1.1" and hooked.lock["series"]["patches"] == 1
    assert (
        "1 patches before, 0 dropped, 1 after" in report(hooked)
        and "Hook run" in report(hooked).partition("range-diff")[2]
    )
    hooked.ok("check")
    hooked.ok("rebase", "1.0")
    assert hooked.state() == before


def test_twin_function_is_noticed(hooked: Toy) -> None:
    """Upstream puts a function with the old body before a rewritten one: git merges into the wrong one, silently."""
    hooked.release("1.1", {"sglang/engine.py": ENGINE.replace(RUN, TWIN)})
    before = hooked.state()
    message = hooked.error("rebase", "1.1")
    assert "Hook-run: moved: sglang/engine.py::Engine.run -> sglang/engine.py::Engine.warm" in message
    assert "--accept Hook-run" in message
    assert "moved" in hooked.error("rebase", "--continue"), "going on without a decision is no decision"
    assert hooked.state() == before


def test_moved_function_is_accepted_with_a_new_anchor(hooked: Toy) -> None:
    hooked.release("1.1", {"sglang/engine.py": ENGINE.replace("class Engine", "class Runner")})
    assert "Engine.run -> sglang/engine.py::Runner.run" in hooked.error("rebase", "1.1")
    hooked.ok("rebase", "--continue", "--accept", "Hook-run")
    (text,) = hooked.patches().values()
    assert b"Anchor: sglang/engine.py::Runner.run\n" in text and b"Engine.run" not in text
    assert "moved, accepted: sglang/engine.py::Engine.run -> sglang/engine.py::Runner.run" in report(hooked)
    hooked.ok("check")


def test_moved_lines_can_be_put_right_by_hand(hooked: Toy) -> None:
    hooked.release("1.1", {"sglang/engine.py": ENGINE.replace(RUN, TWIN)})
    hooked.error("rebase", "1.1")
    hook = HOOK.replace("size", "1")
    right = ENGINE.replace(RUN, TWIN.replace("        return [1]", hook + "        return [1]"))
    (hooked.rebase / "sglang" / "engine.py").write_text(right)
    hooked.ok("rebase", "--continue")
    assert hooked.read("sglang/engine.py") == right
    hooked.ok("apply")


def test_function_moved_to_another_file_is_gone_with_a_hint(hooked: Toy) -> None:
    other = ENGINE.replace("    def prepare(self, batch):\n        size = len(batch)\n        return size\n\n", "")
    hooked.release("1.1", {"sglang/engine.py": ENGINE.replace(RUN, ""), "sglang/runner.py": "import os\n\n" + other})
    message = hooked.error("rebase", "1.1")
    assert "target gone: sglang/engine.py::Engine.run (that name is now at sglang/runner.py:7)" in message
    hooked.git("checkout", "--quiet", "HEAD", "--", "sglang/engine.py", at=hooked.rebase)
    runner = hooked.rebase / "sglang" / "runner.py"
    runner.write_text(runner.read_text().replace(RUN, HOOKED_RUN))
    assert "moved" in hooked.error("rebase", "--continue")
    hooked.ok("rebase", "--continue", "--accept", "Hook-run")
    assert hooked.read("sglang/runner.py").endswith(HOOKED_RUN)
    hooked.ok("check")


def test_file_renamed_upstream_is_followed_and_must_be_accepted(hooked: Toy) -> None:
    hooked.release("1.1", {"sglang/engine.py": None, "sglang/motor.py": ENGINE})
    assert "sglang/engine.py::Engine.run -> sglang/motor.py::Engine.run" in hooked.error("rebase", "1.1")
    hooked.ok("rebase", "--continue", "--accept", "Hook-run")
    hooked.ok("check")


def test_absorbed_patch_is_dropped_only_when_told(hooked: Toy) -> None:
    guard_port(hooked)
    hooked.ok("export")
    hooked.release("1.1", {"sglang/engine.py": ENGINE.replace(RUN, HOOKED_RUN)})
    message = hooked.error("rebase", "1.1")
    assert "Hook-run: absorbed" in message and "--drop Hook-run" in message
    assert "absorbed" in hooked.error("rebase", "--continue")
    hooked.ok("rebase", "--continue", "--drop", "Hook-run")
    assert list(hooked.patches()) == ["0001-Guard-port.patch"]
    assert "2 patches before, 1 dropped, 1 after" in report(hooked)
    assert "| Hook-run | dropped (absorbed) |" in report(hooked)


def test_partly_absorbed_patch_stops(toy: Toy) -> None:
    both = RUN.replace("run", "prepare") + "\n" + RUN
    toy.commit(
        "sglang/engine.py",
        both,
        both.replace("        return size\n", "        hook(size)\n        return size\n"),
        "Hook both",
        "sglang/engine.py::Engine.prepare",
        "sglang/engine.py::Engine.run",
    )
    toy.ok("export")
    upstream = ENGINE.replace("        return size\n\n", "        hook(size)\n        return size\n\n")
    toy.release("1.1", {"sglang/engine.py": upstream})
    assert "Hook-both: moved: sglang/engine.py::Engine.prepare, sglang/engine.py::Engine.run -> " in toy.error(
        "rebase", "1.1"
    )


def test_partly_absorbed_patch_within_one_function_stops(toy: Toy) -> None:
    toy.commit(
        "sglang/server.py",
        "    check(port)\n    return port\n",
        "    first(port)\n    check(port)\n    second(port)\n    return port\n",
        "Two calls",
        "sglang/server.py::serve",
    )
    toy.ok("export")
    toy.release("1.1", {"sglang/server.py": "def serve(port):\n    first(port)\n    check(port)\n    return port\n"})
    assert "Two-calls: partly absorbed: upstream does 1 of its lines" in toy.error("rebase", "1.1")
    assert "partly absorbed" in toy.error("rebase", "--continue")
    toy.ok("rebase", "--continue", "--accept", "Two-calls")
    assert toy.read("sglang/server.py").count("first(port)") == 1


def test_reindented_target_conflicts_at_file_and_line(hooked: Toy) -> None:
    indented = (
        "    def run(self, batch):\n        with self.lock:\n            size = len(batch)\n            return size\n"
    )
    hooked.release("1.1", {"sglang/engine.py": ENGINE.replace(RUN, indented)})
    assert "Hook-run: conflict: sglang/engine.py:10" in hooked.error("rebase", "1.1")
    assert "still has conflict markers" in hooked.error("rebase", "--continue")
    merged = indented.replace(
        "            return",
        "            from sglang_sm120 import hooks\n            hooks.run(size)\n            return",
    )
    (hooked.rebase / "sglang" / "engine.py").write_text(ENGINE.replace(RUN, merged))
    hooked.ok("rebase", "--continue")
    assert hooked.read("sglang/engine.py") == ENGINE.replace(RUN, merged)
    assert "conflict at sglang/engine.py:10" in report(hooked) and "resolved by hand" in report(hooked)


def test_merge_that_is_no_python_any_more_stops(toy: Toy) -> None:
    """Upstream turns statements into the arguments of a call around the hook: no conflict, no Python either."""
    toy.commit("sglang/names.py", "C = 3", "guard()\nC = 3", "Guard", "sglang/names.py::<module>")
    toy.ok("export")
    toy.release("1.1", {"sglang/names.py": "X = dict(\nA = 1,\nB = 2,\nC = 3,\nD = 4,\n)\n"})
    assert "Guard: broken: sglang/names.py:4 is not valid Python after the patch" in toy.error("rebase", "1.1")
    assert "broken" in toy.error("rebase", "--continue")
    (toy.rebase / "sglang" / "names.py").write_text("guard()\nX = dict(\nA = 1,\nB = 2,\nC = 3,\nD = 4,\n)\n")
    toy.ok("rebase", "--continue")


def test_deleted_target_is_ported_or_dropped(hooked: Toy) -> None:
    guard_port(hooked)
    hooked.ok("export")
    hooked.release("1.1", {"sglang/engine.py": None})
    message = hooked.error("rebase", "1.1")
    assert (
        "Hook-run: target gone: sglang/engine.py::Engine.run" in message
        and "sglang/engine.py (not in the new release)" in message
    )
    assert "is not in the new release" in hooked.error("rebase", "--continue"), "the file must not come back by itself"
    hooked.ok("rebase", "--continue", "--drop", "Hook-run")
    assert not (hooked.checkout / "sglang" / "engine.py").exists()
    assert list(hooked.patches()) == ["0001-Guard-port.patch"]


def test_crlf_and_binary_files_are_carried(toy: Toy) -> None:
    toy.commit(
        "sglang/windows.py", "    return", "    note(base)\r\n    return", "Note path", "sglang/windows.py::path"
    )
    toy.ok("export")
    table = b"\r\n\0" * 99
    toy.release(
        "1.1", {"sglang/windows.py": "import os\r\n\r\n\r\n" + FILES["sglang/windows.py"], "sglang/table.bin": table}
    )
    toy.ok("rebase", "1.1")
    assert toy.read("sglang/windows.py").endswith("    base = name\r\n    note(base)\r\n    return base\r\n")
    assert (toy.checkout / "sglang" / "table.bin").read_bytes() == table
    toy.ok("apply")


def test_patch_count_is_conserved(hooked: Toy) -> None:
    """A patch that vanishes on the way, by whatever fault, ends the rebase."""
    guard_port(hooked)
    hooked.commit("sglang/names.py", "C = 3", "guard()\nC = 3", "Guard names", "sglang/names.py::<module>")
    hooked.ok("export")
    hooked.release("1.1", {"sglang/engine.py": ENGINE.replace("class Engine", "class Runner")})
    hooked.error("rebase", "1.1")
    before = hooked.state()
    state = hooked.root / "build" / "rebase.json"
    document = json.loads(state.read_text())
    assert [slug for slug, _ in document["todo"]] == ["Hook-run", "Guard-port", "Guard-names"]
    document["todo"].pop(1)
    state.write_text(json.dumps(document))
    message = hooked.error("rebase", "--continue", "--accept", "Hook-run")
    assert "3 patches before, 0 dropped, but 2 after: a patch was lost" in message
    assert hooked.state() == before


def test_decisions_can_be_given_up_front(hooked: Toy) -> None:
    guard_port(hooked)
    hooked.ok("export")
    hooked.release("1.1", {"sglang/engine.py": ENGINE.replace("class Engine", "class Runner")})
    hooked.ok("rebase", "1.1", "--accept", "Hook-run", "--drop", "Guard-port")
    assert list(hooked.patches()) == ["0001-Hook-run.patch"]


def test_wrong_slug_is_named(hooked: Toy) -> None:
    hooked.release("1.1")
    before = hooked.state()
    message = hooked.error("rebase", "1.1", "--drop", "hook")
    assert "no patch 'hook' is left to carry: the ones left are Hook-run" in message
    assert hooked.state() == before and not hooked.rebase.exists()


def test_abort_restores_and_keeps_what_was_done(hooked: Toy) -> None:
    before = hooked.state()
    hooked.release("1.1", {"sglang/engine.py": None})
    hooked.error("rebase", "1.1")
    (hooked.rebase / "sglang" / "port.py").write_text("mine = 1\n")
    hooked.git("add", "--all", at=hooked.rebase)
    hooked.git("commit", "--quiet", "-m", "Mine", at=hooked.rebase)
    hooked.ok("rebase", "--abort")
    assert hooked.state() == before and not hooked.rebase.exists()
    assert hooked.git("show", "refs/fork/saved/1:sglang/port.py") == "mine = 1"
    assert "no rebase is in progress" in hooked.error("rebase", "--continue")


def test_abort_of_an_untouched_rebase_keeps_nothing(hooked: Toy) -> None:
    hooked.release("1.1", {"sglang/engine.py": ENGINE.replace(RUN, RUN.replace("size", "count"))})
    assert "conflict" in hooked.error("rebase", "1.1")
    hooked.ok("rebase", "--abort")
    assert not hooked.git("for-each-ref", "refs/fork/saved")
    hooked.ok("clean")


def test_abort_keeps_an_edited_file(hooked: Toy) -> None:
    hooked.release("1.1", {"sglang/engine.py": ENGINE.replace(RUN, RUN.replace("size", "count"))})
    hooked.error("rebase", "1.1")
    with (hooked.rebase / "sglang" / "engine.py").open("a") as file:
        file.write("mine = 1\n")
    hooked.ok("rebase", "--abort")
    assert hooked.git("show", "refs/fork/saved/1:sglang/engine.py").endswith("mine = 1")


def test_abort_keeps_the_patch_resolved_before_the_stop(hooked: Toy) -> None:
    guard_port(hooked)
    hooked.ok("export")
    changed = {"sglang/engine.py": ENGINE.replace(RUN, RUN.replace("size", "count")), "sglang/server.py": None}
    hooked.release("1.1", changed)
    hooked.error("rebase", "1.1")
    (hooked.rebase / "sglang" / "engine.py").write_text(ENGINE.replace(RUN, HOOKED_RUN.replace("size", "count")))
    assert "Guard-port: target gone" in hooked.error("rebase", "--continue")
    hooked.ok("rebase", "--abort")
    assert "hooks.run(count)" in hooked.git("show", "refs/fork/saved/1:sglang/engine.py")


def test_commit_made_while_resolving_becomes_the_patch(hooked: Toy) -> None:
    hooked.release("1.1", {"sglang/engine.py": ENGINE.replace(RUN, RUN.replace("size", "count"))})
    assert "conflict" in hooked.error("rebase", "1.1")
    merged = ENGINE.replace(RUN, HOOKED_RUN.replace("size", "count"))
    (hooked.rebase / "sglang" / "engine.py").write_text(merged)
    hooked.git("commit", "--quiet", "--all", "-m", "Mine", at=hooked.rebase)
    hooked.ok("rebase", "--continue")
    assert hooked.read("sglang/engine.py") == merged
    assert list(hooked.patches()) == ["0001-Hook-run.patch"]


@pytest.mark.parametrize("verb", ["apply", "export", "clean", "rebase 1.1", "rebase"])
def test_other_verbs_wait_for_the_rebase(hooked: Toy, verb: str) -> None:
    hooked.release("1.1", {"sglang/engine.py": None})
    hooked.error("rebase", "1.1")
    message = hooked.error(*verb.split())
    assert "a rebase is in progress" in message
    assert f"`{FORK} rebase --continue`" in message and f"`{FORK} rebase --abort`" in message
    assert f"`{FORK} rebase --abort`" in hooked.ok("status")


def test_checkout_changed_during_the_rebase(hooked: Toy) -> None:
    hooked.release("1.1", {"sglang/engine.py": ENGINE.replace("class Engine", "class Runner")})
    hooked.error("rebase", "1.1")
    guard_port(hooked, "Mine")
    head = hooked.git("rev-parse", "HEAD")
    assert "changed since the rebase began" in hooked.error("rebase", "--continue", "--accept", "Hook-run")
    hooked.ok("rebase", "--abort")
    assert hooked.git("rev-parse", "HEAD") == head
    hooked.ok("export")


def test_same_release_and_missing_argument(hooked: Toy) -> None:
    assert "is on sglang 1.0 already" in hooked.error("rebase", "1.0")
    assert "is on sglang 1.0 already" in hooked.error("rebase", "v1.00.0")
    message = hooked.error("rebase")
    assert "rebase needs a release" in message and message.endswith("besides the pinned 1.0, none")
    hooked.release("1.1")
    assert hooked.error("rebase").endswith("besides the pinned 1.0, 1.1")


@pytest.mark.parametrize("spelling", ["v1.1", "1.01", "1.1.0"])
def test_release_spelt_in_many_ways(hooked: Toy, spelling: str) -> None:
    """One release has many spellings; what is written is the wheel's."""
    hooked.release("1.1")
    assert "carry to 1.1" in hooked.ok("drift", spelling)
    hooked.ok("rebase", spelling)
    assert hooked.lock["upstream"]["version"] == "1.1"
    assert [path.name for path in (hooked.root / "docs" / "upgrades").iterdir()] == ["1.0-to-1.1.md"]
    hooked.ok("build", "--no-kernels")


@pytest.mark.parametrize("verb", ["rebase", "drift"])
def test_what_is_no_release_number_is_refused(hooked: Toy, verb: str) -> None:
    assert "'1.*' is no release number" in hooked.error(verb, "1.*")


def test_release_is_looked_up_before_anything_is_applied(hooked: Toy) -> None:
    result = hooked.fork("rebase", "9.9")
    assert result.returncode == 1 and "apply:" not in result.stdout


def go_back(toy: Toy, said: str) -> None:
    """Type what a rebase prints to go back."""
    *_, command = re.findall("`([^`]*)`", said)
    for part in command.split(" && "):
        if part.startswith("make "):
            toy.ok({"make apply-patches": "apply", "make export-patches": "export"}[part])
        else:
            subprocess.run(part.split(), cwd=toy.root, check=True)


def test_rebase_says_how_to_go_back_and_that_loses_nothing(hooked: Toy) -> None:
    """The patches are in no commit, nor is the note beside the report, nor the lock's revision."""
    upgrades = hooked.root / "docs" / "upgrades"
    upgrades.mkdir(parents=True)
    (upgrades / "README.md").write_text("Upgrades\n")
    hooked.ok("bump")
    before = hooked.state()
    hooked.release("1.1", {"sglang/engine.py": ENGINE.replace("class Engine", "class Runner")})
    last = hooked.ok("rebase", "1.1", "--accept", "Hook-run").splitlines()[-1]
    assert "next: `make install && make test-all`, then commit upstream.lock patches docs/upgrades;" in last
    after = hooked.git("rev-parse", "HEAD")
    go_back(hooked, last)
    assert hooked.state() == before and (upgrades / "README.md").read_text() == "Upgrades\n"
    assert hooked.git("rev-parse", "refs/fork/series/1.1") == after


def test_going_back_refuses_while_the_checkout_holds_work(hooked: Toy) -> None:
    hooked.release("1.1")
    last = hooked.ok("rebase", "1.1").splitlines()[-1]
    guard_port(hooked)
    with pytest.raises(AssertionError, match="Guard port"):
        go_back(hooked, last)


def test_a_series_that_another_rebase_left_stays(hooked: Toy) -> None:
    """There, back without a patch: the series that had it is not overwritten."""
    first = hooked.git("rev-parse", "HEAD")
    hooked.release("1.1")
    hooked.ok("rebase", "1.1")
    said = hooked.ok("rebase", "1.0", "--drop", "Hook-run")
    assert "an earlier series of 1.0" in said and hooked.git("rev-parse", "refs/fork/saved/1") == first


def test_rebase_ends_with_the_pins_that_the_release_contradicts(hooked: Toy) -> None:
    (hooked.root / "tools").mkdir()
    (hooked.root / "tools" / "requirements-cpu.txt").write_text("torch==2.0.0\nflashinfer.python==0.7.2\n")
    hooked.release("1.1")
    problem, last = hooked.ok("rebase", "1.1").splitlines()[-2:]
    assert "problem: tools/requirements-cpu.txt has torch==2.0.0, sglang 1.1 asks for torch==2.14.1" in problem
    assert "next: correct these pins, then `make install && make test-all`, then commit" in last


def test_drift_reports_every_patch_and_moves_nothing(hooked: Toy) -> None:
    guard_port(hooked)
    hooked.commit("sglang/names.py", "C = 3", "guard()\nC = 3", "Guard names", "sglang/names.py::<module>")
    hooked.ok("export")
    before = hooked.state()
    hooked.release("1.1", {"sglang/engine.py": None, "sglang/server.py": SERVER.replace("serve", "listen")})
    result = hooked.fork("drift")
    assert "Hook-run: target gone: sglang/engine.py::Engine.run" in result.stdout
    assert "Guard-port: moved: sglang/server.py::serve -> sglang/server.py::listen" in result.stdout
    assert "3/3 Guard-names: clean" in result.stdout
    assert (result.returncode, "2 of 3 patches need work on sglang 1.1" in result.stderr) == (1, True)
    assert "all 3 patches of sglang 1.0 carry to 1.0" in hooked.ok("drift", "1.0")
    assert hooked.state() == before


def test_drift_on_the_pinned_release_needs_no_download(hooked: Toy) -> None:
    output = hooked.ok("drift")
    assert "1.0 is the newest release and is the pinned one" in output and "carry to 1.0" in output
    assert "fetch:" not in output and "import:" not in output
