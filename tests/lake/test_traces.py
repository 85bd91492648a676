# SPDX-License-Identifier: Apache-2.0
"""Where a frame came from: recorded with its links, replayed under its id, and shown live and from the lake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import tensorpool as tp
from tensorpool.cli.trace import command
from tensorpool.client import Client
from tensorpool.client.lineage import FramePlace, TraceStep, trace_steps
from tensorpool.client.live_trace import trace_live
from tensorpool.lake import Lake
from tensorpool.lake.control_tables import Listener
from tensorpool.lake.direct_recorder import DirectRecorder
from tensorpool.lake.live_options import source_options
from tensorpool.lake.recording_engine import Settings
from tensorpool.lake.replay import Part, Replay, ReplayOptions
from tensorpool.lake.side_tables import write_rows
from tensorpool.lake.traces import RecordedLinks, trace_lake
from tests.support import deployment
from tests.support.deployment import new_stream
from tests.support.frame_rows import make_lake, row
from tests.support.lakes import options_of
from tests.support.processes import wait_until
from tests.support.recorder_cases import wait_for_frames

FRAME = np.arange(12, dtype=np.uint8)


class Pipeline:
    """Two cameras, a stage that makes one frame of a pair of theirs, and one that makes another of that."""

    def __init__(self, client: Client) -> None:
        self.streams = [new_stream("deep") for _ in range(4)]
        self.producers = [client.producer(stream, trace_ids=index < 2) for index, stream in enumerate(self.streams)]
        self.readers = [client.consumer(stream) for stream in self.streams]
        for producer in self.producers:
            assert producer.wait_for_consumers(1, 10)
        self.ids: list[list[int]] = []  # of the frames of a turn

    def turn(self) -> None:
        left, right = (self._publish(index) for index in (0, 1))
        depth = self._publish(2, left, right)
        result = self._publish(3, depth, left)
        self.ids.append([frame.trace_id for frame in (left, right, depth, result)])

    def _publish(self, index: int, *parents: tp.Frame) -> tp.Frame:
        self.producers[index].publish(FRAME, parents=parents)
        frame = self.readers[index].poll(10)
        assert frame is not None
        return frame

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        for producer in self.producers:
            producer.close()


@pytest.fixture
def pipeline(client: Client) -> Iterator[Pipeline]:
    pipeline = Pipeline(client)
    yield pipeline
    pipeline.close()


def expected(pipeline: Pipeline, turn: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Depth, id and place of each step back from a result."""
    left, right, depth, result = pipeline.ids[turn]
    streams = dict(zip(pipeline.ids[turn], pipeline.streams, strict=True))
    return [
        (at, one, [(streams[one], turn)]) for at, one in ((0, result), (1, depth), (2, left), (2, right), (1, left))
    ]


def seen(steps: list[TraceStep]) -> list[tuple[int, int, list[tuple[int, int]]]]:
    return [(step.depth, step.trace_id, [(place.stream_id, place.seq) for place in step.frames]) for step in steps]


