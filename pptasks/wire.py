"""Frames: the only module that knows their bytes.

Layout, little-endian, in this order:

    header   76 bytes       magic "PPTF", version u8, kind u8, dtype u8, error code u8, sender u16, flags u16,
                            plan digest 16s, run 16s, step u64, compute us u64, lanes u32, rows u32, width u32,
                            payload bytes u32
    lanes    112 bytes each request 16s, attempt u32, slot u32, position u32, length u32, readout u32,
                            shared: request 16s, slot u32, length u32 (all 0: nothing is);
                            temperature f64, top_k u32, top_p f64, seed u64, presence f64, frequency f64,
                            logprobs u32 (0: none, else one more than the alternatives), counts u32
    counts   8 bytes each   id u32, times u32: those of all lanes, in the order of the lanes
    payload                 rows x width values of dtype, C order
    tag      32 bytes       HMAC-SHA256 over all of the above with the run's secret

A decoder refuses, with a typed error and before it allocates anything, a frame with another magic, version or length,
a count over its limit, or a tag that does not match. Nothing is guessed.
"""

import functools
import hashlib
import hmac
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any

import ml_dtypes
import numpy as np

from pptasks.errors import BadTag, MalformedFrame, VersionMismatch

MAGIC = b"PPTF"
VERSION = 3
TAG_BYTES = 32
MAX_LANES = 1024
MAX_COUNTS = 1 << 18  # of all lanes of a frame
MAX_FRAME_BYTES = 16 << 20
MAX_LOGPROBS = 20
MAX_COMPUTE_US = 1 << 50
ID_BYTES = 16
DIGEST_BYTES = 16

_HEADER = struct.Struct("<4sBBBBHH16s16sQQIIII")
_LANE = struct.Struct("<16sIIIII16sIIdIdQddII")
_COUNT = np.dtype("<u4")  # two of them
_NOBODY = bytes(16)
_VERSION_AT = 4
_TRACED = 1


class Kind(IntEnum):
    ACTIVATION = 1  # hidden state of every row, on its way down the pipeline
    RETURN = 2  # hidden state of the read-out rows, on its way back to the head of a ring
    TOKENS = 3  # one sampled id for each read-out row, on its way back to the head of a line
    ERROR = 4  # these lanes were not computed; the payload is a message in UTF-8
    TRACE = 5  # what the sender's blocks gave for every row, float32 and not rounded: for the head, which verifies


class ErrorCode(IntEnum):
    NONE = 0
    CACHE_MISS = 1  # the stage lacks earlier positions: send the sequence again from the start
    FAILED = 2  # the stage could not compute: the request fails


DTYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "i32": np.dtype(np.int32),
    "u8": np.dtype(np.uint8),
}
_CODE_OF = {dtype: code for code, dtype in enumerate(DTYPES.values())}
_DTYPE_OF = dict(enumerate(DTYPES.values()))
_KIND_DTYPES = {
    Kind.ACTIVATION: {DTYPES[n] for n in ("f32", "bf16", "f16")},
    Kind.RETURN: {DTYPES[n] for n in ("f32", "bf16", "f16")},
    Kind.TOKENS: {DTYPES["i32"]},
    Kind.ERROR: {DTYPES["u8"]},
    Kind.TRACE: {DTYPES["f32"]},
}


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. temperature 0 is greedy; top_k 0 and top_p 1 leave all tokens in. Bounds are checked at
    the door (request.py)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    presence_penalty: float = 0.0  # subtracted from the logit of an id that was generated already
    frequency_penalty: float = 0.0  # the same, times how often
    logprobs: int | None = None  # alternatives to tell of each token; None: not even its own log-probability

    @property
    def is_penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def columns(self) -> int:
        """int32 values that tell of a token: its id, then pairs of a float32 log-probability and the next id."""
        return 1 if self.logprobs is None else 2 + 2 * self.logprobs


@dataclass(frozen=True)
class Shared:
    """The first `length` positions of a sequence are those of `request`, whose KV cache is in `slot`."""

    request: bytes  # 16 bytes, see `short_id`
    slot: int
    length: int


