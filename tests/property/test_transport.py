"""Whatever lies on a queue, the transport makes an envelope or one typed error of it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptasks.errors import MalformedFrame
from pptasks.transport import check_envelope, parse_envelope

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
tags = st.fixed_dictionaries({"delivery_tag": values})
envelopes = st.fixed_dictionaries({"properties": values | tags, "headers": values | st.just({"compression": "x"})})


@given(
    st.binary() | st.binary().map(lambda tail: b"{" + tail) | (values | envelopes).map(lambda v: json.dumps(v).encode())
)
def test_an_envelope_or_malformed_frame(item: bytes) -> None:
    try:
        envelope = parse_envelope(item)
    except MalformedFrame:
        return
    assert isinstance(envelope["properties"]["delivery_tag"], str)
    assert not (envelope.get("headers") or {}).get("compression")


@given(
    st.text(), st.none() | st.dictionaries(st.sampled_from(["task", "id", "eta", "argsrepr"]), st.none() | st.text())
)
def test_what_kombu_sends_passes_unchanged(tag: str, headers: dict[str, object] | None) -> None:
    envelope = {"properties": {"delivery_tag": tag}, "headers": headers, "body": "x"}
    assert parse_envelope(json.dumps(envelope).encode()) == envelope
    with pytest.raises(MalformedFrame):
        check_envelope(envelope | {"headers": {"compression": "zlib"}})
