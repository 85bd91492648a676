# SPDX-License-Identifier: Apache-2.0
"""Does an SHM driver answer, and is it the one that we think? Who answers which streams there are?

A driver is asked to end a lease that does not exist: it should say no, whichever implementation it is, and nothing
changes. One that keeps silent is known by its announces. Driver Model §4.9; Discovery §5, §7; Wire §15.21a.5.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import Final

import msgspec

from tensorpool import aeron
from tensorpool.aeron.adapter import MessageAdapter
from tensorpool.channel import Endpoint
from tensorpool.client.client import connect
from tensorpool.client.discovery_query import DiscoveredStream
from tensorpool.client.streams import ClientStreams
from tensorpool.diagnosis.check_result import CheckResult, fail, ok, warn
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import RegionRejected, TensorPoolError, TransportError
from tensorpool.shm.containment import AllowedBases
from tensorpool.shm.namespace import LOCK_NAME, lock_holder, namespace_path
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import Role, ShmDetachRequest, ShmDetachResponse
from tensorpool.wire.region_uri import RegionUri

DRIVER: Final = "driver"
LOCK: Final = "driver lock"
DISCOVERY: Final = "discovery"
TIMEOUT_S: Final = 2.0
ASK_AGAIN_S: Final = 0.25
LINGER_S: Final = 0.1  # after an answer, for a second one


class Question:
    """A question that every driver has to answer with no; counts who did."""

    def __init__(self) -> None:
        self._request = ShmDetachRequest(
            correlation_id=secrets.randbits(62),
            lease_id=0,
            stream_id=0,
            client_id=secrets.randbelow(2**32 - 2) + 1,
            role=Role.CONSUMER,
        )
        self.answered_by: set[int] = set()  # sessions
        self.announced: set[int] = set()  # streams
        self._answers = MessageAdapter(on_malformed=lambda data, error: None)
        self._answers.add(ShmPoolAnnounce, self.on_shm_pool_announce)
        self._answers.add(ShmDetachResponse, self.on_shm_detach_response)

    def ask(self, streams: ClientStreams, timeout_s: float) -> float | None:
        """Seconds until the first answer; None without."""
        started = time.monotonic()
        deadline, again, first = started + timeout_s, started, None
        while (now := time.monotonic()) < deadline:
            if first is None and now >= again:
                again = now + ASK_AGAIN_S
                streams.control.offer(self._request.encode())
            streams.poll_control(self._answers.on_message, 64)
            if first is None and self.answered_by:
                first = now - started
                deadline = min(deadline, now + LINGER_S)
            time.sleep(0.002)
        return first

    def on_shm_pool_announce(self, announce: ShmPoolAnnounce, info: aeron.MessageInfo) -> None:
        self.announced.add(announce.stream_id)

    def on_shm_detach_response(self, response: ShmDetachResponse, info: aeron.MessageInfo) -> None:
        if response.correlation_id == self._request.correlation_id:
            self.answered_by.add(info.session_id)


def check_driver(config: DriverConfig, aeron_dir: str, timeout_s: float = TIMEOUT_S) -> CheckResult:
    """Whether one driver answers on the control stream."""
    control = config.driver.control
    place = _place(control)
    question = Question()
    try:
        with contextlib.closing(aeron.connect(aeron_dir, client_name="tensorpool doctor")) as client:
            waited_s = question.ask(ClientStreams(client, config, aeron_dir), timeout_s)
    except TransportError as error:
        return fail(DRIVER, f"{place} could not be asked: {error}", "tensorpool driver")
    if waited_s is None and question.announced:
        return ok(DRIVER, f"announces {len(question.announced)} streams at {place} of {aeron_dir}, but does not answer")
    if waited_s is None:
        found = f"no driver answers at {place} of {aeron_dir} within {timeout_s:g} s"
        return fail(DRIVER, found, "tensorpool driver    (with the --config that your clients use)")
    if len(question.answered_by) > 1:
        found = f"{len(question.answered_by)} drivers answer at {place} of {aeron_dir}"
        return fail(DRIVER, found, "stop all but one, or give each a driver.control_stream_id of its own")
    return ok(DRIVER, f"answers at {place} of {aeron_dir} after {1000 * waited_s:.0f} ms")


def check_lock(config: DriverConfig) -> CheckResult:
    """Which process holds the namespace of our configuration."""
    path = namespace_path(config.shm.base_dir, config.shm.namespace)
    lock = os.path.join(path, LOCK_NAME)
    holder = lock_holder(lock)
    if holder is not None:
        return ok(LOCK, f"pid {holder} holds {lock}")
    if not os.path.isdir(path):
        return ok(LOCK, f"free: {path} does not exist, so no driver of this user has run there")
    return ok(LOCK, f"free: no driver that we can see holds {path}")


def check_discovery(config: DriverConfig, aeron_dir: str, timeout_s: float = TIMEOUT_S) -> list[CheckResult]:
    """Each provider that clients ask, and what it answered."""
    settings = config.discovery
    asked = [
        (registry.endpoint, msgspec.structs.replace(settings, enabled=False, registries=(registry,)))
        for registry in settings.registries
    ]
    if settings.enabled:
        asked.insert(0, (settings.endpoint, msgspec.structs.replace(settings, registries=())))
    if not asked:
        found = "discovery.enabled is false and there are no registries: names cannot be looked up"
        return [warn(DISCOVERY, found, "--set discovery.enabled=true, or use stream ids")]
    return [
        _ask(endpoint, msgspec.structs.replace(config, discovery=only), aeron_dir, timeout_s)
        for endpoint, only in asked
    ]


def _ask(endpoint: Endpoint, config: DriverConfig, aeron_dir: str, timeout_s: float) -> CheckResult:
    place = _place(endpoint)
    started = time.monotonic()
    try:
        with connect(aeron_dir, config=config) as client:
            streams = client.discover(timeout=timeout_s)
    except TensorPoolError as error:
        remedy = "tensorpool driver with discovery.enabled = true, or tensorpool discovery --config FILE"
        return fail(DISCOVERY, f"asked {place}: {error}", remedy)
    waited_ms = 1000 * (time.monotonic() - started)
    drivers = sorted({stream.driver_instance_id for stream in streams})
    who = f"{len(streams)} streams of {', '.join(drivers)}" if streams else "no stream yet"
    found = f"asked {place}: answered after {waited_ms:.0f} ms, {who}"
    outside = _outside(streams, config) if config.discovery.enabled else None
    if outside is not None:
        remedy = f"--set shm.base_dir=…, or add {os.path.dirname(outside)} to shm.allowed_base_dirs"
        return warn(DISCOVERY, f"{found}; {outside} is not inside {', '.join(config.shm.allowed_base_dirs)}", remedy)
    return ok(DISCOVERY, found)


def _outside(streams: list[DiscoveredStream], config: DriverConfig) -> str | None:
    """A region of our own driver that this configuration does not allow to be mapped."""
    bases = AllowedBases(config.shm.allowed_base_dirs)
    for stream in streams:
        try:
            path = RegionUri.parse(stream.header_region_uri).path
        except RegionRejected:
            continue
        if not bases.contains(os.path.realpath(path)):
            return path
    return None


def _place(endpoint: Endpoint) -> str:
    return f"{endpoint.channel} stream {endpoint.stream_id}"
