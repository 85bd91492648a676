# SPDX-License-Identifier: Apache-2.0
"""`tensorpool service`: units that systemd accepts, whose commands are ours; how they are; and what is removed."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import pytest
from click.testing import CliRunner, Result

from tensorpool.cli.main import COMMANDS, group
from tensorpool.cli.systemd_units import CONFIGURED, MARK, SERVICES
from tensorpool.errors import ConfigError
from tests.support.processes import ROOT, Process, wait_until

RECORD: Final = "camera/front --to '/srv/lab lake' --direct --retain-age 7d"
MOST_EXPOSED: Final = 3.0  # by `systemd-analyze security`, of 10


def invoke(*words: str) -> Result:
    return CliRunner().invoke(group, ["service", *words])


def install(root: Path, *words: str) -> list[Path]:
    result = invoke("install", "--root", str(root), *words)
    assert result.exit_code == 0, result.output + str(result.exception)
    return [Path(line.removeprefix("wrote ")) for line in result.output.splitlines() if line.startswith("wrote ")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system with the driver's configuration and nothing else."""
    folder = tmp_path / "etc/tensorpool"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "examples/driver/shared_group.toml", folder / "driver.toml")
    return tmp_path


def parse(unit: Path) -> Any:
    found = configparser.RawConfigParser(strict=True, comment_prefixes=("#",))
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read_string(unit.read_text())
    return found


@pytest.mark.parametrize("scope", ["--system", "--user"])
def test_units_of_all_services_are_accepted_by_systemd(scope: str, root: Path) -> None:
    """Type, watchdog and end are as services report them; `systemd-analyze verify`, where it exists, finds no fault."""
    units = [path for path in install(root, scope, *SERVICES, "--record", RECORD) if path.suffix == ".service"]
    assert len(units) == len(SERVICES)
    for path in units:
        text = path.read_text()
        assert text.startswith(MARK)
        service = parse(path)["Service"]
        assert (service["Type"], service["KillMode"], service["NotifyAccess"]) == ("notify", "mixed", "main")
        assert int(service["WatchdogSec"]) > 10
        assert ("User" in service) is (scope == "--system")
        assert (service.get("ProtectSystem") == "strict") is (scope == "--system")
        known = {key for section in parse(path).values() for key in section}
        assert known <= KNOWN_KEYS, known - KNOWN_KEYS
    if shutil.which("systemd-analyze"):
        files = list(map(str, units))
        done = subprocess.run(
            ["systemd-analyze", scope, "--man=no", "verify", *files],
            capture_output=True,
            text=True,
            env=os.environ | {"XDG_RUNTIME_DIR": str(root)},
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, ""), done


# Every key that a unit of ours may have, each in systemd's manual: a misspelt one is ignored by systemd with a warning.
KNOWN_KEYS: Final = frozenset(
    re.findall(
        r"\w+",
        """
        Description After Wants StartLimitIntervalSec StartLimitBurst Type NotifyAccess ExecStart ExecReload Restart
        RestartSec WatchdogSec TimeoutStartSec TimeoutStopSec KillMode LimitMEMLOCK LimitNOFILE Environment User Group
        NoNewPrivileges CapabilityBoundingSet AmbientCapabilities ProtectSystem ProtectHome PrivateTmp PrivateDevices
        ProtectClock ProtectControlGroups ProtectHostname ProtectKernelLogs ProtectKernelModules ProtectKernelTunables
        LockPersonality RestrictNamespaces RestrictRealtime RestrictAddressFamilies SystemCallArchitectures
        SystemCallFilter SystemCallErrorNumber RestrictSUIDSGID ReadWritePaths WantedBy
        """,
    )
)


def test_system_units_may_do_little(root: Path) -> None:
    """`systemd-analyze security`, where it exists, rates each unit below the figure that docs/operations.md states."""
    units = [path for path in install(root, "--system", *SERVICES, "--record", RECORD) if path.suffix == ".service"]
    for path in units:
        section = parse(path)["Service"]
        assert section["CapabilityBoundingSet"] == ""
        assert section["NoNewPrivileges"] == "yes"
        # A driver's directories carry the set-group-ID bit, which RestrictSUIDSGID forbids.
        assert ("RestrictSUIDSGID" in section) is (path.stem.split("-")[-1] not in ("driver", "registry"))
        if shutil.which("systemd-analyze"):
            words = ["systemd-analyze", "security", "--offline=true", "--json=short", str(path)]
            done = subprocess.run(words, capture_output=True, text=True)
            figures = [float(row["exposure"]) for row in json.loads(done.stdout) if row["exposure"]]
            assert figures, done
            overall = subprocess.run(words[:3] + words[4:], capture_output=True, text=True).stdout.splitlines()[-1]
            assert float(overall.rpartition(": ")[2].split()[0]) <= MOST_EXPOSED, overall


def test_each_unit_starts_a_command_that_tensorpool_accepts(root: Path) -> None:
    """Every option exists, and the configuration is the file of that service."""
    units = install(root, "--system", *SERVICES, "--record", RECORD, "--token-file", "/etc/tensorpool/token")
    for path in units:
        if path.suffix != ".service":
            continue
        words = shlex.split(parse(path)["Service"]["ExecStart"].replace("%%", "%").replace("$$", "$"))
        assert words[1:3] == ["-m", "tensorpool"]
        name, *arguments = words[3:]
        assert name in COMMANDS
        command = group.get_command(click.Context(group), name)
        assert command is not None
        context = command.make_context(name, arguments)
        service = next(each for each in SERVICES if path.stem == f"tensorpool-{each}")
        assert context.params["path"] == Path("/etc/tensorpool") / CONFIGURED[service]
        if service == "recorder":
            assert context.params["streams"] == ("camera/front",)
            assert str(context.params["lake"]) == "/srv/lab lake"
            assert parse(path)["Service"]["ReadWritePaths"] == '"/srv/lab lake"'


