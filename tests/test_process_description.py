# SPDX-License-Identifier: Apache-2.0
"""A process in words: what it says of itself, what this host sees of it, and what is never shown."""

from __future__ import annotations

import os
import sys

import msgspec
import pytest

from tensorpool.peer_text import printable
from tensorpool.process_description import MAX_COMMAND, ProcessDescription, command, program, seen
from tensorpool.process_identity import ProcessIdentity, process_stat
from tests.support.processes import Process

LIE = ProcessDescription(user="root\x1b[2J", host="<b>", program="x" * 3000, command="y" * 3000)


def identity_of(pid: int) -> ProcessIdentity:
    own, stat = ProcessIdentity.own(), process_stat(pid)
    assert own is not None
    assert stat is not None
    return msgspec.structs.replace(own, pid=pid, start_ticks=stat.start_ticks)


def test_this_host_sees_for_itself() -> None:
    """The command line that runs, whatever the process declares; nothing of a process that has ended."""
    with Process("-c", "import sys; sys.stdin.read()", "--token", "s3cret") as process:
        identity = identity_of(process.pid)
        found = seen(identity, LIE)
        assert found is not None
        assert found.user == ProcessDescription.own().user
        assert found.command.startswith(f"{os.path.basename(sys.executable)} -c ")
        assert found.command.endswith("--token ***")
        assert seen(msgspec.structs.replace(identity, start_ticks=identity.start_ticks - 1), LIE) is None
    assert seen(identity, LIE) is None


def test_what_another_process_declares_is_escaped_and_cut() -> None:
    """Nothing that a terminal obeys, and no line without end."""
    shown = LIE.bounded()
    assert shown.user == r"root\x1b[2J"
    assert (len(shown.program), len(shown.command)) == (64, MAX_COMMAND)
    assert shown.command.endswith("…")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["/usr/bin/python3", "acquire.py"], "python3 acquire.py"),
        (["x", "--set", "control.token=abc", "--password", "abc", "-v"], "x --set control.token=*** --password *** -v"),
        (["x", "--token", "--json"], "x --token --json"),
        (["x", "--api-key=abc", "SECRET_KEY=abc"], "x --api-key=*** SECRET_KEY=***"),
        (["x", "a\nb", ""], "x a b ''"),
        ([], ""),
    ],
)
def test_a_command_line_has_no_secrets(arguments: list[str], shown: str) -> None:
    """Values of options and settings that are named like one."""
    assert command(arguments) == shown


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["/usr/bin/python3.12", "-u", "/home/lab/acquire.py", "7"], "acquire.py"),
        (["python", "-m", "pytest", "-q"], "pytest"),
        (["python", "-c", "pass"], "python"),
        (["python"], "python"),
        (["/opt/camera/grab", "--rate", "5"], "grab"),
        ([], ""),
    ],
)
def test_the_program_is_what_an_interpreter_runs(arguments: list[str], name: str) -> None:
    """A script, a module, or else the interpreter."""
    assert program(arguments) == name


def test_bytes_that_are_no_text_can_be_printed() -> None:
    """A command line may hold any bytes."""
    text = printable(b"caf\xe9".decode("utf-8", "surrogateescape"))
    assert text == r"caf\udce9"
    assert msgspec.json.encode(text)
