# SPDX-License-Identifier: Apache-2.0
"""Which epoch a consumer has mapped, and when it must let go.

    UNMAPPED ──attach response, announce──► Map … on_mapped ──► MAPPED(E)
        ▲                                                         │ epoch > E, another layout of E, stale activity,
        │                                                         │ producer revoked, superblock changed, lease lost,
        └──────────────── Unmap ──────────────────────────────────┘ seq went back

Holds no clock and does no IO: methods take `now_ns` and return effects. Nothing is mapped but what a fresh announce or
the driver's own answer names; a replayed or late announce changes nothing. A descriptor of a later epoch alone unmaps
nothing: the owner asks the driver, whose answer comes to `on_attached` (K1).
Wire §10.1.1, §15.1, §15.2, §15.12, §15.14, §15.21; Driver Model §4.9, §6; decisions C1, C5-C10, C13, C15, C17, E40,
E41, K1, K2.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tensorpool.errors import RemoteProtocolError
from tensorpool.shm.announced import FRESH_PERIODS, Regions
from tensorpool.wire.attach import AttachResponse
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import ShmLeaseRevoked

ACTIVE_PERIODS: Final = 4  # of the superblock's activity stamp (§15.14)


class Map(msgspec.Struct, frozen=True):
    """Map these; answer with `on_mapped` or `on_rejected`."""

    regions: Regions


class Check(msgspec.Struct, frozen=True):
    """Compare the mapped superblocks again (§15.1); answer a difference with `on_rejected`."""


class Unmap(msgspec.Struct, frozen=True):
    """Deliver nothing more from the mapped epoch."""

    reason: str


type Effect = Map | Check | Unmap


class MappingState:
    """The consumer's side of epochs, for one stream."""

    def __init__(self, announce_period_ns: int) -> None:
        self.epoch: int | None = None  # that is mapped
        self.producer_id: int | None = None  # as last announced: 0 is no producer, None is not known
        self.mismatches = 0  # announces of the mapped epoch that described something else (K2)
        self._window_ns = FRESH_PERIODS * announce_period_ns
        self._activity_window_ns = ACTIVE_PERIODS * announce_period_ns
        self._is_attached = False
        self._known: Regions | None = None  # the last that was believed
        self._spoilt: int | None = None  # an epoch that two processes wrote
        self._asked: int | None = None  # an epoch whose mapping is under way
        self._announced_ns = 0  # when the mapped epoch was last announced
        self._highest = 0
        self._highest_ns = 0
        self._beyond: int | None = None  # §4.9: nothing up to this epoch, its producer is gone
        self._beyond_until_ns = 0
        self._revoked: int | None = None  # the lease whose end was noticed last: its notice may come again

    # --- leases

    def on_attached(self, response: AttachResponse, now_ns: int) -> list[Effect]:
        """The answer is exempt from the freshness rules (C7): we asked for it just now."""
        self._is_attached = True
        self._beyond = None
        regions = Regions.of(response)
        effects: list[Effect] = []
        if self.epoch is not None and self.epoch != regions.epoch:
            effects += self._unmap(f"the driver's epoch is {regions.epoch}")
        elif self.epoch is not None and self._known is not None and (found := self._known.difference(regions)):
            effects += self._unmap(f"the driver's layout differs from what is mapped: {found}")
        self._highest, self._highest_ns = regions.epoch, now_ns
        self._announced_ns = now_ns
        return effects + ([] if self.epoch is not None else self._map(regions))

    def on_listening(self) -> None:
        """There is no driver to ask: what is announced freshly may be mapped."""
        self._is_attached = True

    def on_lease_lost(self, reason: str) -> list[Effect]:
        """§4.7: no lease, no memory."""
        self._is_attached = False
        self._known = None
        return self._unmap(reason)

    def on_producer_revoked(self, notice: ShmLeaseRevoked, now_ns: int) -> list[Effect]:
        """§4.9: wait for the epoch after the one whose producer is gone. The end of any other lease changes nothing."""
        if self.epoch is None or self.producer_id not in (None, notice.client_id):
            return []
        if notice.lease_id == self._revoked:
            return []
        self._revoked = notice.lease_id
        self._beyond = self.epoch
        self._beyond_until_ns = now_ns + self._window_ns
        self._known = None
        return self._unmap(f"the producer's lease ended ({notice.reason.name})")

    # --- announces

    def on_announce(self, announce: ShmPoolAnnounce, now_ns: int, is_active: bool) -> list[Effect]:
        """A fresh announce. `is_active`: the mapped regions' activity stamps are fresh; C1 asks when epochs go back."""
        if not self._is_attached:
            return []
        epoch = announce.epoch
        if epoch < self._highest and now_ns - self._highest_ns <= self._window_ns:
            return []  # the highest that is still being announced counts
        if epoch == self.epoch:
            return self._on_same_epoch(announce, now_ns)
        is_current_live = now_ns - self._announced_ns <= self._window_ns and is_active
        if self.epoch is not None and epoch < self.epoch and is_current_live:
            return []
        if self._beyond is not None and epoch <= self._beyond:
            return []  # when the wait is over the driver is asked (`on_tick`), not the first process that announces
        regions = Regions.of(announce)
        self._beyond = None
        effects = self._unmap(f"epoch {epoch} was announced")
        self.producer_id = announce.producer_id
        self._note(epoch, now_ns)
        return effects + self._map(regions)

    def _on_same_epoch(self, announce: ShmPoolAnnounce, now_ns: int) -> list[Effect]:
        """§15.1, K2: it must describe what is mapped. Raises RemoteProtocolError where nothing can be as described."""
        try:
            regions = Regions.of(announce)
        except RemoteProtocolError:
            self.mismatches += 1
            raise
        self._note(regions.epoch, now_ns)
        found = None if self._known is None else self._known.difference(regions)
        effects: list[Effect] = [Check()]
        if found is not None:
            self.mismatches += 1
            effects = self._unmap(f"the announce differs from what is mapped: {found}") + self._map(regions)
        self.producer_id = announce.producer_id
        return effects

    def is_activity_fresh(self, activity_ns: int, now_ns: int, wall_ns: int) -> bool:
        """§15.14: whether an activity stamp, by either clock (C8), is recent; one from the future is not."""
        ages_ns = now_ns - activity_ns, wall_ns - activity_ns
        return any(-self._window_ns <= age_ns <= self._activity_window_ns for age_ns in ages_ns)

    def on_stale(self) -> list[Effect]:
        """No process refreshes the mapped regions: their owner is dead."""
        return self._unmap("the regions' activity stamps are stale")

    # --- the mapping itself

    def is_awaited(self, epoch: int) -> bool:
        """Whether this epoch is still to be mapped: it may have been given up meanwhile."""
        return epoch == self._asked

    def on_mapped(self, epoch: int) -> None:
        self.epoch = epoch
        self._asked = None

    def on_second_writer(self) -> None:
        """C10, §15.14: what was mapped has two writers; `on_rejected` follows, and then only another epoch will do."""
        self._spoilt = self.epoch

    def on_rejected(self, reason: str) -> list[Effect]:
        """The regions are not what was announced: fail closed, and try what is announced next (C13)."""
        self._asked = None
        self._known = None
        return self._unmap(reason)

    def on_seq_went_back(self) -> list[Effect]:
        """B29: the same files again, with nothing remembered about their seqs."""
        known = self._known
        effects = self._unmap("the seq went back")
        return effects + (self._map(known) if known is not None and self._is_attached else [])

    def on_tick(self, now_ns: int) -> bool:
        """Whether the wait for the epoch after a revoked one was in vain: ask the driver (§4.9, E40).

        Until it answers, with `on_attached`, or a later epoch is announced, the wait goes on and is reported again.
        """
        if self._beyond is None or now_ns < self._beyond_until_ns:
            return False
        self._beyond_until_ns = now_ns + self._window_ns
        return True

    # --- inside

    def _note(self, epoch: int, now_ns: int) -> None:
        self._highest, self._highest_ns = epoch, now_ns
        self._announced_ns = now_ns

    def _map(self, regions: Regions) -> list[Effect]:
        if regions.epoch in (self._asked, self._spoilt):
            return []
        self._known = regions
        self._asked = regions.epoch
        return [Map(regions)]

    def _unmap(self, reason: str) -> list[Effect]:
        self._asked = None
        if self.epoch is None:
            return []
        self.epoch = None
        self.producer_id = None
        return [Unmap(reason)]


