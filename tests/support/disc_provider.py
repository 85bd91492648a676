# SPDX-License-Identifier: Apache-2.0
"""A discovery provider made of the codec and Aeron: it answers what the test wants answered, with any lie in it.

Honest unless told otherwise: it returns `results`, filtered as the request asks, to the endpoint that is asked for.
`lies` are what it makes of the next answers: a message, bytes, several of both, or nothing. Requests are kept as they
came over the wire. A thread serves while the test waits for something.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Final, Self

from tensorpool import aeron
from tensorpool.wire import DecodeError, Message, decode, discovery
from tensorpool.wire.discovery import DiscoveryRequest, DiscoveryResponse, DiscoveryStatus, Result, Tag
from tests.support.disc_client import Endpoint, Said, new_response_stream_id
from tests.support.driver_client import Heard
from tests.support.driver_process import IPC
from tests.support.processes import wait_until
from tests.support.wire_producer import WireProducer

CONNECT_WITHIN_S: Final = 5.0

type Lie = Callable[[DiscoveryResponse], Said | Iterable[Said]]


def changed_fields[M](message: M, **changed: Any) -> M:
    """A message, or an entry of one, with some fields otherwise."""
    names: tuple[str, ...] = message.__struct_fields__  # type: ignore[attr-defined]
    return type(message)(**{name: getattr(message, name) for name in names} | changed)


def result_of(peer: WireProducer, name: str = "", tags: Iterable[str] = (), **changed: Any) -> Result:
    """What an honest provider says of a peer's stream, with what the test wants otherwise."""
    layout = peer.regions.layout
    pools = tuple(
        discovery.PayloadPool(**{field: getattr(pool, field) for field in pool.__struct_fields__})
        for pool in layout["payload_pools"]
    )
    channel, stream_id = peer.endpoints.control
    fields: dict[str, Any] = {
        **layout,
        "stream_id": peer.stream_id,
        "producer_id": peer.producer_id,
        "max_dims": 8,
        "payload_pools": pools,
        "tags": tuple(Tag(tag=tag) for tag in tags),
        "data_source_name": name,
        "driver_instance_id": "wire-driver",
        "driver_control_channel": channel,
        "driver_control_stream_id": stream_id,
    }
    return Result(**fields | changed)


class WireProvider:
    """A provider at an endpoint of its own.

    >>> with WireProvider(aeron_dir) as provider:                                   # doctest: +SKIP
    ...     provider.results = [result_of(peer, "camera")]
    ...     provider.lie(status=DiscoveryStatus.ERROR)
    """

    def __init__(self, aeron_dir: str, endpoint: Endpoint | None = None) -> None:
        self.endpoint = endpoint or (IPC, new_response_stream_id())
        self.results: list[Result] = []
        self.lies: deque[Lie] = deque()
        self.always: Lie | None = None
        self.requests: list[Heard[Any]] = []
        self._client = aeron.connect(aeron_dir)
        self._subscription = self._client.add_subscription(*self.endpoint)
        self._publications: dict[Endpoint, aeron.Publication] = {}
        self._failure: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="wire-provider", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing = True
        self._thread.join()
        self._client.close()
        if self._failure is not None:
            raise self._failure

    def reset(self) -> None:
        """Be honest again, and know nothing."""
        self.results = []
        self.lies.clear()
        self.always = None

    def lie(self, **changed: Any) -> None:
        """The next answer is false in these fields."""
        self.lies.append(lambda honest: changed_fields(honest, **changed))

    def honest(self, request: DiscoveryRequest) -> DiscoveryResponse:
        matching = tuple(result for result in self.results if _matches(request, result))
        return DiscoveryResponse(request_id=request.request_id, status=DiscoveryStatus.OK, results=matching)

    def send(self, said: Said, to: Endpoint) -> None:
        """Say something to a client that listens there, asked or not."""
        data = said if isinstance(said, bytes) else said.encode()
        publication = self._publication(to)
        wait_until(lambda: publication.offer(data), "a client takes an answer", timeout_s=CONNECT_WITHIN_S)

    def wait_asked(self, since: int = 0) -> Heard[DiscoveryRequest]:
        """The first request at or after index `since`."""
        wait_until(lambda: self._failure or len(self.requests) > since, "a client asks")
        assert self._failure is None, self._failure
        return self.requests[since]

    @property
    def now(self) -> int:
        return len(self.requests)

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                if not self._subscription.poll(self._on_message, 20):
                    time.sleep(0.001)
        except BaseException as failure:
            self._failure = failure
            raise

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        try:
            message: Message | None = decode(data)
        except DecodeError:
            message = None
        if not isinstance(message, DiscoveryRequest):
            return
        self.requests.append(Heard(message, data, time.monotonic_ns(), len(self.requests), info.stream_id))
        lie = self.lies.popleft() if self.lies else self.always
        honest = self.honest(message)
        told = honest if lie is None else lie(honest)
        for said in [told] if isinstance(told, (Message, bytes)) else told:
            self.send(said, (message.response_channel, message.response_stream_id))

    def _publication(self, to: Endpoint) -> aeron.Publication:
        if to not in self._publications:
            self._publications[to] = self._client.add_publication(*to, exclusive=True)
        return self._publications[to]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _matches(request: DiscoveryRequest, result: Result) -> bool:
    asked = {tag.tag for tag in request.tags}
    return (
        request.stream_id in (None, result.stream_id)
        and request.producer_id in (None, result.producer_id)
        and request.data_source_id in (None, result.data_source_id)
        and request.data_source_name in ("", result.data_source_name)
        and asked <= {tag.tag for tag in result.tags}
    )
