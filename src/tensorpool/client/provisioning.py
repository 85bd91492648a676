# SPDX-License-Identifier: Apache-2.0
"""Asking the driver for a ring that fits, before a producer attaches.

It is a command to the driver's service. A driver without one, such as another implementation, has the rings of its
configuration and no others. Service Control §4.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

import msgspec

from tensorpool import aeron
from tensorpool.client import arguments
from tensorpool.control.commander import Commander, Outcome
from tensorpool.control.errors import CommandFailed, CommandRejected, CommandUnanswered, CommandUnfinished
from tensorpool.control.identification import driver_tag
from tensorpool.control.provisioning import KEY, Provisioned, ProvisionRequest, RingRequest, describe
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import LocalProtocolError, RingRefused, TensorPoolError, TransportError

if TYPE_CHECKING:
    import numpy.typing as npt

    from tensorpool.wire.control import Dtype

SECONDS: Final = 2.0
RATE_HZ: Final = 60.0
AGAIN_S: Final = 1.5  # a service that receives too many commands at a time drops some
MOST_SLOTS: Final = 2**31
MOST_BYTES: Final = 2**31


def ring_request(
    *,
    create: bool,
    frame: tuple[int, ...] | None,
    dtype: npt.DTypeLike | Dtype,
    seconds: float | None,
    rate_hz: float | None,
    slots: int | None,
    max_frame_bytes: int | None,
) -> RingRequest | None:
    """What the arguments of `Client.producer` ask for; None: nothing. Raises LocalProtocolError where they disagree."""
    given = {"seconds": seconds, "rate_hz": rate_hz, "slots": slots}
    named = [name for name, value in given.items() if value is not None]
    if frame is None and max_frame_bytes is None:
        if named:
            raise LocalProtocolError(
                f"{named[0]}= is for a ring: give frame=(…), dtype=…, or max_frame_bytes=, with it"
            )
        return None
    if not create:
        raise LocalProtocolError("a ring that fits is made with the stream: pass create=True with frame= or slots=")
    if frame is not None and max_frame_bytes is not None:
        raise LocalProtocolError("give frame= and dtype=, or max_frame_bytes=, not both")
    if slots is not None and (seconds is not None or rate_hz is not None):
        raise LocalProtocolError("give slots=, or seconds= and rate_hz=, not both")
    if slots is None:
        held_s = arguments.seconds("seconds", SECONDS if seconds is None else seconds)
        frames = held_s * arguments.seconds("rate_hz", RATE_HZ if rate_hz is None else rate_hz)
        slots = max(1, math.ceil(min(frames, MOST_SLOTS + 1)))
    arguments.whole_number("slots", slots, MOST_SLOTS, 1)
    if frame is not None:
        max_frame_bytes = _frame_bytes(frame, dtype)
    request = RingRequest(
        slots=slots, frame_bytes=arguments.whole_number("max_frame_bytes", max_frame_bytes, MOST_BYTES, 1)
    )
    _ = request.ring  # one that no stream may have is refused here
    return request


def _frame_bytes(frame: tuple[int, ...], dtype: npt.DTypeLike | Dtype) -> int:
    from tensorpool.shm.arrays import layout_for
    from tensorpool.shm.carried_dtypes import carried_dtype

    try:
        carried = carried_dtype(dtype)
    except TypeError:
        raise LocalProtocolError(f"dtype = {dtype!r:.80}: expected a dtype of numpy's") from None
    if carried is not None:
        frame, dtype, _ = carried.on_wire(frame, "C", None)
    return layout_for(frame, dtype).extent_bytes


def provision(
    config: DriverConfig, aeron_dir: str, stream_id: int, label: str, request: RingRequest, timeout: float
) -> int:
    """Have the driver give the stream such a ring; its id. Raises RingRefused with the driver's words."""
    asked = ProvisionRequest(stream_id=stream_id, slots=request.slots, frame_bytes=request.frame_bytes)
    tag = driver_tag(config.driver.control)
    if not config.control.enabled:
        raise _unknown(config, label, request, "control.enabled is false")
    client = aeron.connect(aeron_dir)
    try:
        outcome = _send(
            Commander(client, config.control, is_declared=True), tag, msgspec.json.encode(asked).decode(), timeout
        )
        return msgspec.convert(outcome.json, Provisioned).stream_id
    except CommandFailed as error:
        raise RingRefused(label, error.reason) from None
    except (CommandRejected, CommandUnanswered, CommandUnfinished) as error:
        raise _unknown(config, label, request, error.text) from None
    except (msgspec.DecodeError, msgspec.ValidationError, TransportError) as error:
        raise TensorPoolError(f"{KEY} to {tag}: {error}") from None
    finally:
        client.close()


def _send(commander: Commander, tag: str, value: str, timeout: float) -> Outcome:
    """Again where it is not answered: a second one changes nothing."""
    deadline_s = time.monotonic() + timeout
    while True:
        try:
            return commander.send(tag, KEY, value, timeout=min(deadline_s - time.monotonic(), AGAIN_S))
        except (CommandUnanswered, CommandUnfinished):
            if time.monotonic() >= deadline_s:
                raise


def _unknown(config: DriverConfig, label: str, request: RingRequest, reason: str) -> RingRefused:
    """A driver that does not know the command, or is not there."""
    profiles = "; ".join(f"{name}: {describe(profile.ring)}" for name, profile in config.profiles.items())
    return RingRefused(
        label,
        f"the driver makes no ring of {request} ({reason}); leave frame=, slots= and the like out, and give the "
        f"stream a profile of the driver's configuration that fits. This configuration has {profiles}",
    )
