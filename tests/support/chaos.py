# SPDX-License-Identifier: Apache-2.0
"""Clients that die, clients that lie, and the loop that kills them and their driver at random moments.

`Nursery` forks clients from a warm process, so that a thousand of them are cheap: `hold` attaches, writes or listens
until it is killed; `flood` offers prepared bytes as fast as the control stream takes them. Whatever a client sees of
interest it appends to the diary, a file of JSON lines.
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
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tensorpool import aeron, shm
from tensorpool._core import TensorLayout
from tensorpool.errors import RegionRejected
from tensorpool.wire import DecodeError, Message, decode
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import (
    HugepagesPolicy,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachRequest,
    ShmDetachResponse,
    ShmDriverShutdown,
    ShmDriverShutdownRequest,
    ShmLeaseRevoked,
    ShutdownReason,
)
from tests.support import driver_client
from tests.support.driver_client import DriverClient, Lease, attach_request
from tests.support.driver_process import Deployment, DriverProcess
from tests.support.listener import Heard
from tests.support.messages import hello
from tests.support.processes import ROOT, Process, wait_until, whole_lines

ANSWER_WITHIN_S: Final = 1.0  # then a holder asks anew
FRAME_BYTES: Final = 200
LAYOUT: Final = TensorLayout(1, 1, [FRAME_BYTES])  # uint8
TOKEN: Final = "open sesame"
CORPUS: Final = ROOT / "tests" / "fuzz" / "corpus"

_KEY: Final = struct.Struct("<2x2H")  # of a header: template and schema
_ANSWER: Final = struct.Struct("<8xqi")  # of an attach or detach response: correlation id and code
_ANSWERS: Final = frozenset((kind.TEMPLATE_ID, kind.SCHEMA_ID) for kind in (ShmAttachResponse, ShmDetachResponse))
_FROM_DRIVER: Final = _ANSWERS | {
    (kind.TEMPLATE_ID, kind.SCHEMA_ID) for kind in (ShmLeaseRevoked, ShmDriverShutdown, ShmPoolAnnounce)
}


def start_logged(deployment: Deployment, log: Path) -> DriverProcess:
    """The driver with its log at level info, in a file: a test does not read a pipe while it runs."""
    return deployment.start_limited(
        f"log = os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)\n"
        "os.dup2(log, 1), os.dup2(log, 2)\n"
        "sys.argv[-1] = 'info'"
    )


def events_of(log: Path, name: str) -> list[dict[str, Any]]:
    """What a driver has logged under this name."""
    entries = [json.loads(line) for line in whole_lines(log) if line.startswith("{")]
    return [entry for entry in entries if entry["event"] == name]


def end(process: DriverProcess, client: DriverClient) -> None:
    """Have the driver of a deployment whose token is TOKEN end in order."""
    client.send(driver_client.shutdown_request(TOKEN))
    code, output = process.wait_for_end()
    assert code == 0, output


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
            heard = Heard(decode(data), data, time.monotonic_ns(), len(self.transcript), info.stream_id)
            self.transcript.append(heard)


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


# --- a warm process that forks clients


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
        told = {"aeron_dir": deployment.aeron_dir, "folder": str(deployment.folder), "tables": deployment.tables}
        self._process = Process("-m", "tests.support.chaos", json.dumps(told), str(self._diary))
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


def _serve(told: str, diary: str) -> None:
    """The warm process: forks on command. It has no Aeron client and no thread itself."""
    deployment = _deployment(json.loads(told))
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
            _be_somebody_else()
            actions[action](deployment, _Diary(diary), *arguments)
        except BaseException:
            _Diary(diary).enter("failed", text=traceback.format_exc())
        finally:
            os._exit(1)


def _be_somebody_else() -> None:
    """Ids of the child's own: it inherited those that its parent would give next."""
    driver_client._correlation_ids = itertools.count(secrets.randbits(62))
    driver_client._client_ids = itertools.count(1_000_000 + secrets.randbits(24) * 64)


def _deployment(told: dict[str, Any]) -> Deployment:
    deployment = Deployment(Path(told["folder"]), told["aeron_dir"])
    deployment.tables = told["tables"]
    return deployment


class _Diary:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)

    def enter(self, event: str, **fields: Any) -> None:
        entry = {"ns": time.monotonic_ns(), "pid": os.getpid(), "event": event, **fields}
        os.write(self._fd, json.dumps(entry).encode() + b"\n")


