"""The token stream of a request in a real Redis."""

import redis

from pptasks import stream
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
