# SPDX-License-Identifier: Apache-2.0
"""Arguments of public methods, checked where the caller stands.

What no message or slot can carry, or what a log cannot take, is refused at once with the value and what is accepted:
the conductor, which sends later, never meets it. Every check raises LocalProtocolError.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tensorpool._core import MAX_SEQ
from tensorpool.channel import Endpoint, check_channel
from tensorpool.client.consumer_session import Preferences
from tensorpool.client.metadata import CHUNK_MAX, MAX_BLOB_BYTES, NUMPY_DTYPE, to_message
from tensorpool.client.streams import BLOB_TERM, max_message_bytes
from tensorpool.client.trace_ids import MAX_TRACE_ID
from tensorpool.client.wall_clock import MAX_ATTRIBUTE_BYTES
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import LocalProtocolError
from tensorpool.wire.control import DataSourceAnnounce, DataSourceMeta, Mode

MAX_STREAM_ID: Final = 2**32 - 2
MAX_TIMEOUT_S: Final = 1e9
MAX_META_VERSION: Final = 2**32 - 2
MAX_TIMESTAMP_NS: Final = 2**64 - 1
MAX_METADATA_BYTES: Final = 120_000  # one message of the metadata log
MAX_CHANNEL_BYTES: Final = 2_048  # two of them fit a ConsumerHello
CHUNK_OVERHEAD: Final = 64  # header and fields of a MetaBlobChunk
MODES: Final = {"stream": Mode.STREAM, "rate_limited": Mode.RATE_LIMITED}


def whole_number(name: str, value: object, highest: int, lowest: int = 0) -> int:
    """An int, or what numpy has for one."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = lowest - 1
    if isinstance(value, bool) or not lowest <= number <= highest:
        raise LocalProtocolError(f"{name} = {value!r:.80}: expected a whole number from {lowest} to {highest}")
    return number


def seconds(name: str, value: object) -> float:
    """A time to wait. Less than nothing is nothing, infinity is a very long time."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise LocalProtocolError(f"{name} = {value!r:.80}: expected a number of seconds")
    return float(min(max(value, 0.0), MAX_TIMEOUT_S))


def timeout(value: object) -> float:
    """The time that an attach may take."""
    number = seconds("timeout", value)
    if number == 0:
        raise LocalProtocolError(f"timeout = {value!r:.80}: expected a positive number of seconds")
    return number


def stream(value: object) -> tuple[int, str | None]:
    """A stream's id and None, or 0 and its name."""
    if isinstance(value, str):
        if not value or not value.isprintable() or len(value.encode()) > 256 or not value.isascii():
            raise LocalProtocolError(f"stream name {value!r:.80}: expected 1 to 256 printable ASCII characters")
        if not value.isdecimal():
            return 0, value
        value = int(value)
    if type(value) is not int or not 1 <= value <= MAX_STREAM_ID:
        raise LocalProtocolError(f"stream {value!r:.80}: expected a name, or an id from 1 to 2^32 - 2")
    return value, None


