# SPDX-License-Identifier: Apache-2.0
"""Live previews: real frames through a real console to sockets, pixel by pixel, and what they cost the pipeline."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from websockets.sync.client import connect

import tensorpool as tp
from tensorpool.console import budget
from tensorpool.console.server import Console, ConsoleOptions
from tensorpool.console.sockets import MAX_WAITING, Outbox
from tensorpool.shm.arrays import Array
from tests.console.conftest import MakeCamera, noise
from tests.console.page import Preview, Site
from tests.support.processes import wait_until


def pixels(body: bytes) -> Array:
    found: Array = np.asarray(PIL.Image.open(io.BytesIO(body)))
    return found


def console_consumers(site: Site, stream_id: int) -> list[dict[str, Any]]:
    """Of the console itself, as the state has them."""
    rows = site.get("/api/state").json["consumers"]
    return [row for row in rows if row["stream_id"] == stream_id and row["is_console"]]


@pytest.mark.parametrize("shape", [(48, 64), (48, 64, 3)], ids=["gray", "colour"])
def test_a_lossless_preview_is_the_published_frame(site: Site, camera: MakeCamera, shape: tuple[int, ...]) -> None:
    """Every pixel of every picture, of frames that are published while they are looked at."""
    one = camera(noise(shape))
    with site.watch(one.stream_id, lossless=True) as preview:
        for _ in range(5):
            header, body = preview.picture()
            assert header["media"] == "image/png"
            assert (header["stream_id"], header["shape"], header["dtype"]) == (one.stream_id, list(shape), "uint8")
            assert np.array_equal(pixels(body), one.paint(header["seq"]))


def test_a_ring_that_comes_round_while_a_picture_is_made_tears_none(site: Site, client: tp.Client) -> None:
    """Four slots, overwritten hundreds of times a second: pictures come, and each is of one frame alone."""
    is_over = threading.Event()
    with client.producer("console/fast", create=True, frame=(700, 700), slots=4) as producer:

        def publish() -> None:
            pictures = [np.full((700, 700), number, np.uint8) for number in range(16)]
            while not is_over.is_set():
                producer.publish(pictures[producer.next_seq % 16])

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            with site.watch(producer.stream_id, lossless=True) as preview:
                for _ in range(10):
                    header, body = preview.picture()
                    assert set(np.unique(pixels(body))) == {header["seq"] % 16}
        finally:
            is_over.set()
            thread.join()


def test_a_jpeg_differs_from_the_frame_by_its_own_error_only(site: Site, camera: MakeCamera) -> None:
    """A smooth picture stays within a few values."""
    rows, columns = np.mgrid[0:96, 0:128]

    def smooth(seq: int) -> Array:
        values: Array = (rows + columns + seq % 32) % 256
        return values.astype(np.uint8)

    one = camera(smooth)
    with site.watch(one.stream_id) as preview:
        header, body = preview.picture()
    assert header["media"] == "image/jpeg"
    shown, published = pixels(body).astype(int), smooth(header["seq"]).astype(int)
    assert np.abs(shown - published).max() <= 8


def test_pictures_have_the_newest_frame_and_say_what_they_skipped(site: Site, camera: MakeCamera) -> None:
    """Seqs go up, and with those that were skipped they are complete; the age is that of the frame."""
    one = camera(noise((16, 16)), rate_hz=200)
    with site.watch(one.stream_id) as preview:
        headers = [preview.picture()[0] for _ in range(8)]
    for before, after in itertools.pairwise(headers):
        assert after["number"] == before["number"] + 1
        assert after["seq"] == before["seq"] + after["skipped"] + 1
        assert after["age_ms"] >= after["latency_ms"] >= 0
        assert abs(time.time_ns() - after["time"]) < 60e9


def test_however_many_pages_watch_there_is_one_consumer_and_then_none(site: Site, camera: MakeCamera) -> None:
    """The producer has one consumer, the console's, and none soon after the last page has left."""
    one = camera(noise((16, 16)))
    with contextlib.ExitStack() as stack:
        pages = [stack.enter_context(site.watch(one.stream_id)) for _ in range(4)]
        for page in pages:
            page.picture()
        wait_until(lambda: len(console_consumers(site, one.stream_id)) == 1, "the console's consumer is in the state")
        for page in pages:
            page.picture()
        assert one.producer.consumers == 1
        (row,) = [row for row in site.get("/api/state").json["streams"] if row["stream_id"] == one.stream_id]
        assert row["consumers"] == 1
    wait_until(lambda: not one.producer.consumers, "the producer has no consumer any more")
    wait_until(lambda: not console_consumers(site, one.stream_id), "nor has the state")


