# SPDX-License-Identifier: Apache-2.0
"""A process in words that people know: account, host, program and command line.

A process describes itself to others (`own`); on the same host they can see most of that for themselves (`seen`). What
comes from another process is escaped and cut, and what a command line says of passwords and tokens is left out.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from typing import Annotated, Final, Self

import msgspec
from msgspec import Meta

from tensorpool.file_access import user_name
from tensorpool.peer_text import printable
from tensorpool.process_identity import ProcessIdentity

MAX_COMMAND: Final = 200  # characters
MAX_NAME: Final = 64
MAX_ARGUMENTS_BYTES: Final = 4096  # of a command line that are read
HIDDEN: Final = "***"

_SECRET: Final = re.compile(r"token|passw|secret|credential|api.?key", re.IGNORECASE)
_INTERPRETER: Final = re.compile(r"(python|pypy|node|ruby|perl|java|sh|bash)[\d.]*\Z")

Text = Annotated[str, Meta(max_length=4096)]  # of a peer: cut when it is read


class ProcessDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is, for people.

    >>> me = ProcessDescription.own()
    >>> me.user == user_name(os.geteuid())
    True
    """

    user: Text
    host: Text = ""
    program: Text = ""
    command: Text = ""

    @classmethod
    def own(cls) -> Self:
        """Of this process."""
        arguments = _arguments("self") or ()
        return cls(
            user=user_name(os.geteuid()),
            host=socket.gethostname(),
            program=program(arguments),
            command=command(arguments),
        ).bounded()

    def bounded(self) -> Self:
        """As it may be shown: without control characters, and cut."""
        return type(self)(
            user=printable(self.user, MAX_NAME),
            host=printable(self.host, MAX_NAME),
            program=printable(self.program, MAX_NAME),
            command=printable(self.command, MAX_COMMAND),
        )

    def __str__(self) -> str:
        return ", ".join([f"user {self.user}", *filter(None, [self.command])])


def seen(process: ProcessIdentity, declared: ProcessDescription) -> ProcessDescription | None:
    """What this host says of a process that declared itself; None where it cannot be looked at, or is another one.

    Of a command line that may not be read the declared one is kept.
    """
    uid = process.user_id()
    if uid is None:
        return None
    arguments = _arguments(process.pid)
    found = ProcessDescription(
        user=user_name(uid),
        host=socket.gethostname(),
        program=declared.program if arguments is None else program(arguments),
        command=declared.command if arguments is None else command(arguments),
    )
    return found.bounded() if process.user_id() == uid else None  # its number was not given again meanwhile


def process_fields(process: ProcessIdentity, description: ProcessDescription, *, is_seen: bool) -> dict[str, object]:
    """For a log: the process, and how well it is known."""
    return {
        "pid": process.pid,
        "user": description.user,
        "host": description.host,
        "program": description.program,
        "command": description.command,
        "identity": "seen" if is_seen else "declared",
    }


def command(arguments: Sequence[str]) -> str:
    """A command line as people type it, without secrets.

    >>> command(["/usr/bin/python3", "acquire.py", "--token", "s3cret", "--set", "control.token=s3cret"])
    'python3 acquire.py --token *** --set control.token=***'
    """
    shown: list[str] = []
    is_secret = False
    for argument in [os.path.basename(arguments[0]), *arguments[1:]] if arguments else []:
        name, equals, _ = argument.partition("=")
        if is_secret and not argument.startswith("-"):
            argument = HIDDEN
        elif equals and _SECRET.search(name):
            argument = f"{name}={HIDDEN}"
        is_secret = not equals and argument.startswith("-") and _SECRET.search(argument) is not None
        shown.append(" ".join(argument.split()) or "''")
    return " ".join(shown)


def program(arguments: Sequence[str]) -> str:
    """The name of the program: that of the script or module where an interpreter runs one.

    >>> program(["/usr/bin/python3.12", "-u", "/home/lab/acquire.py", "7"]), program(["python", "-m", "pytest"])
    ('acquire.py', 'pytest')
    """
    if not arguments:
        return ""
    name = os.path.basename(arguments[0])
    if not _INTERPRETER.match(name):
        return name
    for index, argument in enumerate(arguments[1:], 1):
        if argument == "-m" and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument == "-c":
            return name
        if not argument.startswith("-"):
            return os.path.basename(argument)
    return name


def _arguments(pid: int | str) -> tuple[str, ...] | None:
    """The command line of a process; None where it may not be read, or there is none."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            data = file.read(MAX_ARGUMENTS_BYTES)
    except OSError:
        return None
    return tuple(part.decode("utf-8", "surrogateescape") for part in data.rstrip(b"\0").split(b"\0")) if data else None
