"""`sglang-sm120`: what this installation and its running server are made of."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Sequence

import torch

from sglang_sm120 import client, moe_balance, ops
from sglang_sm120.cpu import standin
from sglang_sm120.kvdefrag import kv_map


def doctor(url: str | None, api_key: str | None = None) -> int:
    """Print the facts that decide what runs. Exit code: 0 a GPU can serve, 1 only the CPU can, 2 something is wrong."""
    for name, value in _facts():
        _print_fact(name, value)
    if url:
        _print_server(url, api_key)
    problems = list(_problems())
    for problem in problems:
        _print_fact("problem", problem)
    if problems:
        return 2
    if not ops.available():
        _print_fact("exit code 1", "no GPU: only the CPU can serve")
        return 1
    if standin.is_needed():
        reason = "sgl_kernel is absent (`make serve` installs upstream's for GPUs) or SGLANG_USE_CPU_ENGINE=1 is set"
        _print_fact("exit code 1", f"only the CPU can serve: {reason}")
        return 1
    return 0


def _print_fact(name: str, value: str) -> None:
    print(f"{name:<22}{value}")


def _facts() -> Iterator[tuple[str, str]]:
    distribution = importlib.metadata.distribution("sglang")
    yield "sglang", distribution.version
    yield "torch", f"{torch.__version__} (CUDA {torch.version.cuda})"
    provenance = distribution.read_text("PROVENANCE.json")
    if provenance:
        facts = json.loads(provenance)
        yield "patches", ", ".join(patch["slug"] for patch in facts["patches"]) or "none"
        yield "kernel sources", facts["kernels"]["source_hash"] if facts["kernels"] else "not built in"
    yield "kernel library", str(ops.LIBRARY_PATH) if ops.LIBRARY_PATH.exists() else "absent"
    yield "kernels for", " ".join(ops.library_targets()) or "no GPU"
    yield "sgl_kernel", "absent or not asked for (CPU engine)" if standin.is_needed() else "installed"
    if not torch.cuda.is_available():
        yield "GPU", "none: the server runs on the CPU with the reference"
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        yield f"GPU {index}", f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.multi_processor_count} SMs, {memory}"
    if standin.is_needed():  # nor can what follows be imported
        return
    from sglang.srt.utils import get_nvidia_driver_version_str

    from sglang_sm120.attention import select

    yield "driver", get_nvidia_driver_version_str() or "unknown (no nvidia-smi)"
    yield (
        "default for MLA",
        "sm120_mla" if select.is_auto_device() else "upstream's choice (this GPU is not sm_120 / sm_121)",
    )


def _problems() -> Iterator[str]:
    plugins = [ep.value for ep in importlib.metadata.entry_points(group="sglang.srt.plugins")]
    if "sglang_sm120.plugin:register" not in plugins:
        yield "the plugin entry point is missing: SGLang does not see sm120_mla; reinstall the wheel"
    if not torch.cuda.is_available():
        return
    problem = ops.library_problem(torch.cuda.get_device_capability())
    if problem:
        yield problem


def _print_server(url: str, api_key: str | None) -> None:
    """Print what a running server chose, and its hooks. RuntimeError if it cannot be asked or is not ours."""
    (state, *_) = client.server_info(url, api_key)["internal_states"]
    if "sm120" not in state:
        raise RuntimeError(f"the server at {url} runs without this package's hooks: start it from this wheel")
    facts = state["sm120"]
    hooks = facts.pop("hooks").split(", ")
    for name, value in facts.items():
        _print_fact(f"server {name}", value)
    for hook in hooks:
        _print_fact("server hook", hook)


def main(words: Sequence[str] | None = None) -> None:
    """Entry point of the console script; what goes wrong is one line on stderr."""
    try:
        args = _parser().parse_args(words)
        if sys.stdout is None:  # Python's way to say that the descriptor was closed
            raise OSError("standard output is closed: there is nowhere to print to")
        code = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output, `head` say, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit would fail once more
        code = 1
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = args.error_code
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    """Each verb's `run` does it and returns the exit code, None for 0."""
    parser = argparse.ArgumentParser(prog="sglang-sm120", description=__doc__)
    version = f"sglang {importlib.metadata.version('sglang')}"
    parser.add_argument("--version", action="version", version=version)
    parser.set_defaults(error_code=1)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser(
        "doctor", help="GPU, kernels, patches, and what a running server chose", description=doctor.__doc__
    )
    client.add_arguments(verb.add_argument_group("also ask a server (only if --url is given)"), default_url=None)
    verb.set_defaults(run=lambda args: doctor(args.url, args.api_key), error_code=2)
    verb = verbs.add_parser("kv-map", help="a picture of a running server's KV pool", description=kv_map.__doc__)
    kv_map.add_arguments(verb)
    verb.set_defaults(run=kv_map.run)
    verb = verbs.add_parser(
        "moe-balance", help="expert load, what it costs, what helps", description=moe_balance.__doc__
    )
    moe_balance.add_arguments(verb)
    verb.set_defaults(run=moe_balance.run)
    return parser


if __name__ == "__main__":
    main()