class ActivityDuty:
    """When a producer refreshes the activity stamp of its epoch, because its driver does not (C9).

    Drivers may refresh it or leave it to the producer, and no message says which. A stamp that stands still while the
    driver goes on announcing the epoch is left to the producer. A dead driver announces nothing: its regions become
    stale, as they must.
    """

    def __init__(self) -> None:
        self._stamp_ns: int | None = None  # as it was seen last
        self._own_ns: int | None = None  # the last that we wrote
        self._since_ns = 0  # when it was seen to change
        self._announces = 0  # of the epoch, since then

    def on_announce(self) -> None:
        """A fresh announce of the epoch came."""
        self._announces += 1

    def is_due(self, stamp_ns: int, now_ns: int, period_ns: int) -> bool:
        """Whether to refresh now.

        One announce more than the one that a driver sends with a refresh of its own shows that it does not refresh.
        """
        if stamp_ns != self._stamp_ns:
            self._stamp_ns, self._since_ns, self._announces = stamp_ns, now_ns, 0
        needed = 1 if stamp_ns == self._own_ns else 2
        return self._announces >= needed and now_ns - self._since_ns >= period_ns

    def on_refreshed(self, stamp_ns: int, now_ns: int) -> None:
        self._stamp_ns = self._own_ns = stamp_ns
        self._since_ns, self._announces = now_ns, 0