# --- what clients do


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
        answers: list[Heard[ShmAttachResponse]] = []
        while not answers and time.monotonic() < until_s:
            client.poll()
            answers = client.heard(ShmAttachResponse, correlation_id=request.correlation_id)
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
    heard_ns = time.monotonic_ns()
    reason = ""
    while not reason:
        for _ in range(20):
            if writer is not None:
                writer.write(writer.next_seq, LAYOUT, frame(lease.client_id, writer.next_seq))
        client.poll()
        for heard in client.transcript:
            reason = reason or _end_of(lease, heard.message)
            if isinstance(heard.message, ShmPoolAnnounce) and heard.message.stream_id == lease.stream_id:
                heard_ns = heard.received_ns
        client.transcript.clear()
        if time.monotonic_ns() - heard_ns > window_ns:
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


# --- what no client should say


def hostile_messages(seed: int, count: int, leases: list[Lease], max_length: int) -> list[bytes]:
    """Messages none of which gives its sender a lease, or may touch those of others.

    Noise, messages of all schemas with bytes changed, cut or added, groups and texts of absurd length, messages as long
    as the log takes them, and requests that are well-formed but name what is not their sender's.
    """
    chance = random.Random(seed)
    samples = [path.read_bytes() for path in sorted(CORPUS.glob("*/*")) if path.parent.name != "driver_control"]
    makers = {
        _noise: 10,
        _mutant: 50,
        _absurd: 10,
        _foreign_lease: 15,
        _refusable_attach: 8,
        _greedy_hello: 6,
        _wrong_token: 1,
    }
    chosen = chance.choices(list(makers), list(makers.values()), k=count)
    messages = [maker(chance, samples, leases) for maker in chosen]
    giants = [_giant(chance, samples, length) for length in (max_length, max_length - 1, max_length // 3)]
    return messages + giants


def _noise(chance: random.Random, samples: list[bytes], _: list[Lease]) -> bytes:
    """Nothing at all, behind a good header or not."""
    noise = chance.randbytes(chance.choice((0, 1, 7, 8, 9, 15, 16, 24, 33, 200, 1400, 3000)))
    return noise if chance.random() < 0.5 else chance.choice(samples)[:8] + noise


def _mutant(chance: random.Random, samples: list[bytes], leases: list[Lease]) -> bytes:
    """A message of any schema, damaged."""
    data = bytearray(chance.choice(samples))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0 if data:
                data[at % len(data)] ^= 1 << chance.randrange(8)
            case 1:
                data[at : at + 4] = chance.choice(
                    (b"\xff\xff\xff\xff", b"\xfe\xff\xff\xff", bytes(4), b"\xff\xff\xff\x7f")
                )
            case 2:
                del data[at:]
            case 3:
                data += chance.randbytes(chance.randint(1, 40))
            case _:
                data[at:at] = data[:at]
    return bytes(data)


def _absurd(chance: random.Random, samples: list[bytes], _: list[Lease]) -> bytes:
    """A group of 65534 entries, or a text of four gigabytes, in a message that has nothing of the kind."""
    claims = (
        struct.pack("<HH", chance.choice((0, 10, 65535)), 65534),
        struct.pack("<I", chance.choice((2**32 - 1, 2**30))),
    )
    return chance.choice(samples) + chance.choice(claims) * chance.randint(1, 30)


def _foreign_lease(chance: random.Random, _: list[bytes], leases: list[Lease]) -> bytes:
    """A keepalive or detach that is right but for one field: of another client's lease."""
    lease = chance.choice(leases)
    wrong: dict[str, Any] = chance.choice(
        [
            {"lease_id": lease.lease_id + chance.choice((-1, 1)) * chance.randint(10**6, 10**12)},
            {"client_id": lease.client_id ^ 1 << chance.randrange(31)},
            {"stream_id": lease.stream_id ^ 1 << chance.randrange(31)},
            {"role": Role.PRODUCER if lease.role is Role.CONSUMER else Role.CONSUMER},
        ]
    )
    return (lease.keepalive if chance.random() < 0.5 else lease.detach)(**wrong).encode()


def _refusable_attach(chance: random.Random, _: list[bytes], leases: list[Lease]) -> bytes:
    """For a missing stream, with client id 0, by a client that has a lease, or in a later version."""
    lease = chance.choice(leases)
    wrong: dict[str, Any] = chance.choice(
        [
            {"stream_id": chance.choice((0, 1, 2**31, 2**32 - 2))},
            {"client_id": 0},
            {"client_id": lease.client_id},
            {"expected_layout_version": 7},
            {"require_hugepages": HugepagesPolicy.HUGEPAGES},
        ]
    )
    stream_id = wrong.pop("stream_id", lease.stream_id)
    data = bytearray(attach_request(stream_id, chance.choice(list(Role)), **wrong).encode())
    data[6] = chance.choice((1, 1, 0, 2, 255))
    return bytes(data)


def _greedy_hello(chance: random.Random, _: list[bytes], leases: list[Lease]) -> bytes:
    """One of many consumers that ask for streams of their own, on channels that cannot be opened."""
    channel = chance.choice(("aeron:ipc", "aeron:\udcff\udc80", "\0" * 10, "x" * 5000, "aeron:ipc|" * 300))
    asked = hello(chance.choice(leases).stream_id, chance.randrange(1, 5000))
    fields = struct.pack("<I", len(channel)) + channel.encode("utf-8", "surrogateescape")
    return asked.encode()[:-8] + fields * 2


def _wrong_token(chance: random.Random, _: list[bytes], __: list[Lease]) -> bytes:
    token = chance.choice(("", "x", "\0", "open sesam", "open sesame ", "x" * 100_000))
    return driver_client.shutdown_request(token).encode()


def _giant(chance: random.Random, samples: list[bytes], length: int) -> bytes:
    """A text as long as the log takes it, in a request that has texts."""
    head = ShmDriverShutdownRequest(correlation_id=1, reason=ShutdownReason.ADMIN, token="", error_message="").encode()[
        :-8
    ]
    room = length - len(head) - 8
    return head + struct.pack("<I", room) + chance.randbytes(room) + bytes(4)


def write_messages(path: Path, messages: Iterable[bytes]) -> None:
    path.write_bytes(b"".join(len(message).to_bytes(4, "little") + message for message in messages))


def read_messages(path: Path) -> list[bytes]:
    data, messages, at = path.read_bytes(), [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        messages.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return messages


# --- the loop


class Chaos:
    """Kills clients and their driver at random moments and starts others in their place.

    Every stream has a producer and two consumers, the first one also a rival who wants to be its producer. An observer
    listens all the time: epochs only grow, no lease id comes twice, no end is told twice. `settle` then looks at what
    is left of it all.
    """

    def __init__(self, deployment: Deployment, stream_ids: Sequence[int], seed: int) -> None:
        self.kills: Counter[str] = Counter()
        self.epochs: dict[int, int] = dict.fromkeys(stream_ids, 0)  # the highest that was announced or granted
        self.bumps = 0
        self.grants = 0
        self._deployment = deployment
        self._chance = random.Random(seed)
        self._granted: set[int] = set()
        self._ended: set[int] = set()
        self._producers: dict[int, int] = {}  # as announced last: stream, client
        roles = [(Role.PRODUCER, id) for id in (stream_ids[0], *stream_ids)]
        roles += [(Role.CONSUMER, id) for id in stream_ids for _ in range(2)]
        with contextlib.ExitStack() as undo:
            self._observer = undo.enter_context(Listener(deployment))
            self._nursery = undo.enter_context(Nursery(deployment))
            self._driver = undo.enter_context(deployment.start())
            self._holders = {self._nursery.hold(*task): task for task in roles}
            self._undo = undo.pop_all()

    def run(self, rounds: int, *, seconds: float = float("inf")) -> int:
        """So many kills, or as many as there is time for; how many there were."""
        until_s = time.monotonic() + seconds
        for round in range(rounds):
            if time.monotonic() > until_s:
                return round
            self._pass_time(self._chance.uniform(0, 0.3))
            assert not self._driver.has_ended, self._driver.finish()
            if self._chance.random() < 0.15:
                self.kills["driver"] += 1
                self._driver.kill()
                self._driver = self._undo.enter_context(self._deployment.start())
            else:
                pid = self._chance.choice(sorted(self._holders))
                role, stream_id = self._holders.pop(pid)
                self.kills[role.name.lower()] += 1
                self._nursery.kill(pid)
                self._holders[self._nursery.hold(role, stream_id)] = role, stream_id
        return rounds

    def settle(self) -> None:
        """Once the killing is over: every client has a lease again; then all clients die and leave nothing."""
        observer, deployment = self._observer, self._deployment
        wait_until(lambda: self._observe() or self._is_everybody_back(), "every client has a lease again")
        wait_until(lambda: self._observe() or all(self._producers.values()), "every stream has a producer")
        for pid in self._holders:
            self._nursery.kill(pid)
        wait_until(lambda: self._observe() or not any(self._producers.values()), "the producers' leases expire")
        self._pass_time(deployment.lease_ns / 1e9)

        most = int(deployment.tables["policies"]["max_leases"])
        before = dict(self.epochs)
        leases = observer.kept  # alive while others are asked for
        for stream_id in self.epochs:
            leases.append(observer.attach(stream_id, Role.PRODUCER))
        while len(leases) < most:
            leases.append(observer.attach(next(iter(self.epochs))))
        refusal = observer.refused(attach_request(next(iter(self.epochs))))
        assert "max_leases" in refusal.error_message, "as many as there may be: none was left"
        assert all(lease.epoch > before[lease.stream_id] for lease in leases[: len(before)])
        for lease in leases.copy():
            leases.remove(lease)
            assert observer.detach(lease).message.code is ResponseCode.OK
        self._pass_time(3 * int(deployment.tables["policies"]["announce_period_ms"]) / 1e3)
        wait_until(lambda: self._observe() or self._has_current_epochs_only(), "old epochs are removed by policy")
        assert zombies_below(os.getpid()) == []
        end(self._driver, observer)
        assert deployment.leftovers() == []
        self._check_diary()
        clients = self.diary()
        ghosts = self.grants - clients["granted"] - most
        killed = self.kills["producer"] + self.kills["consumer"]
        assert 0 <= ghosts <= killed + clients["unanswered"], (
            "leases were granted that no client had asked this driver for"
        )

    def diary(self) -> Counter[str]:
        """How often what happened to the clients."""
        return Counter(
            entry["event"] if "reason" not in entry else f"lost: {entry['reason']}" for entry in self._nursery.diary()
        )

    def close(self) -> None:
        self._undo.close()

    def _pass_time(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        wait_until(lambda: self._observe() or time.monotonic() > until_s, "time passes")

    def _observe(self) -> None:
        """What was said since the last time, in order."""
        self._observer.poll()
        for heard in self._observer.transcript:
            message = heard.message
            match message:
                case ShmPoolAnnounce():
                    self._advance(message.stream_id, message.epoch)
                    self._producers[message.stream_id] = message.producer_id
                case ShmAttachResponse(code=ResponseCode.OK):
                    assert message.stream_id is not None
                    assert message.epoch is not None
                    assert message.lease_id is not None
                    assert message.lease_id not in self._granted, message
                    self._advance(message.stream_id, message.epoch)
                    self._granted.add(message.lease_id)
                    self.grants += 1
                case ShmLeaseRevoked():
                    assert message.lease_id in self._granted, message
                    assert message.lease_id not in self._ended, message
                    self._ended.add(message.lease_id)
        self._observer.transcript.clear()

    def _advance(self, stream_id: int, epoch: int) -> None:
        assert epoch >= self.epochs[stream_id], (stream_id, epoch, self.epochs)
        self.bumps += epoch > self.epochs[stream_id]
        self.epochs[stream_id] = epoch

    def _is_everybody_back(self) -> bool:
        """All but one of two rivals."""
        last = {entry["pid"]: entry["event"] for entry in self._nursery.diary()}
        granted = [pid for pid in self._holders if last.get(pid) == "granted"]
        return len(granted) >= len(self._holders) - 1

    def _has_current_epochs_only(self) -> bool:
        """One epoch to keep beside each current one, and nothing of another name."""
        keep = int(self._deployment.tables["policies"].get("epoch_gc_keep", 2))
        folders = list(self._deployment.base_dir.glob("*/*/*/*"))
        return all(folder.name.isdecimal() for folder in folders) and all(
            len(epochs := self._deployment.epochs(id)) <= keep and epochs[-1] == self.epochs[id] for id in self.epochs
        )

    def _check_diary(self) -> None:
        """Only rivals were refused, and no client was granted memory that could not be mapped, unless it was gone."""
        for entry in self._nursery.diary():
            assert entry["event"] != "failed", entry["text"]
            assert entry["event"] != "refused" or entry["code"] == "REJECTED", entry
            assert entry["event"] != "rejected" or entry["check"] == "missing", entry

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
