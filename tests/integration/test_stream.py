"""Streams of pieces in a real Redis: one request's own, and those that many requests share."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis

from pptasks import stream
from pptasks.errors import RequestFailed
from pptasks.keys import Keys
from pptasks.stream import Account, Piece, TokenLogprobs, Writer

KEYS = Keys("test")
DONE = Account("stop", 7, 5, 4)
ENDED = Piece("id", end="ok", account=DONE)
PIECES = [Piece("id", (1,), "a"), Piece("id", (2, 3), ""), Piece("id", (4,), "é😀"), ENDED]
LOGPROBS = (
    TokenLogprobs(5, "h\ufffd", b"h\xc3", -0.25, ((5, "h\ufffd", -0.25), (6, "", -3.5))),
    TokenLogprobs(1 << 30, "", b"", 0.0),
)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def write(writer: Writer, *pieces: Piece, name: str = "id") -> None:
    """Each in an entry of its own."""
    for piece in pieces:
        writer.write(writer.prepare({name: [piece]}))


def read(client: redis.Redis, name: str = "id", ends: int = 1) -> list[Piece]:
    """All until so many requests have ended."""
    pieces: list[Piece] = []
    for piece in stream.read(client, KEYS, name):
        assert piece is not None, pieces
        pieces.append(piece)
        if sum(p.end is not None for p in pieces) == ends:
            return pieces
    raise AssertionError("a reader that ended by itself")


def in_redis(client: redis.Redis, name: str = "id") -> list[list[Piece]]:
    """What is in the stream, by entry."""
    return [stream.pieces_of(fields) for _, fields in client.xrange(KEYS.stream(name))]


# ---- a stream of one request ----


def test_what_is_written_is_read_until_its_end(client: redis.Redis) -> None:
    write(Writer(client, KEYS, 1), *PIECES)
    assert read(client) == PIECES
    assert 0 < client.ttl(KEYS.stream("id")) <= stream.KEEP_S


@pytest.mark.parametrize(
    "piece",
    [
        Piece("id", (1, 2), "é\0\u2028", LOGPROBS),
        Piece("id", (1,), "last", end="ok", account=Account("length", 0, 0, (1 << 31) - 1)),
        Piece("id", end="failed", error="stage 1: out of memory", error_type="RequestFailed"),
        Piece("id", end="cancelled"),
        Piece("id", (), "what was held back"),
        Piece("id"),
    ],
)
def test_a_piece_survives_the_way(client: redis.Redis, piece: Piece) -> None:
    write(Writer(client, KEYS, 1), piece)
    assert next(stream.read(client, KEYS, "id")) == piece


def test_what_is_written_again_because_its_answer_was_lost_is_there_once(client: redis.Redis) -> None:
    """The first entry, which makes the stream, one in the middle, and the last."""
    writer = Writer(client, KEYS, 1)
    for piece in PIECES:
        entries = writer.prepare({"id": [piece], "shared": [piece]})
        writer.write(entries)
        if piece is not ENDED:  # whose stream is closed now
            writer.write(entries)
    assert in_redis(client) == in_redis(client, "shared") == [[piece] for piece in PIECES]


def test_one_of_several_streams_that_was_written_already_does_not_keep_the_others_away(client: redis.Redis) -> None:
    """As when the connection broke in the middle of a pipeline."""
    writer = Writer(client, KEYS, 1)
    write(writer, Piece("a", (1,)), name="shared")
    entries = writer.prepare({"shared": [Piece("a", (2,))], "id": [PIECES[0]], "more": [Piece("b")]})
    writer.write(replace(entries, data={"shared": entries.data["shared"]}, own={}))
    writer.write(entries)
    assert in_redis(client, "shared") == [[Piece("a", (1,))], [Piece("a", (2,))]]
    assert (in_redis(client), in_redis(client, "more")) == ([[PIECES[0]]], [[Piece("b")]])


def test_a_write_that_fails_is_an_error(client: redis.Redis) -> None:
    client.set(KEYS.stream("shared"), "no stream")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        write(Writer(client, KEYS, 1), Piece("a", (1,)), name="shared")


@pytest.mark.parametrize("is_same_head", [True, False])
def test_a_request_under_an_old_id_starts_a_new_stream(client: redis.Redis, is_same_head: bool) -> None:
    """Whether its first run came to its end or not."""
    writer = Writer(client, KEYS, 100)
    write(writer, *(PIECES if is_same_head else PIECES[:2]))
    again = [Piece("id", (9,), "z"), Piece("id", end="failed", error="no", error_type="RequestFailed")]
    write(writer if is_same_head else Writer(client, KEYS, 1), *again)
    assert read(client) == again


def test_a_long_stream_comes_in_parts(client: redis.Redis) -> None:
    """However much a head has written by the time that somebody reads."""
    pieces = [*(Piece("id", (i,), "x") for i in range(100)), ENDED]
    write(Writer(client, KEYS, 1), *pieces)
    client.config_resetstat()
    assert read(client) == pieces
    assert client.info("commandstats")["cmdstat_xread"]["calls"] == 7


def test_a_reader_is_told_when_there_is_nothing_new(client: redis.Redis) -> None:
    pieces = stream.read(client, KEYS, "id")
    assert next(pieces) is None
    write(Writer(client, KEYS, 1), PIECES[0])
    assert next(pieces) == PIECES[0]
    assert next(pieces) is None


@pytest.mark.parametrize("protocol", [2, 3])
def test_both_protocols_of_redis_are_understood(redis_url: str, protocol: int) -> None:
    with redis.Redis.from_url(redis_url, protocol=protocol) as client:
        write(Writer(client, KEYS, 1), *PIECES)
        assert read(client) == PIECES


# ---- a stream that many requests share ----


def test_a_shared_stream_has_an_entry_for_what_many_requests_said_at_once(client: redis.Redis) -> None:
    writer = Writer(client, KEYS, 1)
    first = [Piece("a", (1,), "A"), Piece("b", (2,), "B"), Piece("a", (3,), "C")]
    second = [Piece("b", end="ok", account=DONE), Piece("a", end="cancelled")]
    for said in (first, second):
        writer.write(writer.prepare({"shared": said, "id": [PIECES[0]]}))
    assert in_redis(client, "shared") == [first, second]
    assert in_redis(client) == [[PIECES[0]], [PIECES[0]]]
    assert read(client, "shared", ends=2) == [*first, *second]


def test_a_lap_of_many_requests_is_one_round_trip_and_few_commands(client: redis.Redis) -> None:
    writer = Writer(client, KEYS, 1)
    lap = {"shared": [Piece(f"r{i}", (i,), "x") for i in range(32)], "id": [Piece("id", (1,), "x")]}
    writer.write(writer.prepare(lap))
    client.config_resetstat()
    for _ in range(10):
        writer.write(writer.prepare(lap))
    calls = {name: stats["calls"] for name, stats in client.info("commandstats").items()}
    assert calls["cmdstat_xadd"] == 20
    assert not calls.keys() & {"cmdstat_expire", "cmdstat_del", "cmdstat_multi"}


def test_a_head_after_another_goes_on_with_a_shared_stream(client: redis.Redis) -> None:
    """Its entries come after those of the head before, by its first number; the answer of a request that shares a
    stream is not what it began with."""
    write(Writer(client, KEYS, 1_000), Piece("a", (1,)), Piece("b", end="cancelled"), name="shared")
    write(Writer(client, KEYS, 2_000), Piece("c", (2,)), Piece("a", end="cancelled"), name="shared")
    ids = [entry_id for entry_id, _ in client.xrange(KEYS.stream("shared"))]
    assert ids == [b"1001-1", b"1002-1", b"2001-1", b"2002-1"]
    assert [p.request for p in read(client, "shared", ends=2)] == ["a", "b", "c", "a"]


def test_a_shared_stream_keeps_what_is_new_and_one_of_its_own_all(client: redis.Redis) -> None:
    """Whoever does not read for so long has gone; somebody may read an answer long after it was given."""
    n = stream.SHARED_ENTRIES
    writer = Writer(client, KEYS, 10)
    writer.write(writer.prepare({"id": [PIECES[0]], "shared": [Piece("a")]}))
    for name in ("id", "shared"):
        with client.pipeline(transaction=False) as pipe:
            for i in range(n + 500):
                pipe.xadd(KEYS.stream(name), {"e": "x"}, id=f"11-{i + 2}")
            pipe.execute()
    write(writer, PIECES[1])
    write(writer, Piece("b"), name="shared")
    assert client.xlen(KEYS.stream("id")) == n + 502
    assert n <= client.xlen(KEYS.stream("shared")) <= n + 200
    assert client.xrevrange(KEYS.stream("shared"), count=1)[0][0] == b"13-1"


def test_what_waited_for_a_broker_is_cut_into_entries_that_a_reader_takes(client: redis.Redis) -> None:
    """2.6 MB of alternatives, said while the broker was away."""
    logprobs = (replace(LOGPROBS[0], top=LOGPROBS[0].top[:1] * 20),)
    said = [Piece(f"r{i % 9}", (i,), "é" * 9, logprobs) for i in range(4_000)]
    writer = Writer(client, KEYS, 1)
    entries = writer.prepare({"shared": [*said, Piece("r0", end="cancelled")]})
    writer.write(entries)
    writer.write(entries)
    assert read(client, "shared") == [*said, Piece("r0", end="cancelled")]
    sizes = [len(fields[b"e"]) for _, fields in client.xrange(KEYS.stream("shared"))]
    assert 2 < len(sizes) < 6
    assert max(sizes) < 2 << 20
    write(writer, Piece("a"), name="shared")
    assert in_redis(client, "shared")[-1] == [Piece("a")]


# ---- entries that no head writes ----


def entry(*pieces: object) -> dict[str, str]:
    return {"e": json.dumps({"pieces": pieces})}


def piece(**changes: object) -> dict[str, str]:
    return entry({"request": "id", "ids": [1], "text": "x"} | changes)


def logprobs(*changed: object) -> dict[str, str]:
    return piece(logprobs=[changed])


@pytest.mark.parametrize(
    "fields",
    [{"z": "1"}, {"e": "x"}, {"e": b"\xff"}, {"e": ""}, {"e": "[" * 50_000}, {"e": "[]"}, {"e": "5"}, {"e": "{}"},
     {"e": '{"pieces": 5}'}, {"e": '{"pieces": null}'}, {"e": '{"pieces": "id"}'}, {"e": '{"pieces": {"a": {}}}'},
     {"e": '{"pieces": [' + "1" * 5000 + "]}"}, entry(5), entry(None), entry("id"), entry([]), entry({}),
     entry({"ids": [1], "text": "a"}), piece(request=5), piece(request=None), piece(ids=5), piece(ids=None),
     piece(ids="12"), piece(ids={"1": 1}), piece(ids=["a"]), piece(ids=[-1]), piece(ids=[1 << 31]), piece(ids=[True]),
     piece(ids=[1.0]), piece(text=7), piece(text=None), piece(text=["a"]), piece(text="\ud800"), piece(end=[]),
     piece(end=""), piece(end="maybe"), piece(end=True), piece(account=5), piece(account=[]), piece(account={}),
     piece(account=["stop", 1, 2]), piece(account=["stop", 1, 2, 3, 4]), piece(account=["maybe", 1, 2, 3]),
     piece(account=["stop", 1, -1, 3]), piece(account=["stop", 1, 1 << 31, 3]), piece(account=["stop", 1, 2.0, 3]),
     piece(account=["stop", 1, True, 3]), piece(account=[[], 1, 2, 3]), piece(logprobs=5), piece(logprobs=None),
     piece(logprobs="abcde"), logprobs(), logprobs(1, "a", "61", -1.0), logprobs(1, "a", "61", -1.0, [], 0),
     logprobs(-1, "a", "61", -1.0, []), logprobs(1, 5, "61", -1.0, []), logprobs(1, "\ud800", "61", -1.0, []),
     logprobs(1, "a", "6", -1.0, []), logprobs(1, "a", 61, -1.0, []), logprobs(1, "a", "61", 0.5, []),
     logprobs(1, "a", "61", float("nan"), []), logprobs(1, "a", "61", float("-inf"), []),
     logprobs(1, "a", "61", -(10**400), []), logprobs(1, "a", "61", "-1", []), logprobs(1, "a", "61", -1.0, None),
     logprobs(1, "a", "61", -1.0, [[1, "a"]]), logprobs(1, "a", "61", -1.0, [[1, "a", 1.0]]),
     logprobs(1, "a", "61", -1.0, [[-1, "a", -1.0]]), logprobs(1, "a", "61", -1.0, [[1, "\udfff", -1.0]]),
     piece(text="x" * (2 << 20))],
    ids=lambda fields: str(fields)[:80],
)  # fmt: skip
def test_an_entry_that_no_head_writes_is_named(client: redis.Redis, fields: dict[str, Any]) -> None:
    write(Writer(client, KEYS, 1), PIECES[0])
    client.xadd(KEYS.stream("id"), fields, id="7-1")
    pieces = stream.read(client, KEYS, "id")
    assert next(pieces) == PIECES[0]
    with pytest.raises(RequestFailed, match=r"^entry 7-1 of the answer on id is no piece of text$"):
        next(pieces)


def test_words_of_an_error_are_harmless(client: redis.Redis) -> None:
    client.xadd(
        KEYS.stream("id"), piece(end="failed", error="a\x1b[2J\nerror: b" + "x" * 9999, error_type="\x07Odd" * 99)
    )
    [last] = in_redis(client)[0]
    assert last.error.startswith("a[2J error: bx")
    assert len(last.error) == 2000
    assert last.error_type == ("Odd" * 99)[:40]


def test_more_than_we_know_is_let_be(client: redis.Redis) -> None:
    client.xadd(KEYS.stream("id"), piece(mood="good") | {"z": "1"})
    assert in_redis(client) == [[Piece("id", (1,), "x")]]