def test_installations_of_two_names_share_nothing(root: Path) -> None:
    """Other units, other folders, other ports: two drivers for two groups on one host."""
    found = {}
    for name, port in (("imaging", "9500"), ("robots", "9600")):
        units = install(root, "--system", "--name", name, "--first-port", port, "--account", name)
        found[name] = {path.name: path.read_text() for path in units}
    assert found["imaging"].keys().isdisjoint(found["robots"])
    text = "".join(found["imaging"].values())
    assert "127.0.0.1:9501" in text
    assert "/etc/tensorpool/imaging/driver.toml" in text
    assert "robots" not in text


def test_what_is_mapped_is_kept_from_cleaning_and_the_lakes_folder_exists(root: Path) -> None:
    """By the driver's own configuration: an age for /dev/shm in another file of tmpfiles.d does not apply."""
    install(root, "--system", "recorder", "driver", "--record", RECORD, "--account", "lab", "--group", "imaging")
    lines = (root / "etc/tmpfiles.d/tensorpool.conf").read_text().splitlines()
    assert lines[1:] == [r"d /srv/lab\x20lake 0750 lab imaging -", "x /dev/shm/imaging*", "x /dev/shm/imaging-aeron*"]


def test_units_may_write_where_the_drivers_memory_is(root: Path) -> None:
    """ProtectSystem=strict leaves /dev/shm writable, and no other mount."""
    config = root / "etc/tensorpool/driver.toml"
    config.write_text(config.read_text().replace("/dev/shm/", "/mnt/imaging/"))
    for path in install(root, "--system", *SERVICES, "--record", RECORD):
        if path.suffix == ".service":
            written = shlex.split(parse(path)["Service"]["ReadWritePaths"])
            has_lake = path.stem.endswith(("recorder", "console"))
            assert written == ["/mnt/imaging", *(["/srv/lab lake"] if has_lake else [])], path


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--system", "recorder"], "what to record and where"),
        (["--system", "recorder", "--record", "a --to lake"], "an absolute path after --to"),
        (["--system", "recorder", "--record", "a --too /lake"], "No such option"),
        (["--system", "--name", "a-b"], "letters, digits and _"),
        (["--system", "printer"], "'printer' is not one of"),
        ([], "Missing option '--user"),
    ],
)
def test_what_cannot_be_installed_is_refused_and_nothing_is_written(words: list[str], reason: str, root: Path) -> None:
    """With the option at fault."""
    result = invoke("install", "--root", str(root), *words)
    assert result.exit_code != 0
    assert reason in result.output + str(result.exception)
    assert not (root / "etc/systemd").exists()


def test_files_of_others_are_neither_replaced_nor_removed(root: Path) -> None:
    """A unit that an operator wrote by hand stays, and installing says which one it is."""
    (own,) = [path for path in install(root, "--system", "driver") if path.suffix == ".service"]
    by_hand = own.with_name("tensorpool-supervisor.service")
    by_hand.write_text("[Service]\nExecStart=/bin/true\n")
    result = invoke("install", "--root", str(root), "--system")
    assert isinstance(result.exception, ConfigError)
    assert str(by_hand) in str(result.exception)
    removed = invoke("uninstall", "--root", str(root), "--system")
    assert removed.exit_code == 0, removed.output
    assert [path.name for path in (root / "etc/systemd/system").iterdir()] == [by_hand.name]
    assert list((root / "etc/tmpfiles.d").iterdir()) == []
    assert "no unit of ours" in invoke("uninstall", "--root", str(root), "--system").output


@pytest.fixture
def installed_driver(root: Path, shm_dir: Path) -> Iterator[tuple[Path, Process]]:
    """A driver, started as its unit says, and its supervisor's unit, of which nothing runs."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = root / "driver.toml"
    config.write_text((ROOT / "examples/driver/minimal.toml").read_text())
    place = ("--system", "--config-dir", str(root), "--first-port", str(port - 1))
    (unit, _, _) = install(root, *place, "driver", "supervisor")
    words = shlex.split(parse(unit)["Service"]["ExecStart"])
    with Process(*words[1:], AERON_DIR=str(shm_dir / "aeron"), SHM_BASE_DIR=str(shm_dir / "shm")) as process:
        while "serves" not in (line := process.read_line()):
            assert line, "the driver ended"
        yield root, process


def test_status_tells_a_service_that_is_well_from_one_that_does_not_answer(
    installed_driver: tuple[Path, Process],
) -> None:
    """By the health that each serves where its unit says; exit code 1 while one of them is not well."""
    root, process = installed_driver

    def status(*words: str) -> tuple[int, dict[str, str]]:
        result = invoke("status", "--system", "--root", str(root), "--json", *words)
        return result.exit_code, {row["service"]: row["health"] for row in json.loads(result.output)}

    code, health = status()
    assert code == 1
    assert health["driver"] == "ok"
    assert health["supervisor"].startswith("no answer on port")
    (root / "etc/systemd/system/tensorpool-supervisor.service").unlink()
    assert status() == (0, {"driver": "ok"})
    process.send(signal.SIGTERM)
    wait_until(lambda: status()[0] == 1, "the driver is gone")
    text = invoke("status", "--system", "--root", str(root)).output
    assert "tensorpool-driver.service" in text
