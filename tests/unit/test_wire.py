"""Frames byte by byte: the layout, and what a decoder refuses."""

import hmac
import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from pptasks.errors import BadTag, MalformedFrame, VersionMismatch, WireError
from pptasks.wire import (
    DTYPES,
    MAX_COMPUTE_US,
    MAX_COUNTS,
    MAX_FRAME_BYTES,
    MAX_LANES,
    MAX_LOGPROBS,
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
    max_rows,
    short_id,
)

SECRET = bytes(range(32))
HEADER = struct.Struct("<4s4BHH16s16sQQ4I")  # as the module's docstring states it, written down once more
LANE = struct.Struct("<16s5I16s2IdIdQ2d2I")
U32 = (1 << 32) - 1

LANES = (
    Lane(
        b"A" * 16, attempt=1, slot=2, position=7, length=2, readout=1,
        sampling=Sampling(0.5, 40, 0.9, 1234, 1.5, -0.25, logprobs=3),
        counts=((9, 1), (5, 70_000)), shared=Shared(b"C" * 16, 3, 7),
    ),
    Lane(b"B" * 16, attempt=0, slot=0, position=0, length=1, readout=0),
)  # fmt: skip
FRAME = Frame(
    kind=Kind.ACTIVATION,
    plan=b"P" * 16,
    run=b"R" * 16,
    step=1 << 50,
    compute_us=1500,
    lanes=LANES,
    payload=np.array([[1.0, -2.0], [0.0, 3.5], [1e-3, 4.0]], DTYPES["bf16"]),
    sender=3,
    traced=True,
)


def signed(body: bytes) -> bytes:
    return body + hmac.digest(SECRET, body, "sha256")


def packed(**changes: float | bytes) -> bytes:
    """A lane of one row that is read out, with some of its fields changed."""
    fields: dict[str, float | bytes] = {
        "request": b"A" * 16, "attempt": 0, "slot": 0, "position": 0, "length": 1, "readout": 1,
        "source": bytes(16), "source_slot": 0, "shared": 0,
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "presence": 0.0, "frequency": 0.0,
        "logprobs": 0, "counts": 0,
    }  # fmt: skip
    assert changes.keys() <= fields.keys()
    return LANE.pack(*(fields | changes).values())


def header(**changes: int | bytes) -> bytes:
    """The header of a valid frame without lanes or rows, with some of its fields changed."""
    fields: dict[str, int | bytes] = {
        "magic": b"PPTF",
        "version": 3,
        "kind": Kind.ACTIVATION,
        "dtype": 0,  # f32
        "error": 0,
        "sender": 0,
        "flags": 0,
        "plan": b"P" * 16,
        "run": b"R" * 16,
        "step": 1,
        "compute_us": 0,
        "lanes": 0,
        "rows": 0,
        "width": 1,
        "nbytes": 0,
    }
    assert changes.keys() <= fields.keys()
    return HEADER.pack(*(fields | changes).values())


def refused(data: bytes, error: type[WireError]) -> str:
    """The message of the refusal, which must be exactly of that type."""
    with pytest.raises(WireError) as refusal:
        decode(data, SECRET)
    assert refusal.type is error
    return str(refusal.value)


def test_the_layout_is_the_stated_one() -> None:
    payload = FRAME.payload.tobytes()
    head = HEADER.pack(
        b"PPTF", 3, 1, 1, 0, 3, 1, b"P" * 16, b"R" * 16, 1 << 50, 1500, 2, 3, 2, len(payload)
    )  # fmt: skip
    first = LANE.pack(b"A" * 16, 1, 2, 7, 2, 1, b"C" * 16, 3, 7, 0.5, 40, 0.9, 1234, 1.5, -0.25, 4, 2)
    second = LANE.pack(b"B" * 16, 0, 0, 0, 1, 0, bytes(16), 0, 0, 0.0, 0, 1.0, 0, 0.0, 0.0, 0, 0)
    counts = struct.pack("<4I", 9, 1, 5, 70_000)
    body = head + first + second + counts + payload
    assert (HEADER.size, LANE.size) == (76, 112)
    assert encode(FRAME, SECRET) == signed(body)
    assert decode(signed(body), SECRET) == FRAME


