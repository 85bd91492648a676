# SPDX-License-Identifier: Apache-2.0
"""Which stream an id or a name means, and the error where it is none or several.

Providers of discovery are asked first; where none answers, what drivers and producers announce here decides.
Discovery §5; Wire §10.1.1, §10.3.1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

from tensorpool.client.client import Client
from tensorpool.client.discovery_query import DiscoveredStream, Filters
from tensorpool.diagnosis.announced_streams import announced_streams, observe_for
from tensorpool.errors import ConfigError, DriverUnreachable, LocalProtocolError, TensorPoolError
from tensorpool.supervisor.observer import Observer

MAX_LISTED: Final = 20


class Wanted:
    """What was asked for: an id or a name, of one driver or of any."""

    def __init__(self, stream: str, driver_instance_id: str | None = None) -> None:
        is_id = stream.isascii() and stream.isdecimal()
        if is_id and not 1 <= int(stream) <= 2**32 - 2:
            raise LocalProtocolError(f"stream {stream}: expected a name, or an id from 1 to 2^32 - 2")
        self.text: Final = stream
        self.filters: Final = Filters(
            stream_id=int(stream) if is_id else None,
            name=None if is_id else stream,
            driver_instance_id=driver_instance_id,
        ).check()

    def choose(self, streams: Iterable[DiscoveredStream]) -> DiscoveredStream | None:
        """The one that fits; None where none does. Raises TensorPoolError, which lists them, for several."""
        found = [stream for stream in streams if self.filters.fit(stream)]
        if len(found) > 1:
            drivers = {stream.driver_instance_id for stream in found}
            choice = "give one of the ids" if len(drivers) == 1 else "choose with --driver INSTANCE"
            raise TensorPoolError(f"{self.text!r} is ambiguous: {_listed(found)}; {choice}")
        return found[0] if found else None

    def unknown(self, streams: list[DiscoveredStream], asked: str) -> TensorPoolError:
        """What there is instead, the most alike first."""
        if not streams:
            remedy = "start a producer, or name another driver with --aeron-dir or --config"
            return TensorPoolError(f"there is no stream {self.text!r}, nor any other ({asked}); {remedy}")
        names = {_label(stream): stream for stream in streams}
        close = difflib.get_close_matches(self.text, names, 3, 0.5)
        hint = f"; did you mean {' or '.join(close)}" if close else ""
        return TensorPoolError(f"there is no stream {self.text!r} ({asked}){hint}; there are: {_listed(streams)}")


def find_stream(wanted: Wanted, client: Client, observer: Observer, *, timeout: float) -> tuple[DiscoveredStream, str]:
    """The stream, and where it was found. Raises TensorPoolError with the candidates, after about `timeout` s."""
    asked = "no provider was asked"
    found: list[DiscoveredStream] = []
    try:
        found = client.discover(timeout=timeout)
        asked = "as discovery says"
    except ConfigError:  # discovery is switched off
        pass
    except DriverUnreachable:
        asked = f"no provider answers at {client.config.discovery.channel} stream {client.config.discovery.stream_id}"
    chosen = wanted.choose(found)
    if chosen is not None:
        return chosen, "discovery"
    config = client.config
    patience_s = 1.5 * config.announce_period_ns / 1e9
    observe_for(observer, patience_s, lambda: wanted.choose(announced_streams(observer, config)) is not None)
    announced = announced_streams(observer, config)
    chosen = wanted.choose(announced)
    if chosen is not None:
        return chosen, "announce"
    raise wanted.unknown(_merged(found, announced), asked)


def _merged(first: list[DiscoveredStream], second: list[DiscoveredStream]) -> list[DiscoveredStream]:
    known = {stream.stream_id for stream in first}
    return first + [stream for stream in second if stream.stream_id not in known]


def _label(stream: DiscoveredStream) -> str:
    return stream.data_source_name or str(stream.stream_id)


def _listed(streams: list[DiscoveredStream]) -> str:
    shown = [
        f"{stream.data_source_name or '(no name)'} ({stream.stream_id} of {stream.driver_instance_id})"
        for stream in streams[:MAX_LISTED]
    ]
    more = f" and {len(streams) - MAX_LISTED} more (`tensorpool ls`)" if len(streams) > MAX_LISTED else ""
    return ", ".join(shown) + more
