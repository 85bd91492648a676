# SPDX-License-Identifier: Apache-2.0
"""A camera on one host, a reader on another, and a bridge between them; both hosts are network namespaces here.

Every command is the one of a real host, and so are the files. Needs root, for the namespaces.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = Path(__file__).parent
ADDRESSES = {"camera_host": "10.0.0.1/24", "gpu_host": "10.0.0.2/24"}


class Host:
    """A network namespace; its drivers keep their files in a folder of its own, as if it were another machine."""

    def __init__(self, name: str, folder: str) -> None:
        self.name = name
        self.namespace = f"{name}_{os.getpid()}"
        self.environment = os.environ | {"AERON_DIR": f"{folder}/{name}-aeron", "SHM_BASE_DIR": f"{folder}/{name}-shm"}
        subprocess.run(["ip", "netns", "add", self.namespace], check=True)
        self.ip("link", "set", "lo", "up")

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", "-n", self.namespace, *words], check=True)

    def run(self, *words: str) -> subprocess.Popen[str]:
        """`tensorpool …` on this host."""
        command = ["ip", "netns", "exec", self.namespace, sys.executable, "-m", "tensorpool", *words]
        return subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True)

    def serve(self, service: str, ready: str) -> subprocess.Popen[str]:
        """A service with its file, once it says that it is ready."""
        process = self.run(service, "--config", f"{FILES}/{self.name}/{service}.toml", "--log-level", "error")
        assert process.stdout is not None
        while (line := process.stdout.readline()) and ready not in line:
            pass
        if not line:
            sys.exit(f"{service} did not start on {self.name}")
        print(f"{self.name}: {line.strip()}")
        return process


def main(folder: str, undo: contextlib.ExitStack) -> None:
    hosts = []
    for name in ADDRESSES:
        hosts.append(Host(name, folder))
        undo.callback(subprocess.run, ["ip", "netns", "del", hosts[-1].namespace])
    camera_host, gpu_host = hosts
    camera_host.ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", gpu_host.namespace)
    for host in hosts:
        host.ip("addr", "add", ADDRESSES[host.name], "dev", "eth0")
        host.ip("link", "set", "eth0", "up")

    def end(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)

    for host in hosts:
        for service, ready in (("driver", "serves"), ("bridge", "ready")):
            undo.callback(end, host.serve(service, ready))
    reader = gpu_host.run("consume", "2001", "--count", "60", "--timeout", "60", "--verify", "--json")
    camera = camera_host.run("produce", "1001", "--shape", "480x640x3", "--rate", "30", "--pattern", "checked")
    undo.callback(end, camera)
    seen = json.loads(reader.communicate(timeout=120)[0])
    print(f"gpu_host: received {seen['received']} frames of stream {seen['stream_id']}, {seen['lost']} lost")
    print(f"every byte is right: {seen['verified'] + seen['overwritten'] == seen['received']}")


if __name__ == "__main__":
    if os.geteuid() != 0 or not shutil.which("ip"):
        sys.exit("network namespaces need root and iproute2: sudo python examples/two_hosts/main.py")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, contextlib.ExitStack() as undo:
        main(folder, undo)
