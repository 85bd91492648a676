# SPDX-License-Identifier: Apache-2.0
"""The producer behind a sink, in a process of its own: tasks and micro-batches come and go, the lease stays.

    task ──Arrow batch in a memory file, its descriptor through a Unix socket──► publisher ──► ring
         ◄── how many rows are published, or what is wrong with which one ──────

One per query and stream, started by the first task that has rows. It remembers what it published of the batch that it
is at: a task that runs again goes on where the first attempt ended. It ends when its query does, when no task came for
a while, and when the Spark that started it is gone; its socket has no name in the file system, so nothing is left
behind.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from tensorpool.client import Client, Producer, connect
from tensorpool.errors import FrameTooLarge, LocalProtocolError, TensorPoolError
from tensorpool.shm.arrays import Array, numpy_dtype
from tensorpool.wire.control import Dtype

IDLE_S: Final = 30.0
ATTACH_TIMEOUT_S: Final = 10.0
CONSUMERS_S: Final = 10.0
REATTACH_S: Final = 30.0
DRAIN_S: Final = 2.0
LOOK_S: Final = 0.5  # whether Spark is still there
START_S: Final = 60.0
DTYPES: Final = ", ".join(member.name for member in Dtype if member)

_LENGTH: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("3i")


class RowRefused(TensorPoolError):
    """A row that is no frame."""


class Order(msgspec.Struct, frozen=True):
    """What a publisher is started with."""

    key: str
    stream: int | str
    create: bool
    consumers: int  # that must be there before the first frame
    aeron_dir: str | None
    config: str | None
    overrides: dict[str, str]
    parent: int  # the process whose end is ours too


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A task begins: which batch, and which task of it."""

    batch: int
    partition: int


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """A memory file with Arrow batches comes along; `first` is the number of its first row in the task."""

    first: int


class End(msgspec.Struct, frozen=True, tag="end"):
    """There will be no more: give the lease back."""


class Answer(msgspec.Struct, frozen=True):
    """`rows` of this task's batch are published."""

    rows: int = 0
    error: str = ""
    is_row: bool = False  # which the error is about


_requests: Final = msgspec.msgpack.Decoder(Hello | Rows | End)


# --- the task's side


class SinkConnection:
    """A task's connection to the publisher of a stream; starts it where there is none.

    >>> with SinkConnection(order, batch=7, partition=0) as connection:    # doctest: +SKIP
    ...     connection.publish(batch)

    Raises RowRefused and TensorPoolError with the publisher's words.
    """

    def __init__(self, order: Order, *, batch: int, partition: int) -> None:
        self._socket = _connected(order)
        self._rows = 0
        try:
            self._published = self._ask(Hello(batch, partition)).rows
        except BaseException:
            self._socket.close()
            raise

    def publish(self, batch: pa.RecordBatch) -> None:
        """Publish rows, in order, unless an earlier attempt of this task has done so."""
        done = min(batch.num_rows, max(0, self._published - self._rows))
        first = self._rows + done
        self._rows += batch.num_rows
        if done == batch.num_rows:
            return
        memory = os.memfd_create("tensorpool-rows", os.MFD_CLOEXEC)
        try:
            with pa.OSFile(f"/proc/self/fd/{memory}", "wb") as file, pa.ipc.new_stream(file, batch.schema) as writer:
                writer.write_batch(batch.slice(done))
            self._published = self._ask(Rows(first), [memory]).rows
        finally:
            os.close(memory)

    @property
    def rows(self) -> int:
        return self._rows

    def close(self) -> None:
        self._socket.close()

    def _ask(self, request: Hello | Rows | End, files: list[int] | None = None) -> Answer:
        _send(self._socket, msgspec.msgpack.encode(request), files or [])
        answer = _receive(self._socket)
        if answer is None:
            raise TensorPoolError("the publisher of the stream has ended; the task may run again")
        found = msgspec.msgpack.decode(answer[0], type=Answer)
        if found.error:
            raise RowRefused(found.error) if found.is_row else TensorPoolError(found.error)
        return found

    def __enter__(self) -> SinkConnection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def end(key: str) -> None:
    """Tell the publisher of a key, if there is one on this host, to give its lease back; wait until it has."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(_address(key))
        _send(connection, msgspec.msgpack.encode(End()), [])
        _receive(connection)


def _connected(order: Order) -> socket.socket:
    deadline = time.monotonic() + START_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(_address(order.key))
            _require_own(connection)
            return connection
        except ConnectionRefusedError:
            connection.close()
            if time.monotonic() > deadline:
                raise TensorPoolError(f"the publisher of stream {order.stream} does not start") from None
            _start(order)
        except BaseException:
            connection.close()
            raise


# Forks before anything is loaded that has threads, so that the worker has no child to wait for.
_LAUNCH: Final = "import os\nif os.fork(): os._exit(0)\nfrom tensorpool.spark.sink_process import main\nmain()"


def _start(order: Order) -> None:
    """Start the process and wait until it listens, or has found that another one does."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin, process.stdout:  # its child goes on without a parent
        process.stdin.write(msgspec.msgpack.encode(order))
        process.stdin.close()
        word = process.stdout.readline()
    if not word:
        raise TensorPoolError(f"the publisher of stream {order.stream} does not start; the worker's stderr says why")


