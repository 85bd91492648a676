# SPDX-License-Identifier: Apache-2.0
"""Where HTTP is served: on a loopback address, unless another one is allowed."""

from __future__ import annotations

import ipaddress
from typing import Final

from tensorpool.errors import ConfigError

LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
HTTP_ADDRESS: Final = 'HOST:PORT such as 127.0.0.1:9464 or [::1]:9464, or "" for none'


def parse_address(key: str, text: str) -> tuple[str, int]:
    """A host and a port. Raises ConfigError for `key`."""
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if is_bracketed else host
    if not colon or not bare or (":" in bare and not is_bracketed):
        raise ConfigError(key, text, HTTP_ADDRESS)
    if not (port.isascii() and port.isdecimal()) or int(port) > 65_535:
        raise ConfigError(key, text, "a port from 0 to 65535 after the colon; 0 takes any that is free")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this host can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_address(key: str, text: str, *, allow_remote: bool, permission: str) -> tuple[str, int]:
    """A host and a port; `permission` is what allows an address that other hosts reach. Raises ConfigError."""
    host, port = parse_address(key, text)
    if not allow_remote and not is_loopback(host):
        accepted = f"a loopback address, or {permission}: every host that reaches it can read"
        raise ConfigError(key, text, accepted)
    return host, port


def accepted_names(host: str) -> frozenset[str] | None:
    """The names by which requests may ask for a server at `host`; None: any."""
    return LOCAL_NAMES | {host} if is_loopback(host) else None
