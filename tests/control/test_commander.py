# SPDX-License-Identifier: Apache-2.0
"""A commander: echo, then result; and an error for each way in which a command can come to nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from tensorpool import aeron
from tensorpool.control import (
    Commander,
    CommandError,
    CommandFailed,
    CommandRejected,
    CommandUnanswered,
    CommandUnfinished,
    ControlConfig,
    Ref,
    Service,
    ServiceAgent,
    add_common_commands,
)
from tensorpool.errors import ConfigError, LocalProtocolError
from tensorpool.wire import decode
from tensorpool.wire.event import EventMessage, Format
from tests.control.peer import new_endpoints
from tests.support.processes import wait_until

TAG = "service:recorder:lab1"
LONG = 30.0  # seconds that no test waits for


class Liar:
    """A service that says what a test tells it to: `answers` maps a command to the bytes that follow it."""

    def __init__(self, client: aeron.Client, config: ControlConfig) -> None:
        self.commands: list[EventMessage] = []
        self._status = client.add_publication(config.status_channel, config.status_stream_id)
        self._control = client.add_subscription(config.control_channel, config.control_stream_id)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def answers(self, command: EventMessage) -> list[EventMessage]:
        def event(key: str, correlation_id: int, value: bytes = b"") -> EventMessage:
            return EventMessage(
                timestamp_ns=0, correlation_id=correlation_id, format=Format.STRING, tag=TAG, key=key, value=value
            )

        number = command.correlation_id
        match command.key:
            case "echo-only":
                return [command]
            case "forged":  # answers of others, a result without an echo, an echo that is almost one
                other = event("forged", number)
                return [event("result:forged", number + 1), event("result:forged", number), other]
            case "late":
                return [event("result:late", number, b"early"), event("rejected:late", number + 1), command,
                        event("rejected:late", number), event("result:other", number, b"other"),
                        event("result:late", number, b"right"), event("result:late", number, b"second")]  # fmt: skip
        return []

    def _run(self) -> None:
        def on_message(data: bytes, info: aeron.MessageInfo) -> None:
            command = decode(data)
            assert isinstance(command, EventMessage)
            self.commands.append(command)
            for answer in self.answers(command):
                self._status.offer(answer.encode())
            self._status.offer(b"\x01")
            self._status.offer(bytes(24))

        while not self._ended.wait(0.001):
            self._control.poll(on_message, 10)


@pytest.fixture
def config() -> ControlConfig:
    return ControlConfig(**new_endpoints())


@pytest.fixture
def client(shared_media_driver: aeron.MediaDriver) -> Iterator[aeron.Client]:
    client = aeron.connect(shared_media_driver.aeron_dir)
    yield client
    client.close()


@pytest.fixture
def service(shared_media_driver: aeron.MediaDriver, config: ControlConfig) -> Iterator[Service]:
    """A service on a thread, with a connection of its own."""
    service = Service("recorder", "lab1", config=config)
    add_common_commands(service, status=lambda: {"frames": 3}, drain=lambda: None)

    @service.command("fail")
    def fail() -> None:
        raise ConfigError("gain", 7, "1 to 5")

    @service.command("point")
    def point(ref: Ref) -> Ref:
        return ref

    with aeron.AgentRunner(ServiceAgent(service, shared_media_driver.aeron_dir), aeron.SleepingIdle()):
        yield service


def test_the_result_comes_behind_the_echo(client: aeron.Client, config: ControlConfig, service: Service) -> None:
    """With its value, and who answered; commands that fail or are not accepted say so in the service's words."""
    commander = Commander(client, config)
    outcome = commander.send(TAG, "ping", timeout=LONG)
    assert (outcome.value, outcome.is_accepted, outcome.service) == ("pong", True, TAG)
    assert commander.send(TAG, "status", timeout=LONG).json["frames"] == 3
    assert commander.send(TAG, "point", Ref(1, 2, 3), timeout=LONG).value == Ref(1, 2, 3)
    echoed = commander.send(TAG, "ping", timeout=LONG, until="echo")
    assert echoed.is_accepted
    assert commander.send(TAG, "ping", timeout=LONG, until="sent").correlation_id != echoed.correlation_id
    with pytest.raises(CommandFailed, match="accepted, then failed: gain = 7 is not usable; accepted: 1 to 5"):
        commander.send(TAG, "fail", timeout=LONG)
    with pytest.raises(CommandRejected, match="not accepted: ping takes no value; this is INT8 7") as rejected:
        commander.send(TAG, "ping", 7, timeout=LONG, format=Format.INT8)
    assert (rejected.value.tag, rejected.value.key) == (TAG, "ping")
    with pytest.raises(LocalProtocolError):
        commander.send(TAG, "ping", 7, format=Format.STRING)
    with pytest.raises(LocalProtocolError, match="the control stream takes"):
        commander.send(TAG, "ping", b"x" * (1 << 20))
    with pytest.raises(ConfigError):
        commander.send("service recorder", "ping")
    with pytest.raises(LocalProtocolError):
        commander.send(TAG, "pïng")
    commander.close()


