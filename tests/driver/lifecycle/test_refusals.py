# SPDX-License-Identifier: Apache-2.0
"""Which attaches the driver refuses, by which code and text."""

from __future__ import annotations

import pytest

from tensorpool.driver import lifecycle as module
from tensorpool.driver.clients import Owner
from tensorpool.driver.effects import CreateEpoch
from tensorpool.driver.lifecycle import Lifecycle
from tensorpool.driver.streams import Stream
from tensorpool.process_description import ProcessDescription
from tensorpool.process_identity import ProcessIdentity
from tensorpool.wire.driver import (
    HugepagesPolicy,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmDetachResponse,
    ShutdownReason,
)
from tests.driver.conftest import (
    DYNAMIC,
    FRONT,
    PERIOD_NS,
    REAR,
    RING,
    SECOND_NS,
    attach,
    created,
    detach,
    driver_config,
    serving,
)
from tests.driver.lifecycle.conftest import CREATE, message_of, only_message, outline, refusal, with_producer

HOW_TO_CREATE = "; pass create=True, or see `tensorpool ls`"
MAX_TEXT_BYTES = 1024


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (attach(0), ResponseCode.INVALID_PARAMS, "clientId 0 is reserved"),
        (attach(2**32 - 1), ResponseCode.INVALID_PARAMS, "clientId 4294967295 is reserved"),
        (attach(1, 2**32 - 1, publish_mode=CREATE), ResponseCode.INVALID_PARAMS, "streamId 4294967295 is reserved"),
        (attach(1, DYNAMIC[0]), ResponseCode.REJECTED, "stream 20000 does not exist" + HOW_TO_CREATE),
        (
            attach(1, DYNAMIC[0], publish_mode=PublishMode.REQUIRE_EXISTING),
            ResponseCode.REJECTED,
            "stream 20000 does not exist" + HOW_TO_CREATE,
        ),
        (attach(1, 0), ResponseCode.REJECTED, "stream 0 does not exist" + HOW_TO_CREATE),
        (
            attach(1, 555, publish_mode=CREATE),
            ResponseCode.INVALID_PARAMS,
            "stream 555 is outside driver.stream_id_range 20000-20002",
        ),
        (
            attach(1, layout_version=2),
            ResponseCode.REJECTED,
            "layout_version: expected 2, this driver has 1; update the older of the two",
        ),
    ],
)
def test_what_is_wrong_or_unwanted_is_refused_by_code_and_text(
    request_: ShmAttachRequest, code: ResponseCode, text: str
) -> None:
    """§4.6: a wrong parameter is INVALID_PARAMS, a lawful wish that is denied is REJECTED; nothing is kept."""
    lifecycle = serving()
    assert refusal(lifecycle.on_attach(request_, 0)) == (code, text)
    assert (len(lifecycle.leases), len(lifecycle.streams)) == (0, 2)
    assert lifecycle.counts["attaches_refused"] == 1


@pytest.mark.spec("DRV-4.3-02")
@pytest.mark.parametrize("layout_version", [0, 1, 2**32 - 1])
def test_the_own_layout_version_or_none_is_accepted(layout_version: int) -> None:
    """E16, E17: zero and all ones are absent."""
    assert outline(serving().on_attach(attach(1, layout_version=layout_version), 0)) == ["attach OK"]


def test_dynamic_streams_may_be_forbidden() -> None:
    """Then an unknown id is denied by policy, whatever the mode."""
    lifecycle = serving({"policies.allow_dynamic_streams": False})
    code, text = refusal(lifecycle.on_attach(attach(1, DYNAMIC[0], publish_mode=CREATE), 0))
    assert code is ResponseCode.REJECTED
    assert text == (
        "stream 20000 is not configured and policies.allow_dynamic_streams is false; configure it, or set that to true"
    )


