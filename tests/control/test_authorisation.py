# SPDX-License-Identifier: Apache-2.0
"""Commands that change a service: accepted from senders that have its secret, once, and not for ever."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import tensorpool as tp
from tensorpool import aeron
from tensorpool.control import Commander, CommandRejected, ControlConfig, Ref, authorisation, make_event
from tensorpool.control.authorisation import WINDOW_NS, Authority, Signer
from tensorpool.control.commands import Unacceptable
from tensorpool.errors import ConfigError
from tensorpool.settings import Secret
from tensorpool.wire.event import EventMessage
from tests.support.processes import run_script, wait_until

TOKEN = "correct horse battery staple"
NOW_NS = 10**18
TAG = "service:driver:driver-01"
SMALL = {"profiles.default": {"header_nslots": 8, "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}]}}


def command(value: object = None, *, correlation_id: int = 1, timestamp_ns: int = NOW_NS) -> EventMessage:
    return make_event(TAG, "drain", value, correlation_id=correlation_id, timestamp_ns=timestamp_ns)


@pytest.fixture
def authority() -> Authority:
    return Authority(lambda: Signer(TOKEN.encode()), "ask ann")


@pytest.mark.parametrize("value", [None, "now", b"\x00" * 40, 7, Ref(1, 2, 3)])
def test_a_signed_command_is_read_as_it_was_without(authority: Authority, value: object) -> None:
    """Whatever its value; an unsigned one is refused with what to do."""
    message = command(value)
    assert authority.checked(Signer(TOKEN.encode()).sign(message), NOW_NS) == message
    with pytest.raises(Unacceptable, match="not authorised: drain changes the service; ask ann"):
        authority.checked(message, NOW_NS)


@pytest.mark.parametrize(
    "change",
    [
        {"tag": "service:driver:other"},
        {"key": "pause"},
        {"correlation_id": 2},
        {"timestamp_ns": NOW_NS + 1},
        {"ref_seq": 9},
        {"format": make_event(TAG, "x", "text", correlation_id=1, timestamp_ns=0).format},
    ],
)
def test_nothing_of_a_signed_command_can_be_changed(authority: Authority, change: dict[str, object]) -> None:
    """Its target, its id and its time included; nor its value, nor the signature."""
    signed = Signer(TOKEN.encode()).sign(command(b"value"))
    with pytest.raises(Unacceptable, match="not authorised"):
        authority.checked(msgspec.structs.replace(signed, **change), NOW_NS)
    for index in range(len(signed.value)):
        bent = bytearray(signed.value)
        bent[index] ^= 1
        with pytest.raises(Unacceptable, match="not authorised"):
            authority.checked(msgspec.structs.replace(signed, value=bytes(bent)), NOW_NS)


def test_a_signature_counts_once_and_for_a_while(authority: Authority) -> None:
    """A recorded command is refused at once, and still when its id is forgotten."""
    signed = Signer(TOKEN.encode()).sign(command())
    authority.checked(signed, NOW_NS)
    with pytest.raises(Unacceptable, match="a signature counts once"):
        authority.checked(signed, NOW_NS + WINDOW_NS)
    for now_ns in (NOW_NS + WINDOW_NS + 1, NOW_NS + 10 * WINDOW_NS, NOW_NS - WINDOW_NS - 1):
        with pytest.raises(Unacceptable, match="do the clocks agree"):
            authority.checked(signed, now_ns)


def test_another_secret_or_none_authorises_nothing() -> None:
    """A service without any secret refuses, whatever it is sent."""
    for service in (Authority(lambda: Signer(b"x" * 16), "ask ann"), Authority(lambda: None, "ask ann")):
        for secret in (TOKEN.encode(), b""):
            with pytest.raises(Unacceptable, match="not authorised"):
                service.checked(Signer(secret).sign(command()), NOW_NS)


def test_tokens_come_from_the_environment_or_a_file_and_are_never_shown(tmp_path: Path) -> None:
    """One that can be guessed is refused, and so is a file that is not there; no error shows it."""
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    config = tp.DriverConfig.load(environ={"CONTROL_TOKEN": TOKEN})
    for made in (config.control, ControlConfig(token_file=str(path))):
        signer = authorisation.signer(made)
        assert signer is not None
        assert signer.mac(command()) == Signer(TOKEN.encode()).mac(command())
    assert TOKEN not in repr(config) + str(config.dump())
    path.write_text("short-secret")
    for key, value in (("token", "short-secret"), ("token_file", str(path))):
        with pytest.raises(ConfigError, match="at least 16 characters") as caught:
            authorisation.signer(tp.DriverConfig.load(environ={}, overrides={f"control.{key}": value}).control)
        assert "short-secret" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"control.token_file.*No such file"):
        authorisation.signer(ControlConfig(token_file=str(tmp_path / "none")))


# Another account of the same machine, which may use the media driver.
AS_BOB = """
import os, sys
from tensorpool import aeron
from tensorpool.control import Commander, CommandError, ControlConfig, authorisation
from tensorpool.control.commander import make_event
import tensorpool.aeron.library
tensorpool.aeron.library.load()
os.setgroups([64100])
os.setgid(64002)
os.setuid(64002)
commander = Commander(aeron.connect(sys.argv[1]), ControlConfig())
for key in ("ping", "drain", "reload", "log-level"):
    try:
        print(key, commander.send(sys.argv[2], key, timeout=30).value, flush=True)
    except CommandError as error:
        print(key, type(error).__name__, error, flush=True)
