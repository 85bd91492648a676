# SPDX-License-Identifier: Apache-2.0
"""Settings from file, environment and flags: precedence, refusals and their words, the kinds of values."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpool import settings
from tensorpool.errors import ConfigError
from tensorpool.settings import AeronStreamId, Channel, Derived, Name, Range, Secret, StreamIdRange
from tests import settings_reference


class Relay(msgspec.Struct, frozen=True, kw_only=True):
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 4000
    title: Name = "relay"
    is_open: bool = False
    hosts: tuple[str, ...] = ()
    weights: tuple[Annotated[int, msgspec.Meta(ge=0, le=9)], ...] = ()
    channel: Channel = "aeron:ipc"
    ids: StreamIdRange = Range()
    mode: Literal["FAST", "SAFE"] = "SAFE"
    token: Secret = Secret("")


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    stream_id: AeronStreamId
    label: str = ""


class Mapped(msgspec.Struct, frozen=True, kw_only=True):
    source: AeronStreamId
    target: int = 0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    relay: Relay = msgspec.field(default_factory=Relay)
    peers: Mapping[str, Peer] = {}
    mappings: tuple[Mapped, ...] = ()


def load(text: str = "", environ: Mapping[str, str] | None = None, /, *, folder: Path, **overrides: Any) -> Settings:
    path = folder / "relay.toml"
    path.write_text(text)
    return settings.load(Settings, path=path, environ=environ or {}, overrides=overrides)


def refusal(
    text: str = "", environ: Mapping[str, str] | None = None, /, *, folder: Path, **overrides: Any
) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(text, environ, folder=folder, **overrides)
    return caught.value


def test_flags_go_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    """Each layer only replaces what it names."""
    text, environ = '[relay]\nport = 1\ntitle = "file"\nmode = "FAST"', {"RELAY_PORT": "2", "RELAY_TITLE": "env"}
    relay = load(text, environ, folder=tmp_path, **{"relay.port": 3}).relay
    assert (relay.port, relay.title, relay.mode, relay.is_open) == (3, "env", "FAST", False)


def test_nothing_at_all_gives_the_defaults() -> None:
    """Neither file, variables nor flags are needed."""
    assert settings.load(Settings) == Settings()


def test_the_built_in_tables_stand_in_for_a_file_that_is_not_given(tmp_path: Path) -> None:
    """A file replaces them as a whole."""
    built_in = {"relay": {"port": 7}}
    path = tmp_path / "empty.toml"
    path.touch()
    assert settings.load(Settings, built_in=built_in).relay.port == 7
    assert settings.load(Settings, built_in=built_in, path=path).relay.port == 4000


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("RELAY_PORT", "4001", "port", 4001),
        ("RELAY_TITLE", "x", "title", "x"),
        ("RELAY_IS_OPEN", "true", "is_open", True),
        ("RELAY_IS_OPEN", "false", "is_open", False),
        ("RELAY_HOSTS", "a,b", "hosts", ("a", "b")),
        ("RELAY_HOSTS", "a", "hosts", ("a",)),
        ("RELAY_HOSTS", "", "hosts", ()),
        ("RELAY_WEIGHTS", "1,2", "weights", (1, 2)),
        ("RELAY_IDS", "5-9", "ids", Range(5, 9)),
        ("RELAY_IDS", "5,9", "ids", Range(5, 9)),
        ("RELAY_IDS", "", "ids", Range()),
        ("RELAY_MODE", "FAST", "mode", "FAST"),
        ("RELAY_TOKEN", "hush", "token", Secret("hush")),
        ("RELAY_CHANNEL", "aeron:udp?endpoint=h:1|mtu=8k", "channel", "aeron:udp?endpoint=h:1|mtu=8k"),
    ],
)
def test_a_variable_is_read_as_its_key_wants_it(
    tmp_path: Path, variable: str, text: str, name: str, value: object
) -> None:
    """Every type that a variable can express; a text given as a flag is read alike."""
    assert getattr(load("", {variable: text}, folder=tmp_path).relay, name) == value
    assert getattr(load(folder=tmp_path, **{f"relay.{name}": text}).relay, name) == value


@pytest.mark.parametrize(
    ("variable", "text", "key", "accepted"),
    [
        ("RELAY_PORT", "", "relay.port", "an integer from 1 to 65535"),
        ("RELAY_PORT", "4e3", "relay.port", "an integer"),
        ("RELAY_PORT", "0x10", "relay.port", "an integer"),
        ("RELAY_PORT", "1_000", "relay.port", "an integer"),
        ("RELAY_PORT", " 1", "relay.port", "an integer"),
        ("RELAY_PORT", "010", "relay.port", "an integer"),
        ("RELAY_PORT", "١", "relay.port", "an integer"),
        ("RELAY_PORT", "9" * 5000, "relay.port", "an integer"),
        ("RELAY_IS_OPEN", "True", "relay.is_open", "true or false"),
        ("RELAY_IS_OPEN", "1", "relay.is_open", "true or false"),
        ("RELAY_IS_OPEN", "", "relay.is_open", "true or false"),
        ("RELAY_MODE", "fast", "relay.mode", "FAST or SAFE"),
        ("RELAY_IDS", "9-5", "relay.ids", "first <= last"),
        ("RELAY_CHANNEL", "", "relay.channel", "an Aeron URI"),
        ("RELAY_TITLE", "a b", "relay.title", "visible ASCII"),
        ("RELAY_TITLE", "ab\n", "relay.title", "visible ASCII"),
    ],
)
def test_a_text_that_does_not_fit_is_refused_by_key_value_and_variable(
    tmp_path: Path, variable: str, text: str, key: str, accepted: str
) -> None:
    """Nothing is guessed, trimmed or rounded, and the error says which variable to mend."""
    error = refusal("", {variable: text}, folder=tmp_path)
    assert (error.key, error.value) == (key, text)
    assert accepted in error.accepted
    assert f"(from the environment variable {variable})" in str(error)


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("-1", -1), ("65536", 65536)])
def test_a_number_out_of_range_is_refused_as_the_number_it_is(tmp_path: Path, text: str, value: int) -> None:
    """Also a negative one."""
    error = refusal("", {"RELAY_PORT": text}, folder=tmp_path)
    assert (error.key, error.value) == ("relay.port", value)


def test_one_bad_entry_of_an_array_is_named_by_its_index(tmp_path: Path) -> None:
    """From a file and from a variable."""
    error = refusal("", {"RELAY_WEIGHTS": "1,10"}, folder=tmp_path)
    assert (error.key, error.value) == ("relay.weights[1]", 10)
    error = refusal('[relay]\nweights = [1, "x"]', folder=tmp_path)
    assert (error.key, error.value) == ("relay.weights[1]", "x")


@pytest.mark.parametrize(
    ("text", "key", "value", "accepted"),
    [
        ("[relay]\nport = true", "relay.port", True, "an integer"),
        ("[relay]\nport = 1.0", "relay.port", 1.0, "an integer"),
        ("[relay]\nport = '1'", "relay.port", "1", "an integer"),
        ("[relay]\nport = 99999999999999999999999", "relay.port", 99999999999999999999999, "an integer"),
        ("[relay]\nis_open = 1", "relay.is_open", 1, "true or false"),
        ("[relay]\nis_open = 'true'", "relay.is_open", "true", "true or false"),
        ("[relay]\ntitle = ''", "relay.title", "", "not empty"),
        ("[relay]\nhosts = 'a,b'", "relay.hosts", "a,b", "an array"),
        ("[relay]\nmode = 1", "relay.mode", 1, "FAST or SAFE"),
        ("[relay]\nids = [1, 2, 3]", "relay.ids", [1, 2, 3], "[first, last]"),
        ("[relay]\nids = [0, 5]", "relay.ids", "0-5", "ids from 1 to 4294967294"),
        ("relay = 1", "relay", 1, "a table with port"),
        ("peers = 1", "peers", 1, "a table of tables"),
        ("[peers]\nx = 1", "peers.x", 1, "a table with stream_id"),
        ("mappings = 1", "mappings", 1, "an array of tables"),
        ("mappings = [1]", "mappings[0]", 1, "a table with source"),
        ("[[mappings]]\nsource = 1\n[[mappings]]\nsource = 0", "mappings[1].source", 0, "an integer from 1"),
    ],
)
def test_a_value_of_the_file_that_does_not_fit_is_refused_by_key_and_value(
    tmp_path: Path, text: str, key: str, value: object, accepted: str
) -> None:
    """Wrong type, out of range or the wrong shape, each with what would do and the file's name."""
    error = refusal(text, folder=tmp_path)
    assert (error.key, error.value) == (key, value)
    assert accepted in error.accepted
    assert str(tmp_path / "relay.toml") in error.accepted


