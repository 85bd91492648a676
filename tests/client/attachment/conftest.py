# SPDX-License-Identifier: Apache-2.0
"""A client's attachment on a bench: time passes by hand, and the effects say what it sends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tensorpool.client.attach_dialects import AttachDialects
from tensorpool.client.attachment import Attached, Attachment, AttachSpec, Effect, Lost, Send
from tensorpool.wire.attach import AttachResponse
from tensorpool.wire.driver import Role, ShmAttachRequest, ShmDetachRequest, ShmLeaseKeepalive
from tests.client.conftest import SECOND_NS, STREAM, announced, granted

T0 = 1_000 * SECOND_NS
WALL = 10**18  # the wall clock is far from the monotonic one
KEEPALIVE_NS = SECOND_NS
SILENCE_NS = 3 * SECOND_NS
LEASE_NS = 3 * SECOND_NS


class Bench:
    """An attachment, and a driver that is the test."""

    def __init__(
        self,
        spec: AttachSpec | None = None,
        role: Role = Role.CONSUMER,
        lease_ns: int = LEASE_NS,
        dialects: AttachDialects | None = None,
    ) -> None:
        self.client_ids: Iterator[int] = itertools.count(41)
        self.correlation_ids: Iterator[int] = itertools.count(901)
        self.attachment = Attachment(
            spec or AttachSpec(STREAM, role),
            new_client_id=lambda: next(self.client_ids),
            new_correlation_id=lambda: next(self.correlation_ids),
            keepalive_interval_ns=KEEPALIVE_NS,
            silence_ns=SILENCE_NS,
            lease_ns=lease_ns,
            dialects=dialects,
        )
        self.request: ShmAttachRequest | None = None

    def start(self, now_ns: int = T0) -> ShmAttachRequest:
        self.request = attach_request(self.attachment.start(now_ns))
        return self.request

    def answer(self, now_ns: int = T0, **changed: Any) -> list[Effect]:
        assert self.request is not None
        return self.attachment.on_attach_response(
            granted(self.request.correlation_id, **changed), now_ns, WALL + now_ns
        )

    def attach(self, now_ns: int = T0, *, lease_ns: int | None = LEASE_NS, **changed: Any) -> AttachResponse:
        """To ATTACHED, by the shortest way."""
        self.start(now_ns)
        expiry_ns = None if lease_ns is None else now_ns + lease_ns
        (effect,) = self.answer(now_ns, lease_expiry_timestamp_ns=expiry_ns, **changed)
        assert isinstance(effect, Attached)
        return effect.response

    def keep(self, now_ns: int) -> ShmLeaseKeepalive | None:
        """Send the keepalive that is due, if one is."""
        keepalive = self.attachment.keepalive(now_ns, now_ns)
        if keepalive is not None:
            self.attachment.on_keepalive_sent(now_ns)
        return keepalive

    def hear(self, now_ns: int, epoch: int = 5, **changed: Any) -> list[Effect]:
        producer = {"producer_id": self.attachment.client_id} if "producer_id" not in changed else {}
        return self.attachment.on_announce(announced(epoch, **producer, **changed), now_ns)


def attach_request(effects: list[Effect]) -> ShmAttachRequest:
    (effect,) = effects
    assert isinstance(effect, Send)
    assert isinstance(effect.message, ShmAttachRequest)
    return effect.message


def detach_request(effects: list[Effect]) -> ShmDetachRequest:
    effect = effects[0]
    assert isinstance(effect, Send)
    assert isinstance(effect.message, ShmDetachRequest)
    return effect.message


def lost(effects: list[Effect]) -> Lost:
    (effect,) = effects
    assert isinstance(effect, Lost)
    return effect


@pytest.fixture(params=list(Role), ids=lambda role: role.name.lower())
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(role=request.param)
