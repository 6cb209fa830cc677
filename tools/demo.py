"""`make demo`: serve the tiny model with the installed patched server, ask it once, show what answered."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from pathlib import Path

from tools import server, tiny_model

PROMPT = "def read_config(path):\n"


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("build/demo"), help="folder for the model and the server's log"
    )
    parser.add_argument("--serve", action="store_true", help="leave the server up until Ctrl-C")
    args = parser.parse_args()

    model = args.work / "tiny-mla"
    if not (model / "model.safetensors").exists():
        print("making the tiny MLA model (latent 512 + 64, 8 heads, MoE, random weights) ...", flush=True)
        tiny_model.write(model)
    print(f"starting sglang {importlib.metadata.version('sglang')} on the CPU ...", flush=True)
    begin = time.monotonic()
    with server.running(model, args.work / "server.log", ["--dtype", "float32", "--enable-metrics"]) as up:
        print(f"ready after {time.monotonic() - begin:.1f} s at {up.url}")
        answer = up.post("/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0})
        print(f"prompt:     {PROMPT!r}\ncompletion: {answer['choices'][0]['text']!r}")
        print_evidence(up)
        if args.serve:
            print("serving; Ctrl-C ends it", flush=True)
            while True:
                time.sleep(3600)


def print_evidence(up: server.Server) -> None:
    """Show the backend the running server reports, and how many forward steps our backend planned."""
    info = json.loads(up.get("/server_info"))
    calls = [line for line in up.get("/metrics").splitlines() if line.startswith("sm120:") and "_total" in line]
    print(f"evidence:   the server runs attention_backend={info['attention_backend']}, version {info['version']}")
    for line in calls:
        print(f"            {line}")


if __name__ == "__main__":
    main()
