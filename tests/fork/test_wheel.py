"""The patched wheel: repeatable, complete, and gone without a trace when uninstalled."""

import json
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from toy import ENTRY_POINTS, FILES, Toy
from wheel.wheelfile import WheelFile

from tools.lock import read_lock
from tools.project import Project
from tools.wheel import KernelLibrary, build

REPOSITORY = Path(__file__).parents[2]
NAME = "sglang-1.0+sm120.1-{0}-{0}-manylinux_2_34_x86_64.whl"
INFO = "sglang-1.0+sm120.1.dist-info/"


@pytest.fixture
def wheels(hooked: Toy) -> dict[str, Path]:
    """The patched wheel of each Python."""
    hooked.ok("build", "--no-kernels", "--python", "all")
    return {python: hooked.root / "build" / "dist" / NAME.format(python) for python in ("cp311", "cp312")}


def test_two_builds_in_two_folders_are_equal(hooked: Toy, wheels: dict[str, Path], tmp_path: Path) -> None:
    clone = Toy(tmp_path / "clone", hooked.index)
    for name in ("overlay", "patches", "upstream.lock", "tests"):
        source = hooked.root / name
        clone.root.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", source, clone.root / name], check=True)
    for path in (clone.root / "overlay").rglob("*.py"):
        path.chmod(0o600)
    clone.ok("build", "--no-kernels", "--python", "all", "--out", str(tmp_path / "elsewhere"), TZ="Asia/Tokyo")
    for wheel in wheels.values():
        assert (tmp_path / "elsewhere" / wheel.name).read_bytes() == wheel.read_bytes()


def test_wheel_holds_patched_tree_overlay_and_this_pythons_extension(wheels: dict[str, Path]) -> None:
    for python, path in wheels.items():
        with WheelFile(path) as wheel:  # reading checks every hash in RECORD
            names = wheel.namelist()
            content = {name: wheel.read(name) for name in names if not name.endswith("RECORD")}
            record = wheel.read(INFO + "RECORD").decode()
        assert len(set(names)) == len(names) == len(record.splitlines())
        assert b"hooks.run(size)" in content["sglang/engine.py"]
        assert content["sglang/table.bin"] == FILES["sglang/table.bin"]
        assert content["sglang/windows.py"] == FILES["sglang/windows.py"].encode()
        assert content[f"sglang/_ext.cpython-{python[2:]}-x86_64-linux-gnu.so"] == f"\x7fELF {python}".encode()
        assert sum(name.endswith(".so") for name in names) == 1
        assert "sglang_sm120/hooks.py" in names and not any("__pycache__" in name for name in names)
        assert f"Tag: {python}-{python}-manylinux_2_34_x86_64" in content[INFO + "WHEEL"].decode()


def test_metadata_is_upstreams_under_our_version(wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels["cp311"]) as archive:
        metadata = Metadata.from_email(archive.read(INFO + "METADATA"))
        notice = archive.read(INFO + "licenses/NOTICE").decode()
        assert INFO + "licenses/LICENSE" in archive.namelist()
        assert archive.read(INFO + "top_level.txt") == b"sglang\nsglang_sm120\n"
    assert (metadata.name, str(metadata.version)) == ("sglang", "1.0+sm120.1")
    assert str(metadata.requires_dist[0]) == "torch==2.14.1"
    assert metadata.license_files == ["LICENSE", "NOTICE"]
    assert "sglang/engine.py" in notice and "sglang/server.py" not in notice


def test_entry_points_are_upstreams_and_ours(wheels: dict[str, Path], tmp_path: Path) -> None:
    zipfile.ZipFile(wheels["cp311"]).extractall(tmp_path / "site")
    distribution: Distribution = PathDistribution(tmp_path / "site" / INFO)
    found = {(point.group, point.name, point.value) for point in distribution.entry_points}
    upstream = dict(line.split(" = ") for line in ENTRY_POINTS.splitlines()[1:])
    assert found == {
        *(("console_scripts", name, value) for name, value in upstream.items()),
        ("console_scripts", "sglang-sm120", "sglang_sm120.cli:main"),
        ("sglang.srt.plugins", "sm120", "sglang_sm120.plugin:register"),
    }


