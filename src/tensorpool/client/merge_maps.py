# SPDX-License-Identifier: Apache-2.0
"""The rules of a join, as they are announced and asked for on the control stream (schema 903).

A frame of an input, with the seq or time k, belongs to the output o where k + offset lies within `window` before o. So
equal seqs have no window, times within a tolerance have it as the window of every input, and what others announce as
OFFSET and WINDOW rules is either. Holds no clock and does no IO.
"""

from __future__ import annotations

import threading
from typing import Any, Final, Literal

import msgspec

from tensorpool.errors import LocalProtocolError, RemoteProtocolError, TensorPoolError
from tensorpool.wire.merge import (
    ClockDomain,
    Rule,
    SequenceMergeMapAnnounce,
    SequenceMergeMapRequest,
    SequenceRuleType,
    TimeRule,
    TimestampMergeMapAnnounce,
    TimestampMergeMapRequest,
    TimestampRuleType,
    TimestampSource,
)

MAX_INPUTS: Final = 256

type MergeMapAnnounce = SequenceMergeMapAnnounce | TimestampMergeMapAnnounce
type MergeMapRequest = SequenceMergeMapRequest | TimestampMergeMapRequest


class MergeRule(msgspec.Struct, frozen=True, kw_only=True):
    """Of one input, in seqs or nanoseconds."""

    stream_id: int
    offset: int = 0  # added to its seqs or times
    window: int = 0  # how far behind the output they may be then
    source: TimestampSource = TimestampSource.SLOT_HEADER


class MergeMap(msgspec.Struct, frozen=True, kw_only=True):
    """Of all inputs. `timeout_ns`: how long a frame waits for its partners; None: for as long as it takes."""

    by: Literal["seq", "time"]
    rules: tuple[MergeRule, ...]
    timeout_ns: int | None = None
    clock_domain: ClockDomain = ClockDomain.REALTIME_SYNCED  # of by="time"

    def announce(self, out_stream_id: int, epoch: int) -> MergeMapAnnounce:
        """As a message about this epoch of the joined stream. Raises LocalProtocolError for what no rule can say."""
        if len({rule.stream_id for rule in self.rules}) < len(self.rules):
            raise LocalProtocolError("merge map: two of the inputs are the same stream")
        common: dict[str, Any] = {
            "out_stream_id": out_stream_id,
            "epoch": epoch,
            "stale_timeout_ns": self.timeout_ns,
        }
        if self.by == "seq":
            message: MergeMapAnnounce = SequenceMergeMapAnnounce(**common, rules=tuple(map(_seq_rule, self.rules)))
        else:
            windows = {rule.window for rule in self.rules}
            lateness = windows.pop() if len(windows) == 1 else 0
            message = TimestampMergeMapAnnounce(
                **common,
                clock_domain=self.clock_domain,
                lateness_ns=lateness or None,
                time_rules=tuple(_time_rule(rule, lateness) for rule in self.rules),
            )
        message.encode()  # an offset may have too many bits
        return message

    @classmethod
    def read(cls, message: MergeMapAnnounce) -> MergeMap:
        """What a message says. Raises RemoteProtocolError for rules that break the rules."""
        if isinstance(message, SequenceMergeMapAnnounce):
            rules = tuple(map(_read_seq_rule, message.rules))
            read = cls(by="seq", rules=rules, timeout_ns=message.stale_timeout_ns)
        else:
            rules = tuple(_read_time_rule(rule, message.lateness_ns or 0) for rule in message.time_rules)
            domain = message.clock_domain
            read = cls(by="time", rules=rules, timeout_ns=message.stale_timeout_ns, clock_domain=domain)
            if domain is not ClockDomain.MONOTONIC and any(
                rule.source is TimestampSource.FRAME_DESCRIPTOR for rule in rules
            ):
                raise RemoteProtocolError("merge map: times of descriptors are monotonic, and its clock is not")
        ids = [rule.stream_id for rule in rules]
        if not 2 <= len(set(ids)) == len(ids) <= MAX_INPUTS:
            text = f"merge map: {len(ids)} rules for {len(set(ids))} inputs, expected one each for 2 to {MAX_INPUTS}"
            raise RemoteProtocolError(text)
        return read

    def for_streams(self, stream_ids: list[int]) -> tuple[MergeRule, ...]:
        """The rules in the order of these inputs. Raises LocalProtocolError where they are not the map's inputs."""
        rules = {rule.stream_id: rule for rule in self.rules}
        if rules.keys() != set(stream_ids):
            wanted, found = (", ".join(map(str, sorted(ids))) for ids in (rules, stream_ids))
            raise LocalProtocolError(f"the merge map joins the streams {wanted}; the consumers read {found}")
        return tuple(rules[stream_id] for stream_id in stream_ids)


