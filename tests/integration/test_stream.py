"""The token stream of a request in a real Redis."""

import json

import pytest
import redis

from pptasks import stream
from pptasks.errors import RequestFailed
from pptasks.keys import Keys
from pptasks.stream import Piece

KEYS = Keys("test")
PIECES = [Piece((1,), "a"), Piece((2, 3), ""), Piece((4,), "é"), Piece(end="ok")]


def write(client: redis.Redis, pieces: list[Piece]) -> None:
    for number, piece in enumerate(pieces, start=1):
        stream.write(client, KEYS, "id", number, piece)


def test_what_is_written_is_read_until_its_end(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        write(client, PIECES)
        assert list(stream.read(client, KEYS, "id")) == PIECES
        assert 0 < client.ttl(KEYS.stream("id")) <= stream.KEEP_S


def test_a_piece_that_is_written_twice_is_there_once(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        write(client, PIECES[:2])
        stream.write(client, KEYS, "id", 2, PIECES[1])
        stream.write(client, KEYS, "id", 3, PIECES[3])
        assert list(stream.read(client, KEYS, "id")) == [PIECES[0], PIECES[1], PIECES[3]]


def test_a_request_under_an_old_id_starts_a_new_stream(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        write(client, PIECES)
        again = [Piece((9,), "z"), Piece(end="failed")]
        write(client, again)
        assert list(stream.read(client, KEYS, "id")) == again


@pytest.mark.parametrize(
    "fields",
    [{"z": "1"}, {"e": "x"}, {"e": b"\xff"}, {"e": "[" * 50_000}, {"e": "[]"}, {"e": '{"ids": 5}'},
     {"e": '{"ids": ["a"]}'}, {"e": '{"ids": [-1]}'}, {"e": '{"ids": [1], "text": 7}'}, {"e": '{"text": "no token"}'},

     {"e": '{"ids": [1], "text": "\\ud800"}'}, {"e": json.dumps({"ids": [1], "text": "x" * 70_000})},
     {"e": '{"end": []}'}, {"e": '{"end": null}'}],
    ids=lambda fields: str(fields)[:40],
)  # fmt: skip
def test_an_entry_that_no_head_writes_is_named(redis_url: str, fields: dict[str, str]) -> None:
    with redis.Redis.from_url(redis_url) as client:
        write(client, PIECES[:1])
        client.xadd(KEYS.stream("id"), fields, id="7-1")
        pieces = stream.read(client, KEYS, "id")
        assert next(pieces) == PIECES[0]
        with pytest.raises(RequestFailed, match=r"entry 7-1 .* request id "):
            next(pieces)


def test_a_long_stream_comes_in_parts(redis_url: str) -> None:
    """However much a head has written by the time that somebody reads."""
    pieces = [*(Piece((i,), "x") for i in range(100)), Piece(end="ok")]
    with redis.Redis.from_url(redis_url) as client:
        write(client, pieces)
        client.config_resetstat()
        assert list(stream.read(client, KEYS, "id")) == pieces
        assert client.info("commandstats")["cmdstat_xread"]["calls"] == 7
