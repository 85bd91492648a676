# SPDX-License-Identifier: Apache-2.0
"""What stands for a lease where no driver grants any.

For consumers of producers that own their regions and announce them. Wire §10.1, §10.1.2, §15.12.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final

from tensorpool.client.attachment import Attachment, Effect
from tensorpool.client.attachment_phases import Event, Phase
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import ShmLeaseKeepalive

LEASELESS_TRANSITIONS: Final[Mapping[tuple[Phase, Event], Phase]] = MappingProxyType(
    {
        (Phase.UNATTACHED, Event.START): Phase.ATTACHED,
        (Phase.UNATTACHED, Event.DETACH): Phase.CLOSED,
        (Phase.UNATTACHED, Event.DISCONNECTION): Phase.UNATTACHED,
        (Phase.ATTACHED, Event.DETACH): Phase.CLOSED,
        (Phase.ATTACHED, Event.DISCONNECTION): Phase.UNATTACHED,
    }
)


class LeaselessAttachment(Attachment):
    """Attached once the client is connected, with an id of its own."""

    transitions: ClassVar = LEASELESS_TRANSITIONS

    def start(self, now_ns: int) -> list[Effect]:
        if self._may(Event.START):
            self._go(Event.START)
            self.take_new_id()
        return []

    def take_new_id(self) -> None:
        self.client_id = self._new_client_id()

    def detach(self, now_ns: int) -> list[Effect]:
        return self._close(Event.DETACH) if self._may(Event.DETACH) else []

    def on_announce(self, announce: ShmPoolAnnounce, now_ns: int) -> list[Effect]:
        return []

    def on_mapping_failed(self, now_ns: int) -> list[Effect]:
        return []

    def on_driver_shutdown(self, words: str, now_ns: int) -> list[Effect]:
        return []

    def on_tick(self, now_ns: int) -> list[Effect]:
        return []

    def keepalive(self, now_ns: int, stamp_ns: int) -> ShmLeaseKeepalive | None:
        return None
