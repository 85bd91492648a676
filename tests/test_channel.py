# SPDX-License-Identifier: Apache-2.0
"""Aeron channels: taken apart, refused when malformed, and agreed on where they meet."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpool.channel import Endpoint, check_channel, check_endpoints
from tensorpool.errors import ConfigError


@pytest.mark.parametrize(
    ("channel", "media", "parameters"),
    [
        ("aeron:ipc", "ipc", {}),
        ("aeron:ipc?term-length=4m", "ipc", {"term-length": "4m"}),
        ("aeron:ipc?term-length=65536|sparse=true", "ipc", {"term-length": "65536", "sparse": "true"}),
        ("aeron:ipc?alias=a=b", "ipc", {"alias": "a=b"}),
        ("aeron:udp?endpoint=[::1]:40123|mtu=8K", "udp", {"endpoint": "[::1]:40123", "mtu": "8K"}),
        ("aeron:udp?control=h:1|control-mode=dynamic", "udp", {"control": "h:1", "control-mode": "dynamic"}),
        ("aeron:udp?control-mode=manual", "udp", {"control-mode": "manual"}),
        ("aeron:ipc?of-the-future=1", "ipc", {"of-the-future": "1"}),
    ],
)
def test_a_channel_is_taken_apart(channel: str, media: str, parameters: dict[str, str]) -> None:
    """Media and parameters; parameters that Aeron does not know pass."""
    uri = check_channel("k", channel)
    assert (uri.media, uri.parameters, uri.is_spy) == (media, parameters, False)
    assert check_channel("k", f"aeron-spy:{channel}").is_spy


@pytest.mark.parametrize(
    ("channel", "accepted"),
    [
        ("", "an Aeron URI"),
        ("ipc", "an Aeron URI"),
        ("aeron", "an Aeron URI"),
        ("aeron:", "an Aeron URI"),
        ("AERON:ipc", "an Aeron URI"),
        ("aeron:tcp?endpoint=h:1", "an Aeron URI"),
        ("aeron:ipc ", "an Aeron URI"),
        ("aeron:ipc\n", "an Aeron URI"),
        ("aeron:ipc?alias=a b", "an Aeron URI"),
        ("aeron:ipc?alias=ä", "an Aeron URI"),
        ("aeron:ipc;term-length=4m", "an Aeron URI"),
        ("aeron-spy:ipc", "an Aeron URI"),
        ("aeron:ipc?alias=" + "x" * 4096, "an Aeron URI"),
        ("aeron:ipc?", "name=value"),
        ("aeron:ipc?term-length", "name=value"),
        ("aeron:ipc?term-length=", "name=value"),
        ("aeron:ipc?=4m", "name=value"),
        ("aeron:ipc?term-length=4m|", "name=value"),
        ("aeron:ipc?term-length=4m||mtu=8k", "name=value"),
        ("aeron:ipc?mtu=8k|mtu=8k", "each once"),
        ("aeron:ipc?term-lenght=4m", "almost term-length"),
        ("aeron:ipc?term_length=4m", "almost term-length"),
        ("aeron:udp?endpoit=h:1", "almost endpoint"),
        ("aeron:ipc?term-length=3m", "a power of two from 64k to 1g"),
        ("aeron:ipc?term-length=32k", "a power of two from 64k to 1g"),
        ("aeron:ipc?term-length=2g", "a power of two from 64k to 1g"),
        ("aeron:ipc?term-length=0", "a power of two from 64k to 1g"),
        ("aeron:ipc?term-length=4mb", "a power of two from 64k to 1g"),
        ("aeron:ipc?mtu=1400", "a multiple of 32"),
        ("aeron:ipc?mtu=64k", "a multiple of 32"),
        ("aeron:ipc?mtu=0", "a multiple of 32"),
        ("aeron:udp", "endpoint=host:port"),
        ("aeron:udp?mtu=8k", "endpoint=host:port"),
    ],
)
def test_a_malformed_channel_is_refused(channel: str, accepted: str) -> None:
    """With the key, the channel and what is wrong with it."""
    with pytest.raises(ConfigError) as caught:
        check_channel("relay.channel", channel)
    assert (caught.value.key, caught.value.value) == ("relay.channel", channel)
    assert accepted in caught.value.accepted


@given(st.text(alphabet="aeronipcudp:?|=-4mk", max_size=30) | st.text())
def test_any_text_is_a_channel_or_a_config_error(text: str) -> None:
    """The parser has no third outcome."""
    for channel in (text, f"aeron:ipc?{text}"):
        with contextlib.suppress(ConfigError):
            uri = check_channel("k", channel)
            rebuilt = "|".join(f"{name}={value}" for name, value in uri.parameters.items())
            assert channel.endswith(f"aeron:{uri.media}?{rebuilt}" if rebuilt else f"aeron:{uri.media}")


@pytest.mark.parametrize(
    ("one", "other", "is_refused"),
    [
        ("aeron:ipc?term-length=4m", "aeron:ipc?term-length=4m", False),
        ("aeron:ipc?term-length=4m", "aeron:ipc?term-length=4096k", False),
        ("aeron:ipc?term-length=4m|mtu=8k", "aeron:ipc?mtu=8192|term-length=4M", False),
        ("aeron:ipc?term-length=4m|alias=a", "aeron:ipc?term-length=4m|alias=b", False),
        ("aeron:ipc?term-length=4m", "aeron:ipc?term-length=1m", True),
        ("aeron:ipc?term-length=4m", "aeron:ipc", True),
        ("aeron:ipc?mtu=8k", "aeron:ipc?mtu=4k", True),
        ("aeron:ipc", "aeron:udp?endpoint=h:1", False),
        ("aeron:udp?endpoint=h:1|mtu=8k", "aeron:udp?endpoint=h:2", False),
        ("aeron:udp?endpoint=h:1|mtu=8k", "aeron:udp?endpoint=h:1", True),
        ("aeron:ipc?term-length=4m", "aeron-spy:aeron:ipc", False),
    ],
)
def test_channels_that_meet_on_a_stream_id_must_agree(one: str, other: str, is_refused: bool) -> None:
    """In what shapes the log, however it is written; apart by media, address or id, each may do as it likes."""
    check_endpoints({"a": Endpoint(one, 1), "b": Endpoint(other, 2)})
    if not is_refused:
        check_endpoints({"a": Endpoint(one, 1), "b": Endpoint(other, 1)})
        return
    with pytest.raises(ConfigError) as caught:
        check_endpoints({"a": Endpoint(one, 1), "b": Endpoint(other, 1)})
    assert (caught.value.key, caught.value.value) == ("b", other)
    assert "the parameters of a" in caught.value.accepted


@pytest.mark.parametrize(
    "channel", ["aeron:ipc", "aeron:ipc?alias=a=b|term-length=4m", "aeron-spy:aeron:udp?endpoint=h:1|mtu=8k"]
)
def test_a_channel_is_written_as_it_was_read(channel: str) -> None:
    """Parameters stay in their order."""
    assert str(check_channel("k", channel)) == channel


def test_parameters_are_replaced_added_or_kept() -> None:
    """`with_parameters` decides over the channel, `with_defaults` the channel over them; the original stays."""
    uri = check_channel("k", "aeron:ipc?term-length=4m|alias=x")
    assert str(uri.with_parameters({"term-length": "64k", "mtu": "8k"})) == "aeron:ipc?term-length=64k|alias=x|mtu=8k"
    assert uri.with_defaults({"term-length": "64k", "mtu": "8k"}).parameters == {
        "term-length": "4m",
        "alias": "x",
        "mtu": "8k",
    }
    assert str(uri.with_only(("alias", "ttl", "term-length"))) == "aeron:ipc?alias=x|term-length=4m"
    assert str(uri.with_only(())) == "aeron:ipc"
    assert str(uri) == "aeron:ipc?term-length=4m|alias=x"


def test_a_channel_may_decide_itself_whether_aeron_skips_it() -> None:
    """On any media."""
    assert check_channel("k", "aeron:ipc").for_subscription().parameters == {"tether": "false"}
    udp = check_channel("k", "aeron:udp?endpoint=h:1|tether=true")
    assert udp.for_subscription() == udp


def test_only_logs_over_ipc_are_sized_and_freed_early() -> None:
    """A channel's own time limit stays, its size does not."""
    uri = check_channel("k", "aeron:ipc?term-length=4m|untethered-window-limit-timeout=1s")
    assert uri.for_publication().parameters == uri.parameters
    assert uri.for_publication("64k").parameters == {**uri.parameters, "term-length": "64k"}
    assert check_channel("k", "aeron:ipc").for_publication("64k").parameters == {
        "term-length": "64k",
        "untethered-window-limit-timeout": "100ms",
    }
    udp = check_channel("k", "aeron:udp?endpoint=h:1")
    assert udp.for_publication("64k") == udp
