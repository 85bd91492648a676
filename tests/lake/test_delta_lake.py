# SPDX-License-Identifier: Apache-2.0
"""A lake is a Delta table: what others read of it, and what its log remembers, also when entries are forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import deltalake
import msgspec
import polars
import pytest
from click.testing import CliRunner

from tensorpool.cli.main import group
from tensorpool.lake import Lake, commits, delta_log, maintenance, ring_reader
from tensorpool.lake.commits import Staged
from tensorpool.lake.delta_log import AddFile
from tensorpool.lake.file_policy import FilePolicy
from tensorpool.lake.lake import Change
from tensorpool.lake.manifest import UNKNOWN_TAIL, Commit, Gap, LakeFile
from tensorpool.lake.staging import Staging
from tensorpool.lake.table_log import now_ms
from tensorpool.spark.lake_options import LakeOptions
from tests.support.delta_readers import check_readers
from tests.support.frame_rows import SECOND_NS, attribute, make_lake, rows_over_time, source
from tests.support.lakes import Ring, check

ROOT = Path(__file__).resolve().parents[2]
NO_SYNC = FilePolicy("none", is_durable=False)


@pytest.fixture
def lake(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """On a local disk, and in a bucket."""
    monkeypatch.setenv("TENSORPOOL_SPOOL_DIR", str(tmp_path / "spool"))
    return Lake.create(place)


@pytest.fixture
def ring(shm_dir: Path) -> Iterator[Ring]:
    yield Ring(shm_dir)
    ring_reader.let_go(0)


def record(lake: Lake, ring: Ring, batch: int, lo: int, hi: int) -> Commit | None:
    staged = Staging(lake.path, "q", batch).stage(ring.part(lo, hi), ring.span(lo, hi), NO_SYNC)
    return commits.commit(lake, "q", batch, [staged])


def forget_everything(lake: Lake) -> None:
    """Leave a checkpoint and nothing else of the log."""
    lake.log.write_checkpoint()
    version = lake.state.number
    lake.store.remove(delta_log.entry_name(number) for number in range(version + 1))


# --- what others read


def test_readers_agree_after_compaction_retention_and_vacuum(lake: Lake, ring: Ring) -> None:
    """At every step deltalake, Polars, DuckDB and pyarrow find what we find."""
    for batch in range(6):
        ring.write(4)
        record(lake, ring, batch, 4 * batch, 4 * batch + 4)
    assert check(lake) == {(10_000, 1): list(range(24))}
    assert maintenance.compact(lake).files_before == 6
    assert check(lake) == {(10_000, 1): list(range(24))}
    ring.write(4)
    record(lake, ring, 6, 24, 28)
    maintenance.retain(lake, max_bytes=1)
    assert check(lake) == {(10_000, 1): list(range(24, 28))}
    assert maintenance.remove_unused(lake, grace_s=0).files == 7
    assert check(lake) == {(10_000, 1): list(range(24, 28))}


def test_a_vacuum_of_deltalake_deletes_what_left_the_lake_only(lake: Lake, ring: Ring) -> None:
    """Staged files, checkpoints and the tables beside stay, and so does every frame."""
    for batch in range(3):
        ring.write(4)
        record(lake, ring, batch, 4 * batch, 4 * batch + 4)
    Staging(lake.path, "q", 3).stage(ring.part(8, 12), ring.span(8, 12), NO_SYNC)
    maintenance.compact(lake)
    gone = deltalake.DeltaTable(lake.uri).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert len(gone) == 3
    assert check(lake) == {(10_000, 1): list(range(12))}
    assert len(list((lake.path / "_staging" / "q" / "3").iterdir())) == 1
    ring.write(1)
    record(lake, ring, 3, 12, 13)
    assert check(lake) == {(10_000, 1): list(range(13))}


def test_the_log_has_statistics_of_seq_and_time(tmp_path: Path) -> None:
    """A reader skips files by them; times are in whole milliseconds that no row lies beyond."""
    lake = Lake.create(tmp_path / "lake")
    path = "stream_id=1/epoch=2/part.parquet"
    file = LakeFile(path, 1, 2, 10, 20, 8, 100, first_seq=11, last_seq=19, first_time_us=1_500, last_time_us=2_500)
    lake.append("record", lambda _: Change((file,)))
    adds = deltalake.DeltaTable(lake.uri).get_add_actions(flatten=True)
    found = polars.DataFrame(adds).to_dicts()[0]
    assert (found["min.seq"], found["max.seq"], found["num_records"]) == (11, 19, 8)
    assert found["min.time"] == datetime(1970, 1, 1, 0, 0, 0, 1_000, tzinfo=UTC)
    assert found["max.time"] == datetime(1970, 1, 1, 0, 0, 0, 3_000, tzinfo=UTC)
    assert (found["partition.stream_id"], found["partition.epoch"]) == (1, 2)
    back = Lake.open(lake.uri).state.files[path]
    assert (back.lo, back.hi, back.first_seq, back.last_time_us) == (10, 20, 11, 2_500)


def test_gaps_can_be_read_without_our_code(lake: Lake, ring: Ring) -> None:
    """`dropped_before` and `dropped_reason` of the first frame behind a gap say what is missing."""
    ring.write(4)
    record(lake, ring, 0, 0, 4)
    ring.write(20)
    record(lake, ring, 1, 4, 24)
    rows = polars.read_delta(lake.uri).select("seq", "dropped_before", "dropped_reason", "time").sort("seq")
    behind = rows.filter(polars.col("dropped_before") > 0).to_dicts()
    assert behind == [{"seq": 16, "dropped_before": 12, "dropped_reason": "OVERWRITTEN", "time": None}]
    assert lake.gaps() == [Gap(10_000, 1, 4, 16, "OVERWRITTEN")]


def test_tables_beside_the_frames_are_delta_tables(tmp_path: Path) -> None:
    metadata = [source(10_000, "camera/front"), attribute(10_000, 1, "exposure_ms", "4", told_ns=7)]
    lake = make_lake(tmp_path / "lake", rows_over_time(3), metadata=metadata)
    rows = polars.read_delta(str(lake.path / "_tables" / "metadata")).to_dicts()
    assert [(row["kind"], row["name"], row["key"], row["value"]) for row in rows] == [
        ("source", "camera/front", None, None),
        ("attribute", None, "exposure_ms", b"4"),
    ]
    assert [file.rows for file in lake.tables("metadata")] == [2]
    assert lake.tables("qos") == []


def test_rows_that_another_writer_appends_are_read(tmp_path: Path) -> None:
    """They are not recorded, and nothing is known of them but their statistics; the frames are there."""
    lake = make_lake(tmp_path / "lake", rows_over_time(3))
    table = deltalake.DeltaTable(lake.uri)
    more = table.to_pyarrow_table()
    deltalake.write_deltalake(
        table, more.set_column(more.schema.get_field_index("seq"), "seq", [[7, 8, 9]]), mode="append"
    )
    (foreign,) = [file for file in lake.files() if not file.is_recorded]
    assert (foreign.lo, foreign.hi, foreign.frames, foreign.stream_id) == (7, 10, 3, 10_000)
    check_readers(lake)


def test_commands_take_a_bucket(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ring: Ring) -> None:
    """A shell's s3://… reaches the library, although it passes through a Path."""
    monkeypatch.setenv("TENSORPOOL_SPOOL_DIR", str(tmp_path / "spool"))
    place = f"{bucket}/deep/lake"
    ring.write(4)
    record(Lake.create(place), ring, 0, 0, 4)
    for command in (["ls"], ["verify", "--deep"], ["compact"], ["retain", "--bytes", "1", "--dry-run"]):
        found = CliRunner().invoke(group, ["lake", *command, place])
        assert found.exit_code == 0, found.output
    listed = CliRunner().invoke(group, ["lake", "ls", place, "--json"])
    assert msgspec.json.decode(listed.output)["lake"] == place
    refused = CliRunner().invoke(group, ["lake", "ls", "gs://bucket/lake"])
    assert "accepted: a path, file://… or s3://bucket/path" in str(refused.exception)


