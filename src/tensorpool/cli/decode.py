# SPDX-License-Identifier: Apache-2.0
"""`tensorpool decode`: turns SBE messages in hexadecimal, from arguments or standard input, into lines of JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import Enum

import click
import msgspec

from tensorpool.errors import DecodeError
from tensorpool.wire import Message, decode


def to_json(message: Message) -> bytes:
    """One line: the message's name, then its fields; binary data as hexadecimal, enums by name."""
    return msgspec.json.encode({"message": type(message).__name__, **plain_fields(message)})


def plain_fields(struct: msgspec.Struct) -> dict[str, object]:
    return {name: _plain(getattr(struct, name)) for name in struct.__struct_fields__}


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return plain_fields(value)
    return value


@click.command(name="decode")
@click.argument("hex_messages", metavar="[HEX]...", nargs=-1)
def command(hex_messages: tuple[str, ...]) -> None:
    """Decode SBE messages given as HEX, or as lines of hexadecimal on standard input, to one line of JSON each.

    Bytes may be separated by spaces or colons. A malformed message is reported with the offset of its fault, the others
    are still decoded, and the exit code is 1.
    """
    texts: Iterable[str] = hex_messages or (line for line in sys.stdin if line.strip())
    failed = False
    for text in texts:
        try:
            click.echo(to_json(decode(bytes.fromhex(text.replace(":", "")))))
        except ValueError:
            failed = True
            click.echo(f"error: not hexadecimal: {text.strip()[:80]}", err=True)
        except DecodeError as error:
            failed = True
            click.echo(f"error: {error}", err=True)
    sys.exit(1 if failed else 0)
