# SPDX-License-Identifier: Apache-2.0
"""Channels as the bridge opens them: what the configuration says, with what it leaves open filled in.

Wire §15.11; Bridge §5.2, §10; decision G1.
"""

from __future__ import annotations

from tensorpool.bridge.config import BridgeSection
from tensorpool.channel import check_channel

_ALIGNMENT_BYTES = 32  # of an MTU


def listening(channel: str) -> str:
    """For a local subscription: on IPC we let ourselves be passed over, so that no publisher ever waits for us."""
    if check_channel("channel", channel).media != "ipc":
        return channel
    return _with(channel, "tether", "false")


def carrying(section: BridgeSection) -> str:
    """For the publication of chunks: with room for them in one datagram, where the channel itself names no MTU."""
    mtu_bytes = -(-section.mtu_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return _with(section.payload_channel, "mtu", str(mtu_bytes))


def _with(channel: str, name: str, value: str) -> str:
    """With a parameter that the channel does not set itself."""
    if name in check_channel("channel", channel).parameters:
        return channel
    return f"{channel}{'|' if '?' in channel else '?'}{name}={value}"


def telling(channel: str, term: str) -> str:
    """For a local publication with a log of its own: on IPC whoever stops reading it is passed over soon."""
    uri = check_channel("channel", channel)
    if uri.media != "ipc":
        return channel
    parameters = {"untethered-window-limit-timeout": "100ms"} | dict(uri.parameters) | {"term-length": term}
    return "aeron:ipc?" + "|".join(f"{name}={value}" for name, value in parameters.items())


def hearing(channel: str) -> str:
    """For a subscription over the network: room for what arrives while this host does something else.

    With Aeron's own 128 KiB the sender waits for us all the time. The kernel books a datagram with up to twice its
    bytes (one of 8 KiB takes 16): the socket gets twice the window. A kernel that allows less grants what it allows.
    """
    if check_channel("channel", channel).media != "udp":
        return channel
    return _with(_with(channel, "so-rcvbuf", "4m"), "rcv-wnd", "2m")
