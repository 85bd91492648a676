# SPDX-License-Identifier: Apache-2.0
"""EventMessages as values: what a format and its bytes mean, and what the keys of our status events say.

    command, on the control stream     tag of the service, key of the command, value
    its echo, on the status stream     the same bytes
    result:<key>  error:<key>          tag of the service, correlation id of the command, what came of it
    rejected:<key>                     the same, for a command that was not accepted: the reason as text
    alive                              JSON, once a second and when the state changes
    making                             JSON, from a driver: the attach of that correlation id waits for memory

Service Control §5.1, §5.2; decisions H2-H5.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import Any, Final

import msgspec

from tensorpool.errors import LocalProtocolError, RemoteProtocolError
from tensorpool.wire.event import EventMessage, Format

RESULT: Final = "result:"
ERROR: Final = "error:"
REJECTED: Final = "rejected:"
ALIVE: Final = "alive"
MAKING: Final = "making"
ANSWERS: Final = (RESULT, ERROR, REJECTED)

NUMBERS: Final = {
    Format.UINT8: struct.Struct("<B"),
    Format.INT8: struct.Struct("<b"),
    Format.UINT16: struct.Struct("<H"),
    Format.INT16: struct.Struct("<h"),
    Format.UINT32: struct.Struct("<I"),
    Format.INT32: struct.Struct("<i"),
    Format.UINT64: struct.Struct("<Q"),
    Format.INT64: struct.Struct("<q"),
    Format.FLOAT32: struct.Struct("<f"),
    Format.FLOAT64: struct.Struct("<d"),
}
_TRUTHS: Final = (Format.BOOLEAN, Format.BIT)
_FLOATS: Final = (Format.FLOAT32, Format.FLOAT64)


class Ref(msgspec.Struct, frozen=True):
    """A frame, by reference."""

    stream_id: int
    epoch: int
    seq: int


type Value = bool | int | float | str | bytes | Ref | None


class State(StrEnum):
    """What a service says of itself."""

    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """The value of an `alive` event: the service health announcement of Wire §10.5."""

    service: str
    instance: str | None
    pid: int
    state: State
    version: str


class Making(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a `making` event: how much memory a stream's driver is making, and since when."""

    stream_id: int
    bytes: int
    elapsed_ms: int


def read_making(message: EventMessage) -> Making | None:
    """What a `making` event says; None for every other event, and for one that says something else."""
    if message.key != MAKING or message.format is not Format.STRING:
        return None
    try:
        return msgspec.json.decode(message.value, type=Making)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_alive(message: EventMessage) -> Alive | None:
    """What an `alive` event says; None for every other event, and for one that says something else."""
    if message.key != ALIVE or message.format is not Format.STRING:
        return None
    try:
        return msgspec.json.decode(message.value, type=Alive)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def make_event(
    tag: str, key: str, value: object, *, correlation_id: int, timestamp_ns: int, format: Format | None = None
) -> EventMessage:
    """An event that carries `value` in `format`, or in the one that fits it best.

    >>> make_event("service:recorder", "show", Ref(10000, 3, 17), correlation_id=1, timestamp_ns=0).format
    <Format.REF: 15>

    Numbers of Python become INT64, UINT64 or FLOAT64, those of numpy the format of their dtype; what only JSON can
    carry becomes a STRING of it. Raises LocalProtocolError.
    """
    chosen, value = _chosen(value, format)
    data, ref = _packed(chosen, value), value if isinstance(value, Ref) else None
    return EventMessage(
        timestamp_ns=timestamp_ns,
        correlation_id=correlation_id,
        format=chosen,
        ref_stream_id=ref.stream_id if ref else None,
        ref_epoch=ref.epoch if ref else None,
        ref_seq=ref.seq if ref else None,
        tag=tag,
        key=key,
        value=data,
    )


def read_value(message: EventMessage) -> tuple[Format, Value]:
    """What an event carries, and in which format. Raises RemoteProtocolError when the bytes are not of their format.

    H4: no bytes at all are a reference when all of it is there, unless the format is one whose values may be empty.
    """
    format, data = message.format, message.value
    if format is Format.REF or (not data and format not in (Format.STRING, Format.BYTES)):
        ref = _ref_of(message)
        if ref is not None and not data:
            return Format.REF, ref
        if format is Format.REF:
            what = "beside it a value, which must not repeat it" if ref else "without stream id, epoch and seq"
            raise RemoteProtocolError(f"a reference, {what}")
    if format is Format.STRING:
        try:
            return format, data.decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError(f"a STRING whose byte {error.start} is no UTF-8") from None
    if format is Format.BYTES:
        return format, data
    expected = 0 if format is Format.NOTHING else 1 if format in _TRUTHS else NUMBERS[format].size
    if len(data) != expected:
        raise RemoteProtocolError(f"a value of {len(data)} bytes, {format.name} has {expected}")
    if format is Format.NOTHING:
        return format, None
    if format in _TRUTHS:
        if data[0] > 1:
            raise RemoteProtocolError(f"a {format.name} of {data[0]}, which is neither 0 nor 1")
        return format, data[0] == 1
    number: int | float = NUMBERS[format].unpack(data)[0]
    return format, number


def _ref_of(message: EventMessage) -> Ref | None:
    stream_id, epoch, seq = message.ref_stream_id, message.ref_epoch, message.ref_seq
    return None if stream_id is None or epoch is None or seq is None else Ref(stream_id, epoch, seq)


def _chosen(value: Any, format: Format | None) -> tuple[Format, Any]:
    """The format for a value, and the value in Python's own types."""
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and value.shape == ():
        natural = Format.__members__.get("BOOLEAN" if value.dtype.name == "bool" else value.dtype.name.upper())
        if natural is None:
            raise LocalProtocolError(f"a value of dtype {value.dtype} has no format; convert it")
        return format or natural, value.item()
    if format is not None:
        return format, value
    match value:
        case None:
            return Format.NOTHING, value
        case bool():
            return Format.BOOLEAN, value
        case int():
            return Format.UINT64 if value >= 1 << 63 else Format.INT64, value
        case float():
            return Format.FLOAT64, value
        case str():
            return Format.STRING, value
        case bytes():
            return Format.BYTES, value
        case Ref():
            return Format.REF, value
    try:
        return Format.STRING, msgspec.json.encode(value).decode()
    except TypeError as error:
        raise LocalProtocolError(
            f"a {type(value).__name__} fits no format, and neither does its JSON: {error}"
        ) from None


def _packed(format: Format, value: Any) -> bytes:
    match format, value:
        case (Format.NOTHING, None) | (Format.REF, Ref()):
            return b""
        case Format.STRING, str():
            return value.encode()
        case Format.BYTES, bytes():
            return value
        case ((Format.BOOLEAN | Format.BIT), bool()):
            return bytes([value])
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if format in NUMBERS and (is_number or (format in _FLOATS and isinstance(value, float))):
        try:
            return NUMBERS[format].pack(value)
        except (struct.error, OverflowError):
            pass
    raise LocalProtocolError(f"{value!r} is no value of format {format.name}")