@pytest.mark.spec("DRV-4.3-06", "DRV-4.3-07")
@pytest.mark.parametrize(
    ("hugepages", "pages", "text"),
    [
        (
            False,
            HugepagesPolicy.HUGEPAGES,
            "hugepages are required; shm.base_dir is not on hugetlbfs: mount one there, or ask for any pages",
        ),
        (
            True,
            HugepagesPolicy.STANDARD,
            "standard pages are required; shm.base_dir is on hugetlbfs: choose another, or ask for any pages",
        ),
        (False, HugepagesPolicy.STANDARD, None),
        (True, HugepagesPolicy.HUGEPAGES, None),
        (False, HugepagesPolicy.UNSPECIFIED, None),
        (True, HugepagesPolicy.UNSPECIFIED, None),
    ],
)
def test_pages_that_the_regions_do_not_have_are_refused(
    hugepages: bool, pages: HugepagesPolicy, text: str | None
) -> None:
    """E38: compared with what there is; who does not care gets what there is."""
    effects = serving(hugepages=hugepages).on_attach(attach(1, pages=pages), 0)
    if text is None:
        assert outline(effects) == ["attach OK"]
    else:
        assert refusal(effects) == (ResponseCode.REJECTED, text)


@pytest.mark.spec("DRV-4.3-09")
@pytest.mark.parametrize("role", Role)
def test_a_stream_without_pools_is_an_invalid_parameter(role: Role) -> None:
    """§4.3; nothing is ever made for it, also not by the clock."""
    lifecycle = serving()
    lifecycle.streams._streams[77] = Stream(77, "bare", None)
    effects = lifecycle.on_attach(attach(1, 77, role), 0)
    assert refusal(effects) == (
        ResponseCode.INVALID_PARAMS,
        "stream 77 has no payload pools; give its profile one",
    )
    assert not any(isinstance(effect, CreateEpoch) for effect in lifecycle.on_tick(PERIOD_NS))
    assert lifecycle.announce(77, 0) is None


@pytest.mark.spec("DRV-4.8-05")
@pytest.mark.parametrize("second", [attach(5, REAR), attach(5, FRONT, Role.PRODUCER), attach(5, correlation_id=2)])
def test_a_client_holds_one_lease(second: ShmAttachRequest) -> None:
    """E1: another stream, another role or another attempt of the same client is rejected; the lease stays."""
    lifecycle = serving()
    lifecycle.on_attach(attach(5), 0)
    code, text = refusal(lifecycle.on_attach(second, 0))
    assert code is ResponseCode.REJECTED
    assert text == f"client 5 already holds lease 500 on stream {FRONT}; one client, one lease"
    assert len(lifecycle.leases) == 1


def test_a_client_that_waits_for_memory_cannot_ask_for_more() -> None:
    """A promised lease counts as one that is held."""
    lifecycle = serving()
    lifecycle.on_attach(attach(5, role=Role.PRODUCER), 0)
    code, text = refusal(lifecycle.on_attach(attach(5, REAR), 0))
    assert (code, text) == (ResponseCode.REJECTED, f"client 5 is already attaching to stream {FRONT}")


@pytest.mark.spec("DRV-5-01")
def test_a_second_producer_learns_which_client_is_attached() -> None:
    """§5: the client and its lease, so that an operator can act."""
    lifecycle = with_producer(client_id=7)
    code, text = refusal(lifecycle.on_attach(attach(8, role=Role.PRODUCER), 0))
    assert code is ResponseCode.REJECTED
    assert text == (f"stream {FRONT} already has a producer (client 7, lease 500); detach it or use another stream")


@pytest.mark.spec("DRV-5-01")
def test_a_second_producer_is_refused_while_the_first_ones_memory_is_made() -> None:
    """The promise is exclusive too; when it fails the stream is free again."""
    lifecycle = serving()
    lifecycle.on_attach(attach(7, role=Role.PRODUCER), 0)
    second = attach(8, role=Role.PRODUCER)
    code, text = refusal(lifecycle.on_attach(second, 0))
    assert (code, text) == (ResponseCode.REJECTED, f"stream {FRONT}: another producer is attaching; use another stream")
    lifecycle.on_epoch_failed(FRONT, True, "full", 0)
    assert outline(lifecycle.on_attach(second, 0)) == [f"create {FRONT} for a producer"]


