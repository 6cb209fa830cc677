"""Builds the CUDA kernels into one shared library and reads what the compiler says about them.

python -m tools.kernels build  [--archs sm_90 sm_120a] [--out DIR]   one .so, incremental, by ninja
python -m tools.kernels report [--check]                             registers, shared memory, spills, instruction mix
python -m tools.kernels bench | gpu-report                           needs a GPU: see tools/kernel_bench.py
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tools.project import write_atomic

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "kernels"
BUILD = ROOT / "build" / "kernels"
LIBRARY = "libsm120_mla.so"
OVERLAY_LIB = ROOT / "overlay" / "sglang_sm120" / "lib"
DEFAULT_ARCHS = ("sm_90", "sm_120a", "sm_121a")
ALL_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120a", "sm_121a")
# The parts must be of one release: the assembler of one refuses the intermediate code of the next.
PIP_TOOLKIT = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
)
MAX_SHARED_BYTES = 101_376
FLAGS = "-std=c++17 -O3 -lineinfo -Xcompiler -fPIC -Xptxas -v -Xptxas -warn-spills -cudart static"
INCLUDES = ("include", "mla_verify")


class KernelError(RuntimeError):
    """A build or check failed; the message says what to do."""


def source_hash(sources: Path = SOURCES) -> str:
    """SHA-256 over names and contents of every file under kernels/: equal hashes build equal kernels."""
    digest = hashlib.sha256()
    for path in sorted(p for p in sources.rglob("*") if p.suffix in {".cu", ".cuh", ".h"}):
        digest.update(f"{path.relative_to(sources).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def find_nvcc() -> str:
    """`$CUDA_HOME/bin/nvcc`, else nvcc on PATH, else the one of the pip package nvidia-cuda-nvcc."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc") or _pip_nvcc()
    if nvcc is None:
        raise KernelError(
            "no nvcc: install the CUDA 13 toolkit, set CUDA_HOME to where it is, or "
            "`.venv/bin/pip install " + " ".join(PIP_TOOLKIT) + "`"
        )
    return nvcc


def find_ninja() -> str:
    """ninja of this Python's environment, else on PATH: two releases taking turns would compile everything again."""
    own = sysconfig.get_path("scripts")
    ninja = shutil.which("ninja", path=own) or shutil.which("ninja")
    if ninja is None:
        raise KernelError(f"no ninja: `{sys.executable} -m pip install ninja`")
    return ninja


def _pip_nvcc() -> str | None:
    """nvcc where NVIDIA's CUDA 13 wheels put it, beside the include and lib folders of the others."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return shutil.which("nvcc", path=os.pathsep.join(f"{folder}/cu13/bin" for folder in folders)) if folders else None


def _gencode(arch: str) -> str:
    if arch not in ALL_ARCHS:
        raise KernelError(f"unknown architecture {arch!r}; choose from {' '.join(ALL_ARCHS)}")
    return f"-gencode arch={arch.replace('sm_', 'compute_')},code={arch}"


def _ninja_text(archs: tuple[str, ...], nvcc: str, sources: Path, flags: str) -> str:
    """The build as ninja rules: an object per .cu for all architectures, its compiler report beside it as .log."""
    includes = " ".join(_word(f"-I{sources / folder}") for folder in INCLUDES)
    command = f"{_word(nvcc)} {flags} {includes} {' '.join(map(_gencode, archs))}"
    link = f"{_word(nvcc)} -shared -cudart static {_word(f'-L{Path(nvcc).parent.parent}/lib')} -Xlinker -s"
    lines = [
        "ninja_required_version = 1.8",
        "rule compile",
        f"  command = {command} -MD -MF $out.d -c $in -o $out > $out.log 2>&1 || (cat $out.log >&2; false)",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = nvcc $in",
        "rule link",
        f"  command = {link} {' '.join(map(_gencode, archs))} $in -o $out",
        "  description = link $out",
    ]
    objects = []
    for source in sorted(sources.rglob("*.cu")):
        objects.append(f"{source.parent.name}.{source.stem}.o")
        lines.append(f"build {objects[-1]}: compile {_path(source)}")
    return "\n".join([*lines, f"build {LIBRARY}: link {' '.join(objects)}", ""])


def _word(text: str) -> str:
    """One word of a ninja command."""
    return shlex.quote(text).replace("$", "$$")


def _path(path: Path) -> str:
    """A path in a ninja build line; ninja quotes it for the shell itself."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def _objects_dir(archs: tuple[str, ...]) -> Path:
    return BUILD / "-".join(archs)


def wanted_archs() -> list[str]:
    """GPU targets of the environment variable ARCHS, or the defaults."""
    return os.environ.get("ARCHS", "").replace(",", " ").split() or list(DEFAULT_ARCHS)


