# SPDX-License-Identifier: Apache-2.0
"""Fuzz target for the codec: `fuzz_wire.py SCHEMA [libFuzzer options] [corpus]`.

SCHEMA is a module of `tensorpool.wire`. Whatever the bytes, decoding returns a message that encodes and
decodes to itself, or raises DecodeError with an offset inside the buffer.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from types import FunctionType

import atheris

import tensorpool.wire
from tensorpool.errors import DecodeError, LocalProtocolError

SCHEMAS = ("bridge", "control", "discovery", "driver", "event", "merge", "trace")


def instrument(package: str) -> None:
    """Trace the functions of a package for coverage.

    Atheris' import hook does not reach them: an editable install has a loader of its own.
    """
    for candidate in gc.get_objects():
        if isinstance(candidate, FunctionType) and (candidate.__module__ or "").startswith(package):
            atheris.instrument_func(candidate)


def main(arguments: list[str]) -> None:
    name = arguments[1] if len(arguments) > 1 else ""
    if name not in SCHEMAS:
        raise SystemExit(f"usage: fuzz_wire.py {'|'.join(SCHEMAS)} [libFuzzer options] [corpus]")
    schema = import_module(f"tensorpool.wire.{name}").schema

    def read_and_write(data: bytes) -> None:
        try:
            message = schema.decode(data)
        except DecodeError as error:
            if not 0 <= error.offset <= len(data):
                raise AssertionError("the offset is outside the buffer") from error
            return
        assert tensorpool.wire.decode(data) == message
        try:
            again = message.encode()
        except LocalProtocolError as error:
            if "expected ASCII text" not in str(error):  # what we would not write is still read
                raise AssertionError("a decoded message cannot be encoded") from error
            return
        assert schema.decode(again) == message

    instrument("tensorpool.wire")
    atheris.Setup([arguments[0], *arguments[2:]], read_and_write)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
