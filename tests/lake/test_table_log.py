# SPDX-License-Identifier: Apache-2.0
"""The log of a table: each version is written once, also when writers race or die; other Delta readers agree."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import deltalake
import duckdb
import msgspec
import polars
import pyarrow.parquet as pq
import pytest

from tensorpool.errors import ConfigError
from tensorpool.lake import delta_log
from tensorpool.lake.delta_log import Action, AddFile, CommitInfo, Metadata, Protocol, RemoveFile, Txn
from tensorpool.lake.errors import LakeDamaged
from tensorpool.lake.log_store import LocalStore, open_store
from tensorpool.lake.snapshot import Snapshot
from tensorpool.lake.table_log import TableLog, now_ms
from tests.support.delta_tables import ROWS, append_next, open_log, replace_all, write_file


def test_every_reader_sees_the_rows_of_the_log(place: str) -> None:
    """deltalake, Polars, DuckDB and pyarrow count the same seqs: after appends, a checkpoint, a compaction."""
    log = open_log(place)
    for _ in range(5):
        append_next(log)
    _check_readers(place, range(5 * ROWS))
    log.write_checkpoint()
    _check_readers(place, range(5 * ROWS))
    replace_all(log)
    append_next(log)
    _check_readers(place, range(6 * ROWS))
    log.write_checkpoint()
    log.forget_before(now_ms() + 1000)
    _check_readers(place, range(6 * ROWS))
    assert list(TableLog(open_store(place)).snapshot().files) == list(log.snapshot().files)


def _check_readers(place: str, expected: range) -> None:
    seqs = list(expected)
    table = deltalake.DeltaTable(place)
    # deltalake: what the log says, without reading a file
    adds = table.get_add_actions(flatten=True)
    assert sum(adds.column("num_records").to_pylist()) == len(seqs)
    assert table.transaction_version("10000/3") == len(seqs)
    assert sorted(table.to_pyarrow_table(columns=["seq"]).column("seq").to_pylist()) == seqs
    frame = polars.scan_delta(place).select("seq", "stream_id").collect()
    assert sorted(frame["seq"].to_list()) == seqs
    assert set(frame["stream_id"].to_list()) == {10000}
    if "://" in place:
        return  # DuckDB's S3 reader is an extension that it fetches from the network
    files = table.file_uris()
    found = duckdb.execute(
        f"select seq from read_parquet({files!r}, hive_partitioning = true) where epoch = 3"
    ).fetchall()
    assert sorted(row[0] for row in found) == seqs
    assert sum(pq.ParquetFile(file).metadata.num_rows for file in files) == len(seqs)


def test_tags_and_transactions_survive_a_checkpoint(place: str) -> None:
    """What a file says about itself, and how far applications have come, is read back as it was written."""
    log = open_log(place)
    append_next(log)
    log.append(lambda _: [Txn("query", 7)], "WRITE")
    before = log.snapshot().copy()
    log.write_checkpoint()
    _remove_entries(log, before.version)
    found = TableLog(open_store(place)).snapshot()
    assert found.txns == {"10000/3": ROWS, "query": 7} == before.txns
    for path, file in found.files.items():
        assert msgspec.structs.replace(before.files[path], data_change=False) == file
    assert found.metadata == before.metadata
    assert found.version == before.version


def _remove_entries(log: TableLog, version: int) -> None:
    log.store.remove(delta_log.entry_name(number) for number in range(version + 1))


def test_a_checkpoint_of_deltalake_is_read(tmp_path: Path) -> None:
    """Checkpoints that another writer makes do as well as ours."""
    place = str(tmp_path / "table")
    log = open_log(place)
    for _ in range(3):
        append_next(log)
    replace_all(log)
    deltalake.DeltaTable(place).create_checkpoint()
    _remove_entries(log, log.snapshot().version)
    found = TableLog(open_store(place)).snapshot()
    assert found.txns == log.snapshot_at(4).txns
    assert list(found.files) == list(log._snapshot.files)
    assert [file.tags for file in found.files.values()] == [file.tags for file in log._snapshot.files.values()]


def test_processes_that_race_all_land(place: str) -> None:
    """Three processes append ten times each: thirty versions, no seq twice, none missing."""
    open_log(place)
    command = [sys.executable, "-m", "tests.support.delta_tables", place, "10"]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    versions = []
    for writer in writers:
        out, _ = writer.communicate(timeout=120)
        assert writer.returncode == 0
        versions += [int(line) for line in out.splitlines()[1:]]
    assert sorted(versions) == list(range(1, 31))
    _check_readers(place, range(30 * ROWS))


def test_a_process_killed_while_it_commits_leaves_a_whole_log(tmp_path: Path) -> None:
    """SIGKILL at any moment: every version that was reported is there, whole, and the next process goes on."""
    place = str(tmp_path / "table")
    open_log(place)
    reported = 0
    for attempt in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.support.delta_tables", place, "100000"], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        for _ in range(5 + attempt):
            reported = int(writer.stdout.readline())
        time.sleep(0.003 * attempt)  # another place in the commit each time
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().splitlines(keepends=True)
        writer.wait()
        writer.stdout.close()
        reported = max([reported, *(int(line) for line in rest if line.endswith("\n"))])
        assert TableLog(open_store(place)).snapshot().version >= reported
    version = append_next(TableLog(open_store(place)))
    _check_readers(place, range(version * ROWS))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty"),
        (b'{"add": {"path": "a", "size"', "torn"),
        (b'{"commit": 3}', "torn or no entry of a Delta log"),
        (b"PAR1", "torn"),
        (b'{"protocol":{"minReaderVersion":3,"minWriterVersion":7}}', "reader version 3"),
        (
            b'{"add":{"path":"a","partitionValues":{},"size":1,"modificationTime":1,"dataChange":true,'
            b'"deletionVector":{"storageType":"u"}}}',
            "deletion vector",
        ),
    ],
)
def test_an_entry_that_is_torn_or_foreign_is_refused(place: str, data: bytes, problem: str) -> None:
    """Opening fails and names the entry; nothing is guessed."""
    log = open_log(place)
    append_next(log)
    log.store.put(delta_log.entry_name(2), data)
    for reader in (log, TableLog(open_store(place))):
        with pytest.raises(LakeDamaged, match=problem) as error:
            reader.snapshot()
        assert error.value.path.endswith("00000000000000000002.json")


def test_a_log_without_its_beginning_is_refused(place: str) -> None:
    """An entry is missing and no checkpoint covers it: no reader may take the rest for the table."""
    log = open_log(place)
    append_next(log)
    append_next(log)
    log.store.remove([delta_log.entry_name(1)])
    with pytest.raises(LakeDamaged, match="missing"):
        TableLog(open_store(place)).snapshot_at(2)
    log.store.remove([delta_log.entry_name(0)])
    with pytest.raises(LakeDamaged, match="missing"):
        TableLog(open_store(place)).snapshot()


@pytest.mark.parametrize("torn", ["_last_checkpoint", "00000000000000000003.checkpoint.parquet"])
def test_a_torn_checkpoint_costs_time_only(place: str, torn: str) -> None:
    """A checkpoint is a short cut: where it cannot be read, the entries are."""
    log = open_log(place)
    for _ in range(3):
        append_next(log)
    log.write_checkpoint()
    log.store.put(f"_delta_log/{torn}", b"{half of")
    found = TableLog(open_store(place)).snapshot()
    assert (found.version, list(found.files)) == (3, list(log.snapshot().files))


def test_another_table_at_the_same_place_is_noticed(tmp_path: Path) -> None:
    """A table that was deleted and made anew shares nothing with what an open log remembers."""
    place = tmp_path / "table"
    log = open_log(str(place))
    for _ in range(3):
        append_next(log)
    first = log.snapshot().table_id
    shutil.rmtree(place)
    other = open_log(str(place))
    append_next(other)
    assert log.snapshot().version == 1
    assert log.snapshot().table_id == other.snapshot().table_id != first
    for _ in range(5):
        append_next(other)
    assert append_next(log) == 7
    _check_readers(str(place), range(7 * ROWS))


def test_a_reader_left_behind_by_forgotten_entries_goes_on(place: str) -> None:
    """Entries that it had not read are gone: it goes on from the checkpoint that covers them."""
    log = open_log(place)
    append_next(log)
    reader = TableLog(open_store(place))
    assert reader.snapshot().version == 1
    for _ in range(4):
        append_next(log)
        log.write_checkpoint()
    assert log.forget_before(now_ms() + 1000) > 0
    assert reader.snapshot().version == 5
    assert reader.oldest()[0] > 1
    with pytest.raises(LakeDamaged, match="missing"):
        reader.entry(2)
    assert len(reader.snapshot_at(reader.oldest()[1]).files) == reader.oldest()[1]


def test_entries_younger_than_the_moment_are_kept(tmp_path: Path) -> None:
    """Forgetting is by age: what is young stays readable version by version."""
    log = open_log(str(tmp_path / "table"))
    for _ in range(3):
        append_next(log)
        log.write_checkpoint()
    assert log.forget_before(now_ms() - 3_600_000) == 0
    assert log.oldest() == (0, 0)
    assert [len(log.snapshot_at(version).files) for version in range(4)] == [0, 1, 2, 3]


def test_a_checkpoint_comes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After enough entries, on a thread beside the committer."""
    monkeypatch.setattr("tensorpool.lake.table_log.MIN_ENTRIES_PER_CHECKPOINT", 4)
    log = open_log(str(tmp_path / "table"))
    for _ in range(10):
        append_next(log)
        log.settle()
    names = log.store.names("_delta_log")
    assert [name for name in names if "checkpoint.parquet" in name] == [
        "00000000000000000003.checkpoint.parquet",
        "00000000000000000007.checkpoint.parquet",
    ]
    assert deltalake.DeltaTable(tmp_path / "table").version() == 10