@dataclass(frozen=True)
class Lane:
    """One sequence inside a frame: `length` rows at positions `[position, position + length)` of a slot, the last
    `readout` of them read out.

    `counts`: how often each id was generated so far, where the sampling asks for penalties. `shared`: what a stage
    copies into the slot before; only with `position` right behind it.
    """

    request: bytes  # 16 bytes, see `short_id`
    attempt: int
    slot: int
    position: int
    length: int
    readout: int
    sampling: Sampling = Sampling()
    counts: tuple[tuple[int, int], ...] = ()
    shared: Shared | None = None


@dataclass(frozen=True, eq=False)
class Frame:
    """One hop. `payload` is (rows, width) in its wire dtype; `step` numbers the laps of a head, rising also across its
    restarts."""

    kind: Kind
    plan: bytes  # the plan's digest
    run: bytes  # `short_id` of the run's name
    step: int
    compute_us: int  # spent computing on this lap so far, microseconds
    lanes: tuple[Lane, ...]
    payload: np.ndarray
    error: ErrorCode = ErrorCode.NONE
    sender: int = 0  # the stage that made it
    traced: bool = False  # whoever computes this lap also sends a TRACE to the head

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frame):
            return NotImplemented
        same = all(
            getattr(self, n) == getattr(other, n)
            for n in ("kind", "plan", "run", "step", "compute_us", "lanes", "error", "sender", "traced")
        )
        mine, theirs = self.payload, other.payload
        return same and mine.dtype == theirs.dtype and mine.shape == theirs.shape and mine.tobytes() == theirs.tobytes()

    __hash__ = None  # type: ignore[assignment]


def short_id(name: str) -> bytes:
    """16 bytes that stand for a run or a request in a frame, whatever its name looks like."""
    return hashlib.blake2b(name.encode(), digest_size=ID_BYTES).digest()


def key_id(secret: bytes) -> str:
    """16 hex digits that tell one run's secret from another's, and nothing of the secret itself (32 random bytes)."""
    return hashlib.blake2b(secret, digest_size=8, person=b"pptasks key id").hexdigest()


def frame_bytes(lanes: int, counts: int, rows: int, width: int, dtype: np.dtype) -> int:
    """Size of a frame on the wire."""
    return _HEADER.size + lanes * _LANE.size + counts * 8 + rows * width * dtype.itemsize + TAG_BYTES


