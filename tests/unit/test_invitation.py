"""Tickets: they survive what people do to text, and nothing else passes for one."""

import base64
import hashlib
import string

import pytest

from pptasks.errors import UsageError
from pptasks.invitation import CHECK_BYTES, MAX_CHARACTERS, Invitation, parse

INVITED = Invitation(
    run="run-0123456789ab", seat=2, ticket="endpoint" + "abc234" * 20, link_key="0f" * 32, link_secret="1e" * 32,
    relay="https://relay.example:7842/", user="pp-run-0123456789ab-g2", password="pass/word-+_",
)  # fmt: skip
TICKET = str(INVITED)


def test_a_ticket_is_one_word_of_letters_and_digits() -> None:
    assert set(TICKET) <= set(string.ascii_lowercase + string.digits)
    assert TICKET.startswith("pp1")
    assert len(TICKET) < 600
    assert parse(TICKET) == INVITED


@pytest.mark.parametrize(
    "text",
    [
        TICKET.upper(),
        f"  {TICKET}\n",
        "\r\n> ".join(TICKET[i : i + 76] for i in range(0, len(TICKET), 76)).replace("> ", ""),
        f"{TICKET[:100]} {TICKET[100:]}",
        TICKET.capitalize(),
    ],
)
def test_it_survives_capitals_and_broken_lines(text: str) -> None:
    assert parse(text) == INVITED


def test_every_character_counts() -> None:
    alphabet = "abcdefghijklmnopqrstuvwxyz234567"
    for i in range(len(TICKET)):
        other = alphabet[(alphabet.find(TICKET[i]) + 1) % 32]
        with pytest.raises(UsageError):
            parse(TICKET[:i] + other + TICKET[i + 1 :])
        with pytest.raises(UsageError):
            parse(TICKET[:i])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "does not begin with pp1"),
        ("endpointabc", "does not begin with pp1"),
        ("pp2" + TICKET[3:], "of another version"),
        (TICKET[:-1], "damaged or not complete"),
        (TICKET + "a", "damaged or not complete"),
        (TICKET[:40] + "!" + TICKET[41:], "damaged or not complete"),
        (TICKET[:40] + "é" + TICKET[41:], "damaged or not complete"),
        ("pp1", "damaged or not complete"),
        ("pp1a", "damaged or not complete"),
        (f"pp join {TICKET}", "does not begin with pp1"),
        ("pp1" + "a" * MAX_CHARACTERS, "too long"),
        (TICKET + " a" * (1 << 20), "too long"),
    ],
)
def test_what_is_no_ticket_is_refused_with_a_remedy_and_not_quoted(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as raised:
        parse(text)
    assert "copy all of the line" in str(raised.value)
    assert TICKET[10:30] not in str(raised.value)


def test_a_ticket_with_a_true_check_and_a_length_that_lies_is_refused() -> None:
    raw = base64.b32decode(TICKET[3:].upper() + "=" * (-len(TICKET[3:]) % 8))
    body = bytearray(raw[:-CHECK_BYTES])
    body[66:68] = b"\xff\xff"  # of the run's name
    checked = bytes(body) + hashlib.sha256(body).digest()[:CHECK_BYTES]
    forged = "pp1" + base64.b32encode(checked).decode().rstrip("=").lower()
    with pytest.raises(UsageError, match="damaged"):
        parse(forged)


def test_its_repr_shows_no_secret() -> None:
    shown = repr(INVITED)
    assert "seat=2" in shown
    for secret in (INVITED.ticket, INVITED.link_key, INVITED.link_secret, INVITED.password):
        assert secret not in shown
