"""What `pp up --join` hands to one machine, and `pp join` takes: a ticket of letters and digits.

It survives a chat or an e-mail: no sign that one of them would format, and lines broken anywhere, or capitals, do no
harm. Its text is "pp1", then base32 (RFC 4648, small letters, no padding) of

    seat (2 bytes), link_key (32), link_secret (32), then each of TEXTS: its length (2 bytes), its ASCII bytes
    the first CHECK_BYTES of SHA-256 of all that

Whoever has the ticket can take the seat: it is a secret. It is good for one seat of one run, and ends with the run.
"""

import base64
import binascii
import hashlib
import re
import struct
from dataclasses import dataclass, field

from pptasks.errors import UsageError

VERSION = "pp1"
MAX_CHARACTERS = 8192
CHECK_BYTES = 6
TEXTS = ("run", "user", "password", "relay", "ticket")
_HEADER = struct.Struct(">H32s32s")
_LENGTH = struct.Struct(">H")
_PRINTABLE = re.compile(r"[!-~]*", re.ASCII)  # ASCII without spaces
_REMEDY = "copy all of the line that `pp up --join` printed for this machine"


@dataclass(frozen=True)
class Invitation:
    """One seat of a run: where its broker is reached, and as whom. Its repr is safe, its str is the ticket."""

    run: str
    seat: int  # 1, 2, ...
    ticket: str = field(repr=False)  # of the link: what the serving end printed
    link_key: str = field(repr=False)  # 64 hex digits, of this seat alone
    link_secret: str = field(repr=False)  # 64 hex digits
    relay: str  # as in PP_LINK_RELAY
    user: str  # of the broker; of this seat alone
    password: str = field(repr=False)

    def __str__(self) -> str:
        body = _HEADER.pack(self.seat, bytes.fromhex(self.link_key), bytes.fromhex(self.link_secret))
        for name in TEXTS:
            text = getattr(self, name).encode("ascii")
            body += _LENGTH.pack(len(text)) + text
        return VERSION + base64.b32encode(body + _check(body)).decode().rstrip("=").lower()


def parse(text: str) -> Invitation:
    """The invitation of a ticket. Raises UsageError, which never quotes it, for anything but what `str` made."""
    token = "".join(text[: 2 * MAX_CHARACTERS].split()).lower()
    if not token.startswith(VERSION):
        other = "is of another version of pptasks" if re.match(r"pp\d", token) else f"does not begin with {VERSION}"
        raise UsageError(f"the ticket {other}: {_REMEDY}, and use the same version there and here")
    if len(token) > MAX_CHARACTERS:
        raise UsageError(f"the ticket is too long: {_REMEDY}, and nothing else")
    encoded = token.removeprefix(VERSION).upper()
    try:
        body = base64.b32decode(encoded + "=" * (-len(encoded) % 8))
        invitation = _unpack(body[:-CHECK_BYTES])
        if str(invitation) != token:  # the check, and that nothing was written in another way
            raise ValueError
    except (ValueError, binascii.Error, struct.error):
        raise UsageError(f"the ticket is damaged or not complete: {_REMEDY}") from None
    return invitation


def _unpack(body: bytes) -> Invitation:
    """Raises ValueError or struct.error."""
    seat, link_key, link_secret = _HEADER.unpack_from(body)
    texts, at = {}, _HEADER.size
    for name in TEXTS:
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size + length
        texts[name] = body[at - length : at].decode("ascii")
        if not _PRINTABLE.fullmatch(texts[name]):
            raise ValueError
    return Invitation(seat=seat, link_key=link_key.hex(), link_secret=link_secret.hex(), **texts)


def _check(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:CHECK_BYTES]
