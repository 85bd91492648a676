# SPDX-License-Identifier: Apache-2.0
"""No misuse of the Aeron binding may crash the process: each script runs in one of its own and must exit in order."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.support.processes import run_script

PROLOGUE = """
import gc, os, sys, threading, time
from tensorpool import aeron
from tensorpool.errors import *
from tests.support.processes import wait_until

directory = sys.argv[1]
driver = aeron.MediaDriver(directory)
client = aeron.connect(directory)
IPC = "aeron:ipc?term-length=64k"
subscription = client.add_subscription(IPC, 10)
publication = client.add_publication(IPC, 10)
wait_until(lambda: publication.has_room, "connected")

def expect(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise SystemExit(f"{kind.__name__} was not raised")
"""

MISUSES = {
    "close the subscription in its own handler": """
        for n in range(3): publication.offer(bytes([n]))
        seen = []
        def handler(data, info):
            seen.append(data)
            subscription.close()
        wait_until(lambda: subscription.poll(handler) or seen, "a message")
        assert seen == [b"\\0"], seen
        expect(Closed, lambda: subscription.poll(handler))
        print("ok")
    """,
    "close the client in a handler": """
        publication.offer(b"x" * 5000)
        def handler(data, info):
            client.close()
            expect(Closed, lambda: publication.offer(b"y"))
        wait_until(lambda: subscription.poll(handler), "a fragment")
        while not subscription.is_closed: subscription.poll(handler)
        assert client.is_closed
        print("ok")
    """,
    "close from another thread while polling": """
        stop = threading.Event()
        def pump():
            try:
                while True: publication.offer(b"z" * 3000)
            except Closed:
                pass
        outcome = []
        def poll():
            try:
                while True: subscription.poll(lambda *_: None, 100)
            except Closed:
                outcome.append("closed")
        threads = [threading.Thread(target=pump), threading.Thread(target=poll)]
        for thread in threads: thread.start()
        time.sleep(0.3)
        subscription.close()
        client.close()
        for thread in threads: thread.join()
        assert outcome == ["closed"]
        print("ok")
    """,
    "close while another thread sits in a handler": """
        inside, leave = threading.Event(), threading.Event()
        def handler(data, info):
            inside.set()
            leave.wait()
        publication.offer(b"x")
        polled = threading.Thread(target=lambda: wait_until(lambda: subscription.poll(handler), "a message"))
        polled.start()
        inside.wait()
        closer = threading.Thread(target=client.close)
        closer.start()
        closer.join(0.2)
        assert closer.is_alive(), "close() waits for the call inside"
        leave.set()
        closer.join(); polled.join()
        assert client.is_closed and subscription.is_closed
        print("ok")
    """,
    "two handlers close each other's subscription": """
        other = client.add_subscription(IPC, 11)
        second = client.add_publication(IPC, 11)
        wait_until(lambda: second.has_room, "connected")
        both = threading.Barrier(2)
        def handler_of(victim):
            def handler(data, info):
                both.wait()
                victim.close()
            return handler
        publication.offer(b"1"); second.offer(b"2")
        def run(mine, victim):
            try: wait_until(lambda: mine.poll(handler_of(victim)), "a message")
            except Closed: pass
        threads = [threading.Thread(target=run, args=(subscription, other)),
                   threading.Thread(target=run, args=(other, subscription))]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert subscription.is_closed and other.is_closed
        print("ok")
    """,
    "two threads poll one subscription": """
        inside, leave = threading.Event(), threading.Event()
        publication.offer(b"x")
        def handler(data, info):
            inside.set(); leave.wait()
        thread = threading.Thread(target=lambda: wait_until(lambda: subscription.poll(handler), "a message"))
        thread.start(); inside.wait()
        expect(LocalProtocolError, lambda: subscription.poll(lambda *_: None))
        leave.set(); thread.join()
        print("ok")
    """,
    "keep what a handler got": """
        kept = []
        publication.offer(b"a" * 1000)
        wait_until(lambda: subscription.poll(lambda data, info: kept.append((memoryview(data), info))), "a message")
        client.close(); driver.close(); gc.collect()
        data, info = kept[0]
        assert bytes(data) == b"a" * 1000 and info.session_id is not None
        print("ok")
    """,
    "drop every reference while resources are open": """
        del subscription, publication
        gc.collect()
        del client
        gc.collect()
        print("ok")
    """,
    "drop the client before its resources": """
        del client
        gc.collect()
        assert publication.offer(b"x")
        del publication, subscription
        gc.collect()
        print("ok")
    """,
    "close the driver under its clients": """
        driver.close(); driver.close()
        expect((TransportError, Closed), lambda: wait_until(lambda: publication.offer(b"x") is None, "refusal"))
        client.close()
        print("ok")
    """,
    "fork, then use and collect everything in the child": """
        pid = os.fork()
        if pid == 0:
            try:
                assert client.is_closed and publication.is_closed and subscription.is_closed and driver.is_closed
                error = expect(Closed, lambda: publication.offer(b"x"))
                assert "forked" in str(error), error
                expect(Closed, lambda: subscription.poll(lambda *_: None))
                expect(Closed, lambda: client.add_publication(IPC, 12))
                client.close(); driver.close(); subscription.close()
                del publication, subscription, client, driver
                gc.collect()
            except BaseException as error:
                print("child:", repr(error), flush=True)
                os._exit(9)
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert publication.offer(b"still ours")
        client.close()
        print("ok")
    """,
    "fork while another thread polls": """
        running = True
        def poll():
            while running: subscription.poll(lambda *_: None)
        thread = threading.Thread(target=poll); thread.start()
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                expect(Closed, lambda: subscription.poll(lambda *_: None))
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        running = False; thread.join()
        print("ok")
    """,
    "exit without closing anything": """
        publication.offer(b"x")
        print("ok")
    """,
    "exit while a thread polls": """
        def poll():
            while True: subscription.poll(lambda *_: None)
        threading.Thread(target=poll, daemon=True).start()
        time.sleep(0.1)
        print("ok")
    """,
    "exit while an agent runs": """
        class Poller:
            role_name = "poller"
            def on_start(self): pass
            def do_work(self): return subscription.poll(lambda *_: None)
            def on_close(self): print("closed in order")
        runner = aeron.AgentRunner(Poller()).start()
        print("ok")
    """,
    "raise through everything at once": """
        publication.offer(b"x"); publication.offer(b"y")
        def handler(data, info):
            client.close()
            raise KeyError("after close")
        def polled():
            while True: subscription.poll(handler)
        assert "after close" in str(expect(KeyError, polled))
        expect(Closed, lambda: subscription.poll(handler))
        print("ok")
    """,
    "wrong types everywhere": """
        for call in (
            lambda: publication.offer("text"), lambda: publication.offer(None), lambda: publication.offerv([1]),
            lambda: publication.offerv(5), lambda: subscription.poll(None),
            lambda: client.add_publication(None, 1), lambda: client.add_subscription(IPC, "x"),
            lambda: client.add_publication(IPC, 2**40), lambda: client.add_counter(1, "key", "label"),
        ):
            expect((TypeError, BufferError), call)
        expect(BufferError, lambda: publication.offer(memoryview(bytes(10))[::2]))
        print("ok")
    """,
    "a retired driver directory and a stranger's file": """
        client.close(); driver.close()
        assert not os.path.exists(directory)
        os.makedirs(directory); open(directory + "/cnc.dat", "wb").write(os.urandom(100_000))
        assert not aeron.is_driver_active(directory, timeout_ms=100)
        expect(TransportError, lambda: aeron.connect(directory, driver_timeout_ms=200))
        print("ok")
    """,
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_ends_in_a_clean_error(misuse: str, shm_dir: Path) -> None:
    """The process neither dies of a signal nor hangs, and leaves no driver directory behind."""
    lines = [line.removeprefix("        ") for line in MISUSES[misuse].splitlines()]
    code, output = run_script(PROLOGUE + "\n".join(lines), str(shm_dir / "aeron"))
    assert code == 0, output
    assert "ok" in output.splitlines(), output
    assert "Exception ignored" not in output, output
    if "stranger" not in misuse:
        assert not (shm_dir / "aeron").exists(), "the embedded driver's directory was left behind"


def test_a_missing_or_useless_library_is_named(shm_dir: Path) -> None:
    """TENSORPOOL_LIBAERON that names nothing loadable, or a library without Aeron in it, gives a clear error."""
    script = "from tensorpool import aeron; print(aeron.version())"
    code, output = run_script(script, TENSORPOOL_LIBAERON=str(shm_dir / "libaeron.so"))
    assert code == 1
    assert "cannot load Aeron from" in output
    assert str(shm_dir / "libaeron.so") in output
    code, output = run_script(script, TENSORPOOL_LIBAERON="libm.so.6")
    assert code == 1
    assert "symbols are missing: aeron_errcode" in output


def test_without_pyaeron_the_libraries_of_the_system_are_taken(shm_dir: Path) -> None:
    """Where no wheel carries Aeron, the loader's libaeron and libaeron_driver do; without them the error says so."""
    script = """
import sys
sys.modules["pyaeron"] = None
import tensorpool as tp
from tensorpool.aeron import library
try:
    print(*library.library_paths(), library.version().split()[0])
    with tp.local() as pool, pool.connect() as client, client.producer("cam", create=True) as producer:
        print(producer.stream_id > 0)
except tp.TransportError as error:
    print(error)
"""
    code, output = run_script(script)
    assert code == 0, output
    assert output.startswith("no usable Aeron: pyaeron, whose wheel carries one, is not installed, ")
    assert "libaeron.so" in output
    assert "docs/install.md" in output
    spec = importlib.util.find_spec("pyaeron")
    assert spec is not None
    (carried,) = Path(str(spec.origin)).parent.glob("_pyaeron*.so")
    for name in ("libaeron.so", "libaeron_driver.so"):
        shutil.copy(carried, shm_dir / name)
    expected = "libaeron.so libaeron_driver.so aeron\nTrue\n"
    assert run_script(script, LD_LIBRARY_PATH=str(shm_dir)) == (0, expected)
