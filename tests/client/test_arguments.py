# SPDX-License-Identifier: Apache-2.0
"""Extreme arguments of every public method: refused where the caller stands, and never a burden of the conductor.

Each refusal names the argument, shows the value and says what is accepted. What is not refused travels: afterwards the
stream still works, and no turn of the conductor has failed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import tensorpool as tp
from tensorpool.channel import Endpoint
from tensorpool.client import Client, Consumer, Producer, Slot
from tensorpool.client.arguments import MAX_METADATA_BYTES
from tensorpool.client.streams import BLOB_TERM, SMALL_TERM, max_message_bytes
from tensorpool.errors import ConfigError, LocalProtocolError
from tensorpool.wire.control import DataSourceMeta
from tests.client.conftest import Pair, paired
from tests.support.processes import wait_until

NAN, INF = float("nan"), float("inf")
LONG = "x" * 200_000
PRIVATE = Endpoint("aeron:ipc?alias=" + "x" * 3_000, 31_001)
META = DataSourceMeta(stream_id=1, meta_version=2**32 - 1, timestamp_ns=0)


class Circle(dict[str, Any]):
    """A value that contains itself."""

    def __init__(self) -> None:
        super().__init__()
        self["self"] = self


FRAME_NUMBERS: list[dict[str, Any]] = [
    *({"timestamp_ns": value} for value in [-1, 2**64, "now", 1.5]),
    *({"meta_version": value} for value in [-1, 2**32 - 1, 2**64, "1"]),
    *({"trace_id": value} for value in [-1, 2**64 - 1, 2**70, "1"]),
    *({"seq": value} for value in [-1, 2**63, "1"]),
]

# By owner and method: keyword arguments, each of which is to be refused.
REFUSED: dict[tuple[type, str], list[dict[str, Any]]] = {
    (Client, "producer"): [
        *({"stream": value} for value in ["", LONG, "ä", "a\nb", 0, -1, 2**32 - 1, "4294967295", "9" * 200, 1.5, None]),
        *({"timeout": value} for value in [0, -1, NAN, "1"]),
        *({"release_gil_from_bytes": value} for value in [-1, 2**63, "1"]),
        *({"on_state": value} for value in [1, "print"]),
        *({"driver_instance_id": value} for value in ["", LONG, 5]),
        {"max_frame_bytes": 8},
        *({"create": True, "max_frame_bytes": value} for value in [0, -1, "8", 2**31 + 1]),
        *({"create": True, "max_frame_bytes": 8, "slots": value} for value in [0, -1, "8", 2**31 + 1]),
        *({"create": True, "max_frame_bytes": 8, "seconds": value} for value in [NAN, "2", 1e9]),
        *({"create": True, "max_frame_bytes": 8, "slots": 8} | value for value in [{"seconds": 1}, {"rate_hz": 1}]),
        *({"create": True, "frame": value} for value in [5, (), (-1,), ("3",), (1,) * 9]),
        *({"create": True, "frame": (3,), "dtype": value} for value in ["none", "O", ">f4", tp.Dtype.UNKNOWN]),
        {"create": True, "frame": (3,), "max_frame_bytes": 3},
        *({"create": True} | value for value in [{"slots": 8}, {"seconds": 1}, {"rate_hz": 60}]),
    ],
    (Client, "consumer"): [
        *({"stream": value} for value in ["", LONG, "ä", 0, 2**32 - 1]),
        *({"timeout": value} for value in [0, NAN, "1"]),
        *({"mode": value} for value in ["", "fast", None]),
        *({"max_rate_hz": value} for value in [-1, 2**32, "1"]),
        *({"max_outstanding_seq_gap": value} for value in [-1, 2**63, "1"]),
        *({"progress_interval_us": value} for value in [-1, 2**32 - 1, "1"]),
        *({"progress_bytes_delta": value} for value in [-1, 2**32 - 1]),
        *({"progress_major_delta_units": value} for value in [-1, 2**32 - 1]),
        *({"on_state": value} for value in [1, "print"]),
        *({"on_progress": value} for value in [1, "print"]),
        *({"private_descriptors": value} for value in [PRIVATE, Endpoint("", 1), Endpoint("ipc", 1), "aeron:ipc"]),
        *({"private_descriptors": Endpoint("aeron:ipc", value)} for value in [-1, 2**31]),
        *({"private_control": value} for value in [PRIVATE, Endpoint("aeron-spy:aeron:ipc", 31_002)]),
        *({"driver_instance_id": value} for value in ["", LONG, 5]),
    ],
    (Client, "watch"): [*({"stream": value} for value in ["", LONG, 0]), {"timeout": NAN}],
    (Client, "run"): [{"on_frame": value} for value in [None, 7, "print"]],
    (Client, "discover"): [
        *({"name": value} for value in ["", LONG, 5]),
        *({"tags": value} for value in ["lab", [""], [LONG], ["ä"], [5], [f"tag{n}" for n in range(1_000)]]),
        *({"producer_id": value} for value in [-1, 2**32 - 1, "1"]),
        *({"stream_id": value} for value in [-1, 2**32 - 1, "1"]),
        *({"data_source_id": value} for value in [-1, 2**64 - 1, "1"]),
        *({"driver_instance_id": value} for value in ["", LONG, 5]),
        *({"timeout": value} for value in [0, NAN, "1"]),
    ],
    (Producer, "publish"): [
        *({"array": np.zeros(3, np.uint8)} | numbers for numbers in FRAME_NUMBERS),
        *(
            {"array": np.zeros(3, np.uint8), "trace_id": 1, "parents": value}
            for value in [5, [0], [True], [2**64 - 1], ["1"]]
        ),
        {"array": np.zeros(3, np.uint8), "trace_id": 0, "parents": [1]},
        {"array": np.zeros(3, np.uint8), "shape": (3,)},
        {"array": np.zeros(3, np.uint8), "dtype": np.float32},
        {"array": np.zeros(3), "dtype": tp.Dtype.BIT},
        {"array": b"123", "dtype": tp.Dtype.BIT, "shape": (25,)},
        {"array": "text", "dtype": tp.Dtype.BYTES},
        {"array": np.zeros((4, 4))[::-1], "keep_strides": True},
        {"array": np.broadcast_to(np.zeros(4), (4, 4)), "keep_strides": True},
    ],
    (Producer, "check_fits"): [{"nbytes": value} for value in [-1, "1 MiB", 2**63]],
    (Producer, "claim"): [
        *({"shape": value} for value in [(), 5, (-1,), (2**31,), ("3",), (1,) * 9]),
        *({"shape": (3,), "order": value} for value in ["", "A", None]),
        *({"shape": (3, 4), "strides": value} for value in [(4,), (3, 1), (-4, 1), (2**31, 1), ("4", "1"), 4]),
        {"shape": (3,), "dtype": tp.Dtype.BIT, "strides": (1,)},
        {"shape": (3,), "dtype": tp.Dtype.UNKNOWN},
        {"shape": (3,), "progress": "diagonals"},
        *({"shape": (3,)} | numbers for numbers in FRAME_NUMBERS),
    ],
    (Producer, "set_metadata"): [
        *({"attributes": value} for value in [5, {5: 1}, {"": 1}, {"ä": 1}, {"tags": []}, {"a": object()}, Circle()]),
        *({"attributes": {"a": value}} for value in [LONG, b"x" * 200_000, ["x" * 1000] * 200, {1, object()}]),
        *({"attributes": {}, "tags": value} for value in ["lab", [""], ["a,b"], ["ä"], [5], [LONG], 5]),
        *({"attributes": {}, "summary": value} for value in [LONG, "ä", 5, None]),
    ],
    (Producer, "repeat_metadata"): [{"message": META}, {"message": META, "summary": LONG}],
    (Producer, "set_clock"): [{"pair": 0}, {"pair": (1, 2)}],
    (Producer, "publish_many"): [{"arrays": value} for value in [7, None, "text", [LONG], np.zeros(())]],
    (Producer, "publish_blob"): [
        *({"data": b"", "blob_type": value} for value in [-1, 2**32 - 1, 2**32, "1", None]),
        *({"data": value, "blob_type": 1} for value in [5, "text", None, np.zeros(3)]),
    ],
    (Producer, "wait_for_consumers"): [{"n": -1}, {"n": "1"}, {"timeout": NAN}, {"timeout": "1"}],
    (Producer, "drain"): [{"timeout": NAN}, {"timeout": "1"}],
    (Consumer, "poll"): [{"timeout": value} for value in [NAN, "1", None]],
    (Consumer, "poll_many"): [*({"n": value} for value in [0, -1, 1.5, True, 2**32]), {"n": 1, "timeout": NAN}],
    (Consumer, "wait"): [{"timeout": NAN}, {"timeout": "1"}],
    (Slot, "progress"): [
        *({"rows": value} for value in [-1, 5, 2**64, "1", 1.5]),
        *({"bytes_filled": value} for value in [-1, 17, 2**64]),
        {"rows": 1, "bytes_filled": 4},
        {"columns": 1},
    ],
}
# These take no argument that could be wrong, or are part of a protocol of Python's.
WITHOUT = {
    Client: {"close", "invoke"},
    Producer: {"close"},
    Consumer: {"close", "latest", "metadata", "blob", "lent", "widget"},
    Slot: {"abandon", "commit"},
}


@pytest.fixture
def whole(client: Client) -> Iterator[Pair]:
    """A stream that works before and after, and a conductor that never failed."""
    pair = paired(client)
    yield pair
    assert pair.publish() is not None
    assert pair.producer.is_active
    assert pair.consumer.is_active
    assert client._conductor.failures == 0


def called(pair: Pair, client: Client, owner: type, method: str) -> Callable[..., object]:
    if owner is Slot:
        return pair.producer.claim((4, 4), np.uint8, progress="rows").progress
    held: dict[type, object] = {Client: client, Producer: pair.producer, Consumer: pair.consumer}
    found: Callable[..., object] = getattr(held[owner], method)
    return found


@pytest.mark.parametrize(("owner", "method"), REFUSED, ids=lambda it: it if isinstance(it, str) else it.__name__)
def test_what_cannot_travel_is_refused_where_the_caller_stands(
    whole: Pair, client: Client, owner: type, method: str
) -> None:
    """With the argument's name and its value, at once."""
    wrong = []
    for arguments in REFUSED[owner, method]:
        given = {"stream": whole.producer.stream_id} if owner is Client and method not in ("discover", "run") else {}
        call = called(whole, client, owner, method)
        try:
            positional = [arguments["array"]] if "array" in arguments else []
            call(*positional, **given | {name: value for name, value in arguments.items() if name != "array"})
            wrong.append((arguments, "was accepted"))
        except (LocalProtocolError, ConfigError) as error:
            if len(str(error)) > 1_000:
                wrong.append((arguments, "has a long error"))
        except Exception as error:
            wrong.append((arguments, repr(error)))
        if owner is Slot:
            call.__self__.abandon()  # type: ignore[attr-defined]
    assert wrong == []


