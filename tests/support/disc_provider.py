# SPDX-License-Identifier: Apache-2.0
"""A discovery provider made of the codec and Aeron: it answers what the test wants answered, with any lie in it.

Honest unless a test falsifies it: it returns `results`, filtered as requested, to the endpoint of the request.
`lies` are what it makes of the next answers: a message, bytes, several of both, or nothing. Requests are kept as they
came over the wire, and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from tensorpool import aeron
from tensorpool.wire import Message, discovery
from tensorpool.wire.discovery import DiscoveryRequest, DiscoveryResponse, DiscoveryStatus, Result, Tag
from tests.support.disc_client import new_response_stream_id
from tests.support.driver_process import IPC
from tests.support.listener import Endpoint, ReceivedMessage, Said, WireServer, decoded, encoded
from tests.support.processes import wait_until
from tests.support.wire_producer import WireProducer

CONNECT_WITHIN_S: Final = 5.0

type Lie = Callable[[DiscoveryResponse], Said | Iterable[Said]]


def result_of(peer: WireProducer, name: str = "", tags: Iterable[str] = (), **changed: Any) -> Result:
    """What an honest provider says of a peer's stream, with what the test wants otherwise."""
    layout = peer.regions.layout
    pools = tuple(discovery.PayloadPool(**msgspec.structs.asdict(pool)) for pool in layout["payload_pools"])
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


class WireProvider(WireServer):
    """A provider at an endpoint of its own.

    >>> with WireProvider(aeron_dir) as provider:                                   # doctest: +SKIP
    ...     provider.results = [result_of(peer, "camera")]
    ...     provider.lie(status=DiscoveryStatus.ERROR)
    """

    def __init__(self, aeron_dir: str, endpoint: Endpoint | None = None) -> None:
        super().__init__(aeron_dir)
        self.endpoint = endpoint or (IPC, new_response_stream_id())
        self.results: list[Result] = []
        self.lies: deque[Lie] = deque()
        self.always: Lie | None = None
        self._publications: dict[Endpoint, aeron.Publication] = {}
        self.listen(self.endpoint)
        self._thread.start()

    def reset(self) -> None:
        """Be honest again, and know nothing."""
        self.results = []
        self.lies.clear()
        self.always = None

    def lie(self, **changed: Any) -> None:
        """The next answer is false in these fields."""
        self.lies.append(lambda honest: msgspec.structs.replace(honest, **changed))

    def honest(self, request: DiscoveryRequest) -> DiscoveryResponse:
        matching = tuple(result for result in self.results if _matches(request, result))
        return DiscoveryResponse(request_id=request.request_id, status=DiscoveryStatus.OK, results=matching)

    def send(self, said: Said, to: Endpoint) -> None:
        """Say something to a client that listens there, asked or not."""
        data = encoded(said)
        publication = self._publication(to)
        wait_until(lambda: publication.offer(data), "a client takes an answer", timeout_s=CONNECT_WITHIN_S)

    def wait_asked(self, since: int = 0) -> ReceivedMessage[DiscoveryRequest]:
        """The first request at or after index `since`."""
        self.wait_until(lambda: self.now > since, "a client asks")
        return self.transcript[since]

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        message = decoded(data)
        if not isinstance(message, DiscoveryRequest):
            return
        super()._on_message(data, info)
        lie = self.lies.popleft() if self.lies else self.always
        honest = self.honest(message)
        answers = honest if lie is None else lie(honest)
        for said in [answers] if isinstance(answers, (Message, bytes)) else answers:
            self.send(said, (message.response_channel, message.response_stream_id))

    def _publication(self, to: Endpoint) -> aeron.Publication:
        if to not in self._publications:
            self._publications[to] = self._client.add_publication(*to, exclusive=True)
        return self._publications[to]


def _matches(request: DiscoveryRequest, result: Result) -> bool:
    asked = {tag.tag for tag in request.tags}
    return (
        request.stream_id in (None, result.stream_id)
        and request.producer_id in (None, result.producer_id)
        and request.data_source_id in (None, result.data_source_id)
        and request.data_source_name in ("", result.data_source_name)
        and asked <= {tag.tag for tag in result.tags}
    )
