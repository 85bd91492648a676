# SPDX-License-Identifier: Apache-2.0
"""A client of any discovery provider that knows nothing but the wire: the codec, Aeron, and bytes.

It keeps a transcript of its response endpoint, of the stream that requests go to and of whatever else it is asked to
listen to. Requests may be messages or bytes that no codec would write. A provider reads one client's requests in order,
so that an answer to a later one proves that an earlier one got none.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

from tensorpool.wire.discovery import DiscoveryRequest, DiscoveryResponse, DiscoveryStatus, Result, Tag
from tests.support.driver_client import new_client_id, packed_text
from tests.support.driver_process import IPC, DriverProcess
from tests.support.listener import Endpoint, ReceivedMessage, Said, WireListener, encoded
from tests.support.processes import wait_until

NULL_32: Final = 2**32 - 1
NULL_64: Final = 2**64 - 1

_request_ids = itertools.count(secrets.randbits(62))
_response_stream_ids = itertools.count(90_000)  # many clients share a media driver


class Counted(NamedTuple):
    """A raw group: what its header claims, and its entries' bytes."""

    block_length: int
    count: int  # type: ignore[assignment]
    entries: bytes = b""


NO_TAGS: Final = Counted(0, 0)


def new_request_id() -> int:
    """One that no other client of this run uses."""
    return next(_request_ids)


def new_response_stream_id() -> int:
    """An Aeron stream that no other client of this run listens to."""
    return next(_response_stream_ids)


def unused_udp_channel() -> str:
    """A UDP channel of this host with an unused port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return f"aeron:udp?endpoint=127.0.0.1:{probe.getsockname()[1]}"


def raw_request(
    request_id: int,
    *,
    header: tuple[int, int, int, int] = (32, 1, 910, 1),
    client_id: int | None = None,
    response_stream_id: int = 0,
    stream_id: int = NULL_32,
    producer_id: int = NULL_32,
    data_source_id: int = NULL_64,
    tags: Counted = NO_TAGS,
    response_channel: bytes = b"",
    data_source_name: bytes = b"",
) -> bytes:
    """A request byte by byte, also with what no codec would write."""
    client = new_client_id() if client_id is None else client_id
    block = struct.pack("<Q I I I I Q", request_id, client, response_stream_id, stream_id, producer_id, data_source_id)
    group = struct.pack("<2H", tags.block_length, tags.count) + tags.entries
    texts = b"".join(struct.pack("<I", len(text)) + text for text in (response_channel, data_source_name))
    return struct.pack("<4H", *header) + block + group + texts


def packed_tag(text: str) -> bytes:
    """The bytes of one tag in a raw group."""
    return packed_text(text)


class DiscoveryPeer(WireListener):
    """One client of a provider.

    >>> with DiscoveryPeer(aeron_dir, registry.endpoint) as peer:            # doctest: +SKIP
    ...     response = peer.ask(stream_id=10_000)
    ...     peer.wait_listed(10_001)
    """

    def __init__(
        self,
        aeron_dir: str,
        endpoint: Endpoint,
        *,
        responses: Endpoint | None = None,
    ) -> None:
        super().__init__(aeron_dir)
        self.endpoint = endpoint
        self.responses = responses or (IPC, new_response_stream_id())
        self._publication = self._client.add_publication(*endpoint, exclusive=True)
        self.listen(self.responses)
        self.listen(endpoint)
        wait_until(lambda: self._publication.has_room, "the request stream is connected")

    # --- asking

    def request(self, **changed: Any) -> DiscoveryRequest:
        """An ordinary request without filters, with what the test wants otherwise; tags may be given as text."""
        channel, stream_id = self.responses
        fields: dict[str, Any] = {
            "request_id": new_request_id(),
            "client_id": new_client_id(),
            "response_channel": channel,
            "response_stream_id": stream_id,
        }
        fields |= changed
        fields["tags"] = tuple(tag if isinstance(tag, Tag) else Tag(tag=tag) for tag in fields.get("tags", ()))
        return DiscoveryRequest(**fields)

    def raw(self, request_id: int, **changed: Any) -> bytes:
        """The same byte by byte."""
        channel, stream_id = self.responses
        endpoint: dict[str, Any] = {"response_channel": channel.encode(), "response_stream_id": stream_id}
        return raw_request(request_id, **endpoint | changed)

    def send(self, said: Said) -> int:
        """Put it on the request stream; where the transcript was before."""
        data = encoded(said)
        self.poll()
        since = len(self.transcript)
        wait_until(lambda: self._publication.offer(data), "the request stream takes a message")
        return since

    def ask(self, **changed: Any) -> DiscoveryResponse:
        """The answer to a request."""
        return self.answer(self.request(**changed)).message

    def answer(
        self, said: DiscoveryRequest | bytes, request_id: int | None = None
    ) -> ReceivedMessage[DiscoveryResponse]:
        """The answer to a request that was built before, or to bytes with that id."""
        expected = said.request_id if isinstance(said, DiscoveryRequest) else request_id
        return self.wait_for(DiscoveryResponse, self.send(said), request_id=expected)

    def find(self, stream_id: int, **changed: Any) -> Result:
        """The one result for a stream."""
        (result,) = self.ask(stream_id=stream_id, **changed).results
        return result

    def ids(self, **changed: Any) -> set[int]:
        """The streams that match; fails unless all went well."""
        response = self.ask(**changed)
        assert response.status is DiscoveryStatus.OK, response
        return {result.stream_id for result in response.results}

    def fence(self) -> None:
        """Return when the provider has read everything that was sent, and answered what it would."""
        self.ask(stream_id=1)

    def unanswered(self, *said: Said) -> None:
        """Send these, and fail if anything but a later request is answered, wherever we listen."""
        self.poll()
        since = len(self.transcript)
        for each in said:
            self.send(each)
        last = self.answer(self.request(stream_id=1)).message
        answers = [received.message for received in self.received(DiscoveryResponse, since)]
        assert answers == [last]

    # --- waiting

    def wait_answer(
        self, condition: Callable[..., object], what: str, *, timeout_s: float = 20.0, **changed: Any
    ) -> DiscoveryResponse:
        """Ask until an answer is so."""
        answers: list[DiscoveryResponse] = []

        def is_met() -> object:
            answers.append(self.ask(**changed))
            return condition(answers[-1])

        wait_until(is_met, what, timeout_s=timeout_s)
        return answers[-1]

    def wait_listed(self, *stream_ids: int, **changed: Any) -> DiscoveryResponse:
        """Ask until the provider knows these."""
        answers = [
            self.wait_answer(lambda it: it.results, f"stream {id} is listed", stream_id=id, **changed)
            for id in stream_ids
        ]
        return answers[-1]

    def wait_gone(self, stream_id: int, **changed: Any) -> DiscoveryResponse:
        """Ask until the provider does not know this any more."""
        what = f"stream {stream_id} is not listed"
        return self.wait_answer(lambda it: not it.results, what, stream_id=stream_id, **changed)

    def meet(self, process: DriverProcess) -> Self:
        """Wait until the provider answers. Raises DriverEnded with its last words."""

        def ask() -> int:
            probe = self.request(stream_id=1)
            self.send(probe)
            return probe.request_id

        self.wait_served(process, ask, DiscoveryResponse, "request_id")
        self.fence()
        self.transcript.clear()
        return self
