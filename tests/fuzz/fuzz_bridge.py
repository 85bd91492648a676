# SPDX-License-Identifier: Apache-2.0
"""Fuzz target for what arrives at a bridge: `fuzz_bridge.py [libFuzzer options] [corpus]`.

An input is a schedule of datagrams: each begins with a length and an edit script, so that the fuzzer reaches the
assembler with chunks that are almost good. Whatever comes, nothing crashes, memory stays bounded, and every frame that
is published is one that a consumer accepts.
"""

from __future__ import annotations

import sys

import atheris

from tests.bridge.frames import EPOCH, POOLS, Receiving, chunks_of

PAYLOAD = bytes(range(256)) * 12
MAX_INFLIGHT = 3
GOOD = [message for seq in range(6) for message in chunks_of(seq, PAYLOAD[: 500 * seq], [400, 300, 700])]


def feed(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    receiving = Receiving(max_inflight=MAX_INFLIGHT)
    while provider.remaining_bytes() > 0:
        kind = provider.ConsumeIntInRange(0, 9)
        if kind == 0:
            receiving.take(provider.ConsumeBytes(provider.ConsumeIntInRange(0, 400)))
        elif kind == 1:
            receiving.wait(provider.ConsumeIntInRange(0, 300_000_000))
        elif kind == 2:
            receiving.assembler.set_source(EPOCH + provider.ConsumeIntInRange(0, 1), POOLS)
        else:
            message = bytearray(GOOD[provider.ConsumeIntInRange(0, len(GOOD) - 1)])
            for _ in range(provider.ConsumeIntInRange(0, 2)):
                message[provider.ConsumeIntInRange(0, len(message) - 1)] = provider.ConsumeIntInRange(0, 255)
            receiving.take(bytes(message))
        assembler = receiving.assembler
        assert assembler.inflight <= MAX_INFLIGHT
        assert assembler.buffered_bytes <= MAX_INFLIGHT * max(stride for _, stride in POOLS)
        published = assembler.published
        assert published is None or receiving.ring.payload(published) is not None


def main(arguments: list[str]) -> None:
    atheris.instrument_func(feed)
    atheris.Setup(arguments, feed)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