def test_every_public_method_is_in_the_table() -> None:
    """A new one brings its extreme arguments along."""
    for owner, harmless in WITHOUT.items():
        methods = {
            name
            for name, found in inspect.getmembers(owner)
            if not name.startswith("_") and callable(found) and not isinstance(found, property)
        }
        tabled = {method for kind, method in REFUSED if kind is owner}
        assert methods - harmless == tabled, owner.__name__


def test_the_longest_that_fits_travels(whole: Pair) -> None:
    """Metadata, summary, tags, blob type and frame numbers at their limits arrive as they are."""
    producer, consumer = whole.producer, whole.consumer
    version = producer.set_metadata({"a": "x" * (MAX_METADATA_BYTES - 1_000)}, tags=["t" * 500], summary="s" * 100_000)
    wait_until(lambda: consumer.metadata(version), "the metadata is there")
    metadata = consumer.metadata(version)
    assert metadata is not None
    assert len(metadata.attributes["a"]) == MAX_METADATA_BYTES - 1_000
    assert producer.publish_blob(b"table", blob_type=2**32 - 2) == version
    wait_until(lambda: consumer.blob(2**32 - 2) == b"table", "the blob is there")
    numbers: dict[str, Any] = {"timestamp_ns": 2**64 - 2, "meta_version": 2**32 - 2, "trace_id": 2**64 - 2}
    frame = whole.publish(**numbers)
    assert (frame.timestamp_ns, frame.meta_version, frame.trace_id) == tuple(numbers.values())


