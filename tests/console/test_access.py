# SPDX-License-Identifier: Apache-2.0
"""Who may ask: the rules, and a real console that hostile pages and strangers ask."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import stat
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import InvalidStatus

import tensorpool as tp
from tensorpool.console.access import Access, host_name, new_token, place_in_page
from tensorpool.console.server import Console, ConsoleOptions
from tests.console.page import Answer, Site

PATHS = [
    "/",
    "/api/state",
    "/api/streams/1",
    "/api/streams/1/frame.npy",
    "/api/lakes",
    "/api/lakes/lab/timeline?stream=1",
    "/api/doctor",
    "/api/memory",
    "/web/index.html",
    "/web/",
    "/nothing",
]
SOCKETS = ["/ws/state", "/ws/preview/1", "/ws/nothing"]
TOKEN = "t" * 32
OURS = {"host": "127.0.0.1:8000"}


def test_without_the_token_nothing_is_answered(site: Site) -> None:
    """401 and one sentence on every path and for every method; a wrong token is none."""
    port = site.address.rpartition(":")[2]
    strangers: list[dict[str, str]] = [
        {},
        {"Authorization": f"Bearer {'0' * 64}"},
        {"Authorization": site.token},
        {"Cookie": f"tensorpool-console-{port}={'0' * 64}"},
        {"Cookie": f"tensorpool-console-1={site.token}"},
        {"Cookie": f"other={site.token}"},
    ]
    texts = set()
    for headers in strangers:
        for path in PATHS:
            answer = site.ask("GET", path, headers)
            assert answer.status == 401, (path, headers)
            texts.add(answer.body)
        for method, path in (("POST", "/api/lakes/lab/recording"), ("DELETE", "/api/lakes/lab/recording")):
            answer = site.ask(method, path, headers | site.origin, b"{}")
            assert answer.status == 401
            texts.add(answer.body)
        assert site.ask("GET", "/?token=0", headers).status == 401
        assert site.ask("GET", "/?link=0", headers).status == 401
    assert len(texts) == 1
    assert site.token.encode() not in texts.pop()


@pytest.mark.parametrize("path", SOCKETS)
def test_without_the_token_no_socket_is_opened(site: Site, path: str) -> None:
    """Refused before the upgrade."""
    for headers in ({}, {"Authorization": "Bearer x"}, site.origin):
        assert refusal_of(site, path, headers) == 401


def refusal_of(site: Site, path: str, headers: dict[str, str]) -> int:
    with pytest.raises(InvalidStatus) as refused, site.socket(path, headers):
        pass
    return refused.value.response.status_code


def test_a_hostile_page_gets_nothing_though_the_browser_sends_the_cookie(site: Site) -> None:
    """Another origin, also of this host, opens no socket and changes nothing; nor does a request without an origin."""
    for origin in (
        "http://evil.example",
        "http://127.0.0.1:1",
        "http://localhost:8080",
        "null",
        f"https://{site.address}",
    ):
        headers = site.cookie | {"Origin": origin}
        assert refusal_of(site, "/ws/state", headers) == 403
        assert refusal_of(site, "/ws/preview/1", headers) == 403
        assert site.ask("POST", "/api/lakes/lab/recording", headers, b"{}").status == 403
        assert site.ask("DELETE", "/api/lakes/lab/recording", headers).status == 403
        assert site.ask("POST", "/api/services/x/commands", headers, b"{}").status == 403
        assert refusal_of(site, "/ws/state", site.bearer | {"Origin": origin}) == 403
    assert refusal_of(site, "/ws/state", site.cookie) == 403
    assert site.ask("POST", "/api/lakes/lab/recording", site.cookie, b"{}").status == 403
    with site.socket("/ws/state", site.cookie | site.origin) as allowed:
        assert "hello" in str(allowed.recv())
    assert site.ask("POST", "/api/lakes/lab/recording", site.cookie | site.origin, b"{}").status == 400


def test_a_name_that_is_not_ours_is_refused(site: Site) -> None:
    """A page that had its name resolve to our address (DNS rebinding) gets nothing, with or without the token."""
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]", "", "localhost.evil.example"):
        for headers in (site.bearer, site.cookie, {}):
            for path in (*PATHS, "/healthz", f"/?token={site.token}"):
                assert site.ask("GET", path, headers | {"Host": host}).status == 403, host
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:80", site.address):
        assert site.ask("GET", "/api/state", site.bearer | {"Host": host}).status == 200


def test_the_url_is_exchanged_for_a_cookie_that_scripts_cannot_read(site: Site) -> None:
    """The answer leads on by itself, within our own pages, to a place that is no other address."""
    answer = site.ask("GET", f"/?token={site.token}&at=/streams/7", {})
    assert answer.status == 200
    cookie = answer.headers["set-cookie"]
    assert re.fullmatch(rf"tensorpool-console-\d+={site.token}; Path=/; HttpOnly; SameSite=Strict", cookie)
    assert 'content="0;url=/#/streams/7"' in answer.body.decode()
    assert site.token not in answer.body.decode()
    assert site.ask("GET", "/api/state", {"Cookie": cookie.partition(";")[0]}).status == 200
    for place in ("//evil.example", "http://evil.example", '"><script>', "/x?y"):
        answer = site.ask("GET", f"/?token={site.token}&at={quote(place)}", {})
        assert answer.body.endswith(b'content="0;url=/">')


def test_a_link_opens_the_page_once(console: Console, site: Site) -> None:
    """The second time it is refused."""
    path = console.link("/streams/7").partition(site.address)[2]
    assert site.ask("GET", path, {}).status == 200
    assert site.ask("GET", path, {}).status == 401


def test_every_answer_tells_the_browser_to_be_careful(site: Site) -> None:
    """Content policy, no sniffing, no frames, no referrer, no caching; also on refusals and errors."""
    answers: list[Answer] = [
        site.get("/api/state"),
        site.get("/nothing"),
        site.ask("GET", "/", {}),
        site.get("/healthz"),
    ]
    assert [answer.status for answer in answers] == [200, 404, 401, 200]
    for answer in answers:
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers


def test_files_outside_of_the_page_are_not_served(site: Site) -> None:
    """However the path is written."""
    for path in ("/web/../app.py", "/web/%2e%2e/app.py", "/web/..%2fapp.py", "/web//etc/passwd", "/web/%00"):
        assert site.get(path).status in (400, 404), path


def test_healthz_needs_no_token_and_says_nothing_else(site: Site) -> None:
    """For service managers."""
    assert site.ask("GET", "/healthz", {}).body == b"ok"


def test_a_body_that_is_too_long_or_no_json_is_refused(site: Site) -> None:
    """413 and 400, each with a sentence."""
    assert site.ask("POST", "/api/lakes/lab/recording", site.bearer, b"x" * 70_000).status == 413
    for body in (b"", b"{", b"[]", b'{"streams": 7}', b'{"streams": [], "more": 1}', b"\xff", b'{"streams": [null]}'):
        answer = site.ask("POST", "/api/lakes/lab/recording", site.bearer, body)
        assert (answer.status, bool(answer.json["error"])) == (400, True), body


def test_raw_bytes_do_not_end_the_server(site: Site) -> None:
    """What is no HTTP is refused or cut off; the next request is answered."""
    host, _, port = site.address.rpartition(":")
    for data in (
        b"",
        b"\x00\xff",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"X" * 100_000,
        b"GET /ws/state HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=30) as raw, contextlib.suppress(OSError):
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(65_536):
                pass
    assert site.get("/api/state").status == 200


def test_beyond_loopback_it_needs_a_token_that_somebody_chose(pool: tp.Local, tmp_path: Path) -> None:
    """Refused with that sentence; with a file it listens, and answers by the address that was asked for."""
    with pytest.raises(tp.ConfigError, match="--token-file"):
        Console(pool.config, pool.aeron_dir, ConsoleOptions(listen="0.0.0.0"))
    file = tmp_path / "token"
    file.write_text("short\n")
    with pytest.raises(tp.ConfigError, match="at least 32"):
        Console(pool.config, pool.aeron_dir, ConsoleOptions(listen="0.0.0.0", token_file=file))
    file.write_text(f"{TOKEN}\n")
    file.chmod(stat.S_IRUSR)
    with Console(pool.config, pool.aeron_dir, ConsoleOptions(listen="0.0.0.0", token_file=file)) as console:
        connection = http.client.HTTPConnection("127.0.0.2", console.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/api/state", headers={"Authorization": f"Bearer {TOKEN}"})
            assert connection.getresponse().status == 200


def test_an_address_that_cannot_be_used_is_named(pool: tp.Local) -> None:
    """Taken, or of another host."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(tp.ConfigError, match=f"127.0.0.1:{port}"):
            Console(pool.config, pool.aeron_dir, ConsoleOptions(port=port))
    with pytest.raises(tp.ConfigError, match="--supervisor"):
        Console(pool.config, pool.aeron_dir, ConsoleOptions(supervisor="ftp://x"))


