# SPDX-License-Identifier: Apache-2.0
"""Reading without a driver: no process grants leases, so there is none to ask for, to keep or to lose.

For producers that own their regions and announce them by themselves. Holds no clock and does no IO. Wire §10.1, §15.12.
"""

from __future__ import annotations

from tensorpool.client.attachment import Attachment, Effect, Phase
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import ShmLeaseKeepalive


class Unleased(Attachment):
    """In the place of a lease: there as soon as there is a link, with a self-assigned id (§10.1.2)."""

    def start(self, now_ns: int) -> list[Effect]:
        if self.phase is Phase.UNATTACHED:
            self.phase = Phase.ATTACHED
            self.take_new_id()
        return []

    def take_new_id(self) -> None:
        self.client_id = self._new_client_id()

    def detach(self, now_ns: int) -> list[Effect]:
        if self.phase is Phase.CLOSED:
            return []
        return self._closed()

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