def test_a_table_that_is_gone_is_not_begun_by_its_next_version(tmp_path: Path) -> None:
    """A committer whose table was deleted refuses to go on: a log must say first what the table is."""
    log = open_log(str(tmp_path / "table"))
    append_next(log)
    shutil.rmtree(tmp_path / "table" / "_delta_log")
    (tmp_path / "table" / "_delta_log").mkdir()
    with pytest.raises(LakeDamaged, match="the log of the table is missing"):
        append_next(log)
    assert not log.exists()


def test_what_make_refuses_is_not_written(place: str) -> None:
    """None is no version; an error passes through and leaves the log as it was."""
    log = open_log(place)

    def refuse(_: Snapshot) -> None:
        raise RuntimeError("no")

    assert log.append(lambda _: None, "WRITE") == -1
    with pytest.raises(RuntimeError, match="no"):
        log.append(refuse, "WRITE")
    assert log.snapshot().version == 0


@pytest.mark.parametrize(
    "place", ["gs://bucket/lake", "abfss://c@a/lake", "hdfs://host/lake", "http://host/lake", "s3://"]
)
def test_a_place_that_is_not_supported_is_refused(place: str) -> None:
    """No scheme becomes a local directory in silence."""
    with pytest.raises(ConfigError, match="s3://bucket/path"):
        open_store(place)


