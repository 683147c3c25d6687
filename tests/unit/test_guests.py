"""The records of a seat: what an owner believes of a guest, and what a guest does for an owner."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pptasks.config import Settings
from pptasks.errors import ConfigError
from pptasks.guests import MAX_RECORD_BYTES, MAX_TEXT, NOBODY, OF_THE_GUEST, OF_THE_RUN, Assignment, Guest
from pptasks.remote.hubrepo import access_of

GUEST = Guest(3, "laptop", "wait", "CPU (x86_64)", 8 << 30, 1e10)
KEY = "0f" * 32  # of a link
MINE = Settings(cache=Path("/mine"), cc="/mine/cc", hf_endpoint="https://mine", hf_token="mine", hf_home=Path("/h"))
THEIRS = Settings(
    stage=1, num_stages=2, model="smollm2:135m", broker="redis://user:pw@h:1/3", run="r", secret="ab" * 32, split="1,2",
    cache=Path("/theirs"), cc="/theirs/cc", hf_endpoint="https://theirs", hf_token="theirs", slots=7,
)  # fmt: skip


def assigned(*, trust: bool = False, **changes: Any) -> Assignment:
    record = json.loads(Assignment(THEIRS, KEY).to_json())
    record["variables"] |= changes
    record["variables"] = {name: value for name, value in record["variables"].items() if value is not None}
    return Assignment.from_json(json.dumps(record), "r", MINE, trust=trust)


def test_a_guest_comes_back_as_it_was() -> None:
    assert Guest.from_json(GUEST.to_json()) == GUEST


def test_a_guest_is_ready_when_it_waits_and_was_measured() -> None:
    assert GUEST.is_ready
    for changes in ({"phase": "probe"}, {"phase": "failed"}, {"phase": "start"}, {"memory_bytes": 0}, {"speed": 0.0}):
        assert not replace(GUEST, **changes).is_ready


@pytest.mark.parametrize(
    "changes",
    [
        {"seat": "3"}, {"seat": True}, {"host": None}, {"host": "\x1b[2J"}, {"host": "a\nb"}, {"error": "x" * 301},
        {"memory_bytes": -1}, {"memory_bytes": 1 << 60}, {"memory_bytes": 1.5}, {"speed": 1}, {"speed": -1.0},
        {"speed": math.nan}, {"speed": math.inf}, {"more": 1},
    ],
)  # fmt: skip
def test_what_is_no_guest_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="record"):
        Guest.from_json(json.dumps(json.loads(GUEST.to_json()) | changes))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"null", b"\xff", b"[" * 30_000, b" " * (MAX_RECORD_BYTES + 1)])
def test_what_is_no_record_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="record"):
        Guest.from_json(raw)
    with pytest.raises(ConfigError):
        Assignment.from_json(raw, "r", MINE)


def test_a_record_of_texts_as_long_as_they_may_be_fits() -> None:
    assert len(Guest(1, "é" * MAX_TEXT, "é" * MAX_TEXT, "é" * MAX_TEXT, error="é" * MAX_TEXT).to_json()) < 1 << 15


def test_a_guest_does_what_the_run_says_with_what_is_its_own() -> None:
    done = assigned(trust=True)
    mine = {name: getattr(MINE, name) for name in ("cache", "cc", "hf_endpoint", "hf_token", "hf_home")}
    assert done.settings == replace(THEIRS, lease=True, **mine)
    assert (done.deadline, done.link_key) == (math.inf, KEY)
    assert KEY not in repr(done)
    assert Assignment.from_json(Assignment(THEIRS, KEY, 17.5).to_json(), "r", MINE).deadline == 17.5


def test_nothing_of_the_owners_machine_is_sent() -> None:
    sent = Assignment(THEIRS, KEY).to_json()
    assert "theirs" not in sent
    assert not OF_THE_GUEST & set(json.loads(sent)["variables"])


def test_a_guest_leaves_with_its_run_whatever_it_is_told() -> None:
    assert assigned(PP_LEASE="0").settings.lease


def test_every_setting_is_the_runs_or_the_guests() -> None:
    everything = Settings(
        stage=0, memory="8G", context=1, slots=1, kv_bytes="1G", in_flight=1, secret="ab" * 32, cc="x", hf_token="x",
        hf_home=Path("x"),
    )  # fmt: skip
    assert set(everything.to_env()) == OF_THE_RUN | OF_THE_GUEST
    assert not OF_THE_RUN & OF_THE_GUEST


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PATH", "PYTHONPATH", "CC", "PP_CACHE", "HF_TOKEN", "HF_HOME", "PP_X"])
def test_a_foreign_variable_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"would set '{name}'"):
        assigned(**{name: "x"})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"PP_RUN": "other"}, "another run"),
        ({"STAGE": None}, "no stage"),
        ({"PP_SECRET": None}, "no secret"),
        ({"MODEL": "a\nb"}, "MODEL is no short"),
        ({"MODEL": "a\0b"}, "MODEL is no short"),
        ({"MODEL": "a" * 5000}, "MODEL is no short"),
        ({"MODEL": 1}, "MODEL is no short"),
        ({"PP_SLOTS": "100000"}, "PP_SLOTS is 100000"),
        ({"PP_BROKER": "filesystem://"}, "its broker"),
        ({"PP_BROKER": "rediss://u:p@h:1/0"}, "its broker"),
        ({"PP_BROKER": "redis://u:p@h:1/0?ssl_ca_certs=/etc/x"}, "its broker"),
        ({"PP_BROKER": "redis://h:1/0"}, "its broker"),
        ({"PP_BROKER": "redis://u:p@[h:1/0"}, "its broker"),
        ({"PP_BROKER": None}, "its broker"),
    ],
)
def test_an_assignment_that_does_not_hold_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        assigned(**changes)
    assert "ab" * 32 not in str(raised.value)
    assert ":p@" not in str(raised.value)


@pytest.mark.parametrize("deadline", [-1, "1", True, None, math.nan, math.inf, 10**400])
def test_a_deadline_that_is_none(deadline: object) -> None:
    record = json.loads(Assignment(THEIRS, KEY).to_json()) | {"deadline": deadline}
    with pytest.raises(ConfigError):
        Assignment.from_json(json.dumps(record), "r", MINE)


@pytest.mark.parametrize("key", [None, 1, "", "0f" * 31, "0F" * 32, "0f" * 33])
def test_a_link_key_that_is_none(key: object) -> None:
    record = json.loads(Assignment(THEIRS, KEY).to_json()) | {"link_key": key}
    with pytest.raises(ConfigError):
        Assignment.from_json(json.dumps(record), "r", MINE)


@pytest.mark.parametrize(
    "model",
    ["/home/me/private.gguf", "./x", "tests/unit", "http://127.0.0.1:8500/x.gguf", "http://[::1]/x.gguf"]
    + [f"https://{host}/x.gguf" for host in (
        "127.1", "0x7f000001", "2130706433", "10.0.0.1", "192.168.1.7:8443", "169.254.169.254", "[fe80::1]", "nas",
        "[::ffff:10.0.0.1]", "localhost.", "me.localhost", "NAS.local", "db.internal", "router.lan", "100.64.0.1")],
)  # fmt: skip
def test_what_only_this_machine_has_is_for_an_owner_who_is_trusted(model: str) -> None:
    with pytest.raises(ConfigError, match="PP_JOIN_TRUST"):
        assigned(MODEL=model)
    assert assigned(MODEL=model, trust=True).settings.model == model


@pytest.mark.parametrize(
    "model",
    ["llama3.2:1b", "owner/name", "hf:owner/name@main/x.gguf", "https://models.example.org:8443/x.gguf",
     "https://1.1.1.1/x.gguf", "https://[2606:4700::1111]/x.gguf"],
)  # fmt: skip
def test_a_model_that_anyone_has_needs_no_trust(model: str) -> None:
    assert assigned(MODEL=model).settings.model == model


def test_a_guest_that_trusts_nobody_shows_no_login(tmp_path: Path) -> None:
    home = tmp_path / "hf"
    home.mkdir()
    (home / "token").write_text("hf_of_the_guest")
    mine, sent = replace(MINE, cache=tmp_path / "cache", hf_token="", hf_home=home), Assignment(THEIRS, KEY).to_json()
    tokens = [access_of(Assignment.from_json(sent, "r", mine, trust=t).settings.hub).token for t in (False, True)]
    assert tokens == ["", "hf_of_the_guest"]


def test_the_guests_token_is_for_an_owner_who_is_trusted() -> None:
    settings = assigned(MODEL="owner/private").settings
    assert settings.hf_token == ""
    assert settings.hf_home == MINE.cache / NOBODY, "not the user's own, where a login is kept"
    assert assigned(MODEL="owner/private", trust=True).settings.hf_token == "mine"