def _address(key: str) -> str:
    """In Linux's abstract namespace."""
    return f"\0tensorpool-spark-{os.getuid()}-{key}"


def _require_own(connection: socket.socket) -> None:
    """Names in the abstract namespace are anybody's."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(raw)[1] != os.getuid():
        raise TensorPoolError("the publisher's socket belongs to another user")


def _send(connection: socket.socket, data: bytes, files: list[int]) -> None:
    socket.send_fds(connection, [_LENGTH.pack(len(data)), data], files)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    """A message and the files that came with it; None at the end."""
    try:
        head, files, _, _ = socket.recv_fds(connection, _LENGTH.size, 4, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL)
        if len(head) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack(head)
        data = b""
        while len(data) < size:
            more = connection.recv(size - len(data))
            if not more:
                return None
            data += more
    except ConnectionError:
        return None
    return data, list(files)


# --- the publisher's side


class _Server:
    """Serves one task at a time; a task that comes meanwhile waits in the socket's queue."""

    def __init__(self, order: Order, listener: socket.socket) -> None:
        self._order = order
        self._listener = listener
        self._client: Client | None = None
        self._producer: Producer | None = None
        self._at: Hello | None = None
        self._rows = 0
        self._is_over = False

    def run(self) -> None:
        used = time.monotonic()
        self._listener.settimeout(LOOK_S)
        while not self._is_over and time.monotonic() - used < IDLE_S and _is_alive(self._order.parent):
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            with connection:
                _require_own(connection)
                self._serve(connection)
            used = time.monotonic()
        self._close()

    def _serve(self, connection: socket.socket) -> None:
        while not self._is_over:
            message = _receive(connection)
            if message is None:
                return
            data, files = message
            try:
                answer = self._answer(_requests.decode(data), files)
            except TensorPoolError as error:
                answer = Answer(self._rows, str(error), isinstance(error, RowRefused))
            finally:
                for file in files:
                    os.close(file)
            with contextlib.suppress(ConnectionError):
                _send(connection, msgspec.msgpack.encode(answer), [])

    def _answer(self, request: Hello | Rows | End, files: list[int]) -> Answer:
        match request:
            case Hello():
                self._begin(request)
            case Rows():
                with pa.memory_map(f"/proc/self/fd/{files[0]}") as file, pa.ipc.open_stream(file) as batches:
                    for batch in batches:
                        self._publish(batch)
            case End():
                self._is_over = True
                self._close()
        return Answer(self._rows)

    def _begin(self, hello: Hello) -> None:
        stream = self._order.stream
        if self._at is not None and hello.batch == self._at.batch and hello.partition != self._at.partition:
            raise TensorPoolError(
                f"rows of stream {stream} are in partitions {self._at.partition} and {hello.partition}; one task "
                'writes a stream, in order: use coalesce(1), or repartition("stream_id") for several streams'
            )
        if hello != self._at:
            self._at, self._rows = hello, 0
        if self._producer is None:
            order = self._order
            if self._client is None:
                self._client = connect(order.aeron_dir, config=order.config, overrides=order.overrides)
            self._producer = self._client.producer(stream, create=order.create, timeout=ATTACH_TIMEOUT_S)
            if order.consumers and not self._producer.wait_for_consumers(order.consumers, CONSUMERS_S):
                found = self._producer.consumers
                self._close()
                raise TensorPoolError(
                    f"stream {stream}: option waitForConsumers is {order.consumers}, and {found} came within "
                    f"{CONSUMERS_S:.0f} s"
                )

    def _publish(self, batch: pa.RecordBatch) -> None:
        assert self._producer is not None
        assert self._at is not None
        for row in rows_of(batch):
            where = f"row {self._rows} (stream {self._order.stream}, partition {self._at.partition})"
            publish_row(self._producer, row, where)
            self._rows += 1

    def _close(self) -> None:
        if self._producer is not None:
            self._producer.drain(DRAIN_S)
            self._producer = None
        if self._client is not None:
            self._client.close()
            self._client = None


def rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Rows whose payloads are views of the batch."""
    payloads = batch.column("payload")
    others = {name: batch.column(name).to_pylist() for name in batch.schema.names if name != "payload"}
    for index in range(batch.num_rows):
        row = {name: values[index] for name, values in others.items()}
        payload = payloads[index]
        row["payload"] = payload.as_buffer() if payload.is_valid else None
        yield row


def publish_row(producer: Producer, row: dict[str, Any], where: str) -> None:
    """Raises RowRefused for a row that is no frame, and for one that cannot be published."""
    dtype, shape, order, flat = frame_of(row, where)
    deadline = time.monotonic() + REATTACH_S
    while True:
        try:
            slot = producer.claim(
                shape,
                dtype,
                order,
                timestamp_ns=row.get("timestamp_ns"),
                meta_version=row.get("meta_version"),
                trace_id=row.get("trace_id"),
                parents=[parent for parent in row.get("parents") or () if parent is not None],
            )
        except (FrameTooLarge, LocalProtocolError, OverflowError, TypeError) as error:
            raise RowRefused(f"{where}: {error}") from None
        with slot:
            slot.array[...] = flat
        if slot.seq is not None:
            return
        if time.monotonic() > deadline:
            raise RowRefused(
                f"{where}: the lease on the stream is lost and did not come back within {REATTACH_S:.0f} s"
            )
        time.sleep(0.01)


def frame_of(row: dict[str, Any], where: str) -> tuple[Dtype, tuple[int, ...], Any, Array]:
    """What a row stands for: dtype, shape, order, and its elements in that shape. Raises RowRefused."""
    for name in ("payload", "dtype", "shape"):
        if row[name] is None:
            raise RowRefused(f"{where}: {name} is null")
    order: Any
    payload, name, shape, order = row["payload"], row["dtype"], tuple(row["shape"]), row.get("order")
    dtype = Dtype.__members__.get(str(name).upper())
    if not dtype:
        raise RowRefused(f"{where}: dtype {name!r}; expected one of {DTYPES}")
    if order not in ("C", "F", None):
        raise RowRefused(f"{where}: order {order!r}; expected C or F")
    order = order or "C"
    if not shape or any(type(extent) is not int or extent < 0 for extent in shape):
        raise RowRefused(f"{where}: shape {list(shape)}; expected extents from 0, one at least")
    kind = numpy_dtype(dtype)
    count = math.prod(shape)
    expected = -(-count // 8) if dtype is Dtype.BIT else count * kind.itemsize
    if len(payload) != expected:
        raise RowRefused(f"{where}: payload of {len(payload)} bytes; {dtype.name} {list(shape)} has {expected}")
    flat: Array = np.frombuffer(payload, kind) if expected else np.empty(0, kind)
    return dtype, shape, order, flat if dtype is Dtype.BIT else flat.reshape(shape, order=order)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def main() -> None:
    """The publisher's process."""
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(_address(order.key))
        except OSError:
            os.write(1, b"taken\n")  # another one was faster
            return
        listener.listen(64)
        os.write(1, b"ready\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)
        _Server(order, listener).run()