def build_for_release(archs: tuple[str, ...] | list[str] = DEFAULT_ARCHS, out_dir: Path = OVERLAY_LIB) -> Path:
    """`build` whose library has the same bytes wherever this repository lies.

    nvcc writes the absolute path and the time of a source into symbols, so the sources are compiled in a folder whose
    name depends on nothing but their content, at one fixed time. Line tables and the symbol table hold process ids and
    are left out.
    """
    staged = _staged_sources()
    return build(archs, out_dir, sources=staged, flags=FLAGS.replace("-lineinfo ", ""))


def _staged_sources() -> Path:
    """/tmp/sm120_mla-HASH, which stays: another build of the same sources may be using it."""
    staged = Path("/tmp") / f"sm120_mla-{source_hash()[:16]}"
    if not staged.exists():
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            copy = Path(shutil.copytree(SOURCES, Path(folder) / "kernels"))
            for path in copy.rglob("*"):
                os.utime(path, (0, 0))
            with contextlib.suppress(OSError):  # the other build was first; the hash below decides
                copy.rename(staged)
    if source_hash(staged) != source_hash():
        raise KernelError(f"{staged} does not hold the kernel sources it is named after: delete it and build again")
    return staged


def build(
    archs: tuple[str, ...] | list[str] = DEFAULT_ARCHS,
    out_dir: Path = OVERLAY_LIB,
    sources: Path = SOURCES,
    flags: str = FLAGS,
) -> Path:
    """Compiles what changed and leaves `out_dir/libsm120_mla.so` for `archs`; returns its path."""
    archs = tuple(archs)
    folder = _objects_dir(archs) if sources == SOURCES else _objects_dir(archs) / sources.name
    rules = _ninja_text(archs, find_nvcc(), sources, flags)
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(out_dir).resolve() / LIBRARY
    with (BUILD / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # two ninjas would write the same objects
        (folder / "build.ninja").write_text(rules)
        _compile(folder, archs)
        # Builds for other GPUs leave theirs in the same place, and ninja would not notice.
        linked = (folder / LIBRARY).read_bytes()
        if not library.exists() or library.read_bytes() != linked:
            write_atomic(library, linked)
    return library


def _compile(folder: Path, archs: tuple[str, ...]) -> None:
    """Run ninja in `folder`, which says nothing where nothing has changed."""
    command = [find_ninja(), "-C", str(folder)]
    if "no work to do" in subprocess.run([*command, "-n"], capture_output=True, text=True, check=False).stdout:
        return
    print(f"kernels: compiling for {' '.join(archs)} (minutes the first time)", flush=True)
    if subprocess.run(command, check=False).returncode:
        raise KernelError(f"the kernels did not compile; logs are in {folder}")


@dataclass
class Usage:
    """What ptxas says of one kernel on one architecture, and what the disassembly holds."""

    kernel: str
    arch: str
    registers: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    mix: Counter[str] = field(default_factory=Counter)


_COMPILING = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")
_VERIFY = re.compile(r"verify_kernelI\w*?(Bf16|Fp8)KvELi(\d)E")


def kernel_name(mangled: str) -> str:
    """`mla_verify bf16 48 rows` for an instance of the verify kernel, else the bare function name."""
    match = _VERIFY.search(mangled)
    if match:
        return f"mla_verify {match[1].lower()} {8 * int(match[2])} rows"
    return _found(re.compile(r"(?:merge|oracle|move_kv|pack)_kernel"), mangled)[0]


def _found(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.search(text)
    if match is None:
        raise KernelError(f"the compiler's log has no {pattern.pattern!r}: this nvcc is not understood; use CUDA 13")
    return match


def _score_row_parts() -> int:
    config = (SOURCES / "mla_verify" / "config.h").read_text()
    return int(_found(re.compile(r"constexpr int kScoreRowParts = (\d);"), config)[1])


def shared_bytes(fp8: bool, row_groups: int) -> int:
    """Dynamic shared memory of a verify instance: the arithmetic of `Config` in kernels/mla_verify/config.h."""
    column_parts = 4 // (_score_row_parts() if row_groups >= 4 and not fp8 else 1)
    partials = 512 * column_parts * row_groups
    fixed = 256 + 3 * 512 + 3 * 8 * row_groups * 4 + 2 * 16 * (row_groups | 1) * 16
    stage = 16 * (576 if fp8 else 1152)
    stages_beside = [min(10, (MAX_SHARED_BYTES - 127 - fixed - buffers * partials) // stage) for buffers in (1, 2)]
    buffers = 2 if stages_beside[0] == stages_beside[1] else 1
    return -(-(fixed + buffers * partials) // 128) * 128 + stages_beside[0] * stage


def compiler_report(archs: tuple[str, ...] | list[str] = DEFAULT_ARCHS) -> list[Usage]:
    """Registers, spills and shared memory of every kernel, from the logs of the last `build(archs)`."""
    usages = []
    for log in sorted(_objects_dir(tuple(archs)).glob("*.log")):
        for block in re.split(r"(?=ptxas info\s+: Compiling entry)", log.read_text()):
            compiling = _COMPILING.search(block)
            if compiling is None:
                continue
            usage = Usage(kernel_name(compiling[1]), compiling[2], int(_found(_USED, block)[1]))
            usage.stack_bytes = int(_found(_STACK, block)[1])
            usage.spill_bytes = sum(map(int, _found(_SPILLS, block).groups()))
            static, verify = _STATIC_SHARED.search(block), _VERIFY.search(compiling[1])
            usage.shared_bytes = int(static[1]) if static else 0
            if verify:
                usage.shared_bytes += shared_bytes(verify[1] == "Fp8", int(verify[2]))
            usages.append(usage)
    if not usages:
        raise KernelError("no compiler logs: run `python -m tools.kernels build` first")
    return usages


OPCODES = ("HMMA", "LDGSTS", "LDSM", "SYNCS", "MUFU", "LDL", "STL", "HGMMA", "UTCMMA")


def find_cuobjdump() -> Path | None:
    """cuobjdump with nvdisasm beside it: on PATH, or where NVIDIA's wheels or Triton's put them."""
    for folder in (
        None,
        *(f"{p}/{bin_}" for p in sys.path for bin_ in ("nvidia/cu13/bin", "triton/backends/nvidia/bin")),
    ):
        found = shutil.which("cuobjdump", path=folder)
        if found and shutil.which("nvdisasm", path=Path(found).parent):
            return Path(found)
    return None


def disassembly(library: Path, arch: str) -> dict[str, Counter[str]]:
    """Instruction counts by kernel of a built library's code for `arch`; needs cuobjdump and nvdisasm."""
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        raise KernelError("no cuobjdump: `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`")
    env = os.environ | {"PATH": f"{cuobjdump.parent}:{os.environ['PATH']}"}
    command = [str(cuobjdump), "--dump-sass", "-arch", arch, str(library)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    parts = re.split(r"^[ \t]*Function : (\S+)", text, flags=re.M)[1:]
    return {
        kernel_name(function): Counter(re.findall(r"\*/ +(?:@!?U?P\d+ +)?([A-Z][A-Z0-9]*)", code))
        for function, code in zip(parts[::2], parts[1::2], strict=True)
    }


def check(usages: list[Usage]) -> list[str]:
    """Reasons why these kernels may not ship: shared memory over the limit, registers or arrays in local memory."""
    problems = []
    for usage in usages:
        if usage.shared_bytes > MAX_SHARED_BYTES:
            problems.append(
                f"{usage.kernel} on {usage.arch}: {usage.shared_bytes} B of shared memory > {MAX_SHARED_BYTES}"
            )
        if usage.spill_bytes or usage.stack_bytes:
            problems.append(
                f"{usage.kernel} on {usage.arch}: spills {usage.spill_bytes} B, {usage.stack_bytes} B of stack"
            )
    return problems


def report_table(usages: list[Usage]) -> str:
    """The report as a Markdown table."""
    lines = ["| kernel | arch | registers | shared B | spills B | " + " | ".join(OPCODES[:7]) + " |", "|---" * 12 + "|"]
    for usage in sorted(usages, key=lambda u: (u.arch, u.kernel)):
        mix = " | ".join(str(usage.mix[op]) if usage.mix else "-" for op in OPCODES[:7])
        lines.append(
            f"| {usage.kernel} | {usage.arch} | {usage.registers} | {usage.shared_bytes:,} | {usage.spill_bytes} "
            f"| {mix} |"
        )
    return "\n".join(lines)


def _report(archs: tuple[str, ...], library: Path) -> list[Usage]:
    usages = compiler_report(archs)
    if find_cuobjdump():
        mixes = {arch: disassembly(library, arch) for arch in archs}
        for usage in usages:
            usage.mix = mixes[usage.arch][usage.kernel]
    return usages


def main(argv: list[str]) -> int:
    """Runs a verb; returns the exit status."""
    if argv[:1] in (["bench"], ["gpu-report"]):
        from tools import kernel_bench  # needs torch, which building does not

        return kernel_bench.main(argv)
    archs = wanted_archs()
    parser = argparse.ArgumentParser(prog="python -m tools.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("build", "report", "hash", "bench", "gpu-report"))
    parser.add_argument(
        "--archs", nargs="+", default=archs, metavar="SM", help=f"default: $ARCHS, now {' '.join(archs)}"
    )
    parser.add_argument("--out", type=Path, default=OVERLAY_LIB, help="folder of the .so")
    parser.add_argument("--check", action="store_true", help="report: fail on spills or too much shared memory")
    args = parser.parse_args(argv)
    try:
        if args.verb == "hash":
            print(source_hash())
            return 0
        library = build(args.archs, args.out)
        if args.verb == "build":
            print(library)
            return 0
        usages = _report(tuple(args.archs), library)
        print(report_table(usages))
        problems = check(usages)
        print("\n".join(problems) or "no spills, shared memory within limits")
        return 1 if problems and args.check else 0
    except (KernelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
