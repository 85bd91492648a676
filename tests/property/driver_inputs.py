# SPDX-License-Identifier: Apache-2.0
"""What the property test of the driver draws from: a small configuration, requests sound and odd, and moments."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from tensorpool.driver.private_streams import STALE_PERIODS
from tensorpool.wire.control import ConsumerHello
from tensorpool.wire.driver import HugepagesPolicy, PublishMode, Role, ShmDetachRequest, ShmLeaseKeepalive
from tests.driver.conftest import DYNAMIC, FRONT, LEASE_NS, PERIOD_NS, REAR, attach, driver_config
from tests.support import messages

MAX_LEASES, MAX_STREAMS = 4, 4
CONFIG = driver_config(
    {
        "policies.max_leases": MAX_LEASES,
        "policies.max_streams": MAX_STREAMS,
        "policies.shutdown_timeout_ms": 700,  # not in step with the announces
        "policies.dynamic_stream_linger_ms": 5_000,
    }
)
SHUTDOWN_NS, LINGER_NS = CONFIG.shutdown_timeout_ns, CONFIG.dynamic_stream_linger_ns
STAMP_OFFSET_NS = 10**18  # what clients read is in another clock than deadlines are
NULL_U32 = 2**32 - 1
OUTSIDE = 555  # of the range of stream ids
CLIENTS = (1, 2, 3, 4, 5)
FIELDS = ("lease_id", "stream_id", "client_id", "role")
STALE_NS = STALE_PERIODS * PERIOD_NS
LENDABLE = {"descriptor": 2, "control": 1}  # ids in the range of each kind

roles = st.sampled_from(Role)
sound_requests = st.builds(
    attach,
    st.sampled_from(CLIENTS),
    st.sampled_from([FRONT, REAR, *DYNAMIC, 0]),
    roles,
    correlation_id=st.sampled_from([1, 2]),  # shared by all clients: they collide (E3)
    publish_mode=st.just(PublishMode.EXISTING_OR_CREATE),
)
oddities: st.SearchStrategy[dict[str, object]] = st.sampled_from(
    [
        {"client_id": 0},
        {"client_id": NULL_U32},
        {"stream_id": OUTSIDE},
        {"stream_id": NULL_U32},
        {"publish_mode": PublishMode.REQUIRE_EXISTING},
        {"publish_mode": None},
        {"expected_layout_version": 1},
        {"expected_layout_version": 9},
        {"expected_layout_version": NULL_U32},
        {"require_hugepages": HugepagesPolicy.STANDARD},
        {"require_hugepages": HugepagesPolicy.HUGEPAGES},
    ]
)
odd_requests = st.builds(lambda request, odd: msgspec.structs.replace(request, **odd), sound_requests, oddities)
picks = st.integers(0, 11)
wrong_fields = st.sampled_from([None, None, None, *FIELDS])
moments = st.sampled_from([0, 1, PERIOD_NS // 2, PERIOD_NS])
durations = moments | st.sampled_from([LEASE_NS - 1, LEASE_NS, STALE_NS + 1, 3 * LEASE_NS])
seldom = st.integers(0, 3).map(lambda number: number == 3)


def falsified[M: (ShmLeaseKeepalive, ShmDetachRequest)](message: M, wrong: str | None) -> M:
    """The message with one field that is not the lease's."""
    match wrong:
        case None:
            return message
        case "role":
            other = Role.CONSUMER if message.role is Role.PRODUCER else Role.PRODUCER
            return msgspec.structs.replace(message, role=other)
        case "lease_id":
            return msgspec.structs.replace(message, lease_id=message.lease_id + 1_000_000)
    return msgspec.structs.replace(message, **{wrong: getattr(message, wrong) + 1})


def hello(consumer_id: int, stream_id: int, kinds: set[str]) -> ConsumerHello:
    channels = {f"{kind}_channel": "aeron:ipc" for kind in kinds}
    return messages.hello(stream_id, consumer_id, **channels)
