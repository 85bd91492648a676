# SPDX-License-Identifier: Apache-2.0
"""The policy: which consumers get another mode or another source, when, and when the override is lifted.

              over a threshold for `for_ms`                        below it for `release_after_ms`
    watching ──────────────────────────────► overridden ──┬───────────────────────────────────────► cooldown ─► watching
                                                  ▲       │ not obeyed, or overruled by another ConsumerConfig
                                                  └───────┤ sent again, three times in all
                                                          └──► given up, for as long as the consumer lives

It never flaps: a threshold has to be passed for a while, each release is followed by a cooldown twice as long as the
one before, and a consumer that does not obey is left alone. Holds no clock and does no IO: callers publish the
messages.
Wire §10.1.3, §10.5, §15.4; decisions E22, E24-E26, I4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from tensorpool.settings import MS
from tensorpool.supervisor.config import RuleConfig
from tensorpool.supervisor.observed import Consumer, Stream
from tensorpool.supervisor.view import View
from tensorpool.wire.control import ConsumerConfig, Mode

MAX_TRIES: Final = 3
MAX_DOUBLINGS: Final = 10


class Decision(msgspec.Struct, frozen=True):
    """The message to send to a consumer, None for nothing more, and why."""

    stream_id: int
    consumer_id: int
    message: ConsumerConfig | None
    reason: str


class _Phase(Enum):
    WATCHING = auto()
    OVERRIDDEN = auto()
    GIVEN_UP = auto()


class _Case:
    """The state of one consumer under its rule."""

    def __init__(self, rule: RuleConfig) -> None:
        self.rule = rule
        self.phase = _Phase.WATCHING
        self.since_ns: int | None = None  # over a threshold while watching, below it while overridden
        self.sent_ns = 0
        self.tries = 0
        self.releases = 0
        self.until_ns = 0  # of the cooldown


class Policy:
    """The rules, and the state of each consumer under them."""

    def __init__(self, rules: Sequence[RuleConfig], *, patience_ns: int) -> None:
        """`patience_ns` is how long a consumer may take to report that it obeyed."""
        self._rules = tuple(rules)
        self._patience_ns = patience_ns
        self._cases: dict[tuple[int, int], _Case] = {}
        self.overrides = 0
        self.released = 0
        self.given_up = 0

    def decide(self, view: View, now_ns: int) -> list[Decision]:
        """The messages to send now."""
        if not self._rules:
            return []
        decisions: list[Decision] = []
        seen: set[tuple[int, int]] = set()
        for consumer, stream in view.consumers():
            if stream is None or consumer.expired_ns is not None:
                continue
            seen.add(consumer.key)
            if consumer.is_stale:
                continue
            case = self._case(consumer, stream)
            decision = None if case is None else self._step(case, consumer, stream, now_ns)
            if decision is not None:
                decisions.append(decision)
        for key in self._cases.keys() - seen:
            del self._cases[key]
        return decisions

    # --- inside

    def _case(self, consumer: Consumer, stream: Stream) -> _Case | None:
        case = self._cases.get(consumer.key)
        if case is not None:
            return case
        rule = next((rule for rule in self._rules if _fits(rule, consumer, stream)), None)
        if rule is None:
            return None
        case = self._cases[consumer.key] = _Case(rule)
        return case

    def _step(self, case: _Case, consumer: Consumer, stream: Stream, now_ns: int) -> Decision | None:
        if case.phase is _Phase.WATCHING:
            return self._watch(case, consumer, stream, now_ns)
        if case.phase is _Phase.OVERRIDDEN:
            return self._follow(case, consumer, stream, now_ns)
        return None

    def _watch(self, case: _Case, consumer: Consumer, stream: Stream, now_ns: int) -> Decision | None:
        why = _trouble(case.rule, consumer, stream)
        if why is None:
            case.since_ns = None
            return None
        if case.since_ns is None:
            case.since_ns = now_ns
        if now_ns - case.since_ns < case.rule.for_ms * MS or now_ns < case.until_ns:
            return None
        if consumer.wants_own_streams and consumer.assigned is None:
            return None  # E24: the streams that it was assigned have to be repeated, and are not known yet
        case.phase, case.since_ns, case.tries = _Phase.OVERRIDDEN, None, 0
        self.overrides += 1
        return self._override(case, consumer, f"{why}: {_order(case.rule)}", now_ns)

    def _follow(self, case: _Case, consumer: Consumer, stream: Stream, now_ns: int) -> Decision | None:
        if not _has_obeyed(case, consumer):
            if now_ns - case.sent_ns < self._patience_ns:
                return None
            if case.tries < MAX_TRIES:  # also for one that was overruled: two authorities must not alternate
                return self._override(case, consumer, f"not obeyed, sent again: {_order(case.rule)}", now_ns)
            case.phase = _Phase.GIVEN_UP
            self.given_up += 1
            reason = f"did not obey after {case.tries} times and is left alone: {_order(case.rule)}"
            return Decision(consumer.stream_id, consumer.consumer_id, None, reason)
        rule = case.rule
        if not rule.release_after_ms:
            return None
        if _trouble(rule, consumer, stream) is not None:
            case.since_ns = None
            return None
        if case.since_ns is None:
            case.since_ns = now_ns
        if now_ns - case.since_ns < rule.release_after_ms * MS:
            return None
        cooldown_ms = rule.cooldown_ms << min(case.releases, MAX_DOUBLINGS)
        case.phase, case.since_ns = _Phase.WATCHING, None
        case.until_ns = now_ns + cooldown_ms * MS
        case.releases += 1
        self.released += 1
        mode = consumer.wanted_mode or Mode.STREAM
        reason = f"does well again: {mode.name} as it asked for; left alone for {cooldown_ms / 1000:g} s"
        return Decision(*consumer.key, _config(consumer, mode, ""), reason)

    def _override(self, case: _Case, consumer: Consumer, reason: str, now_ns: int) -> Decision:
        case.tries += 1
        case.sent_ns = now_ns
        message = _config(consumer, Mode[case.rule.mode], case.rule.fallback_uri)
        return Decision(*consumer.key, message, reason)


def _fits(rule: RuleConfig, consumer: Consumer, stream: Stream) -> bool:
    if rule.consumer_ids and consumer.consumer_id not in rule.consumer_ids:
        return False
    return rule.stream == str(stream.stream_id) or fnmatchcase(stream.name or "", rule.stream)


def _trouble(rule: RuleConfig, consumer: Consumer, stream: Stream) -> str | None:
    """Which threshold is passed."""
    lag = consumer.lag(stream)
    if rule.when_lag_over and lag is not None and lag > rule.when_lag_over + _skipped_frames(consumer, stream):
        return f"{lag} frames behind, over {rule.when_lag_over}"
    drops_per_s = consumer.drops.rate_hz() or 0.0
    if rule.when_drops_per_s_over and drops_per_s > rule.when_drops_per_s_over:
        return f"loses {drops_per_s:.0f} frames a second, over {rule.when_drops_per_s_over}"
    return None


def _skipped_frames(consumer: Consumer, stream: Stream) -> int:
    """The frames that a consumer skips on purpose are no lag."""
    if consumer.mode is not Mode.RATE_LIMITED or not consumer.max_rate_hz:
        return 0
    return 2 * math.ceil((stream.seq_counter.rate_hz() or 0.0) / consumer.max_rate_hz)


def _has_obeyed(case: _Case, consumer: Consumer) -> bool:
    """A mode is reported with QoS; a consumer that was redirected reports none: there the ConsumerConfig counts."""
    rule = case.rule
    if rule.fallback_uri:
        return consumer.config is not None and not consumer.config[0]
    is_reported = consumer.qos_ns is not None and consumer.qos_ns > case.sent_ns
    return is_reported and consumer.mode is Mode[rule.mode]


def _config(consumer: Consumer, mode: Mode, fallback_uri: str) -> ConsumerConfig:
    descriptor_channel, descriptor_id, control_channel, control_id = consumer.assigned or ("", 0, "", 0)
    return ConsumerConfig(
        stream_id=consumer.stream_id,
        consumer_id=consumer.consumer_id,
        use_shm=not fallback_uri,
        mode=mode,
        descriptor_stream_id=descriptor_id,
        control_stream_id=control_id,
        payload_fallback_uri=fallback_uri,
        descriptor_channel=descriptor_channel,
        control_channel=control_channel,
    )


def _order(rule: RuleConfig) -> str:
    return f"no shared memory, fallback {rule.fallback_uri}" if rule.fallback_uri else f"set to {rule.mode}"
