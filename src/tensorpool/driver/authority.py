# SPDX-License-Identifier: Apache-2.0
"""Whether another driver answers for our streams, and for which.

A driver that starts sends a probe on its control stream: an attach request that no driver can grant. A driver that
runs there refuses it, and one that started earlier but is not serving yet answers it too (`is_later_probe`); the
answer is proof, and the one that asked ends. A driver that runs sees the other in attach responses that are not its own
and in announces of memory that is not its own: each is a claim on a stream, which lasts for three announce periods.

    probe sent ──answered, or a claim on one of our streams, within the first announce period──► must end
        │
        └──► serving ──claim on a stream──► that stream is not granted ──silence for three announce periods──► granted

Announces of our own epochs come from producers of other implementations too and say nothing. Holds no clock and does no
IO. Driver Model §2.1, §5; decisions E31, J, K6, K9.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from tensorpool.soft_state import SoftStateTable
from tensorpool.wire.attach import AttachRequest, AttachResponse, Dialect, attach_refusal
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import (
    ExtendedAttachRequest,
    HugepagesPolicy,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
)

SILENT_PERIODS: Final = 3
YOUNG_PERIODS: Final = 1.25  # every driver that is alive has announced by then
MAX_CLAIMS: Final = 4096
MAX_REQUESTS: Final = 1024
MAX_CLAIM_CHARS: Final = 500  # kept of a claim
NO_CLIENT: Final = 0  # no client has this id, and no driver grants it a lease
NO_STREAM: Final = 0xFFFF_FFFE  # with REQUIRE_EXISTING: there is none of this id to attach to


def probes(correlation_id: int) -> tuple[AttachRequest, ...]:
    """An attach request that every driver refuses, in both dialects: a driver may know one of them (K9).

    `correlation_id` is the monotonic time: later probes have more.
    """
    fields: dict[str, Any] = {
        "correlation_id": correlation_id,
        "stream_id": NO_STREAM,
        "client_id": NO_CLIENT,
        "role": Role.CONSUMER,
        "expected_layout_version": 0,
        "publish_mode": PublishMode.REQUIRE_EXISTING,
        "require_hugepages": HugepagesPolicy.UNSPECIFIED,
    }
    return ShmAttachRequest(**fields, max_dims=0), ExtendedAttachRequest(**fields)


def probe_answer(correlation_id: int, dialect: Dialect = Dialect.SPECIFIED) -> AttachResponse:
    """The answer of a driver to the probe of a later one."""
    return attach_refusal(dialect, correlation_id, ResponseCode.REJECTED, "a driver serves this control stream")


class Authority:
    """The claims of other drivers. `root` is how the URIs of our own regions begin."""

    def __init__(self, announce_period_ns: int, root: str) -> None:
        self._young_ns = int(YOUNG_PERIODS * announce_period_ns)
        self._root = root
        # By stream: what another driver sent about it.
        self._claims = SoftStateTable[int, str](SILENT_PERIODS * announce_period_ns, limit=MAX_CLAIMS)
        self._asked: OrderedDict[int, int] = OrderedDict()  # stream by correlation id: a refusal names no stream
        self._epochs: dict[int, int] = {}  # the latest that we made, by stream
        self._probe_id: int | None = None
        self._began_ns = 0
        self.earlier_driver = ""  # the claim of a driver that started before us: we must end

    def on_start(self, now_ns: int) -> tuple[AttachRequest, ...]:
        """The probes that find a driver that is here already."""
        self._probe_id = self._began_ns = now_ns
        return probes(now_ns)

    def on_epoch_created(self, stream_id: int, epoch: int) -> None:
        self._epochs[stream_id] = epoch

    def is_later_probe(self, correlation_id: int, stream_id: int, client_id: int) -> bool:
        """Whether an attach request is the probe of a driver that started after us: we answer it whatever we do."""
        is_probe = (stream_id, client_id) == (NO_STREAM, NO_CLIENT)
        return is_probe and self._probe_id is not None and correlation_id > self._probe_id

    def on_request(self, request: AttachRequest) -> None:
        """Remember which stream it is for: the other driver may refuse it."""
        self._asked[request.correlation_id] = request.stream_id
        if len(self._asked) > MAX_REQUESTS:
            self._asked.popitem(last=False)

    def is_probe_answer(self, response: AttachResponse) -> bool:
        return response.correlation_id == self._probe_id

    def on_response(self, response: AttachResponse, now_ns: int) -> int | None:
        """An attach response that is not ours; the stream that is claimed by it from now on, None for no new claim."""
        claim = f"answered an attach request: {response.code.name} {response.error_message}".rstrip()
        if self.is_probe_answer(response):
            if now_ns - self._began_ns <= self._young_ns:  # later no message can end us
                self.earlier_driver = claim[:MAX_CLAIM_CHARS]
            return None
        stream_id = response.stream_id
        if stream_id is None:
            stream_id = self._asked.get(response.correlation_id)
        return None if stream_id is None else self._claim(stream_id, claim, now_ns)

    def on_announce(self, announce: ShmPoolAnnounce, now_ns: int) -> int | None:
        """A fresh announce that we did not send; likewise the stream that is claimed by it."""
        uris = (announce.header_region_uri, *(pool.region_uri for pool in announce.payload_pools))
        is_our_memory = all(uri.startswith(self._root) for uri in uris)
        if is_our_memory and announce.epoch <= self._epochs.get(announce.stream_id, announce.epoch):
            return None  # of this run or of an earlier one: by a producer that announces by itself
        claim = f"announced stream {announce.stream_id}, epoch {announce.epoch}, at {announce.header_region_uri}"
        return self._claim(announce.stream_id, claim, now_ns)

    def on_own_stream_claimed(self, stream_id: int, now_ns: int) -> None:
        """A claim on one of our streams: if we have just started, the other was here before us."""
        if now_ns - self._began_ns <= self._young_ns:
            self.earlier_driver = self._claims.get(stream_id) or ""

    def claim_on(self, stream_id: int, now_ns: int) -> str | None:
        """The latest claim of another driver on this stream; None where the stream is ours alone."""
        return self._claims.get_fresh(stream_id, now_ns)

    def expire(self, now_ns: int) -> list[int]:
        """The streams that no other driver claims any more."""
        return [stream_id for stream_id, _ in self._claims.tick(now_ns).gone]

    def _claim(self, stream_id: int, claim: str, now_ns: int) -> int | None:
        is_new = self.claim_on(stream_id, now_ns) is None
        if self._claims.is_full and stream_id not in self._claims:
            self._claims.pop_oldest()
        self._claims.add(stream_id, claim[:MAX_CLAIM_CHARS], now_ns)
        return stream_id if is_new else None
