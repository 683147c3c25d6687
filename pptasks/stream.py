"""The tokens of a request as they come: a Redis stream that the head writes and the client reads.

One entry a write, with one field `e`: JSON `{"ids": [...], "text": "..."}`, and at the end `{"end": "ok" | "failed" |
"cancelled"}`, after which the task's result holds the rest. The stream lives for `KEEP_S` seconds after the last
write.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import redis

from pptasks.errors import RequestFailed
from pptasks.keys import Keys

KEEP_S = 3600
_AT_ONCE, _MAX_ENTRY = 16, 64 << 10  # entries of a read, and bytes of one: a token's text is short
_ENDS = ("ok", "failed", "cancelled")
_POLL_MS = 1000  # under redis-py's socket timeout, so that a broken link is seen


@dataclass(frozen=True)
class Piece:
    """Tokens that came, and their text: "" while a character is incomplete. `end` is set on the last piece of a
    stream."""

    ids: tuple[int, ...] = ()
    text: str = ""
    end: str | None = None


def write(client: redis.Redis, keys: Keys, request_id: str, number: int, piece: Piece) -> None:
    """Append the piece `number` (1, 2, ...) of a stream; a second copy of it changes nothing."""
    entry = {"end": piece.end} if piece.end else {"ids": piece.ids, "text": piece.text}
    with client.pipeline(transaction=False) as pipe:
        if number == 1:  # of a request that was sent before under the same id
            pipe.delete(keys.stream(request_id))
        pipe.xadd(keys.stream(request_id), {"e": json.dumps(entry)}, id=f"{number}-1")
        pipe.expire(keys.stream(request_id), KEEP_S)
        *_, added, _ = pipe.execute(raise_on_error=False)
    if isinstance(added, redis.ResponseError) and "equal or smaller" in str(added):
        return  # it was written before, and the answer was lost
    if isinstance(added, Exception):
        raise added


def read(client: redis.Redis, keys: Keys, request_id: str) -> Iterator[Piece | None]:
    """Pieces as they come, from the first; None once a second while there is nothing new, so that the caller can look
    around. Raises RequestFailed for an entry that is no piece."""
    last = "0"
    key = keys.stream(request_id)
    while True:
        try:
            found = client.xread({key: last}, count=_AT_ONCE, block=_POLL_MS)
        except (redis.ConnectionError, redis.TimeoutError):
            time.sleep(_POLL_MS / 1000)
            found = None
        if not found:
            yield None
            continue
        for entry_id, fields in _entries(found):
            last = entry_id
            try:
                piece = _piece(fields)
            except (ValueError, RecursionError):
                which = entry_id.decode() if isinstance(entry_id, bytes) else entry_id
                raise RequestFailed(
                    f"entry {which} of the answer to request {request_id} is no piece of text"
                ) from None
            yield piece
            if piece.end:
                return


def _piece(fields: dict[bytes, bytes]) -> Piece:
    """Raises ValueError or RecursionError for fields that `write` did not write."""
    raw = fields.get(b"e", b"")
    entry = json.loads(raw) if len(raw) <= _MAX_ENTRY else None
    if not isinstance(entry, dict):
        raise ValueError("not a piece")
    ids, text, end = entry.get("ids", []), entry.get("text", ""), entry.get("end")
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise ValueError("a piece with other things than token ids")
    if not isinstance(text, str) or not (end in _ENDS if "end" in entry else ids):
        raise ValueError("a piece without text, or with an unknown end")
    text.encode()  # half a surrogate cannot be written anywhere
    return Piece(tuple(ids), text, end)


def _entries(found: object) -> list[tuple[str, dict[bytes, bytes]]]:
    """The entries of an XREAD reply of one stream, whatever protocol the client speaks (a list in RESP2, a dict in
    RESP3)."""
    if isinstance(found, dict):
        return [entry for batches in found.values() for batch in batches for entry in batch]
    return [entry for _, entries in found for entry in entries]  # type: ignore[attr-defined]
