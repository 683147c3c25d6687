"""What the two ends of a link are told and prove to each other: settings, keys, allow-list, proof of the secret.

`pptasks/link.py` is the process at either end. Its variables:

| variable | end | meaning | default |
|---|---|---|---|
| PP_LINK_KEY | both | secret key of this end, 64 hex digits | none; needed |
| PP_LINK_SECRET | both | 64 hex digits, the same at both ends | none; needed |
| PP_LINK_TARGET | serve | the broker, host:port on a loopback address | none; needed |
| PP_LINK_ALLOW | serve | path of the allow-list | none; needed |
| PP_LINK_TICKET | connect | what the serving end printed | none; needed |
| PP_LINK_PORT | connect | TCP port on 127.0.0.1; 0: a free one | 0 |
| PP_LINK_RELAY | both | none, default (iroh's public relays), or URLs with commas between them | none |
| PP_LINK_BIND | both | UDP host:port | 127.0.0.1:0; 0.0.0.0:0 with relays |
| PP_LINK_DIE_WITH_PARENT | both | Linux: end with the process of this id; 1: whichever started it | unset |
"""

import contextlib
import errno
import hmac
import ipaddress
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import iroh

from pptasks.errors import ConfigError, LinkError

MAX_ALLOW_BYTES = 64 * 1024


@dataclass(frozen=True)
class LinkSettings:
    """One end of a link: field `x` is the variable PP_LINK_X of its process. Raises ConfigError; its repr is safe."""

    key: str = field(default="", repr=False)  # secret key of this end, 64 hex digits, see new_key()
    secret: str = field(default="", repr=False)  # 32 bytes in hex, the same on both ends
    ticket: str = field(default="", repr=False)  # connect: what the serving end printed
    target: str = ""  # serve: host:port, a loopback address
    allow: str = ""  # serve: path of the allow-list, see write_allow()
    port: str = "0"  # connect: TCP port on 127.0.0.1, 0 for a free one
    relay: str = "none"  # "none", "default" (n0's public relays) or URLs with commas between them
    bind: str = ""  # UDP host:port; "" is 127.0.0.1:0 without relays and 0.0.0.0:0 with them
    die_with_parent: str = ""  # Linux: the parent's process id, or "1" for whoever it is once Python runs

    def __post_init__(self) -> None:
        for name, value in (("KEY", self.key), ("SECRET", self.secret)):
            if len(value) != 64 or not set(value) <= set("0123456789abcdefABCDEF"):
                raise ConfigError(f"PP_LINK_{name} must be 64 hex digits")
        for name, value in (("PORT", self.port), ("DIE_WITH_PARENT", self.die_with_parent or "0")):
            if not (value.isdecimal() and value.isascii() and len(value) < 10):
                raise ConfigError(f"PP_LINK_{name} must be a number")
        if int(self.port) > 65535:
            raise ConfigError("PP_LINK_PORT must be at most 65535")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "LinkSettings":
        return cls(**{f.name: environ[v] for f in fields(cls) if (v := f"PP_LINK_{f.name.upper()}") in environ})

    def to_environ(self) -> dict[str, str]:
        """The variables to start the process with; `from_environ` is its inverse."""
        return {f"PP_LINK_{f.name.upper()}": v for f in fields(self) if (v := getattr(self, f.name)) != f.default}

    @property
    def relayed(self) -> bool:
        return self.relay not in ("", "none")

    def relay_mode(self) -> iroh.RelayMode:
        if not self.relayed:
            return iroh.RelayMode.disabled()
        if self.relay == "default":
            return iroh.RelayMode.default_mode()
        try:
            return iroh.RelayMode.custom_from_urls([url.strip() for url in self.relay.split(",")])
        except iroh.IrohError:
            raise ConfigError(f'PP_LINK_RELAY must be "none", "default" or URLs, not "{self.relay}"') from None

    def target_address(self) -> tuple[str, int]:
        host, _, port = self.target.rpartition(":")
        host = host.strip("[]")
        with contextlib.suppress(ValueError):
            if (host == "localhost" or ipaddress.ip_address(host).is_loopback) and 0 < int(port) < 65536:
                return host, int(port)
        raise ConfigError(f'PP_LINK_TARGET must be a loopback address and port, 127.0.0.1:6379, not "{self.target}"')

    def server_address(self) -> iroh.EndpointAddr:
        try:
            return iroh.EndpointTicket.from_string(self.ticket).endpoint_addr()
        except iroh.IrohError:
            raise ConfigError("PP_LINK_TICKET is not a ticket; take the one that the serving end printed") from None


def new_key() -> tuple[str, str]:
    """A fresh end of a link: (hex secret key, peer id). The id is public: it goes into the other side's allow-list."""
    key = iroh.SecretKey.generate()
    return key.to_bytes().hex(), str(key.public())


def write_allow(path: Path, ids: Iterable[str]) -> None:
    """Replace the allow-list at once: a reader finds the old one or the new one, never a part."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
        file.writelines(f"{peer}\n" for peer in ids)
    os.replace(fresh, path)


def read_allow(path: Path) -> frozenset[str]:
    """The allowed peer ids, one a line. Raises LinkError when the file is missing, too large, or open to others, and
    OSError when this process cannot open one file more."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise LinkError(f"the allow-list {path} must be its owner's alone; chmod 600 it")
            text = file.read(MAX_ALLOW_BYTES + 1)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise LinkError(f"the allow-list {path} cannot be read: {error.strerror}") from None
    if len(text) > MAX_ALLOW_BYTES:
        raise LinkError(f"the allow-list {path} exceeds {MAX_ALLOW_BYTES} bytes")
    return frozenset(text.split())


def proof(secret: str, end: str, nonce: bytes, server_id: str, client_id: str) -> bytes:
    """32 bytes that only a holder of the secret can make, for this nonce and this pair of ids (64 hex digits each)."""
    return hmac.digest(bytes.fromhex(secret), end.encode() + nonce + bytes.fromhex(server_id + client_id), "sha256")
