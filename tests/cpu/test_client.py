"""How the commands of `sglang-sm120` ask a running server, and what they say where none answers as it should."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest
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


def test_an_address_without_a_scheme_is_http_and_an_empty_one_is_refused(capsys):
    parser = argparse.ArgumentParser()
    client.add_arguments(parser)
    assert parser.parse_args(["--url", "localhost:30000"]).url == "http://localhost:30000"
    assert parser.parse_args(["--url", "https://there"]).url == "https://there"
    with pytest.raises(SystemExit):
        parser.parse_args(["--url", ""])
    assert "--url: it is empty" in capsys.readouterr().err


@pytest.mark.parametrize("body", ["<html>", "[]", "{}", '{"internal_states": []}', "\N{BYTE ORDER MARK}"])
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
def test_the_doctor_asks_with_the_key(arguments, says, monkeypatch, capsys):
    with answering(json.dumps(INFO), key="secret") as url:
        monkeypatch.setattr("sys.argv", ["sglang-sm120", "doctor", "--url", url, *arguments])
        with pytest.raises(SystemExit):
            cli.main()
    said = capsys.readouterr()
    assert says in said.out + said.err


def test_a_reader_who_has_enough_is_no_error():
    """As in `sglang-sm120 doctor | head -0`."""
    command = [sys.executable, "-m", "sglang_sm120.cli", "doctor"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait() == 1 and "BrokenPipe" not in said