def test_another_stream_has_another_producer() -> None:
    """Exclusive by stream, not by driver."""
    lifecycle = with_producer()
    assert outline(lifecycle.on_attach(attach(8, REAR, Role.PRODUCER), 0)) == [f"create {REAR} for a producer"]


def test_max_leases_counts_the_promised_ones_too() -> None:
    """One held and one waiting fill a limit of two; an end makes room."""
    lifecycle = serving({"policies.max_leases": 2})
    lifecycle.on_attach(attach(1), 0)
    lifecycle.on_attach(attach(2, REAR, Role.PRODUCER), 0)
    code, text = refusal(lifecycle.on_attach(attach(3), 0))
    assert code is ResponseCode.REJECTED
    assert "policies.max_leases" in text
    lifecycle.on_detach(detach(500, 1), 0)
    assert outline(lifecycle.on_attach(attach(3), 0)) == ["attach OK"]


def test_a_refusal_by_a_limit_names_who_holds_what() -> None:
    """The account and its processes where they are known; others are counted."""
    lifecycle = serving({"policies.max_leases": 3})
    for client_id in (1, 2, 3):
        lifecycle.on_attach(attach(client_id), 0)
    for lease, pid in zip(lifecycle.leases, (8812, 9001), strict=False):
        process = ProcessIdentity(pid=pid, start_ticks=5, pid_namespace=1, time_namespace=2, boot_id="boot")
        lease.owner = Owner(process=process, description=ProcessDescription(user="lab"))
    code, text = refusal(lifecycle.on_attach(attach(4), 0))
    assert (code, text) == (
        ResponseCode.REJECTED,
        "3 leases are held (policies.max_leases): user lab 2 (pids 8812, 9001), not declared 1; detach some, or raise "
        "it",
    )


def test_max_bytes_bounds_what_producers_reserve() -> None:
    """With the epochs that are kept, and with producers whose memory is being made; a new stream is not left behind."""
    both = 2 * 2 * RING.size_bytes
    lifecycle = serving({"policies.max_bytes": both})
    for client_id, stream_id in ((1, FRONT), (2, REAR)):
        lifecycle.on_attach(attach(client_id, stream_id, Role.PRODUCER), 0)
    created(lifecycle, FRONT, 2, 0, reserved=True)
    code, text = refusal(lifecycle.on_attach(attach(3, 0, Role.PRODUCER, publish_mode=CREATE), 0))
    assert (code, text) == (
        ResponseCode.REJECTED,
        f"stream 20000 takes {both // 2} bytes in 2 epochs, and the streams of 2 producers take {both}; "
        f"policies.max_bytes is {both}. Producers: not declared 1; end some, or raise it",
    )
    assert lifecycle.streams.get(DYNAMIC[0]) is None
    assert outline(lifecycle.on_attach(attach(4, FRONT), 0)) == ["attach OK"]
    lifecycle.on_detach(detach(500, 1, role=Role.PRODUCER), 0)
    assert outline(lifecycle.on_attach(attach(3, 0, Role.PRODUCER, publish_mode=CREATE), 0)) == [
        f"create {DYNAMIC[0]} for a producer"
    ]


def test_max_streams_bounds_what_clients_create() -> None:
    """The refused one is not left behind half made."""
    lifecycle = serving({"policies.max_streams": 3})
    assert outline(lifecycle.on_attach(attach(1, 0, publish_mode=CREATE), 0)) == [f"create {DYNAMIC[0]}"]
    code, text = refusal(lifecycle.on_attach(attach(2, 0, publish_mode=CREATE), 0))
    assert (code, text) == (
        ResponseCode.REJECTED,
        "there are already 3 streams (policies.max_streams); raise it, or end some",
    )
    assert len(lifecycle.streams) == 3


