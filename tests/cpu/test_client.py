"""How the commands of `sglang-sm120` ask a running server, and what they say where none answers as it should."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from sglang_sm120 import cli, client
from sglang_sm120.attention import report

from tests.cpu.answering import answering
from tools import server

INFO = {"internal_states": [{report.STATE_KEY: {"attention": "sm120_mla", "hooks": "some.hook, other.hook"}}]}


def test_the_key_is_sent_and_a_last_slash_does_not_matter():
    with answering(json.dumps(INFO), key="secret") as url:
        assert client.server_info(url, "secret") == client.server_info(f"{url}/", "secret") == INFO


@pytest.mark.parametrize("key", [None, "wrong"])
def test_without_the_right_key_the_flag_is_named(key):
    with answering("", key="secret") as url, pytest.raises(RuntimeError, match="/server_info answered 401; give --api"):
        client.server_info(url, key)


@pytest.mark.parametrize("url", [f"http://127.0.0.1:{server.free_port()}", "localhost", "http://[", "http://a b/"])
def test_no_server_there(url):
    with pytest.raises(RuntimeError) as error:
        client.ask(url, "server_info", None)
    assert str(error.value).startswith(f"no server answers at {url} (")


def test_another_program_there():
    with answering("", status=404) as url, pytest.raises(RuntimeError, match="answered 404; is that an SGLang server"):
        client.server_info(url, None)


@pytest.mark.parametrize("key", ["sec\ret", "secret\n", "s\N{HORIZONTAL ELLIPSIS}"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key, capsys):
    parser = argparse.ArgumentParser()
    client.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--api-key", key])
    said = capsys.readouterr().err
    assert "--api-key: it has a line end or another character" in said and key.strip() not in said


def test_the_key_goes_to_nobody_else():
    with answering(json.dumps(INFO), key="secret") as other:
        moved = answering("", status=302, headers={"Location": f"{other}/server_info"})
        with moved as url, pytest.raises(RuntimeError, match="answered 401"):
            client.server_info(url, "secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_stands_between_this_machine_and_itself(host, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with answering(json.dumps(INFO)) as url:
        assert client.server_info(url.replace("127.0.0.1", host), None) == INFO
        assert server.Server(url, Path(), Mock()).info() == INFO
    with pytest.raises(RuntimeError, match="Connection refused"):
        client.ask("http://elsewhere.invalid", "server_info", None)


def test_an_address_without_a_scheme_is_http_and_an_empty_one_is_refused(capsys):
    parser = argparse.ArgumentParser()
    client.add_arguments(parser)
    assert parser.parse_args(["--url", "localhost:30000"]).url == "http://localhost:30000"
    assert parser.parse_args(["--url", "https://there"]).url == "https://there"
    with pytest.raises(SystemExit):
        parser.parse_args(["--url", ""])
    assert "--url: it is empty" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["doctor", "kv-map", "moe-balance"])
@pytest.mark.parametrize("address", ["http://ann:hush@127.0.0.1:9", "ann:hush@127.0.0.1:9", "http://ann:hu/sh@there/"])
def test_a_password_in_the_address_is_refused_and_not_shown(verb, address, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([verb, "--url", address])
    said = "".join(capsys.readouterr())
    assert end.value.code == 2 and "argument --url: it has an @: leave user and password out" in said
    assert "hu" not in said


@pytest.mark.parametrize(
    "body",
    ["<html>", "[]", "{}", '{"internal_states": []}', '{"internal_states": "ab"}', '{"internal_states": [null]}',
     "\N{BYTE ORDER MARK}", b"\xff\xfe"],
)  # fmt: skip
def test_something_else_there(body):
    with answering(body) as url, pytest.raises(RuntimeError, match="is no SGLang server"):
        client.server_info(url, None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--api-key", "secret"],
            "server attention      sm120_mla\nserver hook           some.hook\nserver hook           other.hook",
        ),
        ([], "give --api-key the server's admin key"),
    ],
)
def test_the_doctor_asks_with_the_key(arguments, says, capsys):
    with answering(json.dumps(INFO), key="secret") as url, pytest.raises(SystemExit):
        cli.main(["doctor", "--url", url, *arguments])
    said = capsys.readouterr()
    assert says in said.out + said.err


@pytest.mark.parametrize(
    ("info", "says"), [(None, "no server answers at"), ({"internal_states": [{}]}, "this package's hooks")]
)
def test_the_doctor_says_what_is_wrong_with_the_server(info, says, capsys):
    """After the facts of this machine, with an exit code that tells it from a machine without a GPU."""
    with answering(json.dumps(info)) as url, pytest.raises(SystemExit) as end:
        cli.main(["doctor", "--url", url if info else f"http://127.0.0.1:{server.free_port()}"])
    said = capsys.readouterr()
    assert end.value.code == 2 and "kernel library" in said.out
    assert said.err.startswith("error: ") and says in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize("words", [["doctor"], ["moe-balance", "--record", "dump.pt"]])
def test_a_reader_who_has_enough_is_no_error(words, tmp_path):
    """As in `sglang-sm120 doctor | head -0`."""
    torch.save({"logical_count": torch.ones(2, 2, 8)}, tmp_path / "dump.pt")
    command = [sys.executable, "-m", "sglang_sm120.cli", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait() == 1 and "roken" not in said
