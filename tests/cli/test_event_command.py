# SPDX-License-Identifier: Apache-2.0
"""`tensorpool event send` and `watch` as an operator types them, against a running driver."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import pytest

from tensorpool import aeron
from tensorpool.control import Ref, Service, ServiceAgent
from tests.cli.conftest import Shell
from tests.support.processes import Process

DRIVER = "service:driver:driver-01"
TAG = "service:clerk"


@pytest.fixture(scope="module")
def clerk(shell: Shell) -> Iterator[Service]:
    """A service that says what it was given."""
    service = Service("clerk")

    @service.command("say")
    def say(value: int | float | str | bytes | bool | Ref | None) -> str:
        return repr(value)

    @service.command("blob")
    def blob() -> bytes:
        return b"\x01\xff"

    with aeron.AgentRunner(ServiceAgent(service, shell.pool.aeron_dir), aeron.SleepingIdle()):
        yield service


def send(shell: Shell, *arguments: str) -> tuple[int, str]:
    return shell.run_here("event", "send", *arguments, "--timeout", "30")


def test_a_driver_is_pinged_with_nothing_set_up(shell: Shell) -> None:
    """Its result is printed; as JSON with everything that is known."""
    assert send(shell, DRIVER, "ping") == (0, "pong\n")
    code, output = send(shell, DRIVER, "status", "--json")
    outcome = json.loads(output)
    assert (code, outcome["is_accepted"], outcome["service"]) == (0, True, DRIVER)
    assert json.loads(outcome["value"])["state"] == "running"
    assert send(shell, DRIVER, "ping", "--wait", "echo") == (0, "accepted\n")
    assert send(shell, DRIVER, "ping", "--wait", "sent") == (0, "sent\n")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("hello",), "'hello'"),
        (("7",), "'7'"),
        ((), "None"),
        (("7", "--format", "uint8"), "7"),
        (("-7", "--format", "int64"), "-7"),
        (("2.5", "--format", "float32"), "2.5"),
        (("true", "--format", "boolean"), "True"),
        (("0aff", "--format", "bytes"), r"b'\n\xff'"),
        (("1/2/3", "--format", "ref"), "Ref(stream_id=1, epoch=2, seq=3)"),
        (("--format", "string"), "''"),
    ],
)
def test_values_are_sent_in_their_format(shell: Shell, clerk: Service, arguments: tuple[str, ...], shown: str) -> None:
    """Text unless --format says otherwise."""
    values, options = (arguments[:-2], arguments[-2:]) if "--format" in arguments else (arguments, ())
    sent = shell.run_here("event", "send", "--timeout", "30", *options, "--", TAG, "say", *values)
    assert sent == (0, f"{shown}\n")


def test_bytes_are_shown_in_hexadecimal(shell: Shell, clerk: Service) -> None:
    """Of a result."""
    assert send(shell, TAG, "blob") == (0, '{"hex":"01ff"}\n')


def test_what_goes_wrong_is_said_in_one_line(shell: Shell, clerk: Service) -> None:
    """Exit code 1, and which of the ways it went wrong; 2 for a wrong command line."""
    code, words = send(shell, TAG, "sing")
    assert (code, words) == (1, "error: sing to service:clerk: not accepted: 'sing' is no command of it; it knows "
                                "blob, say\n")  # fmt: skip
    code, words = shell.run_here("event", "send", "service:nobody", "ping", "--timeout", "0.05")
    assert code == 1
    assert words.startswith("error: ping to service:nobody: no answer: waited 0.05 s; ")
    code, words = send(shell, TAG, "say", "x", "--format", "uint8")
    assert (code, "VALUE = 'x' is not usable; accepted: a number, for --format uint8" in words) == (1, True)
    assert send(shell, TAG, "say", "256", "--format", "uint8")[0] == 1
    assert send(shell, TAG, "say", "1/2", "--format", "ref")[0] == 1
    assert send(shell, TAG, "say", "x", "--format", "words")[0] == 2


def test_watch_shows_commands_and_what_became_of_them(shell: Shell, clerk: Service) -> None:
    """The echo shows which were accepted; of one tag where one is asked for; as lines or as JSON."""

    def listen(*arguments: str) -> Process:
        process = shell.start("event", "watch", *arguments)
        assert process.read_line().startswith("listening at ")
        return process

    with listen("--tag", TAG, "--count", "5") as lines, listen("--tag", TAG, "--json") as rows:
        assert send(shell, DRIVER, "ping") == (0, "pong\n")
        assert send(shell, TAG, "say", "a\nb")[0] == 0
        assert send(shell, TAG, "sing")[0] == 1
        code, output = lines.finish()
        assert code == 0
        printed = [json.loads(rows.read_line()) for _ in range(5)]
        rows.send(signal.SIGTERM)
        assert rows.finish()[0] == 0
    stories = [re.split(r"  +", line)[1:] for line in output.splitlines()]
    kinds = [story[0] for story in stories]
    assert sorted(kinds) == ["accepted", "command", "command", "rejected", "result"]
    assert kinds.index("accepted") < kinds.index("result") < kinds.index("rejected")
    accepted = stories[kinds.index("accepted")]
    assert (accepted[1], accepted[2]) == (TAG, r"say = a\nb")
    found = {row["event"]: row for row in printed}
    assert found.keys() == {"command", "accepted", "result", "rejected"}
    assert (found["accepted"]["value"], found["accepted"]["format"]) == ("a\nb", "STRING")
    assert found["accepted"]["correlation_id"] == found["result"]["correlation_id"]
    assert found["result"]["key"] == "say"