@pytest.mark.parametrize(
    ("text", "key"),
    [("[peers.x]\nlabel = 'l'", "peers.x.stream_id"), ("[[mappings]]\ntarget = 1", "mappings[0].source")],
)
def test_a_missing_key_is_refused_as_missing(tmp_path: Path, text: str, key: str) -> None:
    """What has no default must be there."""
    error = refusal(text, folder=tmp_path)
    assert (error.key, repr(error.value)) == (key, "<missing>")
    assert "required" in error.accepted


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("[relay]\nprt = 1", "relay.prt", "relay.port"),
        ("[rely]\nport = 1", "rely", "relay"),
        ("port = 1", "port", "relay.port"),
        ("[relay]\nstream_id = 1", "relay.stream_id", "peers.<name>.stream_id"),
        ("[peers.x]\nstream_di = 1", "peers.x.stream_di", "peers.x.stream_id"),
        ("[peers.x]\nsource = 1", "peers.x.source", "mappings[].source"),
        ("[[mappings]]\nsource = 1\nsorce = 2", "mappings[0].sorce", "mappings[0].source"),
        ("[relay.port]\nx = 1", "relay.port", None),
        ("[relay]\nxyzzy = 1", "relay.xyzzy", None),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(
    tmp_path: Path, text: str, key: str, nearest: str | None
) -> None:
    """A typo never becomes a default; a key of another table is found too."""
    error = refusal(text, folder=tmp_path)
    assert error.key == key
    if nearest is None:
        assert "nearest" not in error.accepted
    else:
        assert f"the nearest is {nearest} (in " in error.accepted