# --- what the log remembers


def test_batches_positions_and_gaps_survive_that_entries_are_forgotten(lake: Lake, ring: Ring) -> None:
    """All that counts is in the checkpoint: a replayed batch is refused, a recording continues, gaps are listed."""
    ring.write(20)
    record(lake, ring, 0, 0, 20)
    tail = Gap(10_000, 1, 20, 20, UNKNOWN_TAIL)
    lost = Gap(10_000, 2, 0, 5, "EPOCH_GONE")
    commits.commit(lake, "q", 1, [Staged((), (tail, lost))])
    before = lake.gaps()
    assert before == [Gap(10_000, 1, 0, 12, "OVERWRITTEN"), tail, lost]
    forget_everything(lake)
    found = Lake.open(lake.uri)
    assert found.gaps() == before
    assert found.streams() == [10_000]
    assert found.state.batches == {"q": 1}
    assert found.state.ends == {(10_000, 1): 20, (10_000, 2): 5}
    assert record(found, ring, 1, 0, 20) is None
    assert deltalake.DeltaTable(lake.uri).transaction_version("10000/1") == 20
    check(found)


def test_gaps_alone_are_merged_into_their_neighbours(lake: Lake, ring: Ring) -> None:
    """A compaction takes in the files that only tell of gaps, and what they tell."""
    ring.write(4)
    record(lake, ring, 0, 0, 4)
    commits.commit(lake, "q", 1, [Staged((), (Gap(10_000, 1, 4, 6, "OVERWRITTEN"),))])
    ring.write(4, skip=2)
    record(lake, ring, 2, 6, 10)
    assert len(lake.state.files) == 3
    assert len(lake.files()) == 2
    assert maintenance.compact(lake).files_after == 1
    assert lake.gaps() == [Gap(10_000, 1, 4, 6, "OVERWRITTEN")]
    assert check(lake) == {(10_000, 1): [0, 1, 2, 3, 6, 7, 8, 9]}