def test_numpys_numbers_are_numbers(whole: Pair) -> None:
    """A time that was computed with numpy is as good as an int."""
    frame = whole.publish(timestamp_ns=np.int64(7), meta_version=np.uint8(3), trace_id=np.uint64(9))
    assert (frame.timestamp_ns, frame.meta_version, frame.trace_id) == (7, 3, 9)


def test_waits_of_any_length_are_possible(whole: Pair) -> None:
    """Negative times are over, infinite ones are long."""
    assert whole.consumer.poll(-5) is None
    assert not whole.consumer.wait(-INF)
    assert whole.producer.publish(np.zeros(3)) == 0
    frame = whole.consumer.poll(INF)
    assert frame is not None
    assert whole.producer.wait_for_consumers(1, INF)


@pytest.mark.parametrize(
    ("channel", "limit"),
    [
        ("aeron:ipc?term-length=64k", 131_072),  # a log of our own size
        ("aeron:udp?endpoint=localhost:40123|term-length=64k", 8_192),
        ("aeron:udp?endpoint=localhost:40123|term-length=1g", 16 << 20),
        ("aeron:udp?endpoint=localhost:40123", 16 << 20),
    ],
)
def test_the_longest_message_follows_from_the_channel(channel: str, limit: int) -> None:
    """An eighth of the term, at most 16 MiB."""
    assert max_message_bytes(Endpoint(channel, 1), BLOB_TERM) == limit
    assert max_message_bytes(Endpoint("aeron:ipc", 1), SMALL_TERM) == 8_192


def test_metadata_that_the_configured_channel_cannot_carry_is_refused(pool: tp.Local) -> None:
    """With the limit of that channel, for attributes, summaries and tables."""
    channel = "aeron:udp?endpoint=127.0.0.1:24399|term-length=64k"
    driver = msgspec.structs.replace(pool.config.driver, metadata_channel=channel)
    config = msgspec.structs.replace(pool.config, driver=driver)
    with tp.connect(pool.aeron_dir, config=config) as client:
        producer = client.producer(20_950, create=True)
        assert producer.set_metadata({"a": "x" * 7_000}, summary="s" * 7_000) == 1
        calls: list[Callable[[], object]] = [
            lambda: producer.set_metadata({"a": "x" * 8_200}),
            lambda: producer.set_metadata({}, summary="s" * 8_200),
            lambda: producer.publish_blob(b"x", blob_type=1),
        ]
        for refused in calls:
            with pytest.raises(LocalProtocolError, match="8192"):
                refused()
        assert client._conductor.failures == 0
        producer.close()
