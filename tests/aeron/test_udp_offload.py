# SPDX-License-Identifier: Apache-2.0
"""The UDP offload of the media driver: what it merges and splits, between which peers, and when it steps aside."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpool import _core, aeron
from tensorpool.aeron import library
from tensorpool.errors import ConfigError
from tests.support.hosts import Network
from tests.support.processes import run_script
from tests.support.stock_media import stock_media_driver
from tests.support.transfers import Arrivals, free_ports, transfer

MOST_BYTES: Final = 65_535 - 48
SIZES: Final = st.integers(0, 65_507) | st.sampled_from([1, 32, 1408, 8192])
BATCHES: Final = st.lists(SIZES, max_size=64) | st.builds(
    lambda size, count, last: [size] * count + [last], SIZES, st.integers(0, 16), SIZES
)


@given(BATCHES)
def test_every_send_of_a_batch_splits_into_the_datagrams_that_were_merged(lengths: list[int]) -> None:
    """No datagram is lost, repeated, cut or joined, whatever the sizes, and no send exceeds what UDP carries."""
    seen: list[int] = []
    for first, count in _core.udp_groups(lengths):
        assert first == len(seen)
        sent = lengths[first : first + count]
        if count == 1:
            seen += sent
            continue
        assert sum(sent) <= MOST_BYTES
        datagrams = _core.udp_split(sum(sent), sent[0])
        assert [offset for offset, _ in datagrams] == [sum(sent[:index]) for index in range(count)]
        seen += [length for _, length in datagrams]
    assert seen == lengths


@given(st.integers(0, 65_535), st.integers(0, 70_000))
def test_datagrams_of_a_buffer_cover_it_once(length: int, segment_bytes: int) -> None:
    """Whatever size the kernel reports: nothing outside of the buffer, nothing twice."""
    at = 0
    for offset, size in _core.udp_split(length, segment_bytes):
        assert offset == at
        at += size
    assert at == length


class Counting:
    """What the offload of this process did since."""

    def __init__(self) -> None:
        self._before = _core.udp_offload_counts()

    @property
    def sent(self) -> int:
        return _core.udp_offload_counts()[0] - self._before[0]

    @property
    def received(self) -> int:
        return _core.udp_offload_counts()[1] - self._before[1]

    @property
    def dropped(self) -> int:
        return _core.udp_offload_counts()[2] - self._before[2]


@pytest.fixture
def two(shm_dir: Path) -> Iterator[list[str]]:
    """Two media drivers of this process, with the offload."""
    with aeron.MediaDriver(str(shm_dir / "one")) as one, aeron.MediaDriver(str(shm_dir / "two")) as two:
        yield [one.aeron_dir, two.aeron_dir]


@pytest.mark.parametrize("mtu", [1408, 8192, 65_504])
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_messages_cross_byte_for_byte(two: list[str], host: str, mtu: int) -> None:
    """IPv4 and IPv6, at the MTU of Ethernet, of jumbo frames and of loopback; merged and split but at the last."""
    counting = Counting()
    channel = f"aeron:udp?endpoint={host}:{free_ports(1, address=host.strip('[]'))[0]}"
    transfer(two[0], two[1:], channel, [channel], mtu=mtu)
    if mtu < 65_504:
        assert counting.sent > 500
        assert counting.received > 500
    assert counting.dropped == 0


BOTH: Final = "|fc=min,g:/2"  # nothing is sent before both subscribers are there


def test_a_group_of_subscribers_gets_everything(two: list[str]) -> None:
    counting = Counting()
    group = f"aeron:udp?endpoint=224.20.31.9:{free_ports(1)[0]}|interface=127.0.0.1"
    transfer(two[0], two, group + BOTH, [group, group])
    assert counting.sent > 500
    assert counting.received > 500


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_several_destinations_each_get_everything(two: list[str], host: str) -> None:
    """Sockets that are not connected: each send names its destination, by an address as long as its family's."""
    counting = Counting()
    control, first, second = free_ports(3, address=host.strip("[]"))
    ends = [f"aeron:udp?endpoint={host}:{end}|control={host}:{control}" for end in (first, second)]
    transfer(two[0], two, f"aeron:udp?control={host}:{control}|control-mode=dynamic{BOTH}", ends)
    assert counting.sent > 500
    assert counting.received > 500


def test_a_stock_aeron_on_the_other_side_sees_no_difference(shm_dir: Path, media_driver: aeron.MediaDriver) -> None:
    """A media driver as Aeron's own program runs it, with none of our code, as receiver and as sender."""
    counting = Counting()
    there = str(shm_dir / "stock")
    with stock_media_driver(there):
        for source, target in ((media_driver.aeron_dir, there), (there, media_driver.aeron_dir)):
            channel = f"aeron:udp?endpoint=127.0.0.1:{free_ports(1)[0]}"
            transfer(source, [target], channel, [channel])
    assert counting.sent > 500


def test_timestamps_of_media_are_those_of_each_datagram(two: list[str]) -> None:
    """A socket that asks the kernel for times is not split; the offload still sends to it."""
    counting = Counting()
    port, other = free_ports(2)
    channel, stamped = (f"aeron:udp?endpoint=127.0.0.1:{port}", "|media-rcv-ts-offset=reserved")
    began_ns = time.time_ns()
    (arrivals,) = transfer(two[0], two[1:], channel, [channel + stamped])
    assert counting.received == 0
    assert counting.sent > 500
    _check_times(arrivals, began_ns)
    channel = f"aeron:udp?endpoint=127.0.0.1:{other}"
    (arrivals,) = transfer(two[0], two[1:], channel + "|channel-snd-ts-offset=reserved", [channel])
    assert counting.received > 500
    _check_times(arrivals, began_ns)


