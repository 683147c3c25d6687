"""The pure parts of the link: settings, allow-list, proof, and the repaired byte copy of iroh's binding."""

import stat
from pathlib import Path
from typing import Any

import iroh
import pytest

from pptasks.errors import ConfigError, LinkError
from pptasks.link import copy_bytes_in_one_go
from pptasks.peers import MAX_ALLOW_BYTES, LinkSettings, new_key, proof, read_allow, write_allow

KEY, SECRET = "a1" * 32, "b2" * 32


def test_settings_survive_the_environment_and_show_no_secret() -> None:
    settings = LinkSettings(key=KEY, secret=SECRET, ticket="endpointabc", port="7000", die_with_parent="1")
    environ = settings.to_environ()
    assert environ["PP_LINK_PORT"] == "7000"
    assert "PP_LINK_BIND" not in environ
    assert LinkSettings.from_environ({**environ, "PATH": "/bin"}) == settings
    assert not any(hidden in repr(settings) for hidden in (KEY, SECRET, "endpointabc"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PP_LINK_KEY", ""),
        ("PP_LINK_KEY", KEY[:-1]),
        ("PP_LINK_SECRET", SECRET[:-1] + "g"),
        ("PP_LINK_SECRET", SECRET + "00"),
        ("PP_LINK_PORT", "65536"),
        ("PP_LINK_PORT", "-1"),
        ("PP_LINK_PORT", ""),
        ("PP_LINK_DIE_WITH_PARENT", "yes"),
    ],
)
def test_a_bad_variable_is_named_without_its_value(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable) as caught:
        LinkSettings.from_environ({"PP_LINK_KEY": KEY, "PP_LINK_SECRET": SECRET, variable: value})
    assert not any(hidden[:60] in str(caught.value) for hidden in (KEY, SECRET))


def test_a_missing_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="PP_LINK_KEY"):
        LinkSettings.from_environ({})


@pytest.mark.parametrize(
    "target", ["", "6379", "127.0.0.1", "127.0.0.1:0", "10.0.0.1:6379", "0.0.0.0:6379", "redis:6379", "127.0.0.1:x"]
)
def test_only_a_loopback_target_is_forwarded_to(target: str) -> None:
    with pytest.raises(ConfigError, match="PP_LINK_TARGET"):
        LinkSettings(key=KEY, secret=SECRET, target=target).target_address()


def test_loopback_targets() -> None:
    assert LinkSettings(key=KEY, secret=SECRET, target="127.0.0.1:6379").target_address() == ("127.0.0.1", 6379)
    assert LinkSettings(key=KEY, secret=SECRET, target="[::1]:6379").target_address() == ("::1", 6379)
    assert LinkSettings(key=KEY, secret=SECRET, target="localhost:6379").target_address() == ("localhost", 6379)


def test_relay_and_ticket_that_are_not_ones() -> None:
    with pytest.raises(ConfigError, match="PP_LINK_RELAY"):
        LinkSettings(key=KEY, secret=SECRET, relay="nonsense").relay_mode()
    with pytest.raises(ConfigError, match="PP_LINK_TICKET"):
        LinkSettings(key=KEY, secret=SECRET, ticket="nonsense").server_address()


def test_a_key_yields_its_id_every_time() -> None:
    key, peer = new_key()
    assert str(iroh.SecretKey.from_bytes(bytes.fromhex(key)).public()) == peer
    assert len(peer) == 64
    assert new_key() != (key, peer)


def test_allow_list_is_private_and_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "allow"
    write_allow(path, ["aa", "bb"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_allow(path) == {"aa", "bb"}
    write_allow(path, [])
    assert read_allow(path) == frozenset()
    assert list(tmp_path.iterdir()) == [path]


def test_an_allow_list_that_cannot_be_trusted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "allow"
    with pytest.raises(LinkError, match="cannot be read"):
        read_allow(path)
    write_allow(path, ["aa"])
    path.chmod(0o620)
    with pytest.raises(LinkError, match="chmod 600"):
        read_allow(path)
    write_allow(path, ["a" * MAX_ALLOW_BYTES])
    with pytest.raises(LinkError, match="exceeds"):
        read_allow(path)


def test_a_proof_depends_on_everything_that_it_speaks_of() -> None:
    said = (SECRET, "connect", b"n" * 32, "11" * 32, "22" * 32)
    others = ("c3" * 32, "serve", b"m" * 32, "22" * 32, "11" * 32)
    variants = [(*said[:i], other, *said[i + 1 :]) for i, other in enumerate(others)]
    assert len({proof(*variant) for variant in [said, *variants]}) == 6  # type: ignore[arg-type]
    assert len(proof(*said)) == 32


@pytest.mark.parametrize("size", [0, 1, 15, 17, 1 << 20])
def test_bytes_reach_rust_unchanged(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    binding: Any = iroh.iroh_ffi
    builder = binding._UniffiRustBufferBuilder
    monkeypatch.setattr(builder, "write", builder.write)  # so that the change ends with this test
    copy_bytes_in_one_go()
    sent = bytes(i * 7 % 256 for i in range(size))
    assert binding._UniffiFfiConverterBytes.lift(binding._UniffiFfiConverterBytes.lower(sent)) == sent
