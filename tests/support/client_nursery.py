# SPDX-License-Identifier: Apache-2.0
"""Clients in processes of their own, and one that keeps up with a flood.

`Nursery` forks clients from a warm process, so that a thousand of them are cheap: `hold` attaches, writes or listens
until it is killed; `flood` offers prepared bytes as fast as the control stream takes them. Each client appends what it
sees of interest to the diary, a file of JSON lines.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import secrets
import signal
import struct
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tensorpool import aeron, shm
from tensorpool._core import TensorLayout
from tensorpool.errors import RegionRejected
from tensorpool.wire import DecodeError, Message, decode
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import (
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachRequest,
    ShmDetachResponse,
    ShmDriverShutdown,
    ShmLeaseRevoked,
)
from tests.support import driver_client
from tests.support.driver_client import DriverClient, Lease, attach_request
from tests.support.driver_process import Deployment
from tests.support.hostile_messages import read_messages
from tests.support.listener import ReceivedMessage
from tests.support.processes import Process, wait_until, whole_lines

ANSWER_WITHIN_S: Final = 1.0  # then a holder asks anew
FRAME_BYTES: Final = 200
LAYOUT: Final = TensorLayout(1, 1, [FRAME_BYTES])  # uint8
_KEY: Final = struct.Struct("<2x2H")  # of a header: template and schema
_ANSWER: Final = struct.Struct("<8xqi")  # of an attach or detach response: correlation id and code
_ANSWERS: Final = frozenset((kind.TEMPLATE_ID, kind.SCHEMA_ID) for kind in (ShmAttachResponse, ShmDetachResponse))
_FROM_DRIVER: Final = _ANSWERS | {
    (kind.TEMPLATE_ID, kind.SCHEMA_ID) for kind in (ShmLeaseRevoked, ShmDriverShutdown, ShmPoolAnnounce)
}


class Listener(DriverClient):
    """A client that holds its own in a flood.

    It speaks on a log of its own, where no other client takes its room. Of what others send and receive it keeps
    nothing but grants and ends; refusals are kept only for requests of its own, or in `asked`.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.asked: set[int] = set()
        super().__init__(deployment)
        self._publication = self._client.add_publication(*deployment.control, exclusive=True)
        wait_until(lambda: self._publication.has_room, "its own log is connected")
        # A log of its own: in the shared one the client that offers most often crowds the others out.
        self._publication = self._client.add_publication(*deployment.control, True)
        wait_until(lambda: self._publication.has_room, "the client's own log is connected")

    def send(self, message: Message | bytes) -> int:
        if isinstance(message, (ShmAttachRequest, ShmDetachRequest)):
            self.asked.add(message.correlation_id)
        data = message if isinstance(message, bytes) else message.encode()
        sent_ns = time.monotonic_ns()
        # A client that waits for room without listening may be the one that the others wait for.
        wait_until(lambda: self._publication.offer(data) or self._listen(), "the control stream takes a message")
        return sent_ns

    def poll(self) -> None:
        super().poll()
        self._listen()

    def _listen(self) -> None:
        for subscription in self._subscriptions:
            subscription.poll(self._on_message, 2000)

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        if len(data) < 20 or (key := _KEY.unpack_from(data)) not in _FROM_DRIVER:
            return
        correlation_id, code = _ANSWER.unpack_from(data)
        if key in _ANSWERS and code != ResponseCode.OK and correlation_id not in self.asked:
            return
        with contextlib.suppress(DecodeError):
            received = ReceivedMessage(decode(data), data, time.monotonic_ns(), len(self.transcript), info.stream_id)
            self.transcript.append(received)


def ring_of(lease: Lease, base_dir: Path, *, writable: bool = False) -> shm.MappedRing:
    """The memory of a lease, mapped as a client maps it."""
    answer = lease.response
    assert answer.header_nslots is not None
    assert answer.header_slot_bytes is not None
    return shm.map_ring(
        shm.RingSpec.announced(answer.header_nslots, answer.header_slot_bytes, answer.payload_pools),
        [answer.header_region_uri, *(pool.region_uri for pool in answer.payload_pools)],
        shm.AllowedBases([base_dir]),
        stream_id=lease.stream_id,
        epoch=lease.epoch,
        writable=writable,
    )


