# SPDX-License-Identifier: Apache-2.0
"""Bridges at work for tests: a host with its SHM driver, a bridge in this process or in one of its own, and both ends.

The only file of the bridge's conformance tests that knows which bridge they judge: its command line, its keys, the
names of its counters. `Reception` is a bridge that receives from a test sender and publishes for a test consumer;
`Sending` one that consumes from a producer made of files and sends to a test receiver. A frame that is published after
another was sent proves that the bridge has made up its mind about the other.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from numpy.typing import NDArray

from tensorpool.bridge.bridge import Bridge
from tensorpool.bridge.config import BridgeConfig
from tensorpool.bridge.receiver import Receiver
from tensorpool.driver import Driver, DriverConfig
from tensorpool.wire import Message
from tensorpool.wire.control import FrameDescriptor, ShmPoolAnnounce
from tensorpool.wire.driver import PublishMode, Role
from tests.support.bridge_receiver import Assembled, BridgeReceiver
from tests.support.bridge_sender import BridgeSender, Chunk, Link, packed_chunk
from tests.support.driver_client import DriverClient
from tests.support.driver_process import NSLOTS, POOLS, Deployment, DriverProcess
from tests.support.listener import Endpoint, ReceivedMessage
from tests.support.patience import PATIENT
from tests.support.processes import private_directory
from tests.support.toml import toml_text
from tests.support.wire_consumer import MappedStream, Slot, WireConsumer, endpoint_of, separate
from tests.support.wire_producer import Endpoints, WireProducer

RANGE: Final = (20_000, 29_999)  # the streams that a host's driver creates
ANNOUNCE_PERIOD_MS: Final = 50
PATIENT_PERIOD_MS: Final = 5_000  # in clients' configuration: none gives its driver up when this machine pauses
ASSEMBLY_TIMEOUT_MS: Final = 60_000  # no frame is given up for one either
PROBE: Final = b"are you there?"
PROBE_EVERY_S: Final = 0.05

_dest_stream_ids = itertools.count(RANGE[0])
_instances = itertools.count(1)


def new_dest_stream_id() -> int:
    """One that no other bridge of this run publishes."""
    return next(_dest_stream_ids)


class Place(NamedTuple):
    """Where a bridge finds its local driver: its media driver, its configuration file, its streams."""

    aeron_dir: str
    config_path: Path
    endpoints: Endpoints

    @classmethod
    def of(cls, producer: WireProducer, aeron_dir: str, config_path: Path) -> Self:
        """A producer that is its own driver, with a file that tells of it."""
        tables: dict[str, Any] = {"driver": {}, "shm": {"base_dir": str(producer.folder)}}
        for key, value in producer.endpoints.settings.items():
            tables["driver"][key.removeprefix("driver.")] = value
        tables["policies"] = {"announce_period_ms": PATIENT_PERIOD_MS}
        tables["profiles.any"] = {"header_nslots": 8, "payload_pools": [{"pool_id": 1, "stride_bytes": 64}]}
        tables["streams.any"] = {"stream_id": producer.stream_id}
        return cls(aeron_dir, write_toml(config_path, tables), producer.endpoints)

    @property
    def keys(self) -> dict[str, Any]:
        """A bridge's configuration of it."""
        return {
            "aeron_dir": self.aeron_dir,
            "driver_config": str(self.config_path),
            "source_metadata_stream_id": self.endpoints.metadata[1],
        }


class Host(Deployment):
    """A host: an SHM driver in this process that creates small streams on demand.

    The file that is there for its clients tells of a driver that announces less often.

    >>> with Host(folder, aeron_dir) as host, WireConsumer(host) as consumer: ...      # doctest: +SKIP
    """

    def __init__(
        self,
        folder: Path,
        aeron_dir: str = "",
        *,
        streams: Sequence[int] = (),
        pools: Mapping[int, int] = POOLS,
        nslots: int = NSLOTS,
        **driver: Any,
    ) -> None:
        profile = {
            "header_nslots": nslots,
            "payload_pools": [{"pool_id": id, "stride_bytes": stride} for id, stride in pools.items()],
        }
        super().__init__(
            folder,
            aeron_dir or str(folder / "aeron"),
            streams=streams,
            driver={"stream_id_range": f"{RANGE[0]}-{RANGE[1]}"} | driver,
            policies={
                "allow_dynamic_streams": True,
                "lease_keepalive_interval_ms": 5_000,  # no lease ends when this machine pauses
                "announce_period_ms": ANNOUNCE_PERIOD_MS,
            },
            profiles={"small": profile},
        )
        separate(self)
        self.pools = dict(pools)
        self.nslots = nslots
        self._driver: Driver | None = None

    @property
    def place(self) -> Place:
        others = (endpoint_of(self, name) for name in ("descriptor", "qos", "metadata"))
        return Place(self.aeron_dir, self.config_path, Endpoints(self.control, *others))

    @property
    def config(self) -> DriverConfig:
        """Its clients' configuration."""
        return DriverConfig.load(self.config_path, environ=PATIENT)

    def pool_for(self, length: int) -> int:
        """The smallest pool that takes so many bytes."""
        return min((stride, id) for id, stride in self.pools.items() if stride >= length)[1]

    def stop(self) -> None:
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write()
        self._driver = Driver(self.config, aeron_dir=self.aeron_dir)
        self.tables["policies"]["announce_period_ms"] = PATIENT_PERIOD_MS
        self._write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def bridge_tables(place: Place, link: Link, mappings: Iterable[Mapping[str, Any]], **keys: Any) -> dict[str, Any]:
    """A configuration as tables; a key of None is left out."""
    own = {"instance_id": f"bridge-{next(_instances)}", "assembly_timeout_ms": ASSEMBLY_TIMEOUT_MS}
    bridge = own | link.keys | place.keys | keys
    return {
        "bridge": {key: value for key, value in bridge.items() if value is not None},
        "mappings": [dict(mapping) for mapping in mappings],
    }


