"""The tokens of requests as they come: a Redis stream that the head writes and a client reads.

A request has a stream of its own, named by its task id, or shares one with others that asked for the same `reply`: then
one read brings all that a lap made. An entry (2 MiB at most) has one field `e`: JSON `{"pieces": [{"request": id,
"ids": [...], "text": "..."}, ...]}`, with "logprobs" where they were asked for; the last piece of a request is
`{"request": id, "end": "ok" | "failed" | "cancelled", ...}`. A stream lives for `KEEP_S` seconds after it was last
written to.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from pptasks.errors import RequestFailed
from pptasks.keys import Keys
from pptasks.shown import line

KEEP_S = 3600
SHARED_ENTRIES = 16384  # of a stream that many requests share, about: a reader that is so far behind has gone
_RENEW_S = 60.0  # a stream's life is renewed that often
_AT_ONCE, _MAX_ENTRY = 16, 2 << 20  # entries of a read, and bytes of one
_ENDS = ("ok", "failed", "cancelled")
_LARGEST = 3.5e38  # a float32 holds no more
_POLL_MS = 1000  # under redis-py's socket timeout, so that a broken link is seen


@dataclass(frozen=True)
class TokenLogprobs:
    """One token of an answer: the natural logarithm of its probability, and the likeliest ids of that place.

    Of the softmax of the logits as they are, before temperature and penalties. Texts are single tokens, U+FFFD where
    one is no whole character; `raw` are the token's bytes.
    """

    id: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()  # id, text, logprob

    def to_json(self) -> list[Any]:
        return [self.id, self.text, self.raw.hex(), self.logprob, self.top]


@dataclass(frozen=True)
class Account:
    """How a request that was answered ended. `finish_reason`: "stop" or "length"."""

    finish_reason: str
    prompt_tokens: int
    cached_tokens: int  # of the prompt: its KV cache was there already
    completion_tokens: int


@dataclass(frozen=True)
class Piece:
    """Tokens of a request, and their text: "" while a character or a stop text is incomplete. The last piece of a
    request has `end`; with "ok" an account, with "failed" what happened."""

    request: str
    ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    end: str | None = None
    account: Account | None = None
    error: str = ""
    error_type: str = ""  # a class of errors.py


class Writer:
    """The head's side. Entries are numbered on from `first`, which must be above those of any head before."""

    def __init__(self, client: redis.Redis, keys: Keys, first: int):
        self._client, self._keys, self._number = client, keys, first
        self._renewed: dict[str, float] = {}  # when the life of each stream was renewed

    def prepare(self, pieces: Mapping[str, Sequence[Piece]]) -> "Entries":
        """Pieces by the name of their stream, to be written once: `write` may be called again with the same."""
        self._number += 1
        return Entries(self._number, {name: _encode(of_one) for name, of_one in pieces.items()}, _own(pieces))

    def write(self, entries: "Entries") -> None:
        """Append them. What was written before, and only its answer lost, is not written twice."""
        now, sent = time.monotonic(), list[bool]()
        with self._client.pipeline(transaction=False) as pipe:
            for name, data in entries.data.items():
                key, own = self._keys.stream(name), name in entries.own
                if own and name not in self._renewed:  # of a request that was sent before under the same id
                    pipe.delete(key)
                    sent.append(False)
                most = None if own else SHARED_ENTRIES
                for i, entry in enumerate(data, start=1):
                    pipe.xadd(key, {"e": entry}, id=f"{entries.number}-{i}", maxlen=most)
                    sent.append(True)
                if now - self._renewed.get(name, -math.inf) > _RENEW_S:
                    pipe.expire(key, KEEP_S)
                    sent.append(False)
            answers = pipe.execute(raise_on_error=False)
        for added in (answer for answer, is_add in zip(answers, sent, strict=True) if is_add):
            if isinstance(added, Exception) and "equal or smaller" not in str(added):
                raise added
        self._renewed |= {name: now for name in entries.data if now - self._renewed.get(name, -math.inf) > _RENEW_S}
        for name in entries.own:
            if entries.own[name]:
                self._renewed.pop(name, None)
        if len(self._renewed) > SHARED_ENTRIES:
            self._renewed = {name: at for name, at in self._renewed.items() if now - at < KEEP_S}


@dataclass(frozen=True)
class Entries:
    """What is written at once, by stream. `own`: streams of one request each, and whether this is their end."""

    number: int
    data: Mapping[str, Sequence[str]]
    own: Mapping[str, bool]


