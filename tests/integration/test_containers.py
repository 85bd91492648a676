# SPDX-License-Identifier: Apache-2.0
"""deploy/: what the image, the compose file and the manifests run is accepted by the commands, and the layout works.

No container engine is needed: each container is a process in mount, pid, ipc, uts and network namespaces of its own, in
which /mnt/exchange is the shared folder and /dev/shm is private. It runs as root, where the image has an account.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import pytest
import yaml

from tensorpool.cli.main import COMMANDS, group
from tensorpool.driver import DriverConfig
from tests.support.processes import ROOT, private_directory

DEPLOY: Final = ROOT / "deploy"
COMPOSE: Final = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS: Final = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
EXCHANGE: Final = "/mnt/exchange"
CONFIG: Final = "/etc/tensorpool/driver.toml"  # in the image
NAMESPACES: Final = ("--mount", "--pid", "--ipc", "--uts", "--net", "--fork", "--kill-child", "--mount-proc")


def pods() -> list[dict[str, Any]]:
    """The pods of the manifests, also those that a DaemonSet makes."""
    return [it["spec"]["template"]["spec"] if it["kind"] == "DaemonSet" else it["spec"] for it in MANIFESTS]


def command_lines() -> Iterator[list[str]]:
    for service in COMPOSE["services"].values():
        yield service["command"]
    for pod in pods():
        for container in pod["containers"]:
            yield container["args"]


def dockerfile() -> list[tuple[str, str]]:
    """Its instructions."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("words", list(command_lines()), ids=" ".join)
def test_each_container_runs_a_command_that_tensorpool_accepts(words: list[str]) -> None:
    """With options that exist and the configuration of the image."""
    name, *arguments = words
    assert name in COMMANDS
    command = group.get_command(click.Context(group), name)
    assert command is not None
    context = command.make_context(name, list(arguments))
    path = context.params.get("path") or context.params["connection"].path
    assert path == Path(CONFIG)


def test_the_image_is_made_of_files_that_exist_and_runs_as_nobody_special() -> None:
    """Every COPY from here, the entry point, and an account whose id the volumes have."""
    instructions = dockerfile()
    for word, rest in instructions:
        if word == "COPY" and "--from" not in rest:
            assert all((ROOT / source).exists() for source in shlex.split(rest)[:-1]), rest
    last = dict(instructions)
    assert last["ENTRYPOINT"] == '["tensorpool"]'
    assert last["USER"] == "tensorpool"
    assert "--uid 10001" in next(rest for _, rest in instructions if "useradd" in rest)
    assert "uid=10001" in COMPOSE["volumes"]["exchange"]["driver_opts"]["o"]
    assert ("COPY", f"deploy/driver.toml {CONFIG}") in instructions


def test_everything_that_is_shared_is_in_the_volume() -> None:
    """Aeron's directory and the regions, in each container at the same place."""
    config = DriverConfig.load(DEPLOY / "driver.toml", environ={})
    for path in (config.driver.aeron_dir, config.shm.base_dir, *config.shm.allowed_base_dirs):
        assert path.startswith(f"{EXCHANGE}/")
    for service in COMPOSE["services"].values():
        assert service["volumes"] == [f"exchange:{EXCHANGE}"]
    for pod in pods():
        (volume,) = pod["volumes"]
        assert ("hostPath" in volume) or volume["emptyDir"]["medium"] == "Memory"
        for container in pod["containers"]:
            assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": EXCHANGE}]


def test_probes_ask_for_health_where_it_is_served() -> None:
    """The port of --metrics; on loopback inside a container, allowed for others where the kubelet asks."""
    driver = COMPOSE["services"]["driver"]
    served = driver["command"][driver["command"].index("--metrics") + 1]
    assert f"http://{served}/healthz" in driver["healthcheck"]["test"][-1]
    for pod in pods():
        driver = next(it for it in pod["containers"] if it["name"] == "driver")
        (port,) = driver["ports"]
        assert f"0.0.0.0:{port['containerPort']}" in driver["args"]
        assert "--metrics-allow-remote" in driver["args"]
        for probe in ("startupProbe", "livenessProbe"):
            assert driver[probe]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    for name in ("producer", "consumer"):
        assert COMPOSE["services"][name]["depends_on"] == {"driver": {"condition": "service_healthy"}}


class Container:
    """A process in namespaces of its own, with a folder at /mnt/exchange and a /dev/shm that nobody shares."""

    def __init__(self, exchange: Path, *words: str) -> None:
        ready = [
            "ip link set lo up",
            "mount -t tmpfs tmpfs /mnt",
            f"mkdir {EXCHANGE}",
            f"mount --bind {shlex.quote(str(exchange))} {EXCHANGE}",
            "mount -t tmpfs tmpfs /dev/shm",
            f"exec {shlex.join([sys.executable, *words])}",
        ]
        self.process = subprocess.Popen(
            ["unshare", *NAMESPACES, "sh", "-ec", "; ".join(ready)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONUNBUFFERED": "1"},
        )

    def read_until(self, words: str) -> str:
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"no {words!r} in {lines}")

    def finish(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=200)
        return self.process.returncode, output

    def reap(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # `unshare --kill-child` takes what runs inside with it
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Host:
    """The containers of the compose file over one volume."""

    def __init__(self, exchange: Path) -> None:
        self.exchange = exchange
        self.started: list[Container] = []

    def start(self, service: str, *more: str) -> Container:
        words = [
            str(DEPLOY / "driver.toml") if word == CONFIG else word for word in COMPOSE["services"][service]["command"]
        ]
        self.started.append(Container(self.exchange, "-m", "tensorpool", *words, *more))
        return self.started[-1]

    def close(self) -> None:
        for container in reversed(self.started):
            container.reap()


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with private_directory("tp-containers-") as folder:
        made = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            made.append(Host(folder / name))
        try:
            yield made[0], made[1]
        finally:
            for host in made:
                host.close()


def test_driver_producer_and_consumer_meet_in_the_volume_alone(hosts: tuple[Host, Host]) -> None:
    """Three containers without a common process table, network or /dev/shm; two such groups have nothing in common.

    Both groups use the same ids and ports; a consumer gets the bytes of the producer beside it, and when the driver's
    container of one group is killed, the other goes on.
    """
    one, two = hosts
    for host in hosts:
        driver = host.start("driver")
        driver.read_until("driver container-driver serves /mnt/exchange/aeron")
    for host, shape in ((one, "8x8"), (two, "4x4x3")):
        host.start("producer", "--shape", shape, "--dtype", "uint8").read_until("producing")
    for host in hosts:
        code, output = host.start("consumer", "--count", "60").finish()
        assert code == 0, output
        assert re.search(r"verified 60 frames, every byte", output), output
    one.started[0].reap()
    code, output = two.start("consumer", "--count", "30").finish()
    assert code == 0, output
    health = Container(two.exchange, "-m", "tensorpool", "ls", "--config", str(DEPLOY / "driver.toml"))
    code, output = health.finish()
    assert code == 0, output
    assert "camera/front" in output
