# SPDX-License-Identifier: Apache-2.0
"""When a feed asks for attention, and what wakes a thread that waits in it."""

from __future__ import annotations

import threading

import pytest

from tensorpool.client.stream_reader import IMAGE_LOST, STOPPED
from tensorpool.errors import Closed, LocalProtocolError
from tests.client.conftest import SECOND_NS, Stream
from tests.client.descriptor_feed.conftest import seqs
from tests.support.processes import wait_until

# --- attention


def test_a_stopped_feed_delivers_nothing_until_it_is_let_go(stream: Stream) -> None:
    """And nothing is lost by it."""
    feed = stream.feed()
    stream.publish()
    feed.stop()
    assert feed.attention == STOPPED
    assert feed.next(stream.subscription) is None
    assert feed.latest(stream.subscription) is None
    feed.forget(STOPPED)
    assert seqs(feed, stream) == [0]


def test_the_end_of_a_publisher_asks_for_attention(stream: Stream) -> None:
    """It may have ended, or we were too slow for it: the owner finds out."""
    feed = stream.feed()
    stream.publish()
    assert seqs(feed, stream) == [0]
    stream.publication.close()
    wait_until(lambda: feed.next(stream.subscription) is None and feed.attention & IMAGE_LOST, "the image is gone")
    feed.forget(IMAGE_LOST)
    assert feed.attention == 0


def test_two_threads_in_one_feed_are_refused(stream: Stream) -> None:
    """One at a time: the second gets an error, the first goes on."""
    feed = stream.feed()
    stream.publish()
    assert seqs(feed, stream) == [0]
    waiter = threading.Thread(target=feed.wait, args=(stream.subscription, 60 * SECOND_NS))
    waiter.start()

    def is_refused() -> bool:
        try:
            feed.next(stream.subscription)
        except LocalProtocolError:
            return True
        return False

    wait_until(is_refused, "the feed is busy")
    with pytest.raises(LocalProtocolError, match="another thread"):
        feed.latest(stream.subscription)
    with pytest.raises(LocalProtocolError, match="another thread"):
        feed.finish()
    feed.stop()
    waiter.join()
    assert feed.finish() == 1


def test_a_closed_subscription_is_an_error(stream: Stream) -> None:
    """Not silence: the owner gets another one."""
    feed = stream.feed()
    subscription = stream.subscribe()
    subscription.close()
    for call in (feed.next, feed.latest, lambda s: feed.wait(s, 0)):
        with pytest.raises(Closed):
            call(subscription)


# --- waiting


def test_a_wait_ends_at_once_when_there_is_something(stream: Stream) -> None:
    """With time or without."""
    feed = stream.feed()
    assert not feed.wait(stream.subscription, 0)
    stream.publish()
    assert feed.wait(stream.subscription, 0)
    assert feed.wait(stream.subscription, 60 * SECOND_NS)
    assert seqs(feed, stream) == [0]
    assert not feed.wait(stream.subscription, 1_000)


@pytest.mark.parametrize("what", ["frame", "stop"])
def test_a_sleeper_is_woken(stream: Stream, what: str) -> None:
    """By a frame with its commit, by its owner, long before its time is over."""
    feed = stream.feed(expected=0)
    started, results = threading.Event(), list[bool]()

    def sleep() -> None:
        started.set()
        results.append(feed.wait(stream.subscription, 60 * SECOND_NS))

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    started.wait()
    if what == "frame":
        stream.publish()
        stream.writer.wake()
    else:
        feed.stop()
    sleeper.join(timeout=30)
    assert not sleeper.is_alive()
    assert results == [True]
    assert seqs(feed, stream) == ([0] if what == "frame" else [])


def test_a_commit_without_descriptor_is_no_frame(stream: Stream) -> None:
    """A wait that was woken by it goes on waiting."""
    feed = stream.feed(expected=0)
    stream.write()
    assert not feed.wait(stream.subscription, 2_000_000)
    assert feed.next(stream.subscription) is None