def test_pages_with_the_same_look_share_a_picture(site: Site, camera: MakeCamera) -> None:
    """The same bytes for the same frame; another look gets its own picture."""
    one = camera(noise((64, 64)), rate_hz=5)
    with (
        site.watch(one.stream_id) as first,
        site.watch(one.stream_id) as second,
        site.watch(one.stream_id, width=8, height=8) as small,
    ):
        seen: dict[Preview, dict[int, bytes]] = {first: {}, second: {}, small: {}}
        for _ in range(6):
            for page, pictures in seen.items():
                header, body = page.picture()
                pictures[header["seq"]] = body
        both = seen[first].keys() & seen[second].keys()
        assert both
        assert all(seen[first][seq] == seen[second][seq] for seq in both)
        assert all(pixels(body).shape == (8, 8) for body in seen[small].values())


def test_a_page_that_stalls_gets_nothing_more_and_changes_no_counter(
    site: Site, camera: MakeCamera, client: tp.Client
) -> None:
    """One picture in flight; the producer, another consumer and the console's own lose nothing meanwhile."""
    one = camera(noise((16, 16)), rate_hz=100)
    is_over = threading.Event()
    with client.consumer(one.stream_id) as reader, site.watch(one.stream_id) as other:

        def read() -> None:
            while not is_over.is_set():
                reader.poll(0.1)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            other.picture()
            with site.watch(one.stream_id, lossless=True) as stalled:
                stalled.unacknowledged()
                first, before = one.producer.next_seq, one.producer.stats
                while one.producer.next_seq < first + 200:
                    other.picture()  # the page beside it goes on
                with pytest.raises(TimeoutError):
                    stalled.receive(timeout=0.2)
                after = one.producer.stats
                assert after.dropped == before.dropped == {}
                assert after.descriptors_lost == before.descriptors_lost == 0
                assert reader.stats.lost == 0
                (own,) = console_consumers(site, one.stream_id)
                assert (own["drops_gap"], own["drops_late"], own["state"]) == (0, 0, "ok")
        finally:
            is_over.set()
            thread.join()


def test_a_look_that_cannot_be_drawn_takes_no_pictures_from_others(site: Site, camera: MakeCamera) -> None:
    """A page that asks for what there is not, of every frame, waits its turn like any other."""
    one = camera(noise((3, 8, 8)))
    with site.watch(one.stream_id, index=[9]) as hopeless, site.watch(one.stream_id) as other:
        hopeless.wait_for_status("9 of axis 0")
        for _ in range(8):
            other.picture()


def test_while_all_pages_stall_the_consumer_keeps_up(site: Site, camera: MakeCamera) -> None:
    """It takes the newest frame at its own pace: it neither lags nor drops in the state."""
    one = camera(noise((16, 16)), rate_hz=300)
    with site.watch(one.stream_id) as stalled, site.states() as states:
        stalled.unacknowledged()
        seq = one.producer.next_seq
        wait_until(lambda: one.producer.next_seq > seq + 600, "several times as many frames as the ring has")

        def own(state: dict[str, Any]) -> list[dict[str, Any]]:
            rows = [row for row in state.get("consumers", ()) if row["stream_id"] == one.stream_id]
            return [row for row in rows if (row["last_seq"] or 0) > seq + 300]

        (row,) = own(states.until(own, "the consumer's report has a late seq"))
        assert (row["state"], row["drops_gap"], row["drops_late"]) == ("ok", 0, 0)


def test_a_page_that_reads_nothing_and_acknowledges_everything_holds_up_nobody(site: Site, camera: MakeCamera) -> None:
    """Its socket is full; pages beside it get their pictures and the state, and it costs one picture in memory."""
    one = camera(noise((100, 100, 3)), rate_hz=100)
    host, _, port = site.address.partition(":")
    full = socket.create_connection((host, int(port)), timeout=60)
    full.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    url = f"ws://{site.address}/ws/preview/{one.stream_id}"
    with (
        connect(url, sock=full, additional_headers=site.bearer, max_queue=1, close_timeout=0, proxy=None) as hostile,
        site.watch(one.stream_id) as other,
        site.states() as states,
    ):
        hostile.send('{"type":"look","look":{"lossless":true}}')
        for number in range(100):
            hostile.send(json.dumps({"type": "ack", "number": number}))
            if number % 10 == 0:
                other.picture()
        states.next()