def record(pool: tp.Local, pipeline: Pipeline, path: Path, streams: list[int], turns: int) -> Lake:
    settings = Settings(trigger_s=0.2, codec="none", is_durable=False, is_warmed_up=False, **options_of(pool))
    with DirectRecorder(streams, path, settings=settings) as recorder:
        for _ in range(turns):
            pipeline.turn()
        wait_for_frames(recorder, turns * len(streams))
    return Lake.open(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


def test_a_loop_of_stages_ends_and_is_cut_where_it_is_long() -> None:
    """Each id once; a link that leads back is shown and not followed."""
    steps = trace_steps(1, {1: [2, 3], 2: [1], 3: [4, 4]}.get)
    assert [(step.depth, step.trace_id, step.is_repeated) for step in steps] == [
        (0, 1, False), (1, 2, False), (2, 1, True), (1, 3, False), (2, 4, False),
    ]  # fmt: skip
    chain = trace_steps(100_000, lambda one: [one - 1] if one else [], max_depth=5)
    assert [step.trace_id for step in chain] == [100_000, 99_999, 99_998, 99_997, 99_996, 99_995]
    assert [step.is_cut for step in chain] == [False] * 5 + [True]


def test_a_recording_knows_where_its_frames_came_from(pool: tp.Local, pipeline: Pipeline, tmp_path: Path) -> None:
    """By the ids in the rings and the links on the metadata stream; also of streams that it has no frames of."""
    lake = record(pool, pipeline, tmp_path / "lake", [pipeline.streams[index] for index in (0, 1, 3)], turns=3)
    for turn in range(3):
        assert seen(trace_lake(lake, pipeline.ids[turn][3])) == expected(pipeline, turn)
    root = trace_lake(lake, pipeline.ids[1][0])
    assert len(root) == 1
    assert root[0].frames[0].time is not None
    assert not trace_lake(lake, 1)[0].is_known
    recording = tp.open(tmp_path / "lake")[pipeline.streams[3]]
    assert [recording[seq].trace_id for seq in range(3)] == [ids[3] for ids in pipeline.ids]


def test_links_that_are_repeated_are_recorded_once(
    pool: tp.Local, client: Client, pipeline: Pipeline, tmp_path: Path
) -> None:
    """A producer sends its last links again to each consumer that comes."""
    settings = Settings(trigger_s=0.2, codec="none", is_durable=False, is_warmed_up=False, **options_of(pool))
    path = tmp_path / "lake"
    with DirectRecorder([pipeline.streams[3]], path, settings=settings) as recorder:
        pipeline.turn()
        lake = Lake.open(path)

        def links() -> list[dict[str, Any]]:
            recorder.poll()
            return [one for file in lake.tables("traces") for one in lake.open_parquet(file.path).read().to_pylist()]

        wait_until(lambda: len(links()) == 4, "the links are recorded")
        for _ in range(2):
            client.consumer(pipeline.streams[3]).close()
        pipeline.turn()
        wait_until(lambda: len(links()) >= 8, "those of the next turn are, too")
        assert len(links()) == 8


def test_a_replay_keeps_ids_and_links(pool: tp.Local, client: Client, pipeline: Pipeline, tmp_path: Path) -> None:
    """So a result of a replay leads to the replayed frames as it led to the frames."""
    lake = record(pool, pipeline, tmp_path / "lake", pipeline.streams, turns=2)
    pipeline.close()
    targets = [new_stream("deep") for _ in pipeline.streams]
    parts = tuple(Part(*pair) for pair in zip(pipeline.streams, targets, strict=True))
    readers = [client.consumer(target) for target in targets]
    listener = Listener(source_options({"table": "traces", "streams": str(targets[3]), **deployment.options_of(pool)}))
    received: list[list[int]] = [[] for _ in targets]

    def listen(_: object) -> None:
        for reader, own in zip(readers, received, strict=True):
            own += [frame.trace_id for frame in iter(reader.poll, None)]

    Replay(lake, client, ReplayOptions(parts=parts, wait_consumers=1, speed=1.0), on_frame=listen).run()
    wait_until(lambda: listen(None) or sum(map(len, received)) == 8, "all frames are received")
    assert received == [[ids[index] for ids in pipeline.ids] for index in range(4)]
    links = [(ids[3], parent) for ids in pipeline.ids for parent in (ids[2], ids[0])]
    wait_until(lambda: {row[4:] for row in listener.rows(0, listener.end)} == set(links), "the links are sent again")
    listener.close()
    for reader in readers:
        reader.close()


def test_a_running_pipeline_is_asked(pool: tp.Local, client: Client, pipeline: Pipeline) -> None:
    """Links that were sent before the question; the frames are still in the rings."""
    for _ in range(3):
        pipeline.turn()
    steps = trace_live(client, pipeline.ids[1][3], timeout=20)
    assert seen(steps) == expected(pipeline, 1)
    assert all(place.time is not None for step in steps for place in step.frames)
    assert not trace_live(client, 5, timeout=0.1)[0].is_known


def test_the_command_shows_both(pool: tp.Local, pipeline: Pipeline, tmp_path: Path) -> None:
    lake = record(pool, pipeline, tmp_path / "lake", pipeline.streams, turns=1)
    left, right, depth, result = pipeline.ids[0]
    where = ["--aeron-dir", pool.aeron_dir, "--set", f"shm.base_dir={pool.config.shm.base_dir}"]
    where += ["--set", f"shm.namespace={pool.config.shm.namespace}"]
    for source in (["--lake", str(lake.path)], ["--timeout", "20", *where]):
        shown = run(hex(result), *source)
        assert shown.exit_code == 0, shown.output
        lines = shown.output.splitlines()
        assert [line.split()[0] for line in lines] == list(map(str, (result, depth, left, right, left)))
        assert [len(line) - len(line.lstrip()) for line in lines] == [0, 2, 4, 4, 2]
        assert str(pipeline.streams[3]) in lines[0]
        steps = json.loads(run(str(result), "--json", *source).output)
        assert [step["depth"] for step in steps] == [0, 1, 2, 2, 1]
        cut = json.loads(run(str(result), "--json", "--depth", "1", *source).output)
        assert [step["is_cut"] for step in cut] == [False, True, False]
    unknown = run("7", "--lake", str(lake.path))
    assert (unknown.exit_code, "trace id 7 was not found" in str(unknown.exception)) == (1, True)
    for wrong in ("0", "x", "-1", str(2**64)):
        assert run("--lake", str(lake.path), "--", wrong).exit_code == 2


def test_links_of_a_lake_are_each_shown_once_and_in_order(tmp_path: Path) -> None:
    lake = make_lake(tmp_path / "lake", [row(seq=seq, trace_id=70 + seq) for seq in range(40)])
    write_rows(lake, "traces", [(1, 10_000, 1, 9, 79, 75), (1, 10_000, 1, 9, 79, 71), (2, 10_000, 1, 9, 79, 75)])
    assert RecordedLinks(lake).parents_of(79) == [75, 71]
    assert RecordedLinks(lake, 10_001).parents_of(79) == []
    steps = trace_lake(lake, 79)
    assert [step.frames for step in steps] == [(FramePlace(10_000, 1, seq),) for seq in (9, 5, 1)]
