# SPDX-License-Identifier: Apache-2.0
"""The policy: which consumers get which override, when, how often, and that it never flaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorpool.supervisor.config import RuleConfig
from tensorpool.supervisor.policy import MAX_TRIES, Decision, Policy
from tensorpool.supervisor.snapshot import ChangeKind
from tensorpool.supervisor.view import View
from tensorpool.wire.control import ConsumerConfig, Mode
from tests.levels import SOAK
from tests.supervisor.conftest import (
    CONSUMER,
    STREAM,
    S,
    a_view,
    announce,
    configured,
    consumed,
    hello,
    named,
    produced,
)

HZ = 100


class Scene:
    """A stream at 100 Hz with a consumer that is as far behind as a test says, and obeys or not."""

    def __init__(self, *rules: RuleConfig, obeys: bool = True, max_rate_hz: int = 5) -> None:
        self.view: View = a_view()
        self.policy = Policy(rules, patience_ns=3 * S)
        self.obeys = obeys
        self.max_rate_hz = max_rate_hz
        self.mode = Mode.STREAM
        self.second = 0
        self.decisions: list[tuple[int, Decision]] = []
        self.on_override: Callable[[ConsumerConfig], None] | None = None

    def run(self, seconds: int, behind: int = 0, **report: Any) -> list[Decision]:
        """So many seconds; what was decided in them."""
        before = len(self.decisions)
        for _ in range(seconds):
            now_ns = self.second * S
            self.view.on_message(announce(now_ns=now_ns), now_ns)
            self.view.on_message(named("camera/front"), now_ns)
            self.view.on_message(produced(self.second * HZ + 1000), now_ns)
            self.view.on_message(hello(max_rate_hz=self.max_rate_hz), now_ns)
            seq = self.second * HZ + 1000 - behind
            self.view.on_message(consumed(seq, **{"mode": self.mode} | report), now_ns)
            self.view.tick(now_ns)
            for decision in self.policy.decide(self.view, now_ns):
                self.decisions.append((self.second, decision))
                self.hear(decision, now_ns)
            self.second += 1
        return [decision for _, decision in self.decisions[before:]]

    def hear(self, decision: Decision, now_ns: int) -> None:
        self.view.on_decision(decision.stream_id, decision.consumer_id, decision.reason, now_ns)
        if decision.message is not None:
            self.view.on_message(decision.message, now_ns)
            if self.obeys:
                self.mode = decision.message.mode


LIMIT = RuleConfig(stream="camera/*", when_lag_over=50, for_ms=2_000)


def test_a_consumer_that_lags_for_a_while_is_overridden_once() -> None:
    """The message, its time, and its entry in the history."""
    scene = Scene(LIMIT)
    assert scene.run(5, behind=50) == []
    (decision,) = scene.run(10, behind=51)
    assert scene.decisions[0][0] == 7
    assert decision.reason == "51 frames behind, over 50: set to RATE_LIMITED"
    assert decision.message == configured(mode=Mode.RATE_LIMITED)
    assert (scene.policy.overrides, scene.policy.released, scene.policy.given_up) == (1, 0, 0)
    texts = [change.text for change in scene.view.history.changes if change.kind is ChangeKind.POLICY_DECIDED]
    assert texts == [f"consumer {CONSUMER} of camera/front ({STREAM}): {decision.reason}"]
    assert scene.run(30, behind=500) == []


def test_a_moment_of_lag_is_no_reason() -> None:
    """Hysteresis: for_ms has to pass without a break."""
    scene = Scene(LIMIT)
    for _ in range(10):
        assert scene.run(2, behind=100) == []
        assert scene.run(1, behind=0) == []


def test_which_consumers_a_rule_is_for() -> None:
    """By the stream's name or id, by the consumer's id; the first that fits counts."""
    for stream, consumer_ids, is_for in [
        ("*", (), True),
        (str(STREAM), (), True),
        ("camera/fron?", (CONSUMER,), True),
        ("camera/rear", (), False),
        ("20002", (), False),
        ("*", (CONSUMER + 1,), False),
    ]:
        scene = Scene(RuleConfig(stream=stream, consumer_ids=consumer_ids, when_lag_over=50, for_ms=0))
        assert bool(scene.run(3, behind=100)) is is_for, stream
    second = RuleConfig(when_lag_over=50, for_ms=0, mode="STREAM", fallback_uri="bridge://b1")
    (decision,) = Scene(RuleConfig(when_lag_over=50, for_ms=0), second).run(9, behind=100)
    assert decision.message == configured(mode=Mode.RATE_LIMITED)


def test_losses_are_a_reason_too() -> None:
    """Frames a second, as its reports count them."""
    scene = Scene(RuleConfig(when_drops_per_s_over=20, for_ms=1_000))
    for second in range(4):
        assert scene.run(1, drops_gap=19 * second) == []
    for second in range(4, 12):
        scene.run(1, drops_gap=76 + 60 * (second - 4))
    (decision,) = [decision for _, decision in scene.decisions]
    assert "frames a second, over 20: set to RATE_LIMITED" in decision.reason


def test_a_redirect_names_the_fallback_and_keeps_the_streams_that_were_assigned() -> None:
    """§10.1.3: an empty channel would take the consumer's own stream away."""
    rule = RuleConfig(when_lag_over=50, for_ms=0, mode="STREAM", fallback_uri="aeron:udp?endpoint=10.0.0.9:40400")
    scene = Scene(rule)
    scene.run(1)
    given: dict[str, Any] = {"descriptor_channel": "aeron:ipc", "descriptor_stream_id": 777}
    scene.view.on_message(configured(**given), 0)
    (decision,) = scene.run(20, behind=100)
    expected = configured(use_shm=False, payload_fallback_uri="aeron:udp?endpoint=10.0.0.9:40400", **given)
    assert decision.message == expected
    assert decision.reason.endswith("no shared memory, fallback aeron:udp?endpoint=10.0.0.9:40400")


