# SPDX-License-Identifier: Apache-2.0
"""Recording without Spark: what holds for every recorder holds for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tensorpool as tp
from tensorpool.client import Client
from tensorpool.lake.direct_recorder import DirectRecorder
from tensorpool.lake.recording_engine import RecordingFailed, Settings
from tests.support.deployment import new_stream
from tests.support.lakes import Camera, options_of
from tests.support.recorder_cases import (  # noqa: F401  run here with the fixture `record` below
    test_a_caller_that_gives_up_draining_learns_what_is_left,
    test_a_driver_that_is_killed_and_started_again_costs_no_recording,
    test_a_full_disk_is_waited_for,
    test_a_new_epoch_goes_on_in_the_same_recording,
    test_a_pause_costs_what_the_rings_forgot_in_it,
    test_a_recorder_that_is_stopped_when_there_is_space_again_records_up_to_the_stop,
    test_a_recording_goes_on_where_it_was_closed,
    test_a_recording_goes_on_with_fewer_streams,
    test_a_recording_is_named_by_its_streams,
    test_two_streams_are_recorded_whole_with_what_was_said_of_them,
    test_what_cannot_be_recorded_is_refused,
    wait_for_frames,
)


@pytest.fixture
def record(pool: tp.Local, tmp_path: Path) -> Iterator[Callable[..., DirectRecorder]]:
    """A recorder to the test's lake; not started, closed with the test."""
    made: list[DirectRecorder] = []

    def make(*streams: int | str, name: str | None = None, **settings: Any) -> DirectRecorder:
        chosen = Settings(trigger_s=0.3, codec="none", is_durable=False, is_warmed_up=False, **options_of(pool))
        chosen = msgspec.structs.replace(chosen, **settings)
        made.append(DirectRecorder(streams, tmp_path / "lake", name=name, settings=chosen))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_failure_is_said_in_the_words_of_its_error(record: Callable[..., DirectRecorder], client: Client) -> None:
    """One that another try cannot mend ends the recording: here a second recording of the same frames."""
    stream = new_stream("deep")
    with Camera(client, stream, hz=50):
        first = record(stream, name="one")
        first.start()
        wait_for_frames(first, 5)
        second = record(stream, name="two")
        second.start()
        with pytest.raises(
            RecordingFailed, match=rf"recording two failed: .*LakeConflict: frames .* of stream {stream}"
        ):
            wait_for_frames(second, 10**9)