def write_toml(path: Path, tables: Mapping[str, Any]) -> Path:
    path.write_text(toml_text(tables), encoding="utf-8")
    return path


@contextmanager
def serving_host(aeron_dir: str, **given: Any) -> Iterator[Host]:
    """A host in a directory of its own, gone at the end."""
    with private_directory() as folder, Host(folder, aeron_dir, **given) as host:
        yield host


class RunningBridge:
    """A bridge on a thread of its own, as `tensorpool bridge` runs it. What ends it is raised by `close`."""

    def __init__(self, tables: Mapping[str, Any], folder: Path) -> None:
        path = write_toml(folder / f"{tables['bridge']['instance_id']}.toml", tables)
        self.bridge = Bridge(BridgeConfig.load(path, environ={})).start()

    def check(self) -> None:
        """Raise what has ended it."""
        if not self.bridge.is_running:
            self.bridge.close()
            raise AssertionError("the bridge has ended")

    def close(self) -> None:
        self.bridge.close()

    def counts(self, prefix: str = "") -> Counter[str]:
        """What it counted of some kind, all mappings together, under what follows the prefix."""
        found: Counter[str] = Counter()
        for counts in self.bridge.counters.values():
            found.update({name.removeprefix(prefix): n for name, n in counts.items() if name.startswith(prefix)})
        return found

    @property
    def inflight_frames(self) -> int:
        return sum(worker.assembler.inflight for worker in self.bridge.workers if isinstance(worker, Receiver))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BridgeProcess:
    """The same as an operator starts it: `tensorpool bridge`, in a process of its own.

    Lines of its log are events, too, where `log_level` shows them.
    """

    def __init__(self, tables: Mapping[str, Any], folder: Path, *, log_level: str = "error") -> None:
        path = write_toml(folder / f"{tables['bridge']['instance_id']}.toml", tables)
        options = ["--config", str(path), "--json", "--log-level", log_level]
        self._process = DriverProcess("-m", "tensorpool", "bridge", *options)
        self.events: list[dict[str, Any]] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, event: str) -> dict[str, Any]:
        """The fields of an event, when it comes."""
        while not self.events or self.events[-1]["event"] != event:
            line = self._process.read_line()
            assert line, (event, self.events)
            self.events.append(json.loads(line))
        return self.events[-1]

    def check(self) -> None:
        assert not self._process.has_ended, self.events

    def stop(self) -> dict[str, dict[str, int]]:
        """SIGTERM: what it counted, by mapping."""
        code, output = self._process.terminate()
        assert code == 0, output
        last: dict[str, Any] = json.loads(output.splitlines()[-1])
        assert last["event"] == "stopped"
        counters: dict[str, dict[str, int]] = last["counters"]
        return counters

    def close(self) -> None:
        self._process.reap()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def held_by_another(host: Host, stream_id: int) -> Iterator[Callable[[], object]]:
    """A stream that already has a producer, until what is given is called."""
    with DriverClient(host) as client:
        create = PublishMode.EXISTING_OR_CREATE
        lease = client.attach(stream_id, Role.PRODUCER, publish_mode=create)
        yield lambda: client.detach(lease)


class Arrived(NamedTuple):
    """A frame as a consumer of the destination finds it."""

    descriptor: FrameDescriptor
    slot: Slot
    payload: bytes
    endpoint_stream_id: int  # Aeron's, where the descriptor came