def read(client: redis.Redis, keys: Keys, name: str) -> Iterator[Piece | None]:
    """Pieces as they come, from the first; None once a second while there is nothing new, so that the caller can look
    around. It never ends by itself. Raises RequestFailed for an entry that is none."""
    last = "0"
    key = keys.stream(name)
    while True:
        try:
            found = client.xread({key: last}, count=_AT_ONCE, block=_POLL_MS)
        except (redis.ConnectionError, redis.TimeoutError):
            time.sleep(_POLL_MS / 1000)
            found = None
        if not found:
            yield None
            continue
        for entry_id, fields in entries_of(found):
            last = entry_id
            try:
                pieces = pieces_of(fields)
            except ValueError:
                which = entry_id.decode() if isinstance(entry_id, bytes) else entry_id
                raise RequestFailed(f"entry {which} of the answer on {name} is no piece of text") from None
            yield from pieces


def entries_of(found: object) -> list[tuple[Any, dict[bytes, bytes]]]:
    """The entries of an XREAD reply of one stream, whatever protocol the client speaks (a list in RESP2, a dict in
    RESP3)."""
    if isinstance(found, dict):
        return [entry for batches in found.values() for batch in batches for entry in batch]
    return [entry for _, entries in found for entry in entries]  # type: ignore[attr-defined]


def pieces_of(fields: Mapping[bytes, bytes]) -> list[Piece]:
    """The pieces of an entry. Raises ValueError for fields that no `Writer` wrote."""
    raw = fields.get(b"e", b"")
    try:
        entry = json.loads(raw) if len(raw) <= _MAX_ENTRY else None
        return [_piece(record) for record in entry["pieces"]]  # type: ignore[index]
    except (TypeError, KeyError, RecursionError, UnicodeEncodeError) as e:
        raise ValueError(f"not an entry: {type(e).__name__}") from None


def _own(pieces: Mapping[str, Sequence[Piece]]) -> dict[str, bool]:
    return {name: of_one[-1].end is not None for name, of_one in pieces.items() if of_one[-1].request == name}


def _encode(pieces: Sequence[Piece]) -> list[str]:
    """One entry, or more where a reader would refuse one as too long: after the broker was away, much is said at
    once."""
    entries, held, size = [], list[str](), 0
    for piece in pieces:
        record = json.dumps(_record(piece), separators=(",", ":"))  # ASCII
        if held and size + len(record) > _MAX_ENTRY // 2:
            entries.append(held)
            held, size = [], 0
        held.append(record)
        size += len(record) + 1
    return ['{"pieces":[' + ",".join(of_one) + "]}" for of_one in (*entries, held)]


def _record(piece: Piece) -> dict[str, Any]:
    record: dict[str, Any] = {"request": piece.request}
    if piece.ids or piece.text or not piece.end:
        record |= {"ids": piece.ids, "text": piece.text}
    if piece.logprobs:
        record["logprobs"] = [t.to_json() for t in piece.logprobs]
    if piece.end:
        record["end"] = piece.end
    if (a := piece.account) is not None:
        record["account"] = [a.finish_reason, a.prompt_tokens, a.cached_tokens, a.completion_tokens]
    if piece.error:
        record |= {"error": piece.error, "error_type": piece.error_type}
    return record


def _piece(record: Any) -> Piece:
    """Raises ValueError, TypeError or KeyError."""
    if not isinstance(record, dict):
        raise ValueError("a piece that is no object")
    ids, text, end, account = record.get("ids", []), record.get("text", ""), record.get("end"), record.get("account")
    if not isinstance(ids, list) or not all(_is_id(token) for token in ids):
        raise ValueError("a piece with other things than token ids")
    if not (isinstance(record["request"], str) and isinstance(text, str) and (end is None or end in _ENDS)):
        raise ValueError("a piece without request or text, or with an unknown end")
    text.encode()  # half a surrogate cannot be written anywhere
    return Piece(
        record["request"],
        tuple(ids),
        text,
        tuple(logprobs_of(t) for t in record.get("logprobs", ())),
        end,
        None if account is None else _account(*account),
        line(str(record.get("error", ""))),
        line(str(record.get("error_type", "")), 40),
    )


def _account(finish_reason: Any, *counts: Any) -> Account:
    if finish_reason not in ("stop", "length") or not all(type(n) is int and 0 <= n < 1 << 31 for n in counts):
        raise ValueError("no account")
    return Account(finish_reason, *counts)


def logprobs_of(record: Any) -> TokenLogprobs:
    """[id, text, hexadecimal bytes, logprob, [[id, text, logprob], ...]]. Raises ValueError or TypeError."""
    token, text, raw, logprob, top = record
    parts = [(token, text, logprob), *((i, t, p) for i, t, p in top)]
    for i, t, p in parts:
        if not (_is_id(i) and isinstance(t, str) and type(p) in (int, float) and -_LARGEST <= p <= 1e-3):
            raise ValueError("no log-probability")
        t.encode()
    return TokenLogprobs(token, text, bytes.fromhex(raw), logprob, tuple(parts[1:]))


def _is_id(token: Any) -> bool:
    return type(token) is int and 0 <= token < 1 << 31