def test_what_waits_for_a_page_is_bounded() -> None:
    """One picture, and texts up to a limit; a picture that was taken makes room for the next."""

    async def fill() -> list[str | bytes]:
        outbox = Outbox()
        for number in range(1000):
            outbox.put(b"%d" % number)
            outbox.put(str(number))
        return [await outbox.get() for _ in range(MAX_WAITING)]

    found = asyncio.run(fill())
    assert [message for message in found if isinstance(message, bytes)] == [b"0"]
    assert found[1:] == [str(number) for number in range(MAX_WAITING - 1)]


def test_a_page_that_waits_for_a_first_frame_costs_next_to_nothing(site: Site, client: tp.Client) -> None:
    """The thread sleeps between its looks at the ring."""
    with client.producer("console/waiting", create=True) as producer, site.watch(producer.stream_id) as preview:
        preview.answer("status")
        (thread,) = [one for one in threading.enumerate() if one.name == f"console-{producer.stream_id}"]
        clock = f"/proc/self/task/{thread.native_id}/stat"

        def ticks() -> int:
            fields = Path(clock).read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])

        before, began_s = ticks(), time.monotonic()
        time.sleep(1.0)
        used_s = (ticks() - before) / os.sysconf("SC_CLK_TCK")
        assert used_s < 0.2 * (time.monotonic() - began_s)


def test_the_rate_of_pictures_is_capped(site: Site, camera: MakeCamera) -> None:
    """Fifteen a second of a stream, however soon a page acknowledges."""
    one = camera(noise((8, 8)), rate_hz=200)
    with site.watch(one.stream_id) as preview:
        preview.picture()
        began_s, count = time.monotonic(), 0
        while time.monotonic() < began_s + 2.0:
            preview.picture()
            count += 1
        seconds = time.monotonic() - began_s
    assert count <= budget.STREAM_HZ * seconds + 2


def test_a_paused_page_keeps_its_frame_for_values_and_for_saving(site: Site, camera: MakeCamera) -> None:
    """Pixels, profile, histogram, PNG and NPY are of the frame that is shown, long after the ring has lost it."""
    one = camera(noise((48, 64)), rate_hz=200)
    with site.watch(one.stream_id, lossless=True) as preview:
        preview.picture()
        header, body = paused(preview)
        published = one.paint(header["seq"])
        wait_until(lambda: one.producer.next_seq > header["seq"] + 70, "the ring has come round")
        assert np.array_equal(pixels(body), published)
        assert header["histogram"]["counts"] == np.bincount(published.reshape(-1), minlength=256).tolist()
        preview.say(type="pixel", x=63, y=47)
        answer = preview.answer("pixel")
        assert (answer["value"], answer["seq"]) == (int(published[47, 63]), header["seq"])
        preview.say(type="profile", x0=0, y0=5, x1=63, y1=5)
        assert preview.answer("profile")["values"] == published[5].tolist()
        path = f"/api/streams/{one.stream_id}"
        assert np.array_equal(np.load(io.BytesIO(site.get(f"{path}/frame.npy?seq={header['seq']}").body)), published)
        assert np.array_equal(pixels(site.get(f"{path}/frame.png?seq={header['seq']}").body), published)
        preview.say(type="step")
        stepped, body = preview.picture()
        assert stepped["seq"] > header["seq"]
        assert np.array_equal(pixels(body), one.paint(stepped["seq"]))
        refused = site.get(f"{path}/frame.npy?seq={header['seq']}")
        assert (refused.status, f"frame {header['seq']} is not kept" in refused.json["error"]) == (422, True)
        preview.say(type="resume")
        assert preview.picture()[0]["seq"] > stepped["seq"]


def paused(preview: Preview) -> tuple[dict[str, Any], bytes]:
    """The picture that a page stands still at, with a histogram."""
    preview.say(type="pause")
    seqs: list[int] = []
    while True:  # what was on its way comes first; then each change of the histogram draws the same frame again
        preview.say(type="histogram", on=len(seqs) % 2 == 0)
        header, body = preview.picture()
        seqs.append(header["seq"])
        if len(seqs) >= 3 and len(set(seqs[-3:])) == 1 and header["histogram"] is not None:
            return header, body