def _check_times(arrivals: Arrivals, began_ns: int) -> None:
    times = [value for value in arrivals.reserved_values if value]  # Aeron stamps the first message of a datagram
    assert len(times) > 0.8 * arrivals.count
    assert all(began_ns <= value <= time.time_ns() for value in times)


def test_the_offload_can_be_turned_off(shm_dir: Path) -> None:
    """And nothing but auto and off is accepted."""
    counting = Counting()
    with aeron.MediaDriver(str(shm_dir / "aeron"), udp_offload="off") as driver:
        channel = f"aeron:udp?endpoint=127.0.0.1:{free_ports(1)[0]}"
        transfer(driver.aeron_dir, [driver.aeron_dir], channel, [channel])
    assert (counting.sent, counting.received) == (0, 0)
    with pytest.raises(ConfigError, match=r"udp_offload = 'on'.*auto or off"):
        aeron.MediaDriver(str(shm_dir / "aeron"), udp_offload="on")


FALLBACK: Final = """
import ctypes, logging, struct, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)

def refuse(number, level, option):  # by seccomp: that system call with that option fails
    machine = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[__import__("platform").machine()]
    code = [(0x20, 0, 0, 4), (0x15, 0, 7, machine), (0x20, 0, 0, 0), (0x15, 0, 5, number), (0x20, 0, 0, 24),
            (0x15, 0, 3, level), (0x20, 0, 0, 32), (0x15, 0, 1, option), (0x06, 0, 0, 0x00050000 | 92),
            (0x06, 0, 0, 0x7FFF0000)]
    filter = b"".join(struct.pack("<HBBI", *step) for step in code)
    buffer = ctypes.create_string_buffer(filter)
    program = struct.pack("HP", len(code), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()

setsockopt, getsockopt = {"x86_64": (54, 55), "aarch64": (208, 209)}[__import__("platform").machine()]
kind, folder, mtu = sys.argv[1:]
if kind == "no UDP_GRO": refuse(setsockopt, 17, 104)
if kind == "no UDP_SEGMENT": refuse(getsockopt, 17, 103)

from tensorpool import _core, aeron
from tests.support.transfers import free_ports, transfer
with aeron.MediaDriver(folder + "/one") as one, aeron.MediaDriver(folder + "/two") as two:
    for _ in range(2):
        channel = f"aeron:udp?endpoint=127.0.0.1:{free_ports(1)[0]}"
        transfer(one.aeron_dir, [two.aeron_dir], channel, [channel], mtu=int(mtu), total_bytes=1 << 20)
print("crossed", _core.udp_offload_counts()[:2])
"""


@pytest.mark.parametrize("refused", ["no UDP_GRO", "no UDP_SEGMENT"])
def test_a_kernel_without_the_offload_is_used_as_it_is(shm_dir: Path, refused: str) -> None:
    """Everything crosses by the default transport, and one line of the process says why."""
    code, output = run_script(FALLBACK, refused, str(shm_dir), "1408")
    assert code == 0, output
    lines = output.splitlines()
    assert len(lines) == 2, output
    assert lines[0].startswith(
        "udp_offload_unavailable reason='this kernel has no UDP offload: Protocol not available'"
    )
    assert lines[1] == "crossed (0, 0)"


# Stands before the real library, and says otherwise in one thing: a version, or the last function of the table.
OTHER_AERON: Final = {
    "it was tried with Aeron 1.53, not with this one": "int aeron_version_minor(void) { return 54; }",
    "is not laid out as expected, at transport_poller_poll": """
        #include <dlfcn.h>
        #include <string.h>
        void *aeron_udp_channel_transport_bindings_default[15];
        __attribute__((constructor)) static void fill(void) {
            void *aeron = dlopen(AERON, RTLD_NOW | RTLD_LOCAL);
            memcpy(aeron_udp_channel_transport_bindings_default,
                   dlsym(aeron, "aeron_udp_channel_transport_bindings_default"), 15 * sizeof(void *));
            aeron_udp_channel_transport_bindings_default[11] = aeron_udp_channel_transport_bindings_default[10];
        }
    """,
}


@pytest.mark.parametrize("reason", OTHER_AERON)
def test_an_aeron_of_another_layout_is_used_as_it_is(shm_dir: Path, tmp_path: Path, reason: str) -> None:
    """Everything crosses by its own transport, and one line of the process says why."""
    real = os.pathsep.join(map(str, library.library_paths()))
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(OTHER_AERON[reason])
    first = real.partition(os.pathsep)[0]
    subprocess.run(["cc", "-shared", "-fPIC", f'-DAERON="{first}"', "-o", shim, source, "-ldl"], check=True)
    code, output = run_script(FALLBACK, "other", str(shm_dir), "1408", TENSORPOOL_LIBAERON=f"{shim}{os.pathsep}{real}")
    assert code == 0, output
    lines = output.splitlines()
    assert len(lines) == 2, output
    assert lines[0].startswith("udp_offload_unavailable reason=")
    assert reason in lines[0]
    assert lines[1] == "crossed (0, 0)"


def test_datagrams_that_the_path_fragments_take_the_default(shm_dir: Path) -> None:
    """At 8 KiB over an MTU of 1500 the kernel refuses to segment: nothing is lost, and one line says so."""
    with ExitStack() as undo:
        network = undo.enter_context(Network("small"))
        network.set_loopback_mtu("small", 1500)
        undo.enter_context(network.inside("small"))
        code, output = run_script(FALLBACK, "small path", str(shm_dir), "8192")
    assert code == 0, output
    lines = output.splitlines()
    assert len(lines) == 2, output
    assert "a segmented send of datagrams of 8192 bytes was refused" in lines[0]
    assert lines[1].startswith("crossed")