def test_an_unknown_flag_is_refused_like_an_unknown_key(tmp_path: Path) -> None:
    """At every depth."""
    assert refusal(folder=tmp_path, **{"relay.prt": 1}).key == "relay.prt"
    assert refusal(folder=tmp_path, **{"relay.port.x": 1}).key == "relay.port.x"
    assert refusal(folder=tmp_path, **{"mappings.source": 1}).key == "mappings.source"
    error = refusal(folder=tmp_path, nope=1)
    assert (error.key, error.accepted) == ("nope", "one of relay, peers, mappings (from a flag)")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[relay]\nport = \n", "line 2"),
        (b"[relay]\nport = 1\nport = 2\n", "line 3"),
        (b"[relay\n", "line 1"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_a_file_that_is_no_toml_is_refused_by_name_and_line(tmp_path: Path, content: bytes, words: str) -> None:
    """The parser's own words are kept."""
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        settings.load(Settings, path=path)
    assert caught.value.value == str(path)
    assert words in caught.value.accepted


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    """A path that was given is never passed over."""
    for path, words in [(tmp_path / "absent.toml", "No such file"), (tmp_path, "directory")]:
        with pytest.raises(ConfigError, match=words) as caught:
            settings.load(Settings, path=path)
        assert caught.value.value == str(path)


def test_a_variable_that_is_no_key_is_left_alone(tmp_path: Path) -> None:
    """It may belong to another program, also when it begins like ours."""
    environ = {"RELAY_PRT": "x", "RELAY": "x", "PORT": "x", "relay_port": "x", "MAPPINGS": "x", "PEERS_X_LABEL": "x"}
    assert load("", environ, folder=tmp_path) == Settings()


def test_a_variable_that_is_almost_a_key_is_found(tmp_path: Path) -> None:
    """For a warning: what resembles a key that exists, and nothing else."""
    loaded = load("[peers.x]\nstream_id = 1", folder=tmp_path)
    environ = {"RELAY_PROT": "1", "RELAY_PORT": "1", "RELAY": "1", "HOME": "/", "DELAY_PORT": "1", "PEERS_Y_LABEL": "a"}
    assert settings.lookalikes(loaded, environ) == {
        "RELAY_PROT": "RELAY_PORT",
        "PEERS_Y_LABEL": "PEERS_X_LABEL",
    }


@pytest.mark.parametrize("name", ["cam", "CAM", "Cam"])
def test_a_named_table_has_variables_whatever_its_case(tmp_path: Path, name: str) -> None:
    """A variable can give what the table leaves out, and replace what it has."""
    loaded = load(f"[peers.{name}]\nlabel = 'l'", {"PEERS_CAM_STREAM_ID": "5", "PEERS_CAM_LABEL": "m"}, folder=tmp_path)
    assert loaded.peers == {name: Peer(stream_id=5, label="m")}


@pytest.mark.parametrize("name", ["front.left", "front-left", "front_left", "front/left", "Front Left"])
def test_what_a_variable_cannot_spell_is_an_underscore(tmp_path: Path, name: str) -> None:
    """Names with dots, dashes and the like have variables too."""
    loaded = load(f'[peers."{name}"]\nstream_id = 1', {"PEERS_FRONT_LEFT_STREAM_ID": "5"}, folder=tmp_path)
    assert loaded.peers[name].stream_id == 5


@pytest.mark.parametrize(("one", "other"), [("a.b", "a_b"), ("A", "a"), ("x-y", "x.y")])
def test_a_variable_that_two_tables_share_is_refused_when_it_is_set(tmp_path: Path, one: str, other: str) -> None:
    """The names may stand side by side in the file; only the variable cannot tell them apart."""
    text = f'[peers."{one}"]\nstream_id = 1\n[peers."{other}"]\nstream_id = 2'
    variable = settings.env_name(f"peers.{one}.stream_id")
    assert len(load(text, {settings.env_name("relay.port"): "1"}, folder=tmp_path).peers) == 2
    error = refusal(text, {variable: "5"}, folder=tmp_path)
    assert (error.key, error.value) == (variable, "5")
    assert f"peers.{one}.stream_id and peers.{other}.stream_id" in error.accepted


def test_flags_take_dotted_keys_and_tables(tmp_path: Path) -> None:
    """They may add named tables, also with dots in their names, and replace arrays of tables."""
    overrides = {
        "peers.a.b.stream_id": 5,
        "peers": {"c": {"stream_id": "6"}},
        "relay": {"title": "t"},
        "mappings": [{"source": 1}],
    }
    loaded = load("[[mappings]]\nsource = 8\n[[mappings]]\nsource = 9", folder=tmp_path, **overrides)
    assert loaded.peers == {"a.b": Peer(stream_id=5), "c": Peer(stream_id=6)}
    assert loaded.relay.title == "t"
    assert loaded.mappings == (Mapped(source=1),)


def test_tables_keep_the_order_of_the_file(tmp_path: Path) -> None:
    """So that "the first one" means what a reader sees."""
    text = "".join(f"[peers.{name}]\nstream_id = 1\n" for name in ("z", "a", "m"))
    assert list(load(text, folder=tmp_path).peers) == ["z", "a", "m"]


def test_neither_the_built_in_tables_nor_the_flags_are_changed() -> None:
    """They may be shared constants."""
    built_in = {"relay": {"port": 7}, "peers": {"a": {"stream_id": 1}}, "mappings": [{"source": 1}]}
    before = pickle.dumps(built_in)
    settings.load(Settings, built_in=built_in, environ={"PEERS_A_STREAM_ID": "2"}, overrides={"mappings": []})
    assert pickle.dumps(built_in) == before


def test_a_dump_says_everything_but_secrets(tmp_path: Path) -> None:
    """One flat table, values as TOML has them."""
    text = "[relay]\nids = [5, 9]\ntoken = 'hush'\nhosts = ['a']\n[peers.x]\nstream_id = 1\n[[mappings]]\nsource = 2"
    assert settings.dump(load(text, folder=tmp_path)) == {
        "relay.port": 4000,
        "relay.title": "relay",
        "relay.is_open": False,
        "relay.hosts": ["a"],
        "relay.weights": [],
        "relay.channel": "aeron:ipc",
        "relay.ids": "5-9",
        "relay.mode": "SAFE",
        "relay.token": "<hidden>",
        "peers.x.stream_id": 1,
        "peers.x.label": "",
        "mappings[0].source": 2,
        "mappings[0].target": 0,
    }


def test_known_keys_come_with_their_variables() -> None:
    """None where a variable cannot express the key."""
    keys = settings.known_keys(Settings)
    assert keys["relay.is_open"] == "RELAY_IS_OPEN"
    assert keys["peers.<name>.stream_id"] == "PEERS_<NAME>_STREAM_ID"
    assert (keys["mappings"], keys["mappings[].source"]) == (None, None)
    assert len(keys) == 14


def test_a_struct_made_by_hand_is_held_to_the_same_rules() -> None:
    """`check` finds what a constructor does not look at."""
    settings.check(Settings(peers={"x": Peer(stream_id=1)}, mappings=(Mapped(source=1),)))
    for made, key in [
        (Settings(relay=Relay(port=0)), "relay.port"),
        (Settings(relay=Relay(channel="ipc")), "relay.channel"),
        (Settings(relay=Relay(hosts=("a", 1))), "relay.hosts[1]"),  # type: ignore[arg-type]
        (Settings(peers={"x": Peer(stream_id=0)}), "peers.x.stream_id"),
        (Settings(mappings=(Mapped(source=1), Mapped(source=-1))), "mappings[1].source"),
    ]:
        with pytest.raises(ConfigError) as caught:
            settings.check(made)
        assert caught.value.key == key


def test_the_reference_of_all_keys_is_up_to_date() -> None:
    """`make configuration` writes docs/configuration.md from the structs."""
    assert settings_reference.PAGE.read_text() == settings_reference.page()


def test_every_key_has_a_meaning_of_one_sentence() -> None:
    """In the text below its field."""
    keys = settings_reference.keys()
    assert len(keys) > 150
    assert not [key for key in keys if not key.meaning.endswith(".") or ". " in key.meaning]


class Follower(msgspec.Struct, frozen=True, kw_only=True):
    leader: Annotated[str, Derived("chief.name")]
    period: int = 2
    expiry: Annotated[int, Derived("three periods", lambda table, _: 3 * table.period if table.gives("period") else 9)]


class Chief(msgspec.Struct, frozen=True, kw_only=True):
    name: str = "ada"


class Court(msgspec.Struct, frozen=True, kw_only=True):
    chief: Chief
    followers: tuple[Follower, ...] = ()


def test_a_key_that_is_left_out_is_derived_from_those_before_it() -> None:
    """From a key of another table, or by a rule that also sees whether a key was given."""
    given = {"chief": {"name": "bo"}, "followers": [{}, {"period": 5}, {"leader": "x", "period": 5, "expiry": 1}]}
    assert settings.load(Court, built_in=given).followers == (
        Follower(leader="bo", period=2, expiry=9),
        Follower(leader="bo", period=5, expiry=15),
        Follower(leader="x", period=5, expiry=1),
    )
    keys = {key.key: (key.default, key.is_derived) for key in settings.describe(Court)}
    assert keys["followers[].leader"] == ("chief.name", True)
    assert keys["followers[].period"] == ("2", False)


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()
_NAMES = st.sampled_from(["relay", "peers", "mappings", "port", "ids", "token", "stream_id", "source", "x", ""])
_TABLES = st.dictionaries(
    _NAMES,
    st.recursive(
        _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3), max_leaves=8
    ),
    max_size=3,
)