class Reception:
    """A bridge that receives one mapping, the test sender at its other end, a consumer of what it publishes.

    >>> with Reception(host) as reception:                                   # doctest: +SKIP
    ...     reception.meet()
    ...     arrived = reception.deliver(np.arange(1000, dtype=np.int32))
    ...     reception.refuses(chunk)

    `mapping` and `keys` go over what is configured by default, `more` are further mappings.
    """

    def __init__(
        self,
        host: Host,
        *,
        link: Link | None = None,
        dest_stream_id: int | None = None,
        sender: BridgeSender | Mapping[str, Any] | None = None,
        mapping: Mapping[str, Any] | None = None,
        more: Iterable[Mapping[str, Any]] = (),
        runs: Callable[[Mapping[str, Any], Path], RunningBridge | BridgeProcess] = RunningBridge,
        **keys: Any,
    ) -> None:
        self.host = host
        self.link = link or Link.unused()
        self.dest_stream_id = new_dest_stream_id() if dest_stream_id is None else dest_stream_id
        self._mapped: dict[int, MappedStream] = {}
        self._stack = ExitStack()
        try:
            if not isinstance(sender, BridgeSender):
                sender = self._stack.enter_context(BridgeSender(host.aeron_dir, self.link, **sender or {}))
            self.sender = sender
            self.consumer = self._stack.enter_context(WireConsumer(host)).forget()
            own = {"source_stream_id": sender.stream_id, "dest_stream_id": self.dest_stream_id} | dict(mapping or {})
            self.tables = bridge_tables(host.place, self.link, [own, *more], **{"role": "receiver"} | keys)
            self.bridge: Any = self._stack.enter_context(runs(self.tables, host.folder))
        except BaseException:
            self._stack.close()
            raise

    def restart(self) -> None:
        """End the bridge and begin another of the same configuration."""
        self.bridge.close()
        self.bridge = self._stack.enter_context(RunningBridge(self.tables, self.host.folder))

    def close(self) -> None:
        self._stack.close()

    def listen(self, endpoint: Endpoint) -> None:
        """Hear one more local stream."""
        self.consumer.listen(endpoint)

    # --- what it counts

    def drops(self) -> Counter[str]:
        """Everything that was dropped, by what and why: `frames.timeout`, `chunks.epoch`, `announces.stale`."""
        drops = {name: n for name, n in self.bridge.counts().items() if "_dropped." in name}
        return Counter({name.replace("_dropped.", "."): n for name, n in drops.items()})

    @property
    def inflight_frames(self) -> int:
        return int(self.bridge.inflight_frames)

    @property
    def chunks_received(self) -> int:
        """Chunks of the mapping's stream that were looked at."""
        return int(self.bridge.counts()["chunks_received"])

    @property
    def complaint(self) -> str:
        """Why it has no lease, in its own words."""
        return " ".join(self.bridge.bridge.failures.values())

    # --- sending

    def meet(self) -> Self:
        """Announce, and return when a frame got through."""
        self.wait_until(self.sender.is_connected, "the bridge listens to the link")
        self.wait_through(announces=True)
        return self

    def wait_through(self, *, announces: bool = False) -> Arrived:
        """Send frames, and announces too, until one is published: an announce may be later than a frame."""
        sent: set[int] = set()
        since = self.now
        next_probe_s = 0.0

        def is_through() -> bool:
            nonlocal next_probe_s
            if time.monotonic() >= next_probe_s:
                next_probe_s = time.monotonic() + PROBE_EVERY_S
                if announces:
                    self.sender.announce()
                sent.add(self.sender.send_frame(PROBE))
            return any(found.seq in sent for found in self.published(since))

        self.wait_until(is_through, "a frame gets through")
        return self.deliver(PROBE)

    def send(self, *said: Chunk | bytes) -> None:
        for each in said:
            self.sender.send(each if isinstance(each, bytes) else packed_chunk(**each))

    def deliver(self, array: NDArray[Any] | bytes, **given: Any) -> Arrived:
        """Send a frame honestly and return what became of it."""
        since = self.now
        seq = self.sender.send_frame(array, **given)
        return self.wait_arrived(seq, since)

    def fence(self) -> int:
        """Return when the bridge has made up its mind about everything that was sent; the seq of the proof."""
        return self.deliver(PROBE).descriptor.seq

    def refuses(self, *said: Chunk | bytes) -> None:
        """Send these, then a good frame, which is the only one that is published."""
        since = self.now
        self.send(*said)
        seq = self.fence()
        assert self.seqs(since) == [seq]

    def accepts(self, *said: Chunk | bytes) -> Arrived:
        """Send these chunks of one frame, which is published once."""
        since = self.now
        self.send(*said)
        seq = next(each["seq"] for each in said if not isinstance(each, bytes))
        arrived = self.wait_arrived(seq, since)
        proof = self.fence()
        assert self.seqs(since) == [seq, proof]
        return arrived

    # --- what is published

    @property
    def now(self) -> int:
        """Where the transcript of the destination ends."""
        self.consumer.poll()
        return len(self.consumer.transcript)

    def published(self, since: int = 0) -> list[FrameDescriptor]:
        found = self.consumer.received(FrameDescriptor, since, stream_id=self.dest_stream_id)
        return [received.message for received in found]

    def seqs(self, since: int = 0) -> list[int]:
        return [descriptor.seq for descriptor in self.published(since)]

    def wait_arrived(self, seq: int, since: int = 0) -> Arrived:
        received = self.wait_for(FrameDescriptor, since, stream_id=self.dest_stream_id, seq=seq)
        mapped = self.mapped(received.message.epoch)
        return Arrived(received.message, mapped.slot(seq), mapped.payload(seq), received.stream_id)

    def mapped(self, epoch: int) -> MappedStream:
        """The destination's memory of an epoch, as the local driver announces it."""
        if epoch not in self._mapped:
            received = self.wait_for(ShmPoolAnnounce, stream_id=self.dest_stream_id, epoch=epoch)
            self._mapped[epoch] = self.consumer.map(received.message)
        return self._mapped[epoch]

    def files(self, epoch: int) -> dict[int, bytes]:
        """Every byte of that memory but the superblocks, by region."""
        return {region: path.read_bytes()[64:] for region, path in self.mapped(epoch).paths.items()}

    def wait_for[M: Message](self, kind: type[M], since: int = 0, **fields: Any) -> ReceivedMessage[M]:
        """The first message of a kind with these fields on the destination's streams."""
        self.wait_until(lambda: self.consumer.received(kind, since, **fields), f"{kind.__name__} with {fields}")
        return self.consumer.received(kind, since, **fields)[0]

    def wait_until(self, condition: Callable[..., object], what: str) -> None:
        """Listen until a condition holds, or the bridge fails."""

        def is_met() -> object:
            self.bridge.check()
            return condition()

        self.consumer.wait_until(is_met, what)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Sending:
    """A bridge that sends one mapping: the producer it consumes from, the test receiver at its other end.

    >>> with Sending(folder, aeron_dir) as sending:                          # doctest: +SKIP
    ...     sending.meet()
    ...     frame = sending.carry(np.arange(1000, dtype=np.int32))

    `producer` goes to the WireProducer, `keys` over what is configured by default; with `has_control` the mapping has
    control streams.
    """

    def __init__(
        self,
        folder: Path,
        aeron_dir: str,
        *,
        link: Link | None = None,
        hears: Iterable[str] = Link._fields,
        producer: Mapping[str, Any] | None = None,
        has_control: bool = False,
        **keys: Any,
    ) -> None:
        self.link = link or Link.unused()
        self._stack = ExitStack()
        try:
            self.producer = self._stack.enter_context(WireProducer(folder / "source", aeron_dir, **producer or {}))
            self.receiver = self._stack.enter_context(BridgeReceiver(aeron_dir, self.link, hears=hears))
            place = Place.of(self.producer, aeron_dir, folder / "driver.toml")
            mapping = {"source_stream_id": self.producer.stream_id, "dest_stream_id": new_dest_stream_id()}
            if has_control:
                mapping["source_control_stream_id"] = self.producer.endpoints.control[1]
                mapping["dest_control_stream_id"] = mapping["source_control_stream_id"]
            tables = bridge_tables(place, self.link, [mapping], **{"role": "sender"} | keys)
            self.bridge = self._stack.enter_context(RunningBridge(tables, folder))
        except BaseException:
            self._stack.close()
            raise
        self.receiver.on_wait.append(self.bridge.check)

    def close(self) -> None:
        self._stack.close()

    def drops(self) -> Counter[str]:
        """Frames that were not sent, by reason."""
        return self.bridge.counts("frames_dropped.")

    def meet(self, *, forgets: bool = True) -> Self:
        """Return when a frame got through; clears the transcript."""
        next_probe_s = 0.0
        sent: list[int] = []

        def is_through() -> bool:
            nonlocal next_probe_s
            if time.monotonic() >= next_probe_s:
                next_probe_s = time.monotonic() + PROBE_EVERY_S
                sent.append(self.producer.publish(PROBE))
            return any(self.receiver.has_frame(seq, epoch=self.producer.epoch) for seq in sent)

        self.receiver.wait_until(is_through, "a frame gets through")
        self.carry(PROBE)
        if forgets:
            self.receiver.transcript.clear()
        return self

    def carry(self, array: NDArray[Any] | bytes, **given: Any) -> Assembled:
        """Publish a frame and return what came of it over the link."""
        return self.receiver.wait_frame(self.producer.publish(array, **given), epoch=self.producer.epoch)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