def test_a_file_uri_is_a_path(tmp_path: Path) -> None:
    """file:///data, file:/data and /data are one place."""
    for place in (f"file://{tmp_path}", f"file:{tmp_path}", str(tmp_path), tmp_path):
        store = open_store(place)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path


def test_an_entry_is_one_action_a_line() -> None:
    """Encoded and decoded again, with the names of the protocol."""
    actions: list[Action] = [
        CommitInfo(5, "WRITE", {"query": "q"}, "tensorpool", "id"),
        Protocol(1, 2),
        Metadata("id", "{}", ("stream_id",), {"k": "v"}, 4),
        AddFile("a=1/x.parquet", {"a": "1"}, 10, 3, True, "{}", {"t": "1"}),
        RemoveFile("y.parquet", 9, False),
        Txn("app", 3, 2),
    ]
    data = delta_log.encode_entry(actions)
    assert [next(iter(msgspec.json.decode(line))) for line in data.splitlines()] == [
        "commitInfo", "protocol", "metaData", "add", "remove", "txn",
    ]  # fmt: skip
    assert b'"partitionValues"' in data
    assert b'"minReaderVersion"' in data
    assert delta_log.decode_entry(data) == actions


def test_versions_follow_each_other() -> None:
    """A snapshot takes the next version only, and needs to know what the table is."""
    snapshot = Snapshot()
    with pytest.raises(ValueError, match="does not follow"):
        snapshot.apply(1, [])
    with pytest.raises(ValueError, match="metaData is missing"):
        snapshot.apply(0, [Txn("a", 1)])


def test_a_file_that_was_removed_can_come_again(tmp_path: Path) -> None:
    """The newest action on a path counts."""
    log = open_log(str(tmp_path / "table"))
    file = write_file(log, 0, 5)
    log.append(lambda _: [file], "WRITE")
    log.append(lambda _: [RemoveFile(file.path, now_ms())], "DELETE")
    assert (list(log.snapshot().files), list(log.snapshot().removed)) == ([], [file.path])
    log.append(lambda _: [file], "WRITE")
    assert (list(log.snapshot().files), list(log.snapshot().removed)) == ([file.path], [])
    assert len(deltalake.DeltaTable(tmp_path / "table").file_uris()) == 1