def test_provenance_tells_patches_and_kernels(hooked: Toy, tmp_path: Path) -> None:
    library = tmp_path / "libsm120_mla.so"
    library.write_bytes(b"\x7fELF kernels")
    project = Project(hooked.root)
    with project.exclusive():
        (path,) = build(project, ["cp311"], KernelLibrary(library, "cafe", ("sm_120a",)), project.dist)
    with zipfile.ZipFile(path) as archive:
        facts = json.loads(archive.read(INFO + "PROVENANCE.json"))
        assert archive.read("sglang_sm120/lib/libsm120_mla.so") == b"\x7fELF kernels"
    assert facts["version"] == "1.0+sm120.1"
    assert facts["lock"] == read_lock(project.lock).to_dict()
    assert [patch["slug"] for patch in facts["patches"]] == ["Hook-run"]
    assert (facts["kernels"]["source_hash"], facts["kernels"]["archs"]) == ("cafe", ["sm_120a"])


def test_wheel_is_rebuilt_when_and_only_when_something_changed(hooked: Toy, wheels: dict[str, Path]) -> None:
    command = ["build", "--no-kernels", "--python", "3.11"]
    assert "up to date" in hooked.ok(*command)
    (hooked.root / "overlay" / "sglang_sm120" / "hooks.py").write_text("def run(size):\n    return size\n")
    before = wheels["cp311"].read_bytes()
    assert "up to date" not in hooked.ok(*command)
    assert wheels["cp311"].read_bytes() != before
    wheels["cp311"].write_bytes(b"cut off")
    assert "up to date" not in hooked.ok(*command)
    hooked.ok("bump")
    hooked.ok(*command)
    assert (wheels["cp311"].parent / NAME.format("cp311").replace("sm120.1", "sm120.2")).exists()


def test_build_ends_with_the_line_that_installs_its_wheel(hooked: Toy) -> None:
    hooked.ok("build", "--no-kernels")
    hooked.release("1.1")
    hooked.ok("rebase", "1.1")
    last = hooked.ok("build", "--no-kernels").splitlines()[-1]
    (wheel,) = (hooked.root / "build" / "dist").glob("sglang-1.1*")
    assert last == f"install it with: pip install build/dist/{wheel.name}"


def test_build_applies_first_and_refuses_unexported_commits(hooked: Toy) -> None:
    subprocess.run(["rm", "-r", hooked.checkout], check=True)
    hooked.ok("build", "--no-kernels")
    hooked.commit("sglang/server.py", "    check(port)", "    check(0)", "Mine", "sglang/server.py::serve")
    assert "make export-patches" in hooked.error("build", "--no-kernels")


def test_install_check_uninstall_leaves_nothing(hooked: Toy, tmp_path: Path) -> None:
    """In an environment of its own: pip install, import, pip check, pip uninstall."""
    overlay = hooked.root / "overlay" / "sglang_sm120"
    (overlay / "cli.py").write_text("def main():\n    print('ours')\n")
    hooked.ok("build", "--no-kernels")
    (wheel,) = (hooked.root / "build" / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    before = sorted((tmp_path / "venv").rglob("*"))

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False, env=hooked.environment())

    assert run(str(python), "-m", "pip", "install", "--no-deps", str(wheel)).returncode == 0
    imported = run(
        str(python), "-c", "import sglang.engine, sglang_sm120, importlib.metadata as m; print(m.version('sglang'))"
    )
    assert imported.stdout == "1.0+sm120.1\n", imported.stderr
    assert run(str(tmp_path / "venv" / "bin" / "sglang-sm120")).stdout == "ours\n"
    complaints = run(str(python), "-m", "pip", "check").stdout.splitlines()
    assert complaints and all(line.startswith("sglang 1.0+sm120.1 requires ") for line in complaints)
    uninstall = ("make", "-s", "-C", str(REPOSITORY), "uninstall", f"PY={python}")
    assert "Successfully uninstalled" in run(*uninstall).stdout
    assert sorted((tmp_path / "venv").rglob("*")) == before
    again = run(*uninstall)
    assert (again.stdout, again.stderr) == ("nothing to uninstall: no sglang in .venv\n", "")


def test_kernels_can_be_left_out_of_an_install() -> None:
    def command(*variables: str) -> str:
        make = ["make", "-n", "-C", str(REPOSITORY), "install", *variables]
        return subprocess.run(make, capture_output=True, text=True, check=True).stdout

    assert "install --kernels-if-nvcc" in command()
    assert "install --no-kernels" in command("KERNELS=0")


@pytest.mark.parametrize("verb", [(), ("build",), ("rebase",), ("drift",)])
def test_help_is_for_users(toy: Toy, verb: tuple[str, ...]) -> None:
    text = toy.ok(*verb, "--help")
    assert "['" not in text and "``" not in text and "PROJECT" not in text