# --- retention


def test_by_size_the_newest_file_of_every_stream_stays(tmp_path: Path) -> None:
    """One file that is larger than the bound is not deleted with everything in it."""
    rows = [*rows_over_time(100), *rows_over_time(30, stream_id=7)]
    lake = make_lake(tmp_path / "lake", rows, rows_per_file=50)
    gone = maintenance.retain(lake, max_bytes=1)
    assert (gone.files, gone.frames) == (1, 50)
    assert [(file.stream_id, file.lo) for file in lake.files()] == [(7, 0), (10_000, 50)]
    assert maintenance.retain(lake, max_bytes=1) == maintenance.Removal()
    check_readers(lake)


def test_a_dry_run_says_what_would_go_and_changes_nothing(lake: Lake, ring: Ring) -> None:
    ring.write(8)
    record(lake, ring, 0, 0, 4)
    record(lake, ring, 1, 4, 8)
    version = lake.state.number
    assert maintenance.retain(lake, max_age_s=0, is_dry=True).files == 2
    assert (lake.state.number, len(lake.files())) == (version, 2)
    maintenance.retain(lake, max_age_s=0)
    assert maintenance.remove_unused(lake, grace_s=0, is_dry=True).files == 2
    assert maintenance.remove_unused(lake, grace_s=0).files == 2


# --- a stream over a lake


def test_a_stream_with_a_bound_begins_where_entries_are_forgotten(lake: Lake, ring: Ring) -> None:
    """What the forgotten versions brought comes as one batch, the rest version by version, everything once."""
    from tensorpool.spark.lake_reader import LakeStreamReader

    for batch in range(6):
        ring.write(2)
        record(lake, ring, batch, 2 * batch, 2 * batch + 2)
        if batch in (2, 3):
            lake.log.write_checkpoint()
    assert lake.log.forget_before(now_ms() + SECOND_NS) > 0
    reader = LakeStreamReader(LakeOptions(path=lake.uri, max_bytes_per_trigger=1))
    at = reader.initialOffset()
    seqs: list[list[int]] = []
    assert at == {"commit": 0}
    while (end := reader.latestOffset(at)) != at:
        for partition in reader.partitions(at, end):
            seqs += [batch.column("seq").to_pylist() for batch in reader.read(partition)]
        at = end
    assert [seq for part in seqs for seq in part] == list(range(12))
    assert len(seqs) > 2


def test_a_compaction_brings_a_stream_nothing(lake: Lake, ring: Ring) -> None:
    """Also one that another tool makes: only actions that change data count."""
    from tensorpool.spark.lake_reader import LakeStreamReader

    for batch in range(3):
        ring.write(2)
        record(lake, ring, batch, 2 * batch, 2 * batch + 2)
    version = lake.state.number
    maintenance.compact(lake)
    deltalake.DeltaTable(lake.uri).optimize.compact()
    lake.log.append(lambda _: [AddFile("x", {"stream_id": "1", "epoch": "1"}, 1, 1, False)], "OPTIMIZE")
    reader = LakeStreamReader(LakeOptions(path=lake.uri))
    assert reader.partitions({"commit": version}, reader.latestOffset({"commit": version})) == []
