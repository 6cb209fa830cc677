"""Asks a running server, for the commands of `sglang-sm120`."""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.request
from typing import Any

TIMEOUT_S = 120
_KEY = "; give --api-key the server's admin key"
_HINTS = {401: _KEY, 403: _KEY, 404: "; is that an SGLang server?"}


def add_arguments(parser: argparse._ActionsContainer, default_url: str | None = "http://127.0.0.1:30000") -> None:
    """Which server to ask, and with which key."""
    url = f" (default {default_url})" if default_url else ""
    parser.add_argument("--url", type=_url, default=default_url, help=f"the address that the server printed{url}")
    parser.add_argument("--api-key", help="its admin key, if it has one")


def _url(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty: give the address that the server printed")
    return text if "://" in text else f"http://{text}"


def ask(url: str, endpoint: str, api_key: str | None) -> str:
    """What the server answers to a GET. RuntimeError names the address, or the status, and what to do about it."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/{endpoint}", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        hint = _HINTS.get(error.code, "")
        raise RuntimeError(f"{url}: /{endpoint} answered {error.code}{hint}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise RuntimeError(f"no server answers at {url} ({reason}); give --url the address that it printed") from None


def server_info(url: str, api_key: str | None) -> dict[str, Any]:
    """The flags of a server and, under `internal_states`, what each of its schedulers says of itself."""
    try:
        info = json.loads(ask(url, "server_info", api_key))
        info["internal_states"][0]
    except (ValueError, LookupError, TypeError):
        raise RuntimeError(f"what answers at {url} is no SGLang server; give --url the address of one") from None
    return info