# --- the rules alone


def test_tokens_are_long_and_never_the_same() -> None:
    """32 random bytes."""
    assert len({new_token() for _ in range(100)}) == 100
    assert len(bytes.fromhex(new_token())) == 32


@given(st.text())
def test_only_the_token_is_the_token(text: str) -> None:
    """Whatever is given, compared without an error."""
    assert Access(TOKEN, 1, frozenset()).is_token(text) == (text == TOKEN)


@given(st.dictionaries(st.sampled_from(["host", "origin", "cookie", "authorization"]), st.text()))
def test_no_headers_but_the_right_ones_pass(headers: dict[str, str]) -> None:
    """Any text in any header is refused, and never an error."""
    assert Access(TOKEN, 1, frozenset()).refusal("WS", headers, None) is not None
    assert Access(TOKEN, 1, frozenset()).refusal("GET", OURS | headers, "127.0.0.1") is not None


def test_a_link_is_good_for_a_minute() -> None:
    """Then it is forgotten."""
    access = Access(TOKEN, 1, frozenset())
    code = access.new_link(0)
    assert not access.use_link(code, 60_000_000_000)
    code = access.new_link(0)
    assert access.use_link(code, 59_999_999_999)


def test_hosts_and_places_are_read_as_they_are_written() -> None:
    """With ports and brackets; a place has no address in it."""
    names = {"a:1": "a", "[::1]:1": "::1", "[::1]": "::1", "A.B": "a.b", "": "", ":1": "", "[": ""}
    assert {given: host_name(given) for given in names} == names
    assert place_in_page("/streams/7") == "/#/streams/7"
    assert [place_in_page(text) for text in ("", "javascript:x", "a b", '"', "é")] == ["/"] * 5
