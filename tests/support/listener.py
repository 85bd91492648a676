# SPDX-License-Identifier: Apache-2.0
"""A listener on the wire that keeps a transcript: every message, its bytes, its stream and its time.

What has arrived is taken while a `WireListener` waits for something; a `WireServer` has a thread for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from tensorpool import aeron
from tensorpool.wire import DecodeError, Message, decode
from tests.support.driver_process import DriverProcess
from tests.support.processes import wait_until

PROBE_EVERY_S: Final = 0.05

type Endpoint = tuple[str, int]
type Said = Message | bytes


class ReceivedMessage[M: Message](NamedTuple):
    """A message as it came over the wire."""

    message: M
    data: bytes
    received_ns: int
    index: int  # type: ignore[assignment]  # place in the transcript
    stream_id: int  # Aeron's


class DriverEnded(AssertionError):
    """The process ended instead of serving: its exit code and last output."""

    def __init__(self, code: int, output: str) -> None:
        super().__init__(code, output)
        self.code = code
        self.output = output


class WireListener:
    """Keeps the transcript of the streams in `_subscriptions`, in the order in which messages were taken.

    What does not decode is there too, with None for its message.
    """

    def __init__(self, aeron_dir: str, *, driver_timeout_ms: int = 10_000) -> None:
        self.transcript: list[ReceivedMessage[Any]] = []
        self._client = aeron.connect(aeron_dir, driver_timeout_ms=driver_timeout_ms)
        self._subscriptions: list[aeron.Subscription] = []

    def close(self) -> None:
        self._client.close()

    def listen(self, endpoint: Endpoint) -> aeron.Subscription:
        """Add a stream to the transcript."""
        self._subscriptions.append(self._client.add_subscription(*endpoint))
        return self._subscriptions[-1]

    def poll(self) -> None:
        """Take what has arrived."""
        for subscription in self._subscriptions:
            subscription.poll(self._on_message, 100)

    @property
    def now(self) -> int:
        """Where the transcript ends."""
        return len(self.transcript)

    def received[M: Message](self, kind: type[M], since: int = 0, **fields: Any) -> list[ReceivedMessage[M]]:
        """What the transcript has of a kind with these fields, from index `since` on."""
        return [received for received in self.transcript[since:] if is_like(received.message, kind, fields)]

    def wait_for[M: Message](
        self,
        kind: type[M],
        since: int = 0,
        *,
        where: Callable[[M], object] = lambda _: True,
        **fields: Any,
    ) -> ReceivedMessage[M]:
        """The first message of a kind with these fields at or after index `since` of the transcript."""
        found: list[ReceivedMessage[M]] = []
        at = since

        def is_found() -> bool:
            nonlocal at
            fresh = self.transcript[at:]
            at += len(fresh)
            found.extend(
                received for received in fresh if is_like(received.message, kind, fields) and where(received.message)
            )
            return bool(found)

        self.wait_until(is_found, f"{kind.__name__} with {fields}")
        return found[0]

    def wait_until(self, condition: Callable[..., object], what: str) -> None:
        """Listen until a condition holds."""

        def is_met() -> object:
            self.poll()
            return condition()

        wait_until(is_met, what)

    def wait_served(self, process: DriverProcess, ask: Callable[[], int], answer: type[Message], id_name: str) -> None:
        """Ask until a question is answered by its id, which `ask` returns. Raises DriverEnded."""
        next_probe_s = 0.0
        asked = set()

        def is_answered() -> bool:
            nonlocal next_probe_s
            if process.has_ended:
                raise DriverEnded(*process.finish())
            if time.monotonic() > next_probe_s:
                next_probe_s = time.monotonic() + PROBE_EVERY_S
                asked.add(ask())
            return any(getattr(received.message, id_name) in asked for received in self.received(answer))

        self.wait_until(is_answered, f"an answer comes: {answer.__name__}")

    def _on_message(self, data: bytes, info: aeron.MessageInfo) -> None:
        self.transcript.append(
            ReceivedMessage(decoded(data), data, time.monotonic_ns(), len(self.transcript), info.stream_id)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WireServer(WireListener):
    """A listener that answers: a thread serves. `wait_until` and `close` raise what ended it."""

    def __init__(self, aeron_dir: str) -> None:
        super().__init__(aeron_dir)
        self._failure: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name=type(self).__name__, daemon=True)

    def close(self) -> None:
        self._is_closing = True
        if self._thread.ident is not None:
            self._thread.join()
        super().close()
        if self._failure is not None:
            raise self._failure

    def poll(self) -> None:
        """The thread takes what arrives; here its failure comes to light."""
        assert self._failure is None, self._failure

    def _act(self) -> None:
        """What it does by itself, in each turn."""

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                self._act()
                if not sum(subscription.poll(self._on_message, 50) for subscription in self._subscriptions):
                    time.sleep(0.001)
        except BaseException as failure:
            self._failure = failure
            raise


def decoded(data: bytes) -> Any:
    """The message, or None: one of those that no codec would write."""
    try:
        return decode(data)
    except DecodeError:
        return None


def encoded(said: Said) -> bytes:
    return said if isinstance(said, bytes) else said.encode()


def is_like(message: Message | None, kind: type[Message], fields: dict[str, object]) -> bool:
    return isinstance(message, kind) and has(message, fields)


def has(message: Message, fields: dict[str, object]) -> bool:
    """Whether a message says this."""
    return all(getattr(message, name, None) == value for name, value in fields.items())