def test_a_consumer_with_streams_of_its_own_is_not_overridden_until_they_are_known() -> None:
    """What it was given has to be repeated."""
    scene = Scene(RuleConfig(when_lag_over=50, for_ms=0))
    now_ns = 0
    for second in range(5):
        now_ns = second * S
        scene.view.on_message(announce(now_ns=now_ns), now_ns)
        scene.view.on_message(produced(second * HZ + 1000), now_ns)
        scene.view.on_message(hello(descriptor_channel="aeron:ipc", descriptor_stream_id=9), now_ns)
        scene.view.on_message(consumed(second * HZ), now_ns)
        assert scene.policy.decide(scene.view, now_ns) == []
    scene.view.on_message(configured(descriptor_channel="aeron:ipc", descriptor_stream_id=9), now_ns)
    (decision,) = scene.policy.decide(scene.view, now_ns)
    assert decision.message is not None
    assert (decision.message.descriptor_channel, decision.message.descriptor_stream_id) == ("aeron:ipc", 9)


def test_a_consumer_that_does_not_obey_gets_three_messages_and_is_then_left_alone() -> None:
    """And the history says that too."""
    scene = Scene(LIMIT, obeys=False)
    decisions = scene.run(60, behind=100)
    assert len(decisions) == MAX_TRIES + 1
    assert [decision.message is None for decision in decisions] == [False] * MAX_TRIES + [True]
    assert "sent again" in decisions[1].reason
    assert "left alone" in decisions[-1].reason
    assert scene.policy.given_up == 1


def test_two_masters_do_not_take_turns() -> None:
    """A producer that answers every hello with the mode the consumer asked for wins after three times."""
    scene = Scene(RuleConfig(when_lag_over=50, for_ms=0))
    for _ in range(60):
        scene.run(1, behind=100)
        scene.mode = Mode.STREAM  # overruled
    assert len(scene.decisions) == MAX_TRIES + 1


def test_a_release_follows_when_it_does_well_and_the_next_order_waits_longer_each_time() -> None:
    """release_after_ms of doing well; then a cooldown that doubles."""
    rule = RuleConfig(when_lag_over=50, for_ms=0, release_after_ms=5_000, cooldown_ms=10_000)
    scene = Scene(rule)
    for _ in range(400):
        scene.run(1, behind=100 if scene.mode is Mode.STREAM else 0)
    times = [second for second, _ in scene.decisions]
    modes = [decision.message.mode for _, decision in scene.decisions if decision.message is not None]
    assert modes[:4] == [Mode.RATE_LIMITED, Mode.STREAM, Mode.RATE_LIMITED, Mode.STREAM]
    released = times[1::2]
    assert [later - before for later, before in zip(times[2::2], released, strict=False)][:4] == [10, 20, 40, 80]
    assert "left alone for 20 s" in scene.decisions[3][1].reason
    assert scene.policy.released == len(released)


def test_what_a_limited_consumer_leaves_out_is_no_lag() -> None:
    """Otherwise a limited consumer would never be released."""
    rule = RuleConfig(when_lag_over=50, for_ms=0, release_after_ms=3_000)
    scene = Scene(rule, max_rate_hz=1)  # one frame in a hundred
    scene.run(4, behind=100)
    assert scene.mode is Mode.RATE_LIMITED
    scene.run(10, behind=150)
    assert scene.policy.released == 1


def test_consumers_that_left_are_forgotten() -> None:
    """A consumer with the same id that comes later is a new case."""
    scene = Scene(RuleConfig(when_lag_over=50, for_ms=0))
    scene.run(2, behind=100)
    later_ns = 3600 * S
    scene.view.tick(later_ns)
    assert scene.policy.decide(scene.view, later_ns) == []
    assert scene.policy._cases == {}


@settings(max_examples=60 * SOAK)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.booleans()), min_size=1, max_size=120),
    st.integers(0, 3),
    st.integers(1, 20),
    st.booleans(),
)
def test_orders_never_come_faster_than_the_policy_allows(
    course: list[tuple[int, bool]], release_s: int, cooldown_s: int, obeys: bool
) -> None:
    """For every course of lag and obedience: at most so many orders, each release followed by its cooldown."""
    rule = RuleConfig(
        when_lag_over=50, for_ms=1_000, release_after_ms=1_000 * release_s, cooldown_ms=1_000 * cooldown_s
    )
    scene = Scene(rule, obeys=obeys)
    for behind, is_overruled in course:
        scene.run(1, behind=behind)
        if is_overruled:
            scene.mode = Mode.STREAM
    releases = [second for second, decision in scene.decisions if "does well" in decision.reason]
    orders = [second for second, decision in scene.decisions if ", over 50" in decision.reason]
    for number, released in enumerate(releases):
        following = [second for second in orders if second > released]
        assert all(second >= released + (cooldown_s << number) for second in following)
    assert len(orders) <= len(releases) + 1
    again = [decision for _, decision in scene.decisions if "sent again" in decision.reason]
    assert len(again) <= (MAX_TRIES - 1) * len(orders)