def max_rows(width: int, dtype: np.dtype, lanes: int) -> int:
    """Rows of `width` values that fit one frame with `lanes` lanes and their counts."""
    return max(0, (MAX_FRAME_BYTES - frame_bytes(lanes, MAX_COUNTS, 0, 0, dtype)) // (width * dtype.itemsize))


def encode(frame: Frame, secret: bytes) -> bytes:
    """Raises MalformedFrame for a frame that `decode` would refuse."""
    if frame.payload.ndim != 2:
        raise MalformedFrame(f"a payload of shape {frame.payload.shape}; it has rows and a width")
    rows, width = frame.payload.shape
    counts = [count for lane in frame.lanes for count in lane.counts]
    size = frame_bytes(len(frame.lanes), len(counts), rows, width, frame.payload.dtype)
    _check(frame.kind, frame.payload.dtype, frame.lanes, rows, width, size)
    if not 0 <= frame.compute_us < MAX_COMPUTE_US:
        raise MalformedFrame(f"a lap of {frame.compute_us} us of computing")
    payload = np.ascontiguousarray(frame.payload)
    if len(frame.plan) != DIGEST_BYTES or len(frame.run) != ID_BYTES:
        raise MalformedFrame("a frame whose plan or run is not 16 bytes")
    head = _pack(
        _HEADER,
        MAGIC,
        VERSION,
        frame.kind,
        _CODE_OF[payload.dtype],
        frame.error,
        frame.sender,
        _TRACED if frame.traced else 0,
        frame.plan,
        frame.run,
        frame.step,
        frame.compute_us,
        len(frame.lanes),
        rows,
        width,
        payload.nbytes,
    )
    lanes = b"".join(_pack_lane(lane) for lane in frame.lanes)
    body = b"".join((head, lanes, _pack_counts(counts), payload.view(np.uint8).data if payload.nbytes else b""))
    return body + _tag(secret, body)


def decode(data: bytes, secret: bytes) -> Frame:
    """The frame in `data`; its payload is a read-only view of it.

    Raises MalformedFrame (magic, length, counts), VersionMismatch, or BadTag.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise MalformedFrame(f"a frame of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}")
    if len(data) < _HEADER.size + TAG_BYTES or data[: len(MAGIC)] != MAGIC:
        raise MalformedFrame(f"{len(data)} bytes are not a frame: wrong magic or too short")
    if data[_VERSION_AT] != VERSION:
        raise VersionMismatch(
            f"a frame of version {data[_VERSION_AT]}; this side speaks version {VERSION}: "
            "install the same pptasks on every stage"
        )
    view = memoryview(data)
    if not hmac.compare_digest(_tag(secret, view[:-TAG_BYTES]), view[-TAG_BYTES:]):
        raise BadTag(
            "a frame's authentication tag does not match: damaged on the way, or sent with another run's PP_SECRET"
        )
    return _unpack(view)


def _tag(secret: bytes, body: bytes | memoryview) -> bytes:
    authenticator = _keyed(secret).copy()
    authenticator.update(body)
    return authenticator.digest()


@functools.lru_cache(maxsize=16)
def _keyed(secret: bytes) -> hmac.HMAC:
    """HMAC-SHA256 that has taken the key in: a copy costs half of a new one when a step has just emptied the caches."""
    return hmac.new(secret, digestmod="sha256")


def _unpack(view: memoryview) -> Frame:
    _, _, kind, code, error, sender, flags, plan, run, step, compute_us, n_lanes, rows, width, nbytes = (
        _HEADER.unpack_from(view)
    )
    try:
        kind, error, dtype = Kind(kind), ErrorCode(error), _DTYPE_OF[code]
    except (ValueError, KeyError):
        raise MalformedFrame(
            f"a frame with kind {kind}, error code {error}, dtype {code}: not known to version {VERSION}"
        ) from None
    if flags & ~_TRACED:
        raise MalformedFrame(f"a frame with flags {flags:#x}: not known to version {VERSION}")
    if compute_us >= MAX_COMPUTE_US:
        raise MalformedFrame(f"a lap of {compute_us} us of computing")
    if n_lanes > MAX_LANES:
        raise MalformedFrame(f"a frame with {n_lanes} lanes; at most {MAX_LANES}")
    counts_at = _HEADER.size + n_lanes * _LANE.size
    if len(view) < counts_at + TAG_BYTES:
        raise MalformedFrame(f"a frame of {len(view)} bytes does not hold {n_lanes} lanes")
    raw = [_LANE.unpack_from(view, at) for at in range(_HEADER.size, counts_at, _LANE.size)]
    n_counts = sum(values[-1] for values in raw)
    if n_counts > MAX_COUNTS:
        raise MalformedFrame(f"a frame with {n_counts} counts; at most {MAX_COUNTS}")
    if nbytes != rows * width * dtype.itemsize or len(view) != frame_bytes(n_lanes, n_counts, rows, width, dtype):
        raise MalformedFrame(
            f"a frame of {len(view)} bytes does not hold {n_lanes} lanes, {n_counts} counts and {rows} x {width} values"
        )
    start = counts_at + n_counts * 8
    counts = iter(np.frombuffer(view[counts_at:start], _COUNT).reshape(-1, 2).tolist())
    lanes = tuple(_unpack_lane(values, counts) for values in raw)
    _check(kind, dtype, lanes, rows, width, len(view))
    payload = np.frombuffer(view, dtype, rows * width, start).reshape(rows, width)
    return Frame(kind, plan, run, step, compute_us, lanes, payload, error, sender, bool(flags & _TRACED))


def _pack_lane(lane: Lane) -> bytes:
    s, shared = lane.sampling, lane.shared or Shared(_NOBODY, 0, 0)
    return _pack(
        _LANE,
        lane.request, lane.attempt, lane.slot, lane.position, lane.length, lane.readout,
        shared.request, shared.slot, shared.length,
        s.temperature, s.top_k, s.top_p, s.seed, s.presence_penalty, s.frequency_penalty,
        0 if s.logprobs is None else s.logprobs + 1, len(lane.counts),
    )  # fmt: skip


def _pack_counts(counts: Sequence[tuple[int, int]]) -> bytes:
    try:
        return np.array(counts, _COUNT).tobytes()
    except (OverflowError, ValueError) as e:
        raise MalformedFrame(f"a number that does not fit a frame: {e}") from None


def _pack(layout: struct.Struct, *values: object) -> bytes:
    try:
        return layout.pack(*values)
    except struct.error as e:
        raise MalformedFrame(f"a number that does not fit a frame: {e}") from None


def _unpack_lane(values: tuple[Any, ...], counts: Iterator[Sequence[int]]) -> Lane:
    *place, source, source_slot, shared = values[:9]
    *sampling, logprobs, n_counts = values[9:]
    request, attempt, slot, position, length, readout = place
    temperature, top_k, top_p, seed, presence, frequency = sampling
    told = None if logprobs == 0 else logprobs - 1
    return Lane(
        request, attempt, slot, position, length, readout,
        Sampling(temperature, top_k, top_p, seed, presence, frequency, told),
        tuple((token, times) for token, times in islice(counts, n_counts)),
        Shared(source, source_slot, shared) if shared or source_slot or source != _NOBODY else None,
    )  # fmt: skip


def _check(kind: Kind, dtype: np.dtype, lanes: tuple[Lane, ...], rows: int, width: int, size: int) -> None:
    """What holds for every frame, on both ways. Raises MalformedFrame."""
    if size > MAX_FRAME_BYTES:
        raise MalformedFrame(
            f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}: use a smaller prefill chunk"
        )
    if len(lanes) > MAX_LANES:
        raise MalformedFrame(f"a frame with {len(lanes)} lanes; at most {MAX_LANES}")
    if dtype not in _KIND_DTYPES[kind]:
        raise MalformedFrame(f"a frame of kind {kind.name} cannot hold {dtype}")
    for lane in lanes:
        if not 0 <= lane.readout <= lane.length or len(lane.request) != ID_BYTES:
            raise MalformedFrame(f"a lane with {lane.readout} read-outs of {lane.length} rows")
        s = lane.sampling
        if not all(map(math.isfinite, (s.temperature, s.top_p, s.presence_penalty, s.frequency_penalty))):
            raise MalformedFrame("a lane whose sampling parameters are not finite")
        if s.logprobs is not None and not 0 <= s.logprobs <= MAX_LOGPROBS:
            raise MalformedFrame(f"a lane that asks for {s.logprobs} alternatives; at most {MAX_LOGPROBS}")
        shared = lane.shared
        if shared is not None and (not 0 < shared.length == lane.position or len(shared.request) != ID_BYTES):
            raise MalformedFrame(f"a lane at position {lane.position} that shares {shared.length} positions")
    if sum(len(lane.counts) for lane in lanes) > MAX_COUNTS:
        raise MalformedFrame(f"a frame with more than {MAX_COUNTS} counts")
    expected = _rows_of(kind, lanes)
    if rows != expected or width == 0 or (kind is Kind.TOKENS and width != columns(lanes)):
        raise MalformedFrame(
            f"a frame of kind {kind.name} with {rows} x {width} values for lanes that need {expected} rows"
        )


def columns(lanes: Sequence[Lane]) -> int:
    """Width of a TOKENS frame: the widest of its lanes, which is `Sampling.columns`; the others end with zeros."""
    return max((lane.sampling.columns for lane in lanes), default=1)


def _rows_of(kind: Kind, lanes: tuple[Lane, ...]) -> int:
    """Rows of the payload."""
    if kind in (Kind.ACTIVATION, Kind.TRACE):
        return sum(lane.length for lane in lanes)
    return 1 if kind is Kind.ERROR else sum(lane.readout for lane in lanes)
