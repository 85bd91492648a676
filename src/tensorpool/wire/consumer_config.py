# SPDX-License-Identifier: Apache-2.0
"""ConsumerConfig: how a consumer is answered that asks for streams of its own, and that others limit or redirect.

The producer answers requests that name a stream id, the driver those that leave the id to it. Both follow the same
rules: an answer repeats what another process has assigned, for as long as the consumer asks for the same mode.
Wire §5, §10.1.2, §10.1.3; decisions E22-E27.
"""

from __future__ import annotations

from typing import Final

from tensorpool.channel import Endpoint
from tensorpool.wire.control import ConsumerConfig, ConsumerHello, Mode

NO_STREAM: Final = Endpoint("", 0)


def requested_streams(hello: ConsumerHello) -> tuple[Endpoint, Endpoint]:
    """The descriptor and the control stream of its own that a consumer asks for."""
    descriptors = Endpoint(hello.descriptor_channel, hello.descriptor_stream_id)
    return descriptors, Endpoint(hello.control_channel, hello.control_stream_id)


def assigned_streams(config: ConsumerConfig) -> tuple[Endpoint, Endpoint]:
    """The descriptor and the control stream of its own that a consumer is given."""
    descriptors = Endpoint(config.descriptor_channel, config.descriptor_stream_id)
    return descriptors, Endpoint(config.control_channel, config.control_stream_id)


class ConsumerTerms:
    """What a consumer asked for in its last hello, and what another process assigned to it since."""

    def __init__(self, hello: ConsumerHello | None = None) -> None:
        self.hello = hello
        self.override: ConsumerConfig | None = None  # the last that another process sent to it

    def on_hello(self, hello: ConsumerHello) -> None:
        if self.hello is not None and self.hello.mode is not hello.mode:
            self.override = None  # it applied to the previous mode
        self.hello = hello

    def max_rate_hz(self, default_hz: int) -> int:
        """The cap of its descriptor stream while RATE_LIMITED: its own, or the default where others limit it (E26)."""
        hello = self.hello
        if hello is None or self._mode(hello) is not Mode.RATE_LIMITED:
            return 0  # E27
        return hello.max_rate_hz if hello.max_rate_hz or hello.mode is Mode.RATE_LIMITED else default_hz

    def answer(
        self, descriptors: Endpoint = NO_STREAM, control: Endpoint = NO_STREAM, *, can_use_shm: bool = True
    ) -> ConsumerConfig:
        """The answer to its hello that assigns these streams to it."""
        hello, override = self.hello, self.override
        assert hello is not None, "an answer follows a hello"
        return ConsumerConfig(
            stream_id=hello.stream_id,
            consumer_id=hello.consumer_id,
            use_shm=can_use_shm and (override is None or override.use_shm),
            mode=self._mode(hello),
            descriptor_stream_id=descriptors.stream_id,
            control_stream_id=control.stream_id,
            payload_fallback_uri="" if override is None else override.payload_fallback_uri,
            descriptor_channel=descriptors.channel,
            control_channel=control.channel,
        )

    def _mode(self, hello: ConsumerHello) -> Mode:
        return hello.mode if self.override is None else self.override.mode
