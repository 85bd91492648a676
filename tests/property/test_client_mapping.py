# SPDX-License-Identifier: Apache-2.0
"""What holds for a consumer's mapping under every schedule of leases, announces, ends and failures.

nothing is mapped without a lease                    after its producer's end, only a later epoch, or the driver's word
unmapped before another is mapped, one at a time     a replayed announce never displaces a live epoch
what was refused stays unmapped until announced      good news in the end, and the announced epoch is mapped in time
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensorpool.client.mapping import Check, Effect, Map, MappingState, Unmap
from tensorpool.shm.announced import FRESH_PERIODS
from tests.client.conftest import SECOND_NS, announced, granted, revoked
from tests.levels import SOAK

PERIOD_NS = SECOND_NS
WINDOW_NS = FRESH_PERIODS * PERIOD_NS
EPOCHS = (3, 4, 5, 6, 7)
PRODUCERS = (0, 8, 9)

epochs = st.sampled_from(EPOCHS)
producers = st.sampled_from(PRODUCERS)
durations = st.sampled_from([1, PERIOD_NS // 3, PERIOD_NS, WINDOW_NS, WINDOW_NS + 1, 5 * WINDOW_NS])


class MappingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 1_000 * SECOND_NS
        self.state = MappingState(PERIOD_NS)
        self.mapped: int | None = None
        self.has_lease = False
        self.is_active = True
        self.announced_ns: dict[int, int] = {}  # when each epoch was last announced, or answered
        self.waits_beyond: tuple[int, int] | None = None  # an epoch, and until when nothing up to it will do
        self.lease_id = 500
        self.fails = False
        self.spoilt: int | None = None  # an epoch that has two writers

    @initialize()
    def begin(self) -> None:
        self.attach(5)

    def perform(self, effects: list[Effect]) -> list[int]:
        """Do what is asked; the epochs that were mapped."""
        done: list[int] = []
        for effect in effects:
            match effect:
                case Unmap(reason=reason):
                    assert self.mapped is not None, "nothing is unmapped twice"
                    assert reason
                    self.mapped = None
                case Map(regions=regions):
                    assert self.has_lease, "no lease, no memory"
                    assert self.mapped is None, "one at a time"
                    assert regions.epoch != self.spoilt, "two writers, and only another epoch will do"
                    if self.waits_beyond is not None:
                        epoch, until_ns = self.waits_beyond
                        assert regions.epoch > epoch or self.now_ns >= until_ns
                    self.waits_beyond = None
                    if self.fails:
                        assert self.state.on_rejected("no such file") == []
                    else:
                        self.state.on_mapped(regions.epoch)
                        self.mapped = regions.epoch
                        done.append(regions.epoch)
                case Check():
                    assert self.mapped is not None
        return done

    @rule(epoch=epochs)
    def attach(self, epoch: int) -> None:
        """The driver's own word: believed, whatever was before."""
        self.has_lease = True
        self.waits_beyond = None
        self.announced_ns = {epoch: self.now_ns}
        self.perform(self.state.on_attached(granted(1, epoch=epoch), self.now_ns))
        is_refused = self.mapped != epoch and (self.fails or epoch == self.spoilt)
        assert self.mapped == (None if is_refused else epoch)

    @rule()
    def lose_lease(self) -> None:
        self.has_lease = False
        self.perform(self.state.on_lease_lost("EXPIRED"))
        assert self.mapped is None

    @rule(epoch=epochs, producer_id=producers)
    def announce(self, epoch: int, producer_id: int) -> None:
        """A fresh one, in whatever order drivers, bridges and replays bring them."""
        if self.waits_beyond is not None and epoch == self.spoilt:
            return  # it ends the wait without being mapped, which cannot be seen from here
        before = self.mapped
        is_live = before is not None and self.now_ns - self.announced_ns.get(before, 0) <= WINDOW_NS
        message = announced(epoch, producer_id=producer_id)
        done = self.perform(self.state.on_announce(message, self.now_ns, self.is_active))
        assert set(done) <= {epoch}, "nothing but what was announced is mapped"
        if before is not None and epoch < before and is_live and self.is_active:
            assert self.mapped == before, "a lower epoch does not displace a live one"
        if before is not None and epoch > before and self.has_lease:
            is_refused = self.fails or epoch == self.spoilt
            assert self.mapped == (None if is_refused else epoch), "a higher epoch does at once"
        if epoch == before:
            assert self.mapped == before
            assert self.state.producer_id == producer_id
        if self.has_lease and (self.mapped == epoch or done):
            self.announced_ns[epoch] = self.now_ns

    @rule(client_id=st.sampled_from(PRODUCERS[1:]), is_new=st.booleans())
    def end_producer(self, client_id: int, is_new: bool) -> None:
        self.lease_id += is_new
        before, owner = self.mapped, self.state.producer_id
        self.perform(self.state.on_producer_revoked(revoked(self.lease_id, client_id), self.now_ns))
        if before is None:
            assert self.mapped is None
        elif owner not in (None, client_id):
            assert self.mapped == before, "not the producer of this epoch"
        elif is_new:
            assert self.mapped is None
        if before is not None and self.mapped is None:
            self.waits_beyond = before, self.now_ns + WINDOW_NS

    @rule(duration_ns=durations)
    def pass_time(self, duration_ns: int) -> None:
        self.now_ns += duration_ns
        is_over = self.state.on_tick(self.now_ns)
        if self.waits_beyond is not None:
            assert is_over == (self.now_ns >= self.waits_beyond[1]), "the wait has an end, and it is reported"
        else:
            assert not is_over
        if is_over and self.waits_beyond is not None:
            self.waits_beyond = self.waits_beyond[0], self.now_ns + WINDOW_NS  # until the driver answers

    @rule(is_active=st.booleans())
    def breathe(self, is_active: bool) -> None:
        self.is_active = is_active

    @rule(fails=st.booleans())
    def files_are_gone(self, fails: bool) -> None:
        self.fails = fails

    @rule()
    def go_stale(self) -> None:
        self.perform(self.state.on_stale())
        assert self.mapped is None

    @precondition(lambda self: self.mapped is not None)
    @rule()
    def superblock_changes(self) -> None:
        self.perform(self.state.on_rejected("magic"))
        assert self.mapped is None
        assert self.perform(self.state.on_seq_went_back()) == [], "what was rejected is not mapped again by itself"

    @precondition(lambda self: self.mapped is not None)
    @rule()
    def another_producer_writes(self) -> None:
        self.spoilt = self.mapped
        self.state.on_second_writer()
        self.perform(self.state.on_rejected("pid"))
        assert self.mapped is None

    @rule()
    def seq_goes_back(self) -> None:
        before = self.mapped
        done = self.perform(self.state.on_seq_went_back())
        if before is not None and not self.fails:
            assert done == [before], "the same files again"

    @invariant()
    def says_what_is_mapped(self) -> None:
        assert self.state.epoch == self.mapped
        assert self.has_lease or self.mapped is None

    def teardown(self) -> None:
        """A lease, files, and one epoch that goes on being announced: it is mapped, high or low."""
        self.fails = False
        if not self.has_lease:
            self.attach(5)
        for epoch in (max(EPOCHS) + 1, min(EPOCHS) - 1):
            for _ in range(FRESH_PERIODS + 2):
                self.pass_time(PERIOD_NS)
                self.announce(epoch, 0)
            assert self.mapped == epoch


MappingMachine.TestCase.settings = settings(max_examples=100 * SOAK, stateful_step_count=50)
TestMapping = MappingMachine.TestCase
