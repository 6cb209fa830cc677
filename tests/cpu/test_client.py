"""How the commands of `sglang-sm120` ask a running server, and what they say where none answers as it should."""

from __future__ import annotations

import json

import pytest
from sglang_sm120 import cli, client
from sglang_sm120.attention import report

from tests.cpu.answering import answering
from tools import server

INFO = {"internal_states": [{report.STATE_KEY: {"attention": "sm120_mla"}}]}


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


@pytest.mark.parametrize("body", ["<html>", "[]", "{}", '{"internal_states": []}', "\N{BYTE ORDER MARK}"])
def test_something_else_there(body):
    with answering(body) as url, pytest.raises(RuntimeError, match="is no SGLang server"):
        client.server_info(url, None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--api-key", "secret"], "server attention         sm120_mla"), ([], "give --api-key the server's admin key")],
)
def test_the_doctor_asks_with_the_key(arguments, says, monkeypatch, capsys):
    with answering(json.dumps(INFO), key="secret") as url:
        monkeypatch.setattr("sys.argv", ["sglang-sm120", "doctor", "--url", url, *arguments])
        with pytest.raises(SystemExit):
            cli.main()
    said = capsys.readouterr()
    assert says in said.out + said.err