@given(built_in=_TABLES, overrides=_TABLES, environ=st.dictionaries(_NAMES.map(str.upper), st.text(max_size=5)))
def test_whatever_comes_is_settings_or_a_config_error(
    built_in: dict[str, Any], overrides: dict[str, Any], environ: dict[str, str]
) -> None:
    """No shape of input gets past the loader or breaks it."""
    with contextlib.suppress(ConfigError):
        loaded = settings.load(Settings, built_in=built_in, environ=environ, overrides=overrides)
        settings.dump(loaded)
        assert settings.load(Settings, built_in=msgspec.to_builtins(loaded, enc_hook=str)) == loaded


# --- Range


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("20000-29999", range(20000, 30000)),
        ([20000, 29999], range(20000, 30000)),
        ((7, 7), range(7, 8)),
        ("7-7", range(7, 8)),
        ("0-4294967295", range(2**32)),
        ("", range(0)),
        ([], range(0)),
    ],
)
def test_a_range_is_inclusive_however_it_is_written(value: object, expected: range) -> None:
    """It contains, counts and lists what Python's range does."""
    ids = Range.parse(value)
    assert len(ids) == len(expected)
    assert bool(ids) == bool(expected)
    assert Range.parse(str(ids)) == ids
    assert pickle.loads(pickle.dumps(ids)) == ids
    assert hash(Range.parse(str(ids))) == hash(ids)
    if expected:
        assert (ids.first, ids.last, next(iter(ids))) == (expected[0], expected[-1], expected[0])
        assert ids.first in ids
        assert ids.last in ids
        assert ids.last + 1 not in ids
    assert "7" not in ids
    assert 7.5 not in ids