def frame(marker: int, seq: int) -> bytes:
    """The bytes of a frame: who wrote it and which it is, again and again."""
    return ((marker & 0xFFFF_FFFF) << 32 | seq & 0xFFFF_FFFF).to_bytes(8, "little") * (FRAME_BYTES // 8)


class Nursery:
    """Clients of one deployment, each in a process of its own.

    >>> with Nursery(deployment) as nursery:               # doctest: +SKIP
    ...     pid = nursery.hold(Role.PRODUCER, 10_000)
    ...     lease = nursery.wait_for(pid, "granted", client)
    ...     nursery.kill(pid)
    """

    def __init__(self, deployment: Deployment) -> None:
        self.pids: set[int] = set()
        self._diary = deployment.folder / f"diary-{time.monotonic_ns()}"
        self._diary.touch()
        settings = {"aeron_dir": deployment.aeron_dir, "folder": str(deployment.folder), "tables": deployment.tables}
        self._process = Process("-m", __name__, json.dumps(settings), str(self._diary))
        assert self._process.read_line() == "ready"

    def hold(self, role: Role, stream_id: int, *, stubborn: bool = False) -> int:
        """A client that attaches, writes frames as a producer, and attaches again whenever its lease ends.

        A `stubborn` one never notices its end.
        """
        return self._order("hold", role.name, stream_id, stubborn)

    def flood(self, messages: Path, seed: int = 0, rounds: int = 0) -> int:
        """A client that sends the messages of a file, in an order of its own, so often, or until it is killed."""
        return self._order("flood", str(messages), seed, rounds)

    def wait_for(self, pid: int, event: str, meanwhile: DriverClient) -> dict[str, Any]:
        """What a client entered in the diary, the first time; another one keeps its leases alive."""
        found: list[dict[str, Any]] = []

        def is_entered() -> bool:
            assert is_alive(pid), f"client {pid} ended: {self.diary(pid)}"
            found.extend(entry for entry in self.diary(pid) if entry["event"] == event)
            return bool(found)

        meanwhile.wait_until(is_entered, f"{event} of client {pid}")
        return found[0]

    def diary(self, pid: int | None = None) -> list[dict[str, Any]]:
        """What the clients entered, in order; of one only or of all."""
        entries = [json.loads(line) for line in whole_lines(self._diary)]
        return [entry for entry in entries if pid is None or entry["pid"] == pid]

    def kill(self, pid: int) -> None:
        """SIGKILL; fails if the client had ended by itself."""
        os.kill(pid, signal.SIGKILL)
        self.pids.remove(pid)
        self._process.write_line(json.dumps(["reap", pid]))
        status = int(self._process.read_line())
        assert status == -signal.SIGKILL, f"client {pid} had ended with {status}: {self.diary(pid)}"

    def close(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.reap()

    def _order(self, *order: Any) -> int:
        self._process.write_line(json.dumps(order))
        pid = int(self._process.read_line())
        self.pids.add(pid)
        return pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_alive(pid: int) -> bool:
    """Whether there is such a process and it is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def zombies_below(pid: int) -> list[int]:
    """Children of a process that ended and were not waited for, and their children."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            child = int(stat.parent.name)
            if int(parent) == pid:
                found += [child] if state == "Z" else zombies_below(child)
    return found


def _serve(settings: str, diary: str) -> None:
    """The warm process: forks on command. It has no Aeron client and no thread itself."""
    deployment = _deployment(json.loads(settings))
    actions = {"hold": _hold, "flood": _flood}
    print("ready", flush=True)
    for line in sys.stdin:
        action, *arguments = json.loads(line)
        if action == "reap":
            print(os.waitstatus_to_exitcode(os.waitpid(arguments[0], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        try:
            os.close(0)
            _take_own_ids()
            actions[action](deployment, _Diary(diary), *arguments)
        except BaseException:
            _Diary(diary).enter("failed", text=traceback.format_exc())
        finally:
            os._exit(1)


def _take_own_ids() -> None:
    """Ids of the child's own: it inherited those that its parent would give next."""
    driver_client._correlation_ids = itertools.count(secrets.randbits(62))
    driver_client._client_ids = itertools.count(1_000_000 + secrets.randbits(24) * 64)


def _deployment(settings: dict[str, Any]) -> Deployment:
    deployment = Deployment(Path(settings["folder"]), settings["aeron_dir"])
    deployment.tables = settings["tables"]
    return deployment


class _Diary:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)

    def enter(self, event: str, **fields: Any) -> None:
        entry = {"ns": time.monotonic_ns(), "pid": os.getpid(), "event": event, **fields}
        os.write(self._fd, json.dumps(entry).encode() + b"\n")


def _hold(deployment: Deployment, diary: _Diary, role: str, stream_id: int, stubborn: bool) -> None:
    with Listener(deployment) as client:
        while True:
            lease = _attached(client, diary, Role[role], stream_id)
            diary.enter("granted", role=role, stream_id=stream_id, lease_id=lease.lease_id, epoch=lease.epoch)
            try:
                ring = ring_of(lease, deployment.base_dir, writable=role == "PRODUCER")
            except RegionRejected as error:
                diary.enter("rejected", check=error.check, text=str(error))
                continue
            reason = _use(deployment, client, lease, ring, stubborn)
            diary.enter("lost", lease_id=lease.lease_id, reason=reason)


def _attached(client: DriverClient, diary: _Diary, role: Role, stream_id: int) -> Lease:
    """A lease, however often it takes: the driver may be gone, or an earlier producer's lease still run."""
    while True:
        client.transcript.clear()
        request = attach_request(stream_id, role)
        sent_ns = client.send(request)
        until_s = time.monotonic() + ANSWER_WITHIN_S
        answers: list[ReceivedMessage[ShmAttachResponse]] = []
        while not answers and time.monotonic() < until_s:
            client.poll()
            answers = client.received(ShmAttachResponse, correlation_id=request.correlation_id)
            time.sleep(0.002)
        if not answers:
            diary.enter("unanswered", stream_id=stream_id)
            continue
        answer = answers[0].message
        if answer.code is ResponseCode.OK:
            return Lease(request.client_id, role, answer, sent_ns, answers[0])
        diary.enter("refused", code=answer.code.name, text=answer.error_message)
        time.sleep(0.05)


def _use(deployment: Deployment, client: DriverClient, lease: Lease, ring: shm.MappedRing, stubborn: bool) -> str:
    """Write or listen until the lease ends; why it did. Silence of the driver ends it too (E42)."""
    writer = ring.writer() if lease.role is Role.PRODUCER else None
    window_ns = 3 * int(deployment.tables["policies"]["announce_period_ms"]) * 1_000_000
    client.kept[:] = [lease]
    client.transcript.clear()
    announced_ns = time.monotonic_ns()
    reason = ""
    while not reason:
        for _ in range(20):
            if writer is not None:
                writer.write(writer.next_seq, LAYOUT, frame(lease.client_id, writer.next_seq))
        client.poll()
        for received in client.transcript:
            reason = reason or _end_of(lease, received.message)
            if isinstance(received.message, ShmPoolAnnounce) and received.message.stream_id == lease.stream_id:
                announced_ns = received.received_ns
        client.transcript.clear()
        if time.monotonic_ns() - announced_ns > window_ns:
            reason = "silence"
        if stubborn:
            reason = ""
        time.sleep(0.001)
    client.kept.clear()
    return reason


def _end_of(lease: Lease, message: Message) -> str:
    match message:
        case ShmLeaseRevoked() if message.lease_id == lease.lease_id:
            return message.reason.name
        case ShmPoolAnnounce() if message.stream_id == lease.stream_id and message.epoch > lease.epoch:
            return "epoch" if lease.role is Role.PRODUCER else ""
        case ShmDriverShutdown():
            return "shutdown"
    return ""


def _flood(deployment: Deployment, diary: _Diary, path: str, seed: int, rounds: int) -> None:
    messages = read_messages(Path(path))
    order = random.Random(seed)
    client = aeron.connect(deployment.aeron_dir)
    publication = client.add_publication(*deployment.control)
    wait_until(lambda: publication.has_room, "the control stream is connected")
    for round in itertools.count(1):
        order.shuffle(messages)
        for message in messages:
            while not publication.offer(message):
                os.sched_yield()
        diary.enter("sent", count=round * len(messages))
        if round == rounds:
            signal.pause()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
