# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as one tree.

    TensorPoolError
    ├─ ConfigError            a setting: key path, given value, accepted range
    ├─ ProtocolError          abstract
    │  ├─ LocalProtocolError    we tried what the specification forbids
    │  └─ RemoteProtocolError   the peer did
    │     └─ DecodeError          bytes that are not the message they claim to be
    ├─ FrameTooLarge          no pool of the stream can ever hold it: sizes and remedy
    ├─ AttachRefused          the driver's answer to an attach, in its own words
    │  └─ RingRefused           it makes no ring of the size that was asked for
    ├─ LeaseLost              a lease ended while something depended on it
    ├─ DriverUnreachable      no SHM driver answers
    │  └─ AttachPending         there is one; it has not answered yet
    ├─ RegionRejected         a shared-memory region that fails a check
    ├─ FrameOverwritten       the producer needed the slot before you were done with the frame
    ├─ TransportError         Aeron's failure, wrapped once
    ├─ MissingExtra           a package that an extra of the distribution brings; an ImportError, too
    └─ Closed                 you used it after close()

Loss is not an error: it is counted with a reason and never raised. Back pressure is a falsy result.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

DISTRIBUTION: Final = "aeron-tensorpool"  # our name on PyPI


class TensorPoolError(Exception):
    """Base of everything that tensorpool raises on purpose. Travels between processes: all of them can be pickled."""

    text = ""  # what str() shows; the arguments stay as they were given

    def __str__(self) -> str:
        return self.text or super().__str__()


class ConfigError(TensorPoolError):
    """A setting that cannot be used: `key` is its path, `value` what was given, `accepted` what would do."""

    def __init__(self, key: str, value: object, accepted: str) -> None:
        super().__init__(key, value, accepted)
        self.text = f"{key} = {value!r} is not usable; accepted: {accepted}"
        self.key = key
        self.value = value
        self.accepted = accepted


class ProtocolError(TensorPoolError):
    """A rule of the specifications was broken: by us or by a peer, as the subclass says."""


class LocalProtocolError(ProtocolError):
    """This process tried what the specification forbids; nothing was sent or written."""


class RemoteProtocolError(ProtocolError):
    """A peer sent what the specification forbids; we fail closed."""


class DecodeFault(StrEnum):
    """Which rule the bytes of a message broke, for code that answers the sender or counts its faults."""

    TRUNCATED = "truncated"
    TRAILING_BYTES = "trailing bytes"
    SCHEMA = "schema"
    TEMPLATE = "template"
    VERSION = "version"
    BLOCK_LENGTH = "block length"
    VALUE = "value"


class DecodeError(RemoteProtocolError):
    """Bytes that are not the message they claim to be: `what` is wrong, at byte `offset` of the buffer.

    `fault` is the kind of mistake; `field` names the field, group or data it is in, "" when it is in none.
    """

    def __init__(self, what: str, offset: int, fault: DecodeFault = DecodeFault.VALUE, field: str = "") -> None:
        super().__init__(what, offset, fault, field)
        self.text = f"{what} (at byte {offset})"
        self.what = what
        self.offset = offset
        self.fault = fault
        self.field = field


class FrameTooLarge(TensorPoolError):
    """A frame of `nbytes` for a `stream` whose largest pool holds `max_frame_bytes`. Nothing was written."""

    def __init__(self, stream: str, nbytes: int, max_frame_bytes: int) -> None:
        super().__init__(stream, nbytes, max_frame_bytes)
        self.text = (
            f"a frame of {nbytes} bytes fits no pool of {stream}: the largest holds {max_frame_bytes}; "
            f"make it with client.producer(…, create=True, max_frame_bytes={nbytes}), or give its profile a larger "
            "stride_bytes"
        )
        self.stream = stream
        self.nbytes = nbytes
        self.max_frame_bytes = max_frame_bytes


class AttachRefused(TensorPoolError):
    """The driver refused a lease: `code` and `words` are its answer, for `stream` in `role`."""

    def __init__(self, code: str, stream: int | str, role: str, words: str) -> None:
        super().__init__(code, stream, role, words)
        self.text = f"{role.lower()} of stream {stream}: {code}: {words or 'the driver gave no reason'}"
        self.code = code
        self.stream = stream
        self.role = role
        self.words = words


class RingRefused(AttachRefused):
    """The driver makes no ring of the size that was asked for: `words` say which limit it meets, or what there is."""

    def __init__(self, stream: int | str, words: str) -> None:
        super().__init__("REJECTED", stream, "PRODUCER", words)
        self.args = stream, words  # for pickle


class LeaseLost(TensorPoolError):
    """A lease ended: `reason` is EXPIRED, REVOKED, DETACHED or DRIVER_GONE."""

    def __init__(self, stream: int | str, reason: str, words: str) -> None:
        super().__init__(stream, reason, words)
        self.text = f"the lease on stream {stream} is lost: {reason}: {words}"
        self.stream = stream
        self.reason = reason
        self.words = words


class DriverUnreachable(TensorPoolError):
    """No driver answers on the control stream `channel`; we waited `waited_ns`."""

    def __init__(self, channel: str, waited_ns: int, words: str) -> None:
        super().__init__(channel, waited_ns, words)
        self.text = f"no answer on {channel} within {waited_ns / 1e9:.1f} s; {words}"
        self.channel = channel
        self.waited_ns = waited_ns
        self.words = words


class AttachPending(DriverUnreachable):
    """There is a driver, and it has not answered yet: `words` say what is known, such as the memory that it makes."""

    def __init__(self, channel: str, waited_ns: int, words: str) -> None:
        super().__init__(channel, waited_ns, words)
        self.text = f"no answer within {waited_ns / 1e9:.1f} s; {words}"


class FrameOverwritten(TensorPoolError):
    """Frame `seq` of `epoch` was overwritten while it was in use: what was read of it may be torn."""

    def __init__(self, stream_id: int, epoch: int, seq: int) -> None:
        super().__init__(stream_id, epoch, seq)
        self.text = (
            f"frame {seq} of stream {stream_id} (epoch {epoch}) was overwritten while in use; "
            "copy frames at once that you keep longer than the ring turns, or give the stream more slots"
        )
        self.stream_id = stream_id
        self.epoch = epoch
        self.seq = seq


class RegionRejected(TensorPoolError):
    """A region that must not be mapped: `check` names the failed validation of `uri`, `detail` what was found.

    `remedy` is what to do about it, where `detail` does not say it already.
    """

    def __init__(self, uri: str, check: str, detail: str, remedy: str = "") -> None:
        super().__init__(uri, check, detail, remedy)
        self.text = f"{uri}: {check}: {detail}" + (f"; {remedy}" if remedy else "")
        self.uri = uri
        self.check = check
        self.detail = detail
        self.remedy = remedy


class TransportError(TensorPoolError):
    """Aeron could not do it: `code` is Aeron's error code, 0 where there is none."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message, code)
        self.text = message
        self.code = code


class Closed(TensorPoolError):
    """You used an object after `close()`, or in a process that was forked from its owner."""


class MissingExtra(TensorPoolError, ImportError):
    """A `part` of tensorpool needs `packages` that are not installed; `extra` of the distribution brings them."""

    def __init__(self, part: str, extra: str, *packages: str) -> None:
        super().__init__(part, extra, *packages)
        self.text = f"{part} needs {' and '.join(packages)}, not installed here: {install_command(extra)}"
        self.part = part
        self.extra = extra
        self.packages = packages


def install_command(extra: str) -> str:
    """What installs an extra. On PyPI the name of the import belongs to another project."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'
