# SPDX-License-Identifier: Apache-2.0
"""Who may ask the console, and for which pages a browser may ask. Holds no clock and does no IO.

A request needs the token, as a cookie or as `Authorization: Bearer`. A browser sends the cookie also for a hostile
page, so what changes something, and every WebSocket, must come from a page of ours. The host that is asked for must be
this one: a name that a hostile page gave our address (DNS rebinding) is refused.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Final

import msgspec

from tensorpool.errors import ConfigError
from tensorpool.telemetry.addresses import LOCAL_NAMES, is_loopback

TOKEN_BYTES: Final = 32
MIN_TOKEN: Final = 32  # characters, of one that an operator chose
LINK_NS: Final = 60_000_000_000  # how long a link for one use is good
SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")
_PLACE: Final = re.compile(r"/?[A-Za-z0-9/_-]*")


class Refusal(msgspec.Struct, frozen=True):
    """Why a request gets nothing."""

    status: int
    text: str


NO_TOKEN: Final = Refusal(401, "open the address that `tensorpool console` printed: it carries the token")
WRONG_HOST: Final = Refusal(403, "ask for this host by its own name or address")
WRONG_ORIGIN: Final = Refusal(403, "only pages of this console may do that")


def new_token() -> str:
    """A token that cannot be guessed."""
    return secrets.token_hex(TOKEN_BYTES)


def chosen_token(text: str, path: str) -> str:
    """The token in an operator's file. Raises ConfigError."""
    token = text.strip()
    if len(token) < MIN_TOKEN or not _TOKEN.fullmatch(token):
        accepted = f"a file with one line of at least {MIN_TOKEN} visible ASCII characters: openssl rand -hex 32"
        raise ConfigError("--token-file", path, accepted)
    return token


def check_listen(host: str, *, has_token_file: bool) -> None:
    """Refuse to serve other hosts with a token that the operator did not choose. Raises ConfigError."""
    if not is_loopback(host) and not has_token_file:
        accepted = (
            "a loopback address, or together with --token-file FILE: other hosts reach this address, so give a token "
            "that you chose and keep"
        )
        raise ConfigError("--listen", host, accepted)


class Access:
    """The rules of one console. `names` are the hosts that may be asked for, beside the address that was reached."""

    def __init__(self, token: str, port: int, names: frozenset[str]) -> None:
        self._token = token.encode()
        self._names = LOCAL_NAMES | {name.lower() for name in names}
        self._links: dict[str, int] = {}
        self.cookie: Final = f"tensorpool-console-{port}"

    def refusal(self, method: str, headers: Mapping[str, str], reached: str | None) -> Refusal | None:
        """Why a request is refused; None for one that may pass. `method` of a WebSocket is "WS"."""
        return self.host_refusal(headers, reached) or self._token_refusal(method, headers)

    def host_refusal(self, headers: Mapping[str, str], reached: str | None) -> Refusal | None:
        """Of what needs no token: whether this host is meant. `reached` is our address that the client connected to."""
        name = host_name(headers.get("host", ""))
        is_ours = name in self._names or (name != "" and name == (reached or "").lower())
        return None if is_ours else WRONG_HOST

    def is_token(self, text: str) -> bool:
        """In constant time."""
        return hmac.compare_digest(text.encode("utf-8", "replace"), self._token)

    def new_link(self, now_ns: int) -> str:
        """A code that opens the page once: for a browser's command line, which other users of the host can read."""
        self._links = {code: until_ns for code, until_ns in self._links.items() if until_ns > now_ns}
        code = secrets.token_urlsafe(TOKEN_BYTES)
        self._links[code] = now_ns + LINK_NS
        return code

    def use_link(self, code: str, now_ns: int) -> bool:
        """Whether a code is good; it is not from then on."""
        return self._links.pop(code, 0) > now_ns

    def set_cookie(self) -> str:
        """The header's value."""
        return f"{self.cookie}={self._token.decode()}; Path=/; HttpOnly; SameSite=Strict"

    def _token_refusal(self, method: str, headers: Mapping[str, str]) -> Refusal | None:
        origin, scheme = headers.get("origin"), "Bearer "
        given = headers.get("authorization", "")
        is_foreign = origin is not None and origin.lower() != f"http://{headers.get('host', '').lower()}"
        if given.startswith(scheme):
            if not self.is_token(given.removeprefix(scheme).strip()):
                return NO_TOKEN
            return WRONG_ORIGIN if is_foreign else None
        if not self.is_token(_cookie(headers.get("cookie", ""), self.cookie)):
            return NO_TOKEN
        if method not in SAFE_METHODS and (is_foreign or origin is None):
            return WRONG_ORIGIN
        return None


def host_name(given: str) -> str:
    """The name in a Host header, without its port."""
    if given.startswith("["):
        return given[1:].partition("]")[0].lower()
    return given.partition(":")[0].lower()


def place_in_page(given: str) -> str:
    """Where in the page a link leads, as a fragment; nothing for what is no such place."""
    return f"/#{given}" if given and _PLACE.fullmatch(given) else "/"


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value