@pytest.mark.parametrize(
    "value",
    [
        *("200-100", "5", "5-", "-5", "-5-6", "5–6", "5 - 6", " 5-6", "5-6-7", "a-b", "5,6", "٣-٤", "1-" + "2" * 21),
        *([200, 100], [5], [1, 2, 3], [True, 5], [1, True], [1.0, 2], ["1", "2"], [-1, 5], [0, -1]),
        *(None, 5, {}, b"1-2"),
    ],
)
def test_what_is_no_range_is_refused(value: object) -> None:
    """Descending, half, with spaces, of other types."""
    with pytest.raises(ValueError, match=r"range|first"):
        Range.parse(value)


def test_a_range_cannot_be_made_descending() -> None:
    """Nor negative."""
    for first, last in [(5, 4), (-1, 5), (0, -2)]:
        with pytest.raises(ValueError, match="no range"):
            Range(first, last)


_RANGES = st.builds(lambda pair: Range(min(pair), max(pair)), st.tuples(st.integers(0, 30), st.integers(0, 30)))


@given(_RANGES | st.just(Range()), _RANGES | st.just(Range()), st.integers(-3, 33))
def test_ranges_behave_as_the_sets_they_stand_for(one: Range, other: Range, number: int) -> None:
    """Membership, size, order, overlap, equality and both spellings."""
    mine, theirs = set(one), set(other)
    assert (number in one) == (number in mine)
    assert len(one) == len(mine)
    assert list(one) == sorted(mine)
    assert one.overlaps(other) == other.overlaps(one) == bool(mine & theirs)
    assert (one == other) == (mine == theirs)
    assert Range.parse(str(one)) == one
    assert eval(repr(one)) == one
    assert not one or Range.parse([one.first, one.last]) == one


