# SPDX-License-Identifier: Apache-2.0
"""What a discovery provider listens to, without drivers: announces and metadata, made of the codec and Aeron only.

`AnnouncedDriver` says about its streams what the test wants said; nothing is said by itself, and there is no memory
behind it. `Registry` is a provider in a process of its own, started as an operator starts it: the only place of the
conformance tests of discovery that knows which provider they judge, its command line and the keys of its configuration.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from tensorpool import aeron
from tensorpool.wire.control import Attribute, DataSourceAnnounce, DataSourceMeta, ShmPoolAnnounce
from tests.support.disc_client import DiscoveryPeer
from tests.support.driver_process import IPC, DriverProcess
from tests.support.listener import Endpoint, Said, encoded
from tests.support.messages import announce
from tests.support.processes import private_directory, wait_until
from tests.support.toml import toml_text
from tests.support.wire_producer import new_stream_id

NSLOTS: Final = 8
POOLS: Final = {1: 256, 7: 4096}  # id: stride
REGISTRY_CHANNEL: Final = "aeron:ipc?term-length=1m"
UNLIMITED: Final = 1_000_000  # requests a second
LONG_PERIOD_MS: Final = 60_000  # what was announced once stays listed for the whole run
SHORT_PERIOD_MS: Final = 100

_aeron_stream_ids = itertools.count(70_000, 10)  # many drivers and registries share a media driver
_instances = itertools.count(1)


class AnnouncedDriver:
    """A driver as a registry sees it, and the producers of its streams.

    >>> driver.announce(10_000, epoch=3)                          # doctest: +SKIP
    >>> driver.name(10_000, "camera/front")                       # doctest: +SKIP
    >>> driver.describe(10_000, tags="lab1,RGB", data_source_id="7")   # doctest: +SKIP
    """

    def __init__(
        self,
        aeron_dir: str,
        *,
        announce_period_ms: int = LONG_PERIOD_MS,
        instance_id: str = "",
        announce_channel: str = IPC,
    ) -> None:
        first = next(_aeron_stream_ids)
        self.aeron_dir = aeron_dir
        self.instance_id = instance_id or f"wire-driver-{next(_instances)}"
        self.control: Endpoint = (IPC, first)
        self.announces: Endpoint = (announce_channel, first + 1)
        self.metadata: Endpoint = (announce_channel, first + 2)
        self.announce_period_ms = announce_period_ms
        self._client = aeron.connect(aeron_dir)
        self._publications = {
            endpoint: self._client.add_publication(*endpoint, exclusive=True)
            for endpoint in (self.announces, self.metadata)
        }
        self._control = self._client.add_subscription(*self.control)
        self.asked: list[bytes] = []  # what came to the control stream

    def close(self) -> None:
        self._client.close()

    @property
    def entry(self) -> dict[str, Any]:
        """A registry's configuration of it."""
        endpoints = {"control": self.control, "announce": self.announces, "metadata": self.metadata}
        entry: dict[str, Any] = {"instance_id": self.instance_id, "announce_period_ms": self.announce_period_ms}
        for name, (channel, stream_id) in endpoints.items():
            entry |= {f"{name}_channel": channel, f"{name}_stream_id": stream_id}
        return entry

    @property
    def is_connected(self) -> bool:
        """Whether all of its streams have subscribers."""
        return all(publication.has_room for publication in self._publications.values())

    def announced(self, stream_id: int, **changed: Any) -> ShmPoolAnnounce:
        """An announce of made-up regions, with what the test wants otherwise."""
        return announce(stream_id, **{"pools": POOLS} | changed)

    def announce(self, stream_id: int | None = None, **changed: Any) -> int:
        """Announce a stream, a new one by default; its id."""
        stream_id = new_stream_id() if stream_id is None else stream_id
        self.send(self.announced(stream_id, **changed), self.announces)
        return stream_id

    def name(self, stream_id: int, name: str | bytes, **changed: Any) -> None:
        """What the producer of a stream says about itself."""
        text = name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name
        fields: dict[str, Any] = {
            "stream_id": stream_id,
            "producer_id": 0,
            "epoch": 1,
            "meta_version": 1,
            "name": text,
        } | changed
        self.send(DataSourceAnnounce(**fields), self.metadata)

    def describe(self, stream_id: int, *attributes: Attribute, meta_version: int = 1, **texts: str) -> None:
        """Metadata: `texts` are attributes of plain text."""
        plain = [Attribute(key=key, format="text/plain", value=text.encode()) for key, text in texts.items()]
        message = DataSourceMeta(
            stream_id=stream_id,
            meta_version=meta_version,
            timestamp_ns=time.monotonic_ns(),
            attributes=(*plain, *attributes),
        )
        self.send(message, self.metadata)

    def source(
        self, name: str | bytes = "", tags: Sequence[str] = (), *, data_source_id: int | None = None, **announce: Any
    ) -> int:
        """A new stream with all that is known of it."""
        stream_id = self.announce(**announce)
        source = {key: announce[key] for key in ("producer_id", "epoch") if key in announce}
        if name:
            self.name(stream_id, name, **source)
        texts: dict[str, Any] = {"tags": ",".join(tags)} if tags else {}
        if data_source_id is not None:
            texts["data_source_id"] = str(data_source_id)
        if texts:
            self.describe(stream_id, **texts)
        return stream_id

    def send(self, said: Said, on: Endpoint) -> None:
        """A message or bytes, on the announce or the metadata stream."""
        data = encoded(said)
        publication = self._publications[on]
        wait_until(lambda: publication.offer(data), "the driver's stream takes a message")

    def settle(self, peer: DiscoveryPeer) -> None:
        """Return when the provider has read all that was said before: it lists what was said after it."""
        stream_id = self.announce()
        peer.wait_listed(stream_id)
        self.name(stream_id, f"fence-{stream_id}")
        peer.wait_answer(lambda it: it.results[0].data_source_name, "a name is known", stream_id=stream_id)

    def requests(self) -> list[bytes]:
        """What was sent to the control stream so far."""
        self._control.poll(lambda data, info: self.asked.append(data), 100)
        return self.asked

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Registry:
    """A standalone provider over some drivers. Keyword arguments are keys of its `discovery` table."""

    def __init__(
        self,
        folder: Path,
        aeron_dir: str,
        drivers: Iterable[AnnouncedDriver | Mapping[str, Any]],
        *,
        channel: str = REGISTRY_CHANNEL,
        **keys: Any,
    ) -> None:
        self.aeron_dir = aeron_dir
        self.drivers = list(drivers)
        self.endpoint: Endpoint = (channel, next(_aeron_stream_ids))
        self.keys = {"requests_per_s": UNLIMITED, "client_requests_per_s": UNLIMITED} | keys
        self.config_path = folder / f"registry-{self.endpoint[1]}.toml"

    def start(self, *, log_level: str = "error", **environment: str) -> DriverProcess:
        """`tensorpool discovery` with this configuration. Returns at once; `meet` waits."""
        self.write()
        arguments = ["--config", str(self.config_path), "--aeron-dir", self.aeron_dir, "--log-level", log_level]
        return DriverProcess("-m", "tensorpool", "discovery", *arguments, **environment)

    def meet(self, process: DriverProcess) -> DiscoveryPeer:
        """A client of it, when it serves and hears all its drivers."""
        peer = DiscoveryPeer(self.aeron_dir, self.endpoint).meet(process)
        for driver in self.drivers:
            if isinstance(driver, AnnouncedDriver):
                wait_until(lambda it=driver: it.is_connected, f"the registry listens to {driver.instance_id}")
        return peer

    def write(self) -> None:
        channel, stream_id = self.endpoint
        drivers = [driver.entry if isinstance(driver, AnnouncedDriver) else driver for driver in self.drivers]
        table = {"channel": channel, "stream_id": stream_id, "drivers": drivers} | self.keys
        self.config_path.write_text(toml_text({"discovery": table}), encoding="utf-8")


class Fleet(NamedTuple):
    """A registry that serves, the drivers that it listens to, and a client of it."""

    registry: Registry
    process: DriverProcess
    drivers: Sequence[AnnouncedDriver]
    peer: DiscoveryPeer

    @property
    def driver(self) -> AnnouncedDriver:
        """The first, or the only one."""
        return self.drivers[0]


@contextmanager
def serving(
    aeron_dir: str,
    *periods_ms: int,
    drivers: Sequence[AnnouncedDriver] = (),
    channel: str = REGISTRY_CHANNEL,
    **keys: Any,
) -> Iterator[Fleet]:
    """A registry that serves these drivers and one for each announce period, and still does at the end."""
    with ExitStack() as stack:
        folder = stack.enter_context(private_directory())
        made = [stack.enter_context(AnnouncedDriver(aeron_dir, announce_period_ms=period)) for period in periods_ms]
        drivers = [*drivers, *made]
        registry = Registry(folder, aeron_dir, drivers, channel=channel, **keys)
        process = stack.enter_context(registry.start())
        peer = stack.enter_context(registry.meet(process))
        yield Fleet(registry, process, drivers, peer)
        assert not process.has_ended, process.finish()
