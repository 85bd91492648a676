# SPDX-License-Identifier: Apache-2.0
"""The driver's decisions in words: effects by kind and order, and the messages in them."""

from __future__ import annotations

from typing import Any

from tensorpool.driver.effects import Announce, CreateEpoch, DropStream, Effect, Exit, Report, Send
from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.wire.control import ConsumerConfig
from tensorpool.wire.driver import (
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachResponse,
    ShmDetachResponse,
    ShmDriverShutdown,
    ShmLeaseRevoked,
)
from tests.driver.conftest import FRONT, attach, created, serving

CREATE = PublishMode.EXISTING_OR_CREATE


def outline(effects: list[Effect]) -> list[str]:
    """Effects in words, in their order."""
    return [_in_words(effect) for effect in effects]


def _in_words(effect: Effect) -> str:
    match effect:
        case Announce(stream_id):
            return f"announce {stream_id}"
        case CreateEpoch(stream_id, _, reserve):
            return f"create {stream_id}" + (" for a producer" if reserve else "")
        case DropStream(stream_id):
            return f"drop {stream_id}"
        case Report(correlation_id):
            return f"report {correlation_id}"
        case Exit():
            return "exit"
        case Send(ShmAttachResponse(code=code)):
            return f"attach {code.name}"
        case Send(ShmDetachResponse(code=code)):
            return f"detach {code.name}"
        case Send(ShmLeaseRevoked() as notice):
            return f"revoked {notice.lease_id} {notice.reason.name}"
        case Send(ShmDriverShutdown(reason=reason)):
            return f"shutdown {reason.name}"
        case Send(ConsumerConfig() as answer):
            return f"ids {answer.descriptor_stream_id} {answer.control_stream_id}"
    raise AssertionError(effect)


def message_of(effect: Effect) -> Any:
    assert isinstance(effect, Send)
    return effect.message


def only_message(effects: list[Effect]) -> Any:
    """The message of the one effect there is."""
    (effect,) = effects
    return message_of(effect)


def refusal(effects: list[Effect]) -> tuple[ResponseCode, str]:
    """Code and text of the one answer, which carries nothing else (§4.2)."""
    answer = only_message(effects)
    assert isinstance(answer, ShmAttachResponse)
    assert answer == ShmAttachResponse(
        correlation_id=answer.correlation_id, code=answer.code, error_message=answer.error_message
    )
    return answer.code, answer.error_message


def with_producer(client_id: int = 7, *, now_ns: int = 0, epoch: int = 2) -> Lifecycle:
    """A driver whose stream FRONT has a producer, lease 500."""
    lifecycle = serving(now_ns=now_ns)
    lifecycle.on_attach(attach(client_id, role=Role.PRODUCER), now_ns)
    created(lifecycle, FRONT, epoch, now_ns, reserved=True)
    return lifecycle