"""


AS_NOBODY = """
import os, pwd
from tensorpool.control import ControlConfig, authorisation
account = pwd.getpwnam("nobody")
os.setuid(account.pw_uid)
print(os.path.isdir(account.pw_dir), authorisation.authority(ControlConfig())._remedy)
"""


def test_nobody_is_sent_to_an_account_that_can_have_no_key() -> None:
    """Accounts of services often have the home /nonexistent: their own commands are refused as well."""
    code, output = run_script(AS_NOBODY)
    text = "False nobody has no home for a key of its own: give service and sender the same control.token_file\n"
    assert (code, output) == (0, text)


@pytest.fixture
def pool() -> Iterator[tp.Local]:
    with tp.local(overrides=SMALL | {"shm.group": "64100"}) as pool:
        os.chmod(os.path.dirname(pool.aeron_dir), 0o755)
        yield pool


def test_a_member_of_the_group_may_look_and_end_nothing(pool: tp.Local) -> None:
    """Without a token the driver obeys the account that runs it; others learn how they could be authorised."""
    code, output = run_script(AS_BOB, pool.aeron_dir, TAG)
    assert code == 0, output
    ping, *refused = output.splitlines()
    assert ping == "ping pong"
    for line, key in zip(refused, ("drain", "reload", "log-level"), strict=True):
        assert line.startswith(f"{key} CommandRejected"), line
        assert "send it as root, whose service it is, or give service and sender the same control.token_file" in line
    assert pool.is_running
    client = aeron.connect(pool.aeron_dir)
    try:
        assert Commander(client, ControlConfig()).send(TAG, "drain", timeout=60).value == "draining"
    finally:
        client.close()
    wait_until(lambda: not pool.is_running, "the driver ends")


def test_with_a_token_only_its_holders_change_the_service() -> None:
    """Also not the account that runs it."""
    with tp.local(overrides=SMALL | {"control.token": TOKEN}) as pool:
        client = aeron.connect(pool.aeron_dir)
        try:
            with pytest.raises(CommandRejected, match=r"not authorised: drain .* CONTROL_TOKEN"):
                Commander(client, ControlConfig()).send(TAG, "drain", timeout=60)
            holder = Commander(client, ControlConfig(token=Secret(TOKEN)))
            assert holder.send(TAG, "drain", timeout=60).value == "draining"
            wait_until(lambda: not pool.is_running, "the driver ends")
        finally:
            client.close()


def test_a_service_makes_no_file_and_obeys_the_key_that_a_sender_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting a driver leaves nothing in a home; the first command that has to be signed makes the key."""
    key = tmp_path / "home" / "command.key"
    monkeypatch.setattr(authorisation, "_key_path", lambda: str(key))
    service = authorisation.authority(ControlConfig())
    with pytest.raises(Unacceptable, match="not authorised"):
        service.checked(command(), NOW_NS)
    assert not key.parent.exists()
    sender = authorisation.signer(ControlConfig())
    assert sender is not None
    assert key.stat().st_mode & 0o777 == 0o600
    assert service.checked(sender.sign(command()), NOW_NS) == command()
