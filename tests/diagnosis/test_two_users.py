# SPDX-License-Identifier: Apache-2.0
"""Two accounts and one driver: one that shares a group reads the stream; another gets the reason and the remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorpool import aeron
from tests.support.processes import Process, run_script

DRIVER, INSIDER, OUTSIDER, GROUP = 64001, 64002, 64003, 64100

# All that will be needed is imported first: another account may not be able to read this interpreter's files.
BECOME = """
import importlib.metadata, os, sys
import numpy as np
import tensorpool as tp
import tensorpool.cli.doctor, tensorpool.cli.main, tensorpool.diagnosis.all_checks, tensorpool.embedded
tensorpool.aeron.library.load()
importlib.metadata.version("aeron-tensorpool"), tp.__version__
uid, groups = int(sys.argv[1]), [int(gid) for gid in sys.argv[2].split(",") if gid]
os.setgroups(groups)
os.setgid(uid)
os.setuid(uid)
"""

# Regions and the media driver's files get their own modes, whatever the umask is.
SERVE = (
    BECOME
    + """
os.umask(0)
profile = {"header_nslots": 4, "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}]}
shared = {"shm.base_dir": sys.argv[4], "shm.group": sys.argv[2], "profiles.default": profile}
config = tp.DriverConfig.load(environ={}, overrides=shared)
with tp.Driver(config, aeron_dir=sys.argv[3]) as driver, tp.connect(driver.aeron_dir, config=config) as client:
    with client.producer("shared", create=True, timeout=60) as producer:
        producer.publish(np.arange(6, dtype=np.uint16))
        print("ready", flush=True)
        sys.stdin.readline()
"""
)

READ = (
    BECOME
    + """
config = tp.DriverConfig.load(environ={}, overrides={"shm.base_dir": sys.argv[4]})
said = ""
while not said:
    try:
        with tp.connect(sys.argv[3], config=config) as client, client.consumer("shared", timeout=2) as consumer:
            frame = consumer.latest()
            said = f"read {None if frame is None else frame.copy().tolist()}"
    except tp.DriverUnreachable:
        pass  # it has much to do
    except tp.TensorPoolError as error:
        said = f"{type(error).__name__} {error}"
print(said)
"""
)

EXAMINE = (
    BECOME
    + """
sys.argv[1:] = ["doctor", "--aeron-dir", sys.argv[3], "--set", "shm.base_dir=" + sys.argv[4]]
tensorpool.cli.main.main()
"""
)


@pytest.fixture
def places(shm_dir: Path) -> Iterator[tuple[str, str]]:
    """As an administrator prepares it: a base whose group, by setgid, is that of all who share."""
    shm_dir.chmod(0o755)
    base, media = shm_dir / "tensorpool", shm_dir / "media"
    for folder, mode in ((base, 0o3777), (media, 0o1777)):
        folder.mkdir()
        os.chown(folder, 0, GROUP)
        folder.chmod(mode)
    where = str(media / "aeron"), str(base)
    with Process("-c", SERVE, str(DRIVER), str(GROUP), *where) as driver:
        assert driver.read_line() == "ready", driver.finish()
        yield where
        driver.finish(stdin="\n")


def test_a_shared_group_works_and_an_outsider_learns_what_would_help(places: tuple[str, str]) -> None:
    """Modes come from the configuration, not from the umask; the denial names uid, groups, owner, mode and the fix."""
    base = Path(places[1])
    user_dir = base / f"tensorpool-{DRIVER}"
    ring = next(user_dir.rglob("header.ring"))
    assert (user_dir.stat().st_mode & 0o7777, user_dir.stat().st_gid) == (0o2750, GROUP)
    assert (ring.stat().st_mode & 0o7777, ring.stat().st_uid, ring.stat().st_gid) == (0o660, DRIVER, GROUP)

    code, output = run_script(READ, str(INSIDER), str(GROUP), *places)
    assert (code, output.splitlines()[-1]) == (0, "read [0, 1, 2, 3, 4, 5]")

    code, output = run_script(READ, str(OUTSIDER), "", *places)
    text = output.splitlines()[-1]
    assert code == 0
    assert text.startswith(f"TransportError the media driver at {places[0]} may be alive and belongs to {DRIVER}: ")
    assert text.endswith(
        f"{places[0]} has group {GROUP} and mode 2750, and {OUTSIDER} (uid {OUTSIDER}) may not use it; add {OUTSIDER} "
        f"to group {GROUP} (usermod -aG {GROUP} {OUTSIDER}) and start anew, or use one of your own "
        f"(AERON_DIR=/dev/shm/aeron-{OUTSIDER} tensorpool driver)"
    )

    code, output = run_script(EXAMINE, str(OUTSIDER), "", *places)
    assert f"this process may not read {user_dir}: it runs as {OUTSIDER}" in output
    assert code == 1, output  # there is no media driver that it may use
    assert ring.exists()


def test_a_living_media_driver_of_another_user_is_called_that(shm_dir: Path) -> None:
    """Not absent and not a leftover: whose it is, its mode, what helps; and no advice to join group root."""
    shm_dir.chmod(0o755)
    base = shm_dir / "tensorpool"
    base.mkdir()
    base.chmod(0o1777)
    (base / "tensorpool-root").mkdir(mode=0o770)
    (base / "tensorpool-root").chmod(0o770)
    before = os.umask(0o022)
    try:
        media_driver = aeron.MediaDriver(str(shm_dir / "aeron"))
    finally:
        os.umask(before)
    with media_driver:
        where = media_driver.aeron_dir, str(base)
        code, output = run_script(READ, str(OUTSIDER), "", *where)
        text = output.splitlines()[-1]
        assert code == 0
        assert text.startswith(f"TransportError the media driver at {where[0]} is alive and belongs to root: ")
        assert (
            f"cnc.dat has group root and mode 0644, and {OUTSIDER} (uid {OUTSIDER}) may not use it; have root set"
            in text
        )
        assert f"AERON_DIR=/dev/shm/aeron-{OUTSIDER} tensorpool driver" in text

        code, output = run_script(EXAMINE, str(OUTSIDER), "", *where)
        assert code == 1
        assert f"the media driver at {where[0]} is alive and belongs to root" in output
        assert f"this process may not read {base / 'tensorpool-root'}" in output
        assert "usermod -aG root" not in output
        assert f"have root set shm.group to a group of root and {OUTSIDER}, and restart the driver" in output
        leftovers = [line for line in output.splitlines() if "leftovers" in line]
        assert leftovers, output
        assert not [line for line in leftovers if where[0] in line]
        assert aeron.is_driver_active(where[0])
