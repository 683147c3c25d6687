"""decode(encode(f)) == f for every frame; anything else is a typed error, never a guess."""

import hmac
import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pptasks.errors import BadTag, WireError
from pptasks.wire import (
    DTYPES,
    MAX_COMPUTE_US,
    MAX_LOGPROBS,
    VERSION,
    ErrorCode,
    Frame,
    Kind,
    Lane,
    Sampling,
    Shared,
    columns,
    decode,
    encode,
    frame_bytes,
)

SECRET = b"s" * 32
FLOATS = ("f32", "bf16", "f16")
NAMES = {Kind.ACTIVATION: FLOATS, Kind.RETURN: FLOATS, Kind.TOKENS: ("i32",), Kind.ERROR: ("u8",), Kind.TRACE: ("f32",)}

u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
ids = st.binary(min_size=16, max_size=16)
reals = st.floats(allow_nan=False, allow_infinity=False)


samplings = st.builds(
    Sampling,
    temperature=reals,
    top_k=u32,
    top_p=reals,
    seed=u64,
    presence_penalty=reals,
    frequency_penalty=reals,
    logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
)


@st.composite
def lanes(draw: st.DrawFn) -> Lane:
    length, position = draw(st.integers(0, 5)), draw(u32)
    counts = tuple(draw(st.lists(st.tuples(u32, u32), max_size=3)))
    shared = Shared(draw(ids), draw(u32), position) if position and draw(st.booleans()) else None
    readout = draw(st.integers(0, length))
    return Lane(draw(ids), draw(u32), draw(u32), position, length, readout, draw(samplings), counts, shared)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(Kind))
    dtype = DTYPES[draw(st.sampled_from(NAMES[kind]))]
    batch = tuple(draw(st.lists(lanes(), max_size=4)))
    n_length, n_readout = sum(lane.length for lane in batch), sum(lane.readout for lane in batch)
    rows = {Kind.ACTIVATION: n_length, Kind.TRACE: n_length, Kind.ERROR: 1}.get(kind, n_readout)
    width = columns(batch) if kind is Kind.TOKENS else draw(st.integers(1, 7))
    size = rows * width * dtype.itemsize
    payload = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(rows, width)
    error = draw(st.sampled_from(ErrorCode))
    sender, traced = draw(st.integers(0, (1 << 16) - 1)), draw(st.booleans())
    compute_us = draw(st.integers(0, MAX_COMPUTE_US - 1))
    return Frame(kind, draw(ids), draw(ids), draw(u64), compute_us, batch, payload, error, sender, traced)


def refused(data: bytes, secret: bytes = SECRET) -> bool:
    """True if `data` is refused with a WireError; any other error goes up."""
    try:
        decode(data, secret)
    except WireError:
        return True
    return False


@given(frames())
@settings(max_examples=300, deadline=None)
def test_a_frame_survives_the_way(frame: Frame) -> None:
    data = encode(frame, SECRET)
    rows, width = frame.payload.shape
    back = decode(data, SECRET)
    assert back == frame
    assert encode(back, SECRET) == data
    counts = sum(len(lane.counts) for lane in frame.lanes)
    assert len(data) == frame_bytes(len(frame.lanes), counts, rows, width, frame.payload.dtype)


@given(frames(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_damaged_frame_is_refused(frame: Frame, data: st.DataObject) -> None:
    whole = encode(frame, SECRET)
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= data.draw(st.integers(1, 255))
    assert refused(bytes(flipped))
    assert refused(whole[:at])
    assert refused(whole[at + 1 :])
    assert refused(whole + data.draw(st.binary(min_size=1, max_size=80)))


@given(frames(), st.binary(min_size=32, max_size=32).filter(lambda key: key != SECRET))
@settings(max_examples=50, deadline=None)
def test_another_secret_is_a_bad_tag(frame: Frame, key: bytes) -> None:
    try:
        decode(encode(frame, key), SECRET)
    except BadTag:
        return
    raise AssertionError("a frame with another secret was taken")


@given(st.binary(max_size=400), st.booleans())
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_refused(noise: bytes, with_magic: bool) -> None:
    assert refused(b"PPTF" + bytes([VERSION]) + noise if with_magic else noise)


small = st.integers(0, 6)
counts = st.one_of(small, u32)


@given(st.tuples(small, small, small), st.tuples(counts, counts, counts, counts), st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_authenticated_noise_is_a_frame_or_a_wire_error(
    codes: tuple[int, int, int], sizes: tuple[int, int, int, int], rest: bytes
) -> None:
    head = struct.pack("<4s4B2H16s16sQQ4I", b"PPTF", VERSION, *codes, 0, 0, b"P" * 16, b"R" * 16, 1, 2, *sizes)
    check_authenticated(head + rest)


@given(frames(), st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=4))
@settings(max_examples=300, deadline=None)
def test_a_frame_that_a_peer_has_changed_and_signed_is_a_frame_or_a_wire_error(
    frame: Frame, changes: list[tuple[int, int]]
) -> None:
    """Most of these get past the tag and the sizes, to the fields of the lanes."""
    body = bytearray(encode(frame, SECRET)[:-32])
    for at, value in changes:
        body[at % len(body)] = value
    check_authenticated(bytes(body))


def check_authenticated(body: bytes) -> None:
    data = body + hmac.digest(SECRET, body, "sha256")
    if not refused(data):
        assert encode(decode(data, SECRET), SECRET) == data
