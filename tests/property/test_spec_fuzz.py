"""Any text is a spec or is refused in one line; what is a spec spells itself and stays inside the cache."""

from pathlib import Path, PurePosixPath

from hypothesis import given, settings
from hypothesis import strategies as st

from pptasks.errors import ModelNotFound
from pptasks.spec import HubFile, HubRepo, Url, parse

pieces = st.sampled_from([
    "hf:", "https://", "http://", "127.0.0.1", "localhost", "owner", "name", "/", "//", "@", ":", ".", "..", "-", "--",
    "%2e%2e", "%2f", "\\", "\0", "\n", "\u202e", "é", " ", "x.gguf", ".gguf", "-00001-of-00002", "refs/pr/", "1",
    "main", "?q=1", "#f", "~", "a" * 97, "[", "]", "user:pass@",
])  # fmt: skip
texts = st.one_of(st.lists(pieces, max_size=8).map("".join), st.text(max_size=40))


@settings(max_examples=3000)
@given(texts)
def test_any_text(text: str) -> None:
    try:
        spec = parse(text, exists=lambda path: False)
    except ModelNotFound as error:
        message = str(error)
        assert message.isprintable()
        assert "pass" not in message.partition("://")[2]
        return
    assert str(spec) == text or isinstance(spec, HubRepo | HubFile)  # "@main" need not be said
    assert parse(str(spec), exists=lambda path: False) == spec
    if isinstance(spec, HubRepo | HubFile):
        cache = Path("/cache")
        place = cache / spec.repo.replace("/", "--") / (spec.file if isinstance(spec, HubFile) else "")
        assert place.resolve().is_relative_to(cache)
        assert ".." not in PurePosixPath(place).parts
    if isinstance(spec, Url):
        assert "/" not in spec.file
        assert spec.file not in ("", ".", "..")
        assert "@" not in spec.shown.split("/")[2]
