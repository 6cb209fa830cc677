"""`make demo`: serve the trained pair with the installed patched server, ask it once, show what answered and how."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import signal
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

from tools import server
from tools.pair import DDTREE_FLAGS, PAIR, TARGET
from tools.port import open_port

PROMPT = '    def read_config(self, path):\n        """'
NEW_TOKENS, TEMPERATURE = 96, 0.6
FLAGS = ["--dtype", "float32", "--enable-metrics", *DDTREE_FLAGS, "--speculative-ddtree-budget", "16"]
# What is left up can be asked everything: `sglang-sm120 moe-balance` and `kv-map` need these.
SERVE_FLAGS = ["--expert-distribution-recorder-mode", "stat"]
SERVE_ENV = {"SGLANG_SM120_KV_COMPACT": "idle"}
LEGEND = "(below a token, guesses at the next one; * was accepted)"


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder for the server's log")
    parser.add_argument("--serve", action="store_true", help="leave the server up until Ctrl-C")
    parser.add_argument("--port", type=open_port, default="0", help="port of the server; default: a free one")
    args = parser.parse_args()

    version, url = importlib.metadata.version("sglang"), f"http://127.0.0.1:{args.port}"
    print(f"starting sglang {version} on the CPU, to answer at {url} ...", flush=True)
    begin = time.monotonic()
    flags, env = ([*FLAGS, *SERVE_FLAGS], SERVE_ENV) if args.serve else (FLAGS, {})
    with server.running(TARGET, args.work / "server.log", flags, env, port=args.port) as up:
        print(f"ready after {time.monotonic() - begin:.1f} s")
        from transformers import PreTrainedTokenizerFast  # seconds, which nobody should wait for the first line

        from tools import draw_tree

        prompt = PreTrainedTokenizerFast.from_pretrained(TARGET)(PROMPT).input_ids
        answer = up.generate([prompt], NEW_TOKENS, temperature=TEMPERATURE)[0]
        print(f"prompt:     {PROMPT!r}\ncompletion:\n{textwrap.indent(answer['text'], '  | ', lambda _: True)}")
        print_evidence(up)
        accepted = answer["meta_info"]["spec_accept_length"]
        print(f"drafting:   DDTREE committed {accepted:.2f} tokens a step; one of its trees {LEGEND}:")
        print(textwrap.indent(draw_tree.best_step(PAIR, prompt, answer["output_ids"]), "            "))
        if args.serve:
            print(f"serving at {up.url}; Ctrl-C ends it", flush=True)
            with suppress(KeyboardInterrupt):
                while (code := up.process.poll()) is None:
                    time.sleep(1)
                sys.exit(f"error: the server ended by itself ({code}): see {up.log}")


def print_evidence(up: server.Server) -> None:
    """Show the backend the running server reports, and how many forward steps our backend planned."""
    info = up.info()
    calls = [line for line in up.get("/metrics").splitlines() if line.startswith("sm120:") and "_total" in line]
    print(f"evidence:   the server runs attention_backend={info['attention_backend']}, version {info['version']}")
    for line in calls:
        print(f"            {line}")


if __name__ == "__main__":
    server.exit_on_signals()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # whatever the terminal can show of the tree
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted: the server has ended", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
