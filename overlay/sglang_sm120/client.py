"""Asks a running server, for the commands of `sglang-sm120`."""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

TIMEOUT_S = 120
_KEY = "; give --api-key the server's admin key"
_HINTS = {401: _KEY, 403: _KEY, 404: "; is that an SGLang server?"}


def add_arguments(parser: argparse._ActionsContainer, default_url: str | None = "http://127.0.0.1:30000") -> None:
    """Which server to ask, and with which key."""
    url = f" (default {default_url})" if default_url else ""
    parser.add_argument("--url", type=_url, default=default_url, help=f"the address that the server printed{url}")
    parser.add_argument("--api-key", type=_key, help="its admin key, if it has one")


def _url(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty: give the address that the server printed")
    if "@" in text:  # which is never sent, and would be shown in every message
        raise argparse.ArgumentTypeError("it has an @: leave user and password out, and give a key by --api-key")
    return text if "://" in text else f"http://{text}"


def _key(text: str) -> str:
    if not (text.isascii() and text.isprintable()):  # what urllib says of it would show the key
        raise argparse.ArgumentTypeError("it has a line end or another character that HTTP cannot carry")
    return text


def ask(url: str, endpoint: str, api_key: str | None) -> str:
    """What the server answers to a GET. RuntimeError names the address, or the status, and what to do about it."""
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/{endpoint}")
        if api_key:  # a redirect may lead to somebody else
            request.add_unredirected_header("Authorization", f"Bearer {api_key}")
        with _opener(url).open(request, timeout=TIMEOUT_S) as answer:
            return answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        hint = _HINTS.get(error.code, "")
        raise RuntimeError(f"{url}: /{endpoint} answered {error.code}{hint}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split())
        raise RuntimeError(f"no server answers at {url} ({reason}); give --url the address that it printed") from None


def _opener(url: str) -> urllib.request.OpenerDirector:
    """What asks `url`: this machine without the proxy that http_proxy names, others through it."""
    here = urllib.parse.urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    return urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * here)


def server_info(url: str, api_key: str | None) -> dict[str, Any]:
    """The flags of a server and, under `internal_states`, what each of its schedulers says of itself."""
    try:
        info = json.loads(ask(url, "server_info", api_key))
        first = info["internal_states"][0]
    except (ValueError, LookupError, TypeError):
        first = None
    if not isinstance(first, dict):
        raise RuntimeError(f"what answers at {url} is no SGLang server; give --url the address of one")
    return info