# --- Secret


def test_a_secret_is_hidden_wherever_it_is_shown(tmp_path: Path) -> None:
    """In texts, structs, dumps and errors, also when its key is misspelt or its type is wrong."""
    loaded = load("[relay]\ntoken = 'hush'", folder=tmp_path)
    token = loaded.relay.token
    shown = [repr(token), str(token), f"{token} {token!r} {token:>20}", "%s %r" % (token, token)]  # noqa: UP031
    shown += [repr(loaded), str(settings.dump(loaded))]
    for text in (
        "[relay]\ntokn = 'hush'",
        "[relay]\nxyzzy = 'hush'",
        "[relay]\ntoken = ['hush']",
        "[relay]\ntoken = {hush = 1}",
        "[relay]\ntoken = 'hush\u00e4'",
        "[relay]\ntoken = hush",
        "[relay]\nport = {token = 'hush'}",
        "[[relay]]\ntoken = 'hush'",
        "[rely]\ntoken = 'hush'",
        "[peers.x]\ntoken = 'hush'",
        "[[mappings]]\ntoken = 'hush'",
        "token = 'hush'",
    ):
        shown.append(str(refusal(text, folder=tmp_path)))
    shown.append(str(refusal("", {"RELAY_TOKEN": "hush\u00e4"}, folder=tmp_path)))
    assert not [text for text in shown if "hush" in text]
    assert token.encode() == b"hush"


def test_the_empty_secret_matches_nothing() -> None:
    """Not even the empty text: a feature that is off cannot be asked for."""
    assert not Secret("")
    assert not Secret("").matches("")
    assert not Secret("").matches("x")
    assert (repr(Secret("")), str(Secret(""))) == ("Secret()", "")


def test_a_secret_matches_itself_only() -> None:
    """Whatever characters a peer sends."""
    token = Secret("hush")
    assert token.matches("hush")
    for other in ("", "hus", "hush ", "HUSH", "hüsh", "\udcff"):
        assert not token.matches(other)
