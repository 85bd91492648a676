# SPDX-License-Identifier: Apache-2.0
"""WebSockets against anything: random texts and bytes, extreme looks. The console answers, and other pages go on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed, InvalidStatus

import tensorpool as tp
from tensorpool.console.messages import MAX_BYTES, MessageRate, read
from tensorpool.console.server import Console
from tensorpool.console.sockets import MAX_SOCKETS
from tests.console.conftest import Camera, noise
from tests.console.page import Preview, Site
from tests.levels import SOAK
from tests.support.processes import wait_until

WHOLE = st.integers(-(2**70), 2**70) | st.sampled_from([0, 1, -1, 2**31, 2**32, 2**63, 4095, 4096])
NUMBER = WHOLE | st.floats()
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KINDS = ["look", "ack", "pause", "resume", "step", "pixel", "profile", "histogram", "other"]
LOOK = st.fixed_dictionaries(
    {},
    optional={
        "width": WHOLE,
        "height": WHOLE,
        "colormap": st.sampled_from(["gray", "viridis", "turbo", "none"]),
        "scale": st.sampled_from(["auto", "full", "minmax", "percentile", "fixed", "log"]),
        "low": st.none() | NUMBER,
        "high": st.none() | NUMBER,
        "index": st.lists(WHOLE, max_size=4),
        "region": st.none() | st.lists(WHOLE, min_size=4, max_size=4),
        "lossless": st.booleans(),
    },
)
# Looks that pass the checks, as extreme as they can be.
GOOD_LOOK = st.fixed_dictionaries(
    {},
    optional={
        "width": st.integers(1, 4096),
        "height": st.integers(1, 4096),
        "colormap": st.sampled_from(["gray", "viridis", "magma", "cividis", "turbo"]),
        "scale": st.sampled_from(["auto", "full", "minmax", "percentile"]),
        "index": st.lists(st.integers(0, 2**70), max_size=2),
        "region": st.none()
        | st.tuples(*[st.integers(0, 2**70)] * 2, *[st.integers(1, 2**70)] * 2)
        | st.tuples(*[st.integers(0, 20)] * 2, *[st.integers(1, 30)] * 2),
        "lossless": st.booleans(),
    },
)
COMMAND = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional={
        "look": LOOK | JSON,
        "number": WHOLE | JSON,
        "x": WHOLE,
        "y": WHOLE,
        "x0": NUMBER,
        "y0": NUMBER,
        "x1": NUMBER,
        "y1": NUMBER,
        "on": st.booleans() | JSON,
    },
)
MESSAGE = st.one_of(
    st.text(max_size=200),
    st.binary(max_size=200),
    JSON.map(json.dumps),
    COMMAND.map(json.dumps),
    GOOD_LOOK.map(lambda look: json.dumps({"type": "look", "look": look})),
)
NO_FRAME = "there is no frame to read values from"
quick = settings(max_examples=40 * SOAK, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def watched(client: tp.Client) -> Iterator[Camera]:
    camera = Camera(client, "console/fuzzed", noise((4, 20, 30)), 60.0)
    yield camera
    camera.close()


@pytest.fixture(scope="module")
def hostile(console: Console, watched: Camera) -> Iterator[Preview]:
    """A page that sends anything, from one example to the next."""
    with Site.of(console).watch(watched.stream_id) as preview:
        preview.picture()
        yield preview


@pytest.fixture(scope="module")
def beside(console: Console, watched: Camera) -> Iterator[Preview]:
    """A page of the same stream that behaves."""
    with Site.of(console).watch(watched.stream_id) as preview:
        yield preview


@quick
@given(st.lists(MESSAGE, min_size=1, max_size=5))
def test_whatever_a_page_sends_is_answered_and_others_go_on(
    hostile: Preview, beside: Preview, sent: list[str | bytes]
) -> None:
    """It gets a picture or the reason why not; the socket stays open, and the page beside it gets its pictures."""
    for message in sent:
        hostile.socket.send(message)
    hostile.say(type="resume")
    hostile.look(width=8)
    hostile.say(type="pixel", x=0, y=0)
    while not isinstance(found := hostile.receive(), dict) or found["type"] != "pixel":
        if not isinstance(found, dict):
            hostile.say(type="ack", number=found[0]["number"])
        elif found.get("text") == NO_FRAME:  # overwritten while it was read, beside a busy neighbour
            hostile.say(type="pixel", x=0, y=0)
    beside.picture()


@settings(max_examples=300 * SOAK)
@given(st.text() | st.binary() | COMMAND.map(json.dumps) | JSON.map(json.dumps))
def test_a_message_is_read_or_refused(text: str | bytes) -> None:
    """ValueError with a sentence, and no other error."""
    with contextlib.suppress(ValueError):
        read(text)


@quick
@given(GOOD_LOOK)
def test_extreme_looks_get_a_picture_or_a_sentence(hostile: Preview, look: dict[str, Any]) -> None:
    """Neither a crash nor silence, whatever part of the array they ask for."""
    hostile.say(type="resume")
    hostile.look(**look)
    hostile.say(type="pixel", x=1, y=1)  # answered after the look was taken
    while not isinstance(found := hostile.receive(), dict) or found["type"] not in ("pixel", "error"):
        if not isinstance(found, dict):
            hostile.say(type="ack", number=found[0]["number"])
    found = hostile.receive()
    if isinstance(found, dict):
        assert found["type"] in ("status", "error"), found
        assert "look." in found["text"]
    else:
        hostile.say(type="ack", number=found[0]["number"])


def test_a_message_that_is_too_long_ends_its_socket_alone(site: Site, watched: Camera, beside: Preview) -> None:
    """1009 for its sender."""
    with site.watch(watched.stream_id) as preview:
        preview.socket.send("x" * (MAX_BYTES + 1))
        assert close_code(preview.receive) == 1009
    beside.picture()


def close_code(act: Callable[[], object]) -> int | None:
    """Of a socket that the console closes meanwhile."""
    try:
        while True:
            act()
    except ConnectionClosed as closed:
        return None if closed.rcvd is None else closed.rcvd.code


@pytest.mark.parametrize("path", ["/ws/state", "/ws/preview/{}"])
def test_a_page_that_sends_too_many_messages_is_cut_off(
    site: Site, watched: Camera, beside: Preview, path: str
) -> None:
    """1008 for its sender; the console stays as it is."""
    with site.socket(path.format(watched.stream_id)) as socket:
        assert close_code(lambda: socket.send('{"type":"ack","number":0}')) == 1008
    beside.picture()


def test_a_page_that_points_and_acknowledges_sends_few_enough() -> None:
    """Sixty pointer moves and fifteen acks a second, for a minute."""
    rate = MessageRate()
    assert all(rate.is_kept(at * 1_000_000_000 // 75) for at in range(75 * 60))
    assert not all(rate.is_kept(60_000_000_000 + at * 1_000_000) for at in range(1000))


def test_sockets_are_limited(site: Site) -> None:
    """One more than the limit is refused with 503; when one is closed there is room again."""
    with contextlib.ExitStack() as stack:
        codes: list[int] = []
        for _ in range(MAX_SOCKETS + 1):
            try:
                stack.enter_context(site.socket("/ws/state"))
            except InvalidStatus as refused:
                codes.append(refused.response.status_code)
        assert set(codes) == {503}

    def is_room() -> bool:
        with contextlib.suppress(InvalidStatus), site.socket("/ws/state"):
            return True
        return False

    wait_until(is_room, "there is room again")


@pytest.mark.parametrize("stream_id", ["0", "4294967295", "99999999999999999999"])
def test_what_is_no_stream_id_opens_no_preview(site: Site, stream_id: str) -> None:
    """404 before the upgrade."""
    with pytest.raises(InvalidStatus) as refused, site.socket(f"/ws/preview/{stream_id}"):
        pass
    assert refused.value.response.status_code == 404