def test_a_payload_is_a_view_that_cannot_be_written() -> None:
    data = encode(FRAME, SECRET)
    payload = decode(data, SECRET).payload
    assert np.shares_memory(payload, np.frombuffer(data, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        payload[0, 0] = 1


def test_frames_differ_where_one_value_differs() -> None:
    others = [
        replace(FRAME, kind=Kind.RETURN),
        replace(FRAME, plan=b"p" * 16),
        replace(FRAME, run=b"r" * 16),
        replace(FRAME, step=1),
        replace(FRAME, compute_us=0),
        replace(FRAME, lanes=LANES[:1]),
        replace(FRAME, error=ErrorCode.FAILED),
        replace(FRAME, sender=2),
        replace(FRAME, traced=False),
        replace(FRAME, payload=FRAME.payload + 1),
        replace(FRAME, payload=FRAME.payload.astype(np.float16)),
        replace(FRAME, payload=FRAME.payload.reshape(2, 3)),
    ]
    assert all(other != FRAME for other in others)
    assert FRAME != "frame"


@pytest.mark.parametrize(("name", "bits"), [("bf16", np.uint16), ("f16", np.uint16)])
def test_every_bit_pattern_of_a_16_bit_type_survives(name: str, bits: type) -> None:
    payload = np.arange(1 << 16, dtype=bits).reshape(256, 256).view(DTYPES[name])
    lane = Lane(b"A" * 16, 0, 0, 0, length=256, readout=1)
    frame = replace(FRAME, lanes=(lane,), payload=payload)
    back = decode(encode(frame, SECRET), SECRET)
    assert np.array_equal(back.payload.view(bits), payload.view(bits))


def test_a_payload_that_is_not_contiguous_is_sent_in_row_order() -> None:
    wide = np.arange(12, dtype=np.float32).reshape(3, 4)
    for payload in (wide[:, ::2], np.asfortranarray(wide[:, :2]), wide[::-1, :2]):
        assert np.array_equal(decode(encode(replace(FRAME, payload=payload), SECRET), SECRET).payload, payload)


def test_every_flipped_byte_is_refused() -> None:
    data = encode(FRAME, SECRET)
    for at in range(len(data)):
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            bad = bytearray(data)
            bad[at] ^= mask
            expected = MalformedFrame if at < 4 else VersionMismatch if at == 4 else BadTag
            refused(bytes(bad), expected)


def test_every_truncation_and_extension_is_refused() -> None:
    data = encode(FRAME, SECRET)
    for end in range(len(data)):
        refused(data[:end], MalformedFrame if end < HEADER.size + 32 else BadTag)
    for more in (1, 2, 32, 64, 1000):
        refused(data + bytes(more), BadTag)
        refused(data + data[:more], BadTag)
        refused(signed(data[:-32] + bytes(more)), MalformedFrame)  # with a tag that matches


def test_bytes_left_out_or_put_in_under_a_matching_tag_are_refused() -> None:
    body = encode(FRAME, SECRET)[:-32]
    counts_at = HEADER.size + 2 * LANE.size
    for at in (HEADER.size, HEADER.size + LANE.size, counts_at, counts_at + 8, len(body) - 1):
        refused(signed(body[:at] + body[at + 1 :]), MalformedFrame)
        refused(signed(body[:at] + b"\0" + body[at:]), MalformedFrame)


@pytest.mark.parametrize("version", [0, 1, 2, 4, 255])
def test_an_unknown_version_is_told_before_anything_else(version: int) -> None:
    body = header(version=version, kind=99, lanes=U32, rows=U32, width=U32, nbytes=U32)
    for data in (signed(body), body + bytes(32)):  # whatever follows, and whoever signed it
        message = refused(data, VersionMismatch)
        assert f"version {version};" in message
        assert "version 3" in message


def test_another_secret_is_refused() -> None:
    for secret in (bytes(32), SECRET[::-1], SECRET[:-1]):
        with pytest.raises(BadTag) as refusal:
            decode(encode(FRAME, secret), SECRET)
        assert SECRET.hex() not in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": U32},
        {"rows": U32, "width": U32, "nbytes": U32},
        {"rows": U32, "width": U32, "nbytes": 4},  # U32 * U32 * 4 is 4 modulo 2 ** 32
        {"rows": 1 << 16, "width": 1 << 16, "nbytes": 0},
        {"rows": 1 << 16, "width": 1 << 14, "nbytes": U32},
        {"lanes": U32},
        {"lanes": MAX_LANES + 1},
        {"lanes": MAX_LANES},
        {"nbytes": U32},
        {"rows": 1, "width": U32, "nbytes": U32},
        {"kind": Kind.ERROR, "dtype": 4, "rows": 1, "width": U32, "nbytes": U32},
        {"kind": 0},
        {"kind": 6},
        {"error": 3},
        {"compute_us": MAX_COMPUTE_US},  # years: the stages after could not add theirs
        {"compute_us": (1 << 64) - 1},
        {"dtype": 5},
        {"dtype": 255},
    ],
    ids=str,
)
def test_a_header_that_promises_what_is_not_there_is_refused_without_allocation(changes: dict[str, int]) -> None:
    data = signed(header(**changes))
    tracemalloc.start()
    try:
        refused(data, MalformedFrame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10


def test_a_frame_over_the_limit_is_refused_on_both_ways() -> None:
    assert "over the limit" in refused(header() + bytes(MAX_FRAME_BYTES), MalformedFrame)  # before its tag is computed
    lane = Lane(b"A" * 16, 0, 0, 0, length=2, readout=0)
    frame = replace(FRAME, lanes=(lane,), payload=np.zeros((2, MAX_FRAME_BYTES // 8), np.float32))
    with pytest.raises(MalformedFrame, match=f"limit of {MAX_FRAME_BYTES}"):
        encode(frame, SECRET)


def test_the_largest_frame_is_exactly_what_max_rows_says() -> None:
    """All counts that there may be fit beside the rows, wherever they are."""
    dtype, width, n = DTYPES["bf16"], 4096, MAX_COUNTS
    rows = max_rows(width, dtype, 4)
    assert frame_bytes(4, n, rows, width, dtype) <= MAX_FRAME_BYTES < frame_bytes(4, n, rows + 1, width, dtype)
    counts = ((), tuple((i, i) for i in range(MAX_COUNTS - 1)), (), ((U32, U32),))
    lanes = tuple(
        Lane(b"A" * 16, 0, slot, 0, length, 1, counts=counts[slot]) for slot, length in enumerate((1, 1, 1, rows - 3))
    )
    data = encode(replace(FRAME, lanes=lanes, payload=np.zeros((rows, width), dtype)), SECRET)
    assert len(data) == frame_bytes(4, n, rows, width, dtype)
    back = decode(data, SECRET)
    assert back.payload.shape == (rows, width)
    assert [lane.counts for lane in back.lanes] == list(counts)
    assert max_rows(1 << 24, dtype, 4) == 0


def test_more_counts_than_a_frame_may_hold_are_refused_on_both_ways() -> None:
    """Before the decoder makes anything of them: a pair takes 8 bytes on the wire, and 25 times that in Python."""
    most = (((1, 1),) * (MAX_COUNTS - 1), ((1, 1),))
    lanes = tuple(Lane(b"A" * 16, 0, slot, 0, 1, 1, counts=counts) for slot, counts in enumerate((*most, most[1])))
    with pytest.raises(MalformedFrame, match=f"{MAX_COUNTS} counts"):
        encode(replace(FRAME, lanes=lanes, payload=np.zeros((3, 1), np.float32)), SECRET)
    body = header(lanes=3, rows=3, nbytes=12) + b"".join(packed(counts=len(lane.counts)) for lane in lanes)
    data = signed(body + bytes(8 * (MAX_COUNTS + 1) + 12))
    tracemalloc.start()
    try:
        assert f"{MAX_COUNTS + 1} counts" in refused(data, MalformedFrame)
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


def test_a_frame_of_tokens_is_as_wide_as_its_widest_lane() -> None:
    """An id alone, an id with its log-probability, and with 20 alternatives beside."""
    widths = {None: 1, 0: 2, 1: 4, MAX_LOGPROBS: 42}
    assert {n: Sampling(logprobs=n).columns for n in widths} == widths
    lanes = tuple(Lane(b"A" * 16, 0, i, 0, 1, 1, Sampling(logprobs=n)) for i, n in enumerate(widths))
    assert [columns(lanes[:n]) for n in range(5)] == [1, 1, 2, 4, 42]
    for n in range(1, 5):
        payload = np.arange(n * columns(lanes), dtype=np.int32).reshape(n, -1)
        frame = replace(FRAME, kind=Kind.TOKENS, lanes=lanes[:n], payload=payload[:, : columns(lanes[:n])])
        assert decode(encode(frame, SECRET), SECRET) == frame
        for width in {1, 2, 4, 41, 42, 43} - {columns(lanes[:n])}:
            with pytest.raises(MalformedFrame, match=f"TOKENS with {n} x {width}"):
                encode(replace(frame, payload=np.zeros((n, width), np.int32)), SECRET)


@pytest.mark.parametrize("logprobs", [None, 0, 1, MAX_LOGPROBS])
@pytest.mark.parametrize("shared", [None, Shared(bytes(16), 0, 1), Shared(b"S" * 16, U32, U32)])
@pytest.mark.parametrize("counts", [(), ((0, 1), (U32, U32))])
def test_what_a_lane_may_carry_survives_the_way(
    logprobs: int | None, shared: Shared | None, counts: tuple[tuple[int, int], ...]
) -> None:
    position = shared.length if shared else 0
    lane = Lane(b"A" * 16, 0, 0, position, 1, 1, Sampling(logprobs=logprobs), counts, shared)
    frame = replace(FRAME, lanes=(LANES[0], lane), payload=np.zeros((3, 1), np.float32))
    assert decode(encode(frame, SECRET), SECRET) == frame


@pytest.mark.parametrize(
    "changes",
    [
        {"payload": np.zeros((3, 2), np.float64)},
        {"payload": np.zeros((3, 2), np.int32)},
        {"payload": np.zeros((3, 2), ">f4")},
        {"payload": np.zeros((2, 2), np.float32)},  # lanes need 3 rows
        {"payload": np.zeros((4, 2), np.float32)},
        {"kind": Kind.RETURN},  # its lanes read out 1 row, not 3
        {"kind": Kind.TOKENS},  # floats are no token ids
        {"kind": Kind.TOKENS, "payload": np.zeros((1, 2), np.int32)},
        {"kind": Kind.ERROR, "payload": np.zeros((3, 2), np.uint8)},
        {"kind": Kind.TRACE},  # bf16: what is told is never rounded
        {"lanes": LANES * (MAX_LANES // 2 + 1), "payload": np.zeros((3 * (MAX_LANES // 2 + 1), 2), np.float32)},
        {"lanes": (replace(LANES[0], length=3, readout=4),)},
        {"lanes": (replace(LANES[0], length=3, readout=-1),)},
        {"lanes": (replace(LANES[0], length=3, request=b"A" * 15),)},
        {"lanes": (replace(LANES[0], length=3, request=b"A" * 17),)},
        {"lanes": (replace(LANES[0], length=3, slot=-1),)},
        {"lanes": (replace(LANES[0], length=3, position=1 << 32),)},
        {"lanes": (replace(LANES[0], length=3, sampling=Sampling(seed=1 << 64)),)},
        {"lanes": (replace(LANES[0], length=3, sampling=Sampling(temperature=float("nan"))),)},
        {"lanes": (replace(LANES[0], length=3, sampling=Sampling(top_p=float("inf"))),)},
        {"lanes": (replace(LANES[0], length=3, sampling=Sampling(presence_penalty=float("nan"))),)},
        {"lanes": (replace(LANES[0], length=3, sampling=Sampling(frequency_penalty=float("-inf"))),)},
        {"lanes": (replace(LANES[0], length=3, sampling=Sampling(logprobs=MAX_LOGPROBS + 1)),)},
        {"lanes": (replace(LANES[0], length=3, sampling=Sampling(logprobs=-1)),)},
        {"lanes": (replace(LANES[0], length=3, counts=((-1, 1),)),)},
        {"lanes": (replace(LANES[0], length=3, counts=((1, 1 << 32),)),)},
        {"lanes": (replace(LANES[0], length=3, shared=Shared(b"C" * 16, 3, 6)),)},  # not right before position 7
        {"lanes": (replace(LANES[0], length=3, shared=Shared(b"C" * 16, 3, 8)),)},
        {"lanes": (replace(LANES[0], length=3, position=0, shared=Shared(b"C" * 16, 3, 0)),)},
        {"lanes": (replace(LANES[0], length=3, shared=Shared(b"C" * 15, 3, 7)),)},
        {"lanes": (replace(LANES[0], length=3, shared=Shared(b"C" * 17, 3, 7)),)},
        {"lanes": (replace(LANES[0], length=3, shared=Shared(b"C" * 16, -1, 7)),)},
    ],
)
def test_what_decode_would_refuse_is_not_encoded(changes: dict[str, object]) -> None:
    with pytest.raises(MalformedFrame):
        encode(replace(FRAME, **changes), SECRET)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"sender": 1 << 16},
        {"plan": b"P"},
        {"run": b"R" * 17},
        {"step": -1},
        {"compute_us": MAX_COMPUTE_US},
        {"compute_us": -1},
        {"payload": np.zeros(3)},
    ],
)
def test_a_header_field_that_does_not_fit_is_not_encoded(changes: dict[str, object]) -> None:
    with pytest.raises(MalformedFrame):
        encode(replace(FRAME, **changes), SECRET)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "dtype", "lane"),
    [
        (Kind.ACTIVATION, 0, {"readout": 2}),  # more read-outs than rows
        (Kind.ACTIVATION, 0, {"length": 2}),  # two rows, one is there
        (Kind.ACTIVATION, 0, {"temperature": float("nan")}),
        (Kind.ACTIVATION, 0, {"top_p": float("inf")}),
        (Kind.ACTIVATION, 0, {"presence": float("nan")}),
        (Kind.ACTIVATION, 0, {"frequency": float("-inf")}),
        (Kind.ACTIVATION, 0, {"logprobs": MAX_LOGPROBS + 2}),
        (Kind.ACTIVATION, 0, {"logprobs": U32}),
        (Kind.ACTIVATION, 0, {"counts": 1}),  # which is not there
        (Kind.ACTIVATION, 0, {"counts": U32}),
        (Kind.ACTIVATION, 0, {"source": b"C" * 16}),  # nothing is shared, and it is named
        (Kind.ACTIVATION, 0, {"source_slot": 1}),
        (Kind.ACTIVATION, 0, {"position": 7, "source": b"C" * 16}),
        (Kind.ACTIVATION, 0, {"position": 7, "source": b"C" * 16, "shared": 6}),
        (Kind.ACTIVATION, 0, {"position": 7, "source": b"C" * 16, "shared": U32}),
        (Kind.ACTIVATION, 3, {}),  # i32 is no hidden state
        (Kind.RETURN, 0, {"readout": 0}),  # nothing to read out, one row is there
        (Kind.TOKENS, 0, {}),  # f32 is no token id
        (Kind.TOKENS, 3, {"logprobs": 1}),  # an id alone, and its log-probability was asked for
    ],
)
def test_lanes_that_contradict_the_payload_are_refused(kind: Kind, dtype: int, lane: dict[str, float | bytes]) -> None:
    whole = header(kind=kind, dtype=dtype, lanes=1, rows=1, nbytes=4)
    refused(signed(whole + packed(**lane) + bytes(4)), MalformedFrame)


def test_billions_of_rows_without_a_width_are_refused() -> None:
    lane = packed(length=U32, readout=0)
    refused(signed(header(lanes=1, rows=U32, width=0) + lane), MalformedFrame)


def test_short_id_is_16_bytes_for_any_name() -> None:
    names = ["", "a", "b", "a" * 1000, "é"]
    assert len({short_id(name) for name in names}) == len(names)
    assert {len(short_id(name)) for name in names} == {16}
    assert short_id("a") == short_id("a")