def callback(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise LocalProtocolError(f"{name} = {value!r:.80}: expected a function, or None")


def ascii_text(name: str, value: object, longest: int) -> str:
    if not isinstance(value, str) or not value or not value.isascii() or len(value) > longest:
        raise LocalProtocolError(f"{name} = {value!r:.80}: expected 1 to {longest} characters of ASCII text")
    return value


def private_endpoint(name: str, endpoint: object) -> None:
    """Of a consumer's own stream. Raises ConfigError for what is no Aeron channel."""
    if endpoint is None:
        return
    if not isinstance(endpoint, Endpoint):
        raise LocalProtocolError(f"{name} = {endpoint!r:.80}: expected a tensorpool.Endpoint")
    ascii_text(f"{name}.channel", endpoint.channel, MAX_CHANNEL_BYTES)
    if check_channel(name, endpoint.channel).is_spy:
        raise LocalProtocolError(f"{name} = {endpoint.channel!r:.80}: expected a channel that can be published to")
    whole_number(f"{name}.stream_id", endpoint.stream_id, 2**31 - 1)


def preferences(
    mode: str,
    max_rate_hz: int,
    supports_progress: bool,
    hints: tuple[int | None, int | None, int | None],
    descriptors: Endpoint | None,
    control: Endpoint | None,
) -> Preferences:
    """How a consumer wants its frames."""
    if mode not in MODES:
        raise LocalProtocolError(f"mode = {mode!r}: expected 'stream' or 'rate_limited'")
    whole_number("max_rate_hz", max_rate_hz, 2**32 - 1)
    if mode == "rate_limited" and max_rate_hz == 0:
        raise LocalProtocolError("mode 'rate_limited' needs max_rate_hz")
    names = "progress_interval_us", "progress_bytes_delta", "progress_major_delta_units"
    for name, value in zip(names, hints, strict=True):
        if value is not None:
            whole_number(name, value, 2**32 - 2)
    for name, endpoint in (("private_descriptors", descriptors), ("private_control", control)):
        private_endpoint(name, endpoint)
    return Preferences(MODES[mode], max_rate_hz, supports_progress, *hints, descriptors, control)


def frame_numbers(
    timestamp_ns: int | None, meta_version: int | None, trace_id: int | None, seq: int | None
) -> tuple[int | None, int | None, int | None, int | None]:
    """What comes with a frame, as plain ints."""
    return (
        None if timestamp_ns is None else whole_number("timestamp_ns", timestamp_ns, MAX_TIMESTAMP_NS),
        None if meta_version is None else whole_number("meta_version", meta_version, MAX_META_VERSION),
        None if trace_id is None else whole_number("trace_id", trace_id, MAX_TRACE_ID),
        None if seq is None else whole_number("seq", seq, MAX_SEQ),
    )


def metadata_message(
    config: DriverConfig,
    name: str | None,
    attributes: Mapping[str, Any],
    tags: Iterable[str],
    summary: str,
    version: int,
    now_ns: int,
    numpy_dtype: str | None = None,
) -> DataSourceMeta:
    """What `set_metadata` sends, made and measured; its stream id is still open."""
    if not isinstance(attributes, Mapping):
        raise LocalProtocolError(f"attributes = {attributes!r:.80}: expected a mapping of names to values")
    if isinstance(tags, str):
        raise LocalProtocolError(f"tags = {tags!r:.80}: expected a list of texts")
    if NUMPY_DTYPE in attributes:
        raise LocalProtocolError(f"metadata key {NUMPY_DTYPE!r} is what the producer fills, from the arrays it gets")
    if numpy_dtype is not None:
        attributes = {**attributes, NUMPY_DTYPE: numpy_dtype}
    try:
        message = to_message(1, version, attributes, tuple(tags), now_ns)
        check_metadata(config, name, message, summary)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalProtocolError(f"metadata: {error}; give text, bytes, or what JSON can hold") from None
    return message


def check_metadata(config: DriverConfig, name: str | None, message: DataSourceMeta, summary: str) -> None:
    """Whether the metadata log of this configuration takes both messages."""
    if type(summary) is not str or not summary.isascii():
        raise LocalProtocolError(f"summary = {summary!r:.80}: expected ASCII text")
    highest = min(MAX_METADATA_BYTES, max_message_bytes(config.driver.metadata, BLOB_TERM))
    size = len(message.encode()) + MAX_ATTRIBUTE_BYTES
    if size > highest:
        raise LocalProtocolError(f"metadata of {size} bytes exceed {highest}; use publish_blob for tables")
    announce = DataSourceAnnounce(stream_id=1, producer_id=1, epoch=1, meta_version=1, name=name or "", summary=summary)
    size = len(announce.encode())
    if size > highest:
        raise LocalProtocolError(f"summary of {len(summary)} characters: its message of {size} bytes exceeds {highest}")


def blob(config: DriverConfig, data: object, blob_type: object) -> bytes:
    """What `publish_blob` distributes."""
    whole_number("blob_type", blob_type, 2**32 - 2)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise LocalProtocolError(f"data = {data!r:.80}: expected bytes; an array has tobytes()")
    kept = bytes(data)
    if len(kept) > MAX_BLOB_BYTES:
        raise LocalProtocolError(f"a blob of {len(kept)} bytes: consumers take at most {MAX_BLOB_BYTES}")
    highest = max_message_bytes(config.driver.metadata, BLOB_TERM)
    if highest < CHUNK_MAX + CHUNK_OVERHEAD:
        raise LocalProtocolError(
            f"a blob travels in messages of {CHUNK_MAX} bytes, driver.metadata_channel takes {highest}; "
            "give it term-length=1m"
        )
    return kept
