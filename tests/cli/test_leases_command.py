# SPDX-License-Identifier: Apache-2.0
"""`tensorpool leases`, `drain` and `reload`: who is attached, by real processes, and what an operator may end."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import tensorpool as tp
from tensorpool.process_description import ProcessDescription
from tests.cli.conftest import Shell
from tests.support.processes import Process, wait_until

HOLD = """
import sys
import tensorpool as tp
from tensorpool.process_description import ProcessDescription
if sys.argv[2] == "lie":
    lie = ProcessDescription(user="nobody\x1b[2J", host="<b>", program="none", command="y" * 4000)
    ProcessDescription.own = classmethod(lambda cls: lie)
client = tp.connect()
lease = client.consumer(sys.argv[1]) if sys.argv[2] == "consume" else client.producer(sys.argv[1], create=True)
print("attached", flush=True)
sys.stdin.read()
"""
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
APART = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


def hold(shell: Shell, name: str, what: str, *run: str) -> Process:
    """A process that attaches; `run` starts it otherwise than directly."""
    first = ("-c", APART, *run, sys.executable) if run else ()
    process = Process(*first, "-c", HOLD, name, what, "--token", "s3cret\x1b[31m", **shell.environment)
    assert process.read_line() == "attached"
    return process


def leases(shell: Shell, name: str) -> dict[str, dict[str, Any]]:
    """The leases of a stream by role, as JSON says."""
    code, output = shell.run_here("leases", "--stream", name, "--json")
    assert code == 0, output
    return {row["role"]: row for row in json.loads(output)}


def declared(shell: Shell, name: str, count: int) -> dict[str, dict[str, Any]]:
    """The same, once that many are known."""
    wait_until(lambda: sum("pid" in row for row in leases(shell, name).values()) == count, f"{count} are declared")
    return leases(shell, name)


def has_other_lease(shell: Shell, before: dict[str, Any]) -> bool:
    now = leases(shell, str(before["stream_id"])).get("PRODUCER")
    return now is not None and now["lease_id"] != before["lease_id"]


@pytest.fixture
def producer(shell: Shell) -> Iterator[Process]:
    with hold(shell, "leases/one", "produce") as process:
        yield process


def test_producers_and_consumers_are_shown_with_their_processes(shell: Shell, producer: Process) -> None:
    """As this host sees them; the command line is cut, escaped and without its token."""
    with hold(shell, "leases/one", "consume") as consumer:
        found = declared(shell, "leases/one", 2)
        for role, process in (("PRODUCER", producer), ("CONSUMER", consumer)):
            row = found[role]
            assert (row["pid"], row["source"], row["stream_name"]) == (process.pid, "seen", "leases/one")
            assert "s3cret" not in row["command"]
            assert row["command"].isprintable()
            assert row["keepalive_age_ms"] <= 5000
        code, output = shell.run_here("leases", "--stream", "leases/one")
        assert code == 0
        heading, *rows = output.splitlines()
        assert heading.split()[:5] == ["stream", "role", "pid", "user", "command"]
        assert [row.split()[1] for row in rows] == ["producer", "consumer"]
        assert str(producer.pid) in rows[0].split()
        code, output = shell.run_here("leases")
        assert str(consumer.pid) in output
    wait_until(lambda: leases(shell, "leases/one").keys() == {"PRODUCER"}, "the consumer's lease has ended")


def test_a_process_in_a_namespace_of_its_own_is_declared_only(shell: Shell) -> None:
    """The driver cannot look at it: its number means another process here."""
    with hold(shell, "leases/apart", "produce", *UNSHARE) as process:
        row = declared(shell, "leases/apart", 1)["PRODUCER"]
        assert (row["source"], row["place"]) == ("declared", "container")
        assert row["pid"] != process.pid
        code, output = shell.run_here("leases", "--stream", "leases/apart")
        assert (code, "declared" in output, "(container)" in output) == (0, True, True)


@pytest.mark.parametrize("run", [(), UNSHARE], ids=["here", "apart"])
def test_what_a_client_says_counts_only_where_nobody_can_look(shell: Shell, run: tuple[str, ...]) -> None:
    """On this host its account and command line are as /proc has them; from elsewhere they are cut and escaped."""
    name = f"leases/lie-{len(run)}"
    with hold(shell, name, "lie", *run):
        row = declared(shell, name, 1)["PRODUCER"]
        if run:
            assert (row["source"], row["user"], row["host"]) == ("declared", r"nobody\x1b[2J", "<b>")
            assert row["command"] == "y" * 199 + "…"
        else:
            assert (row["source"], row["user"]) == ("seen", ProcessDescription.own().user)
            assert " lie " in row["command"]


def test_a_client_that_declares_nothing_shows_what_the_media_driver_knows(shell: Shell) -> None:
    """As one of another implementation."""
    control = msgspec.structs.replace(shell.pool.config.control, enabled=False)
    config = msgspec.structs.replace(shell.pool.config, control=control)
    with (
        tp.connect(shell.pool.aeron_dir, config=config) as silent,
        silent.producer("leases/silent", create=True) as held,
    ):
        stream = str(held.stream_id)
        wait_until(
            lambda: leases(shell, stream)["PRODUCER"]["aeron_client"].startswith("tensorpool"),
            "the media driver has its name, which comes with the client's first heartbeat",
        )
        assert "pid" not in leases(shell, stream)["PRODUCER"]
        code, output = shell.run_here("leases", "--stream", str(held.stream_id))
        assert (code, "unknown" in output) == (0, True)


def test_a_refusal_names_the_process(shell: Shell, producer: Process) -> None:
    """Pid, user, command line, since when."""
    row = declared(shell, "leases/one", 1)["PRODUCER"]
    with shell.pool.connect() as client:
        pattern = rf"already has a producer \(.*pid {producer.pid}, user {row['user']}, .*, since \d\d:\d\d\)"
        with pytest.raises(tp.AttachRefused, match=pattern):
            client.producer("leases/one", create=True, timeout=2)


def test_an_operator_ends_a_lease_and_the_client_gets_another(shell: Shell, producer: Process) -> None:
    """By lease, by client and by stream; the client reads the reason and asks again."""
    for option in ("lease_id", "client_id", "stream_id"):
        row = declared(shell, "leases/one", 1)["PRODUCER"]
        which = {"lease_id": [str(row["lease_id"])], "client_id": ["--client", str(row["client_id"])]}.get(
            option, ["--stream", "leases/one"]
        )
        code, output = shell.run_here("leases", "revoke", *which, "--reason", "maintenance")
        assert (code, f"revoked producer client {row['client_id']}" in output) == (0, True), output
        assert f"pid {producer.pid}" in output
        wait_until(lambda row=row: has_other_lease(shell, row), "it has another lease")
    code, output = shell.run_here("leases", "revoke", "12")
    assert (code, "no lease of lease 12" in output) == (1, True)


@pytest.mark.parametrize("arguments", [(), ("1", "--client", "2"), ("--client", "2", "--stream", "x")])
def test_what_to_end_is_named_once(shell: Shell, arguments: tuple[str, ...]) -> None:
    """A wrong command line ends nothing."""
    code, output = shell.run_here("leases", "revoke", *arguments)
    assert (code, "one of them" in output) == (2, True)
    assert shell.run_here("leases", "--json", "revoke", "1")[0] == 2


def test_top_and_inspect_say_who_it_is(shell: Shell, producer: Process) -> None:
    """From pages that the driver publishes: neither takes a lease."""
    code, output = shell.run_here("inspect", "leases/one", "--seconds", "3")
    assert code == 0
    assert f"pid {producer.pid}, user " in output
    code, output = shell.run_here("top", "--once", "--json", "--seconds", "3")
    view = json.loads(output)
    (held,) = (row for row in view["leases"] if (row["holder"] or {}).get("pid") == producer.pid)
    assert held["holder"]["source"] == "seen"
    (stream,) = (row for row in view["streams"] if row["stream_id"] == held["stream_id"])
    assert str(producer.pid) in stream["producer"].split()


def test_drain_and_reload_are_commands() -> None:
    """Of the driver where no service is named, with its own words."""
    with tp.local() as pool:
        shell = Shell(pool)
        code, output = shell.run_here("reload", "driver:driver-01")
        assert (code, "this driver was started by a program" in output) == (1, True)
        assert shell.run_here("drain", "--reason", "maintenance") == (0, "draining\n")
        wait_until(lambda: not pool.is_running, "the driver ends")


def test_many_leases_come_page_by_page(shell: Shell) -> None:
    """Each once, also where they do not fit into one message."""
    with (
        shell.pool.connect() as client,
        client.producer("leases/many", create=True) as producer,
        contextlib.ExitStack() as held,
    ):
        ids = {held.enter_context(client.consumer(producer.stream_id)).consumer_id for _ in range(80)}
        code, output = shell.run_here("leases", "--stream", str(producer.stream_id), "--json")
        found = [row["client_id"] for row in json.loads(output) if row["role"] == "CONSUMER"]
        assert code == 0
        assert len(output) > 16 << 10
        assert (len(found), set(found)) == (80, ids)
