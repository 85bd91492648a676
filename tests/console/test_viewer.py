# SPDX-License-Identifier: Apache-2.0
"""What a page is sent, and how much of the machine that may take: decisions, without sockets and frames."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensorpool.console.budget import CONSOLE_HZ, CORE_SHARE, STREAM_HZ, Allowance, ConsoleBudget, StreamBudget
from tensorpool.console.messages import Ack, FromPage, Pause, Resume, SetHistogram, SetLook, Step, pack, unpack
from tensorpool.console.viewer import FrameKey, Viewer
from tensorpool.looks import Look

S = 1_000_000_000


def looking(viewer: Viewer | None = None) -> Viewer:
    viewer = viewer or Viewer()
    viewer.on_message(SetLook(Look()))
    return viewer


def show(viewer: Viewer, newest: FrameKey) -> FrameKey | None:
    """As the previews do it: the frame that was drawn, if any."""
    key, wish = viewer.picture_of(newest), viewer.wish
    if key is not None and wish is not None:
        viewer.on_picture(key, wish, 0)
    return key


def test_without_a_look_nothing_is_sent() -> None:
    """A page says first how it looks."""
    viewer = Viewer()
    assert viewer.picture_of((1, 1)) is None
    assert not viewer.is_live
    assert looking(viewer).picture_of((1, 1)) == (1, 1)


def test_one_picture_is_in_flight() -> None:
    """The next one after its ack; acks of other pictures, also of those to come, count for nothing."""
    viewer = looking()
    assert show(viewer, (1, 1)) == (1, 1)
    assert show(viewer, (1, 2)) is None
    viewer.on_message(Ack(0))
    viewer.on_message(Ack(-5))
    assert show(viewer, (1, 2)) is None
    viewer.on_message(Ack(10**30))  # at most what was sent
    assert show(viewer, (1, 2)) == (1, 2)
    assert show(viewer, (1, 3)) is None


def test_a_frame_is_sent_once_unless_the_look_changes() -> None:
    """Another look, or a histogram, of the same frame is another picture."""
    viewer = looking()
    assert show(viewer, (1, 1))
    viewer.on_message(Ack(1))
    assert show(viewer, (1, 1)) is None
    viewer.on_message(SetLook(Look(width=8)))
    assert show(viewer, (1, 1))
    viewer.on_message(Ack(2))
    viewer.on_message(SetHistogram(True))
    assert show(viewer, (1, 1))


def test_what_was_skipped_is_counted_within_an_epoch() -> None:
    """From the picture before; a new epoch begins anew."""
    viewer = looking()
    found = []
    for number, key in enumerate([(1, 5), (1, 6), (1, 10), (2, 0), (2, 1)], 1):
        assert show(viewer, key) == key
        viewer.on_message(Ack(number))
        found.append(viewer.skipped)
    assert found == [0, 0, 3, 0, 0]


def test_a_paused_page_holds_a_frame_and_steps() -> None:
    """It needs a copy first, shows that one whatever is newer, and another one after a step."""
    viewer = looking()
    viewer.on_message(Pause())
    assert viewer.wants_copy((1, 1))
    assert viewer.picture_of((1, 1)) is None
    viewer.hold((1, 1))
    assert not viewer.wants_copy((1, 2))
    assert show(viewer, (1, 2)) == (1, 1)
    viewer.on_message(Ack(1))
    assert show(viewer, (1, 9)) is None
    viewer.on_message(Step())
    assert not viewer.wants_copy((1, 1))  # the frame that it holds is not the next one
    assert viewer.wants_copy((1, 9))
    viewer.hold((1, 9))
    assert show(viewer, (1, 12)) == (1, 9)
    viewer.on_message(Ack(2))
    viewer.on_message(Resume())
    assert viewer.held is None
    assert show(viewer, (1, 12)) == (1, 12)


MESSAGES = st.one_of(
    st.builds(SetLook, st.builds(Look, width=st.integers(1, 9))),
    st.builds(Ack, st.integers(-2, 40)),
    st.builds(SetHistogram, st.booleans()),
    st.sampled_from([Pause(), Resume(), Step()]),
)


@given(st.lists(MESSAGES | st.tuples(st.integers(1, 2), st.integers(0, 9)), max_size=60))
def test_whatever_happens_one_picture_is_in_flight_and_none_is_of_a_frame_it_should_not_see(
    events: list[FromPage | FrameKey],
) -> None:
    """A tuple is the newest frame; copies are made at once."""
    viewer, in_flight = Viewer(), 0
    for event in events:
        if not isinstance(event, tuple):
            viewer.on_message(event)
            if isinstance(event, Ack) and event.number >= viewer.number:
                in_flight = 0
            continue
        if viewer.wants_copy(event):
            viewer.hold(event)
        before = viewer.number
        key = show(viewer, event)
        if key is None:
            assert viewer.number == before
            continue
        in_flight += 1
        assert in_flight == 1
        assert key == (viewer.held if viewer.is_paused else event)
        assert viewer.number == before + 1


def pictures_in(seconds: int, budgets: list[StreamBudget], core_s: float) -> list[int]:
    """How many each stream makes that makes one whenever it may, looking a thousand times a second."""
    made = [0] * len(budgets)
    for now_ns in range(0, seconds * S, S // 1000):
        for at, budget in enumerate(budgets):
            if budget.wait_ns(now_ns) == 0:
                budget.use(core_s)
                made[at] += 1
    return made


def test_pictures_of_a_stream_and_of_the_console_are_capped() -> None:
    """Fifteen a second of one; sixty of all."""
    (alone,) = pictures_in(10, [StreamBudget(ConsoleBudget())], 0.0)
    assert STREAM_HZ * 10 - 1 <= alone <= STREAM_HZ * 10 + 1
    console = ConsoleBudget()
    together = pictures_in(10, [StreamBudget(console) for _ in range(8)], 0.0)
    assert CONSOLE_HZ * 10 - 1 <= sum(together) <= CONSOLE_HZ * 10 + 6


def test_expensive_pictures_are_fewer() -> None:
    """A tenth of a core, however long one takes."""
    for core_s in (0.02, 0.2, 2.0):
        (made,) = pictures_in(60, [StreamBudget(ConsoleBudget())], core_s)
        assert (CORE_SHARE * 60 - core_s) <= made * core_s <= CORE_SHARE * 60 + core_s + 0.02


@given(st.lists(st.integers(0, 10 * S), max_size=50))
def test_a_clock_that_goes_back_gives_nothing_away(times: list[int]) -> None:
    """Never more than the burst and the rate since the first moment."""
    allowance = Allowance(10.0, 3.0)
    taken = sum(allowance.take(now_ns) for now_ns in times)
    assert taken <= 3 + max(times, default=0) * 10 / S


@given(st.dictionaries(st.text(), st.integers() | st.text()), st.binary())
def test_a_picture_is_unpacked_as_it_was_packed(header: dict[str, int | str], body: bytes) -> None:
    """Header and bytes."""
    assert unpack(pack(header, body)) == (header, body)