def test_the_newest_frame_is_saved_whole_without_a_preview(site: Site, camera: MakeCamera) -> None:
    """A verified copy; the consumer that was needed for it is closed again."""
    one = camera(noise((5, 6, 7), "float32"))
    wait_until(lambda: site.get(f"/api/streams/{one.stream_id}").status == 200, "the stream is in the state")
    saved = site.get(f"/api/streams/{one.stream_id}/frame.npy")
    assert saved.status == 200, saved.body
    seq = int(saved.headers["content-disposition"].rpartition("-")[2].removesuffix('.npy"'))
    assert np.array_equal(np.load(io.BytesIO(saved.body)), one.paint(seq))
    wait_until(lambda: not one.producer.consumers, "the consumer is closed")


def test_pixels_are_read_while_frames_flow(site: Site, camera: MakeCamera) -> None:
    """The value is that of the frame whose seq comes with it."""
    one = camera(noise((48, 64, 3)), rate_hz=100)
    with site.watch(one.stream_id) as preview:
        preview.picture()
        for x, y in ((0, 0), (63, 47), (10, 20)):
            preview.say(type="pixel", x=x, y=y)
            answer = preview.answer("pixel")
            assert answer["value"] == one.paint(answer["seq"])[y, x].tolist()
        preview.say(type="pixel", x=64, y=0)
        assert "no pixel at 64, 0" in preview.answer("error")["text"]


def test_metadata_say_what_pixels_mean(site: Site, camera: MakeCamera) -> None:
    """Blue and red change places where the producer says so, and the page gets the metadata."""
    one = camera(noise((8, 8, 3)))
    one.producer.set_metadata({"pixel_format": "bgr24", "lens": "wide"})
    with site.watch(one.stream_id, lossless=True) as preview:

        def is_swapped() -> bool:
            header, body = preview.picture()
            return bool(np.array_equal(pixels(body), one.paint(header["seq"])[..., ::-1]))

        wait_until(is_swapped, "a picture in the channel order of the metadata")
        path = f"/api/streams/{one.stream_id}"
        wait_until(lambda: site.get(path).status == 200, "the stream is in the state")
        assert site.get(path).json["metadata"] == {"pixel_format": "bgr24", "lens": "wide"}


def test_slices_and_lines(site: Site, camera: MakeCamera) -> None:
    """A plane of a stack by its index; what has one axis is a line of pairs."""
    stack, line = camera(noise((6, 20, 30))), camera(noise((100,), "float32"))
    with site.watch(stack.stream_id, lossless=True, index=[4]) as preview:
        header, body = preview.picture()
        assert header["axes"] == [6]
        assert np.array_equal(pixels(body), stack.paint(header["seq"])[4])
    with site.watch(line.stream_id) as preview:
        header, body = preview.picture()
        values = line.paint(header["seq"])
        assert header["media"] == "line"
        assert np.array_equal(np.frombuffer(body, "<f4").reshape(-1, 2), np.stack([values, values], axis=-1))


def test_why_there_is_no_picture_is_said(site: Site, client: tp.Client) -> None:
    """No such stream, nothing published yet, an index that the array does not have; then it goes on."""
    with site.watch(4_000_000_000) as preview:
        preview.wait_for_status("4000000000")
    with client.producer("console/silent", create=True) as producer, site.watch(producer.stream_id) as preview:
        preview.wait_for_status("nothing published yet in this epoch")
        producer.publish(np.zeros((3, 4, 5), np.uint8))
        preview.picture()
        preview.look(index=[7])
        preview.wait_for_status("7 of axis 0, which has 3")
        preview.look(index=[1])
        preview.picture()


def test_a_console_that_closes_leaves_its_streams_in_order(pool: tp.Local, camera: MakeCamera) -> None:
    """Sockets are closed, and the producer has no consumer any more."""
    one = camera(noise((8, 8)))
    with contextlib.ExitStack() as stack:
        with Console(pool.config, pool.aeron_dir, ConsoleOptions()) as console:
            preview = stack.enter_context(Site.of(console).watch(one.stream_id))
            preview.picture()
        assert not preview.is_open()
    wait_until(lambda: not one.producer.consumers, "the consumer is closed")