def test_a_command_without_an_answer_is_an_error(client: aeron.Client, config: ControlConfig, service: Service) -> None:
    """The error names the services that are alive, or says that there is no subscriber."""
    commander = Commander(client, config)

    def knows_who_is_alive() -> bool:
        with pytest.raises(CommandUnanswered) as unanswered:
            commander.send("service:recorder:lab2", "ping", timeout=0.05)
        return f"no answer: waited 0.05 s; alive are {TAG}" in str(unanswered.value)

    wait_until(knows_who_is_alive, "the error names those who live")
    lonely = Commander(client, ControlConfig(**new_endpoints()))
    with pytest.raises(CommandUnanswered, match=r"no service subscribes to the control stream \d+ of aeron:ipc"):
        lonely.send(TAG, "ping", timeout=0.05)


def test_a_command_that_names_no_timeout_waits_as_configured(client: aeron.Client, config: ControlConfig) -> None:
    """`control.command_timeout_ms`."""
    commander = Commander(client, msgspec.structs.replace(config, command_timeout_ms=60))
    started = time.monotonic()
    with pytest.raises(CommandUnanswered):
        commander.send("service:recorder:lab2", "ping")
    assert 0.06 <= time.monotonic() - started < 10  # its configuration says a minute


def test_lies_are_no_answers(client: aeron.Client, config: ControlConfig) -> None:
    """Old, foreign and forged events are passed over: what counts is the very command, and then its own result."""
    liar = Liar(client, config)
    try:
        commander = Commander(client, config)
        wait_until(lambda: stays_unfinished(commander), "it is accepted, and no result comes")
        assert commander.send(TAG, "echo-only", timeout=LONG, until="echo").is_accepted
        with pytest.raises(CommandUnanswered):
            commander.send(TAG, "forged", timeout=0.2)
        assert commander.send(TAG, "late", timeout=LONG).value == "right"
    finally:
        liar.close()
    numbers = [command.correlation_id for command in liar.commands]
    assert len(set(numbers)) == len(numbers)


def stays_unfinished(commander: Commander) -> bool:
    """Whether a command was accepted and then timed out; a slow machine may not even see its echo in time."""
    with pytest.raises((CommandUnfinished, CommandUnanswered)) as late:
        commander.send(TAG, "echo-only", timeout=0.2)
    return "accepted, no result yet: waited 0.2 s" in str(late.value)


def test_many_command_at_once(
    client: aeron.Client, shared_media_driver: aeron.MediaDriver, config: ControlConfig, service: Service
) -> None:
    """Several commanders, and several threads through one: each gets its own answer."""
    other = aeron.connect(shared_media_driver.aeron_dir)
    commanders = [Commander(client, config), Commander(other, config)]
    wrong: list[object] = []

    def ask(commander: Commander, first: int) -> None:
        for seq in range(first, first + 8):
            try:
                found = commander.send(TAG, "point", Ref(1, 2, seq), timeout=LONG)
            except CommandError as error:
                wrong.append(error)
                continue
            if found.value != Ref(1, 2, seq):
                wrong.append(found)

    threads = [
        threading.Thread(target=ask, args=(commander, 1000 * index)) for index, commander in enumerate(commanders * 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other.close()
    assert wrong == []
