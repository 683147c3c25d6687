"""What a machine that joins a run says of itself, and what it is told to do: the two records of a seat.

Each side distrusts the other's: a guest may be anybody's machine, and a run's owner must not rule the guest's.
"""

import ipaddress
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any
from urllib.parse import urlsplit

from pptasks import spec
from pptasks.config import Settings
from pptasks.errors import ConfigError, ModelNotFound

MAX_SEATS = 64
MAX_RECORD_BYTES = 32 << 10
MAX_TEXT = 300  # characters of what a guest says
MAX_VALUE = 4096  # characters of a variable
MAX_MEMORY_BYTES, MAX_SPEED = 1 << 50, 1e16
NOBODY = "nobody"  # folder of the cache, never made: huggingface_hub's without a login
OF_THE_GUEST = {"PP_CACHE", "CC", "HF_ENDPOINT", "HF_TOKEN", "HF_HOME"}  # its own, whatever the run's owner has
_PUBLIC_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.[a-z][a-z0-9-]*")
_HOME_DOMAINS = (".localhost", ".local", ".internal", ".lan", ".home.arpa")  # RFC 6761, 6762, 8375; customary ones
OF_THE_RUN = {f.metadata["env"] for f in fields(Settings)} - OF_THE_GUEST


@dataclass(frozen=True)
class Guest:
    """The machine on a seat. What it can do is 0 until it has been probed."""

    seat: int
    host: str
    phase: str  # "probe", "wait" for the others, "start" its stage; "failed"
    device: str = ""
    memory_bytes: int = 0  # free, for weights and KV cache
    speed: float = 0.0  # bytes of weights that a product of a matrix and a vector reads a second
    error: str = ""

    @property
    def is_ready(self) -> bool:
        return self.phase == "wait" and self.memory_bytes > 0 and self.speed > 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, raw: bytes | str) -> "Guest":
        """Raises ValueError for what is no guest's record, and for a text that would do something to a terminal."""
        record = _object(raw)
        if set(record) != {f.name for f in fields(cls)}:
            raise ValueError("not a guest's record")
        if any(type(record[f.name]) is not f.type for f in fields(cls)):
            raise ValueError("a guest's record with a field of another type")
        texts = [value for value in record.values() if isinstance(value, str)]
        if not all(len(text) <= MAX_TEXT and text.isprintable() for text in texts):
            raise ValueError("a guest's record with a text that is too long, or not printable")
        guest = cls(**record)
        if not (0 <= guest.memory_bytes <= MAX_MEMORY_BYTES and 0 <= guest.speed <= MAX_SPEED):
            raise ValueError("a guest's record with a figure out of bounds")
        return guest


@dataclass(frozen=True)
class Assignment:
    """A stage for a guest. `settings.broker` has the stage's own login; host and port of it do not matter.

    link_key: of the stage's own link, 64 hex digits; the ticket's key is void from then on.
    """

    settings: Settings
    link_key: str = field(repr=False)
    deadline: float = math.inf  # Unix time

    def to_json(self) -> str:
        """Without what is the guest's own."""
        variables = {name: value for name, value in self.settings.to_env().items() if name in OF_THE_RUN}
        deadline = self.deadline if self.deadline < math.inf else 0
        return json.dumps({"deadline": deadline, "link_key": self.link_key, "variables": variables})

    @classmethod
    def from_json(cls, raw: bytes | str, run: str, mine: Settings, *, trust: bool = False) -> "Assignment":
        """What the guest will do: the run's variables, and its own cache, compiler and access to models from `mine`.

        Raises ConfigError for any variable but those of a run (LD_PRELOAD would run the owner's code on the guest),
        another run's name, or a broker that is more than a login: the guest has its own way to it. And without `trust`
        for a model that only this machine has: what it computes goes to the owner. Then nothing of huggingface_hub's
        folder is used either, neither the token that is kept there nor what that has fetched.
        """
        try:
            record = _object(raw)
            deadline, variables = record.pop("deadline"), record.pop("variables")
            key = record.pop("link_key")
            if record or not isinstance(variables, dict) or not _is_time(deadline) or not _is_key(key):
                raise ValueError("another form")
        except (ValueError, KeyError):
            raise ConfigError("the assignment cannot be read: use the same version of pptasks on both sides") from None
        _check_variables(variables)
        settings = Settings.from_env(variables)
        if settings.run != run or settings.stage is None or not settings.secret:
            raise ConfigError("the assignment is refused: it has another run, no stage or no secret")
        _check_broker(settings.broker)
        own = {f.name: getattr(mine, f.name) for f in fields(Settings) if f.metadata["env"] in OF_THE_GUEST}
        if not trust:
            _check_model(settings.model)
            own |= {"hf_token": "", "hf_home": mine.cache / NOBODY}
        return cls(replace(settings, lease=True, **own), key, deadline or math.inf)


def _object(raw: bytes | str) -> dict[str, Any]:
    """Raises ValueError."""
    try:
        record = json.loads(raw) if len(raw) <= MAX_RECORD_BYTES else None
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ValueError("not a record")
    return record


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12


def _is_key(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _check_model(model: str) -> None:
    try:
        wanted = spec.parse(model)
    except ModelNotFound as e:
        raise ConfigError(f"the assignment is refused: {e}") from None
    host = urlsplit(wanted.url).hostname if isinstance(wanted, spec.Url) else None
    if isinstance(wanted, spec.Local) or (host is not None and not _is_public(host)):
        raise ConfigError(
            "the assignment is refused: its model is a file of this machine or on a server of its network; if you "
            "trust who runs it, join with PP_JOIN_TRUST=1"
        )


def _is_public(host: str) -> bool:
    """Whether a URL's host is not on this machine or its network by its very text. Where a public name leads is not
    asked: behind it a server must have a certificate for that name."""
    host = host.rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name; a resolver also takes 127.1 and 0x7f000001 for addresses
        return _PUBLIC_NAME.fullmatch(host) is not None and not host.endswith(_HOME_DOMAINS)
    return address.is_global and not address.is_multicast


def _check_variables(variables: Mapping[str, object]) -> None:
    if foreign := sorted(variables.keys() - OF_THE_RUN):
        raise ConfigError(f"the assignment is refused: it would set {foreign[0][:40]!r}, which is not the run's to set")
    for name, value in variables.items():
        if not isinstance(value, str) or len(value) > MAX_VALUE or not value.isprintable():
            raise ConfigError(f"the assignment is refused: {name} is no short printable text")


def _check_broker(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_login = parts.scheme == "redis" and not parts.query and not parts.fragment
        is_login &= parts.path.strip("/").isdecimal() and parts.username is not None
    except ValueError:
        is_login = False
    if not is_login:
        raise ConfigError("the assignment is refused: its broker is no redis://user:password@host:port/number")
