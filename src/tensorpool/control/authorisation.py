# SPDX-License-Identifier: Apache-2.0
"""Who may change a service by a command: a sender that signs it with the secret that the service has.

A signature is the end of the command's value: HMAC-SHA256, cut to 16 bytes, over everything else that the command
carries. A secret is never sent: commands and their echoes are broadcast. A signature counts once, and for a while.

The secret is `control.token`, or the content of `control.token_file`. Without either it is a key that tensorpool keeps
for each account, in a file that no other account may read: then the services of an account obey that account alone.
The first sender of a command that needs it makes that file; a service only looks for it.
Decisions H2, K10.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import pwd
import secrets
import stat
import struct
from collections.abc import Callable
from typing import Final

import msgspec

from tensorpool.control.commands import Unacceptable
from tensorpool.control.config import ControlConfig
from tensorpool.errors import ConfigError
from tensorpool.file_access import user_name
from tensorpool.settings import Secret
from tensorpool.wire.event import EventMessage

MAC_BYTES: Final = 16
WINDOW_NS: Final = 30_000_000_000  # how old a signature may be, and how far two hosts' clocks may differ
MAX_SECRET_BYTES: Final = 4096
KEY_FILE: Final = ".config/tensorpool/command.key"
UNAUTHORISED: Final = "not authorised: "

_NUMBERS: Final = struct.Struct("<qqB3Q")
_NULL: Final = 2**64 - 1


class Signer:
    """Signs commands with a secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sign(self, message: EventMessage) -> EventMessage:
        """The same command with its signature behind the value."""
        return msgspec.structs.replace(message, value=message.value + self.mac(message))

    def mac(self, message: EventMessage) -> bytes:
        """Over everything that an unsigned command carries; each text with its length before it."""
        refs = (message.ref_stream_id, message.ref_epoch, message.ref_seq)
        numbers = (_NULL if number is None else number for number in refs)
        data = _NUMBERS.pack(message.timestamp_ns, message.correlation_id, message.format, *numbers)
        for text in (message.tag.encode(), message.key.encode(), message.value):
            data += struct.pack("<Q", len(text)) + text
        return hmac.digest(self._secret, data, hashlib.sha256)[:MAC_BYTES]


class Authority:
    """What a service demands of commands that change it. Holds no clock; `find` looks for the secret."""

    def __init__(self, find: Callable[[], Signer | None], remedy: str) -> None:
        self._find = find
        self._remedy = remedy
        self._seen: dict[int, int] = {}  # correlation ids of signed commands, and until when they are remembered

    def checked(self, message: EventMessage, now_ns: int) -> EventMessage:
        """The command without its signature. Raises Unacceptable for one that is not signed, too old, or was there."""
        signer, end = self._find(), len(message.value) - MAC_BYTES
        bare = msgspec.structs.replace(message, value=message.value[: max(end, 0)])
        if signer is None or end < 0 or not hmac.compare_digest(signer.mac(bare), message.value[end:]):
            raise Unacceptable(f"{UNAUTHORISED}{message.key} changes the service; {self._remedy}")
        age_ns = now_ns - message.timestamp_ns
        if abs(age_ns) > WINDOW_NS:
            limit = f"{WINDOW_NS // 10**9} s are accepted; do the clocks agree?"
            raise Unacceptable(f"its signature is {age_ns / 1e9:.1f} s old, at most {limit}")
        self._seen = {number: until_ns for number, until_ns in self._seen.items() if until_ns >= now_ns}
        if message.correlation_id in self._seen:
            raise Unacceptable("it was received already; a signature counts once")
        self._seen[message.correlation_id] = now_ns + 2 * WINDOW_NS
        return bare


def authority(config: ControlConfig) -> Authority:
    """Of a service with this configuration. Raises ConfigError for a token file that cannot be used."""
    if config.token or config.token_file:
        found = signer(config)
        remedy = "send it with the service's token (control.token_file, or the variable CONTROL_TOKEN)"
        return Authority(lambda: found, remedy)
    me = user_name(os.geteuid())
    path = _key_path()
    has_home = path is not None and os.path.isdir(path.removesuffix(KEY_FILE))  # services often have /nonexistent
    first = f"send it as {me}, whose service it is, or" if has_home else f"{me} has no home for a key of its own:"
    return Authority(_own_signer, f"{first} give service and sender the same control.token_file")


def signer(config: ControlConfig) -> Signer | None:
    """For commands to services with the same token, or else to services of this account; None without any secret.

    Raises ConfigError for a token file that cannot be used.
    """
    if config.token:
        return Signer(config.token.encode())
    if config.token_file:
        try:
            with open(config.token_file, "rb") as file:
                token = file.read(MAX_SECRET_BYTES).strip()
        except OSError as error:
            accepted = f"a file with a token, which this process may read; {error.strerror}"
            raise ConfigError("control.token_file", config.token_file, accepted) from None
        config.check_token("control.token_file", Secret(token.decode("utf-8", "replace")))
        return Signer(token)
    path = _key_path()
    if path is not None and not os.path.exists(path):
        with contextlib.suppress(OSError):
            _make_key(path)
    return _own_signer()


def _own_signer() -> Signer | None:
    """With the key of this account; None where there is none that can be trusted."""
    path = _key_path()
    with contextlib.suppress(OSError):
        key = None if path is None else _read_key(path)
        return None if key is None else Signer(key)
    return None


def _key_path() -> str | None:
    try:
        return os.path.join(pwd.getpwuid(os.geteuid()).pw_dir, KEY_FILE)
    except KeyError:
        return None


def _make_key(path: str) -> None:
    """Whole or not at all: another process of the account may make it at the same moment."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    draft = f"{path}.{secrets.token_hex(8)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, secrets.token_hex(32).encode())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.close(fd)
        os.unlink(draft)


def _read_key(path: str) -> bytes | None:
    """None for a file that others may read or may have put there."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        return os.read(fd, MAX_SECRET_BYTES) or None if is_own else None
    finally:
        os.close(fd)