class MergeMapQuery:
    """Asks for the map of a joined stream, once its driver has announced which epoch that has."""

    is_closed = False

    def __init__(self, out_stream_id: int) -> None:
        self.out_stream_id: Final = out_stream_id
        self.epoch: int | None = None
        self.merge_map: MergeMap | None = None
        self.failure: TensorPoolError | None = None
        self.changed: Final = threading.Condition()

    @property
    def is_done(self) -> bool:
        return self.merge_map is not None

    def on_pool_announce(self, epoch: int) -> list[MergeMapRequest]:
        """The stream has this epoch: what to send."""
        self.epoch = epoch
        names = {"out_stream_id": self.out_stream_id, "epoch": epoch}
        return [] if self.is_done else [SequenceMergeMapRequest(**names), TimestampMergeMapRequest(**names)]

    def on_announce(self, message: MergeMapAnnounce) -> None:
        """A map; of another epoch it says nothing, and one that cannot be used may be replaced in time."""
        if (message.out_stream_id, message.epoch) != (self.out_stream_id, self.epoch):
            return
        try:
            merge_map = MergeMap.read(message)
        except RemoteProtocolError as error:
            self.failure = error
            return
        with self.changed:
            self.merge_map = merge_map
            self.changed.notify_all()


def _seq_rule(rule: MergeRule) -> Rule:
    if rule.window == 0:
        return Rule(input_stream_id=rule.stream_id, rule_type=SequenceRuleType.OFFSET, offset=-rule.offset)
    _check_one_parameter(rule)
    window_size = rule.window + 1
    return Rule(input_stream_id=rule.stream_id, rule_type=SequenceRuleType.WINDOW, window_size=window_size)


def _time_rule(rule: MergeRule, lateness_ns: int) -> TimeRule:
    common: dict[str, Any] = {"input_stream_id": rule.stream_id, "timestamp_source": rule.source}
    if rule.window == lateness_ns:
        return TimeRule(**common, rule_type=TimestampRuleType.OFFSET_NS, offset_ns=-rule.offset)
    _check_one_parameter(rule)
    return TimeRule(**common, rule_type=TimestampRuleType.WINDOW_NS, window_ns=rule.window)


def _check_one_parameter(rule: MergeRule) -> None:
    if rule.offset:
        text = "a rule carries an offset or a window, not both"
        raise LocalProtocolError(f"merge map: stream {rule.stream_id} has an offset and a window; {text}")


def _read_seq_rule(rule: Rule) -> MergeRule:
    is_window = rule.rule_type is SequenceRuleType.WINDOW
    _check_pair(rule.input_stream_id, is_window, rule.offset, rule.window_size)
    if is_window:
        return MergeRule(stream_id=rule.input_stream_id, window=(rule.window_size or 1) - 1)
    return MergeRule(stream_id=rule.input_stream_id, offset=-(rule.offset or 0))


def _read_time_rule(rule: TimeRule, lateness_ns: int) -> MergeRule:
    is_window = rule.rule_type is TimestampRuleType.WINDOW_NS
    _check_pair(rule.input_stream_id, is_window, rule.offset_ns, rule.window_ns)
    source = rule.timestamp_source
    if is_window:
        return MergeRule(stream_id=rule.input_stream_id, window=rule.window_ns or 0, source=source)
    offset = -(rule.offset_ns or 0)
    return MergeRule(stream_id=rule.input_stream_id, offset=offset, window=lateness_ns, source=source)


def _check_pair(stream_id: int, is_window: bool, offset: int | None, window: int | None) -> None:
    """Exactly the parameter of its type; a window is positive."""
    if (offset is None) is not is_window or (window is None) is is_window or window == 0:
        kind = "a positive window and no offset" if is_window else "an offset and no window"
        raise RemoteProtocolError(f"merge map: the rule of stream {stream_id} needs {kind}")
