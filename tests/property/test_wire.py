"""decode(encode(f)) == f for every frame; anything else is a typed error, never a guess."""

import hmac
import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pptasks.errors import BadTag, WireError
from pptasks.wire import DTYPES, ErrorCode, Frame, Kind, Lane, Sampling, decode, encode, frame_bytes

SECRET = b"s" * 32
FLOATS = ("f32", "bf16", "f16")
NAMES = {Kind.ACTIVATION: FLOATS, Kind.RETURN: FLOATS, Kind.TOKENS: ("i32",), Kind.ERROR: ("u8",), Kind.TRACE: ("f32",)}

u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
ids = st.binary(min_size=16, max_size=16)
reals = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def lanes(draw: st.DrawFn) -> Lane:
    length = draw(st.integers(0, 5))
    sampling = Sampling(draw(reals), draw(u32), draw(reals), draw(u64))
    return Lane(draw(ids), draw(u32), draw(u32), draw(u32), length, draw(st.integers(0, length)), sampling)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(Kind))
    dtype = DTYPES[draw(st.sampled_from(NAMES[kind]))]
    batch = tuple(draw(st.lists(lanes(), max_size=4)))
    n_length, n_readout = sum(lane.length for lane in batch), sum(lane.readout for lane in batch)
    rows = {Kind.ACTIVATION: n_length, Kind.TRACE: n_length, Kind.ERROR: 1}.get(kind, n_readout)
    width = 1 if kind is Kind.TOKENS else draw(st.integers(1, 7))
    size = rows * width * dtype.itemsize
    payload = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(rows, width)
    error = draw(st.sampled_from(ErrorCode))
    sender, traced = draw(st.integers(0, (1 << 16) - 1)), draw(st.booleans())
    return Frame(kind, draw(ids), draw(ids), draw(u64), draw(u64), batch, payload, error, sender, traced)


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
    assert len(data) == frame_bytes(len(frame.lanes), rows, width, frame.payload.dtype)


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
    assert refused(b"PPTF\x01" + noise if with_magic else noise)


small = st.integers(0, 6)
counts = st.one_of(small, u32)


@given(st.tuples(small, small, small), st.tuples(counts, counts, counts, counts), st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_authenticated_noise_is_a_frame_or_a_wire_error(
    codes: tuple[int, int, int], sizes: tuple[int, int, int, int], rest: bytes
) -> None:
    head = struct.pack("<4s4B16s16sQQ4I", b"PPTF", 1, *codes, b"P" * 16, b"R" * 16, 1, 2, *sizes)
    data = head + rest + hmac.digest(SECRET, head + rest, "sha256")
    if not refused(data):
        assert encode(decode(data, SECRET), SECRET) == data