def test_a_used_up_range_refuses_only_those_who_need_a_new_id() -> None:
    """An existing stream of the range is open to all."""
    lifecycle = serving()
    for client_id, stream_id in enumerate(DYNAMIC, 1):
        lifecycle.on_attach(attach(client_id, 0, publish_mode=CREATE), 0)
        created(lifecycle, stream_id, 1)
    code, text = refusal(lifecycle.on_attach(attach(9, 0, publish_mode=CREATE), 0))
    assert (code, text) == (
        ResponseCode.REJECTED,
        "all stream ids of 20000-20002 are taken; enlarge driver.stream_id_range",
    )
    assert outline(lifecycle.on_attach(attach(9, DYNAMIC[2]), 0)) == ["attach OK"]


def test_attaches_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood while memory is made is refused beyond the bound; those within it are answered."""
    monkeypatch.setattr(module, "MAX_PENDING_ATTACHES", 3)
    lifecycle = Lifecycle(driver_config(), first_lease_id=500)
    lifecycle.on_start(0)
    for client_id in (1, 2, 3):
        assert lifecycle.on_attach(attach(client_id), 0) == []
    code, text = refusal(lifecycle.on_attach(attach(4), 0))
    assert (code, text) == (ResponseCode.REJECTED, "3 attaches wait for memory; try again later")
    assert outline(created(lifecycle, FRONT, 1)) == [f"announce {FRONT}", *["attach OK"] * 3]
    assert outline(lifecycle.on_attach(attach(4), 0)) == ["attach OK"]


def test_a_request_that_cannot_be_understood_is_answered_by_its_correlation_id() -> None:
    """E33: attach and detach each with their own response, and counted."""
    lifecycle = serving()
    code, text = refusal(lifecycle.on_malformed_attach(-4, ResponseCode.UNSUPPORTED, "version 2"))
    assert (code, text) == (ResponseCode.UNSUPPORTED, "version 2")
    answer = only_message(lifecycle.on_malformed_detach(-5, ResponseCode.INVALID_PARAMS, "role 9"))
    assert answer == ShmDetachResponse(correlation_id=-5, code=ResponseCode.INVALID_PARAMS, error_message="role 9")
    assert (lifecycle.counts["malformed_attaches"], lifecycle.counts["malformed_detaches"]) == (1, 1)


@pytest.mark.spec("DRV-4.2-35", "DRV-4.2-36")
@pytest.mark.parametrize("text", ["x" * 5000, "ä" * 600, "x" * 1023 + "ä", "\udcff" * 1025])
def test_long_texts_are_cut_between_characters_at_1024_bytes(text: str) -> None:
    """E39: in every message of the driver, also for bytes that are no text."""
    lifecycle = with_producer()
    messages = [only_message(lifecycle.on_malformed_attach(1, ResponseCode.INVALID_PARAMS, text))]
    messages.append(only_message(lifecycle.on_malformed_detach(1, ResponseCode.INVALID_PARAMS, text)))
    revoked, _ = lifecycle.revoke(500, text, 0)
    lifecycle.drain(ShutdownReason.ADMIN, text, 0)
    *_, notice, _ = lifecycle.on_tick(2 * SECOND_NS)
    messages += [message_of(revoked), message_of(notice)]
    for message in messages:
        assert len(message.error_message.encode("utf-8", "surrogateescape")) <= MAX_TEXT_BYTES
        assert text.startswith(message.error_message)
        assert message.decode_body(message.encode_body()) == message


def test_a_text_that_fits_is_not_touched() -> None:
    """1024 bytes exactly, and bytes that are no text."""
    lifecycle = serving()
    for text in ("x" * 1024, "ä" * 512, "\udcff" * 1024):
        answer = only_message(lifecycle.on_malformed_attach(1, ResponseCode.INVALID_PARAMS, text))
        assert answer.error_message == text
