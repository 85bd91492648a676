# SPDX-License-Identifier: Apache-2.0
"""Two drivers on one control stream, as processes over real Aeron: one of them serves a stream, never both.

Driver Model §2.1, §5; decision K6.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tensorpool import aeron
from tensorpool.wire.attach import Dialect, attach_refusal
from tensorpool.wire.driver import (
    ExtendedAttachRequest,
    ResponseCode,
    Role,
    ShmAttachResponse,
    ShmDriverShutdown,
)
from tests.support.driver_client import DriverClient, attach_request
from tests.support.driver_process import Deployment
from tests.support.messages import announce
from tests.support.processes import wait_until

STREAM = 15_100
OTHER = "/dev/shm/tensorpool/tensorpool-other/lab"

Make = Callable[[str], Deployment]


@pytest.fixture
def make(shared_media_driver: aeron.MediaDriver, shm_dir: Path) -> Make:
    """Deployments with one control stream and a namespace each."""
    made: list[Deployment] = []

    def make(name: str) -> Deployment:
        folder = shm_dir / name
        folder.mkdir()
        place = made[0].tables["driver"] if made else {}
        made.append(
            Deployment(folder, shared_media_driver.aeron_dir, streams=[STREAM], driver=place | {"instance_id": name})
        )
        return made[-1]

    return make


@pytest.mark.spec("DRV-2.1-02")
def test_a_second_driver_on_a_control_stream_refuses_to_start(make: Make) -> None:
    """It says what it saw, leaves nothing behind, and the first one's clients notice nothing."""
    first, second = make("first"), make("second")
    with DriverClient(first) as client, first.start() as process:
        client.meet(process)
        client.attach(STREAM, Role.PRODUCER)
        with second.start() as late:
            code, output = late.wait_for_end()
        assert code == 1
        line = output.splitlines()[-1]  # behind "serves …" where the first one was kept from answering in time
        assert "driver.control_stream_id" in line
        assert "another driver" in line
        assert second.leftovers() == []
        client.fence()
        assert client.received(ShmDriverShutdown) == []
        client.attach(STREAM)


@pytest.mark.spec("DRV-2.1-02")
def test_a_driver_that_knows_the_newer_dialect_only_is_found_too(make: Make) -> None:
    """It leaves the probe of 24 bytes unanswered and refuses the one of 27."""
    deployment = make("ours")
    with DriverClient(deployment) as other, deployment.start() as process:
        probe = other.wait_for(ExtendedAttachRequest, client_id=0).message
        other.send(attach_refusal(Dialect.JANUARY_2026, probe.correlation_id, ResponseCode.REJECTED, "taken"))
        code, output = process.wait_for_end()
    assert code == 1
    assert "another driver answered an attach request: REJECTED taken" in output


@pytest.mark.spec("DRV-2.1-02")
def test_of_two_drivers_that_start_at_once_one_serves(make: Make) -> None:
    """The other ends with one line; a producer is granted by exactly one of them."""
    both = make("left"), make("right")
    with DriverClient(both[0]) as client, both[0].start() as left, both[1].start() as right:
        wait_until(lambda: left.has_ended or right.has_ended, "one of them ends")
        loser, winner = (left, right) if left.has_ended else (right, left)
        code, output = loser.finish()
        assert code == 1
        assert "another driver" in output
        client.meet(winner)

        def is_granted() -> bool:
            """By one of them; refused as long as the loser's announces count, where it had begun to serve."""
            request, since = attach_request(STREAM, Role.PRODUCER), len(client.transcript)
            client.send(request)
            client.wait_for(ShmAttachResponse, since, correlation_id=request.correlation_id)
            client.fence()
            (answer,) = client.received(ShmAttachResponse, since, correlation_id=request.correlation_id)
            return answer.message.code is ResponseCode.OK

        wait_until(is_granted, "the stream is granted")


def test_a_driver_that_follows_a_killed_one_at_once_starts(make: Make) -> None:
    """Answers and announces of its own earlier run lie in the log; they are no other driver's."""
    deployment = make("first")
    with DriverClient(deployment) as client:
        for _ in range(3):
            with deployment.start() as process:
                client.meet(process)
                client.attach(STREAM, Role.PRODUCER)
                process.kill()


@pytest.mark.spec("DRV-2.1-02")
def test_a_running_driver_grants_no_stream_that_another_announces(make: Make) -> None:
    """Until the other was silent for three announce periods; an announce of the driver's own epoch changes nothing."""
    deployment = make("first")
    with DriverClient(deployment) as client, deployment.start() as process:
        client.meet(process)
        for _ in range(3):  # then its first announce period is over
            own = client.next_announce(STREAM).message
        now_ns = time.monotonic_ns()
        client.send(msgspec.structs.replace(own, announce_timestamp_ns=now_ns))  # as some producers do
        client.send(announce(STREAM, below=OTHER, announce_timestamp_ns=now_ns - 400_000_000))
        client.attach(STREAM)
        client.send(announce(STREAM, below=OTHER))
        silent_ns = time.monotonic_ns()
        refused = client.refused(attach_request(STREAM, Role.PRODUCER))
        assert refused.code is ResponseCode.REJECTED
        assert OTHER in refused.error_message
        request = attach_request(STREAM, Role.PRODUCER)

        def is_granted() -> bool:
            since = len(client.transcript)
            client.send(request)
            answer = client.wait_for(ShmAttachResponse, since, correlation_id=request.correlation_id)
            return answer.message.code is ResponseCode.OK

        wait_until(is_granted, "the stream is granted again")
        assert time.monotonic_ns() - silent_ns >= 3 * 100_000_000


@pytest.mark.spec("DRV-2.1-02")
def test_a_driver_that_finds_its_stream_announced_within_its_first_period_ends(make: Make) -> None:
    """Without a word to the other's clients; the line for the operator says which regions were announced."""
    deployment = make("first")
    deployment.tables["policies"]["announce_period_ms"] = 60_000
    with DriverClient(deployment) as client, deployment.start() as process:
        client.meet(process)
        client.send(announce(STREAM, below=OTHER))
        code, output = process.wait_for_end()
        assert code == 1
        assert OTHER in output
        client.poll()
        assert client.received(ShmDriverShutdown) == []


@pytest.mark.spec("DRV-2.1-02")
def test_an_epoch_that_the_driver_has_not_made_is_a_claim(make: Make) -> None:
    """An epoch that this driver has not made, in regions that could be its own."""
    deployment = make("first")
    with DriverClient(deployment) as client, deployment.start() as process:
        client.meet(process)
        for _ in range(3):
            own = client.next_announce(STREAM).message
        claim = msgspec.structs.replace(own, epoch=own.epoch + 1, announce_timestamp_ns=time.monotonic_ns())
        client.send(claim)
        refused = client.refused(attach_request(STREAM))
        assert str(own.epoch + 1) in refused.error_message


@pytest.mark.spec("DRV-2.1-02")
def test_a_running_driver_grants_no_stream_that_another_answers_for(make: Make) -> None:
    """An attach response that it did not send: granted or refused, the other one takes requests for that stream."""
    deployment = make("first")
    with DriverClient(deployment) as client, deployment.start() as process:
        client.meet(process)
        request = attach_request(STREAM)
        client.granted(request)
        client.send(ShmAttachResponse(correlation_id=request.correlation_id, code=ResponseCode.REJECTED))
        refused = client.refused(attach_request(STREAM, Role.PRODUCER))
        assert refused.code is ResponseCode.REJECTED
        assert "another driver" in refused.error_message
