"""What --model may say, and that nothing else gets further than a message."""

from pathlib import Path

import pytest

from pptasks.errors import ModelNotFound
from pptasks.remote.wheel import Source
from pptasks.spec import ALIASES, Alias, HubFile, HubRepo, Local, Spec, Url, parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"

FORMS: dict[str, Spec] = {
    "smollm2:135m": Alias("smollm2:135m"),
    "gpt2": Alias("gpt2"),
    "owner/name": HubRepo("owner/name", "main"),
    "Qwen/Qwen2.5-0.5B_x": HubRepo("Qwen/Qwen2.5-0.5B_x", "main"),
    "owner/name@v1.0": HubRepo("owner/name", "v1.0"),
    f"owner/name@{COMMIT}": HubRepo("owner/name", COMMIT),
    "owner/name@refs/pr/12": HubRepo("owner/name", "refs/pr/12"),
    "hf:owner/name/x.gguf": HubFile("owner/name", "main", "x.gguf"),
    "hf:owner/name@v1/Q8_0/x-00001-of-00003.gguf": HubFile("owner/name", "v1", "Q8_0/x-00001-of-00003.gguf"),
    "hf:owner/name@refs/pr/1/x.gguf": HubFile("owner/name", "refs/pr/1", "x.gguf"),
    "https://example.org/a/x.gguf?Signature=s%2Fx": Url("https://example.org/a/x.gguf?Signature=s%2Fx"),
    "http://127.0.0.1:8080/x.gguf": Url("http://127.0.0.1:8080/x.gguf"),
    "http://[::1]/x.gguf": Url("http://[::1]/x.gguf"),
    "http://localhost/x.gguf": Url("http://localhost/x.gguf"),
    "/models/x.gguf": Local("/models/x.gguf"),
    "./owner/name": Local("./owner/name"),
    "../x": Local("../x"),
    "~/x": Local("~/x"),
    ".": Local("."),
}


@pytest.mark.parametrize("text", FORMS)
def test_forms(text: str) -> None:
    spec = parse(text, exists=lambda path: False)
    assert spec == FORMS[text]
    assert str(spec) == text


def test_what_is_on_the_disk_wins_over_the_hub_but_not_over_an_alias() -> None:
    assert parse("owner/name", exists=lambda path: path == "owner/name") == Local("owner/name")
    assert parse("folder", exists=lambda path: True) == Local("folder")
    assert parse("gpt2", exists=lambda path: True) == Alias("gpt2")
    assert parse("hf:owner/name/x.gguf", exists=lambda path: True) == HubFile("owner/name", "main", "x.gguf")


def test_exists_is_asked_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse("owner/name") == HubRepo("owner/name")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert parse("owner/name") == Local("owner/name")


CRAFTED = {
    "": "empty",
    "nope": "is not a known name",
    "llama3.2:2b": "is not a known name",
    "folder/x.gguf": "no such file or folder",
    "a/b/c": "is not owner/name",
    "a/..": "is not owner/name",
    "a/.": "is not owner/name",
    "a/.b": "is not owner/name",
    "-a/b": "is not owner/name",
    "a/-b": "is not owner/name",
    "a/b-": "is not owner/name",
    "a//b": "is not owner/name",
    "a/": "is not owner/name",
    "a\\b/c": "is not owner/name",
    "a/%2e%2e": "is not owner/name",
    "a/b%00": "is not owner/name",
    "a/b c": "is not owner/name",
    "a/é": "is not owner/name",
    "a/b\0": "control characters",
    "a/b\n": "control characters",
    "a/\u202eb": "control characters",
    "a/b--c": "is no repository's name",
    "a/b..c": "is no repository's name",
    "a/b.git": "is no repository's name",
    "a/" + "b" * 97: "is no repository's name",
    "a/" + "b" * 4000: "too long",
    "a/b@": "malformed revision",
    "a/b@..": "malformed revision",
    "a/b@a/b": "malformed revision",
    "a/b@-x": "malformed revision",
    "a/b@x..y": "malformed revision",
    "a/b@refs/pr/../1": "malformed revision",
    "a/b@" + "x" * 200: "malformed revision",
    "hf:a/b": "does not say hf:owner/name",
    "hf:a/b/": "does not say hf:owner/name",
    "hf:/etc/passwd.gguf": "does not say hf:owner/name",
    "hf:a/b/x.bin": "does not name a .gguf file",
    "hf:a/b/../x.gguf": "has a path",
    "hf:a/b//x.gguf": "has a path",
    "hf:a/b/c/./x.gguf": "has a path",
    "hf:a/b/-x.gguf": "has a path",
    "hf:a/b/c\\..\\x.gguf": "has a path",
    "hf:a/b/%2e%2e/x.gguf": "has a path",
    "hf:a/b/.gguf": "has a path",
    "hf:../b/x.gguf": "is not owner/name",
    "hf:a/b@../x.gguf": "malformed revision",
    "hf:a/b@%2e/x.gguf": "malformed revision",
    "http://example.org/x.gguf": "only https",
    "http://127.0.0.1.example.org/x.gguf": "only https",
    "ftp://example.org/x.gguf": "only https",
    "file:///etc/x.gguf": "names no host",
    "https:///x.gguf": "names no host",
    "https://example.org:99999/x.gguf": "malformed",
    "https://[::1/x.gguf": "malformed",
    "https://example.org/x": "must end in the name of a .gguf file",
    "https://example.org/.gguf": "must end in the name of a .gguf file",
    "https://example.org/x.gguf#part": "must end in the name of a .gguf file",
    "https://example.org/ x.gguf": "a character that no URL has",
    "https://example.org/x\n.gguf": "a character that no URL has",
    "https://example.org/a\\..\\x.gguf": "a character that no URL has",
}


@pytest.mark.parametrize("text", CRAFTED, ids=lambda text: repr(text)[:40])
def test_crafted_texts(text: str) -> None:
    with pytest.raises(ModelNotFound, match=CRAFTED[text]) as caught:
        parse(text, exists=lambda path: False)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 400


SECRETS = [
    "https://user:hunter2@example.org/x.gguf",
    "https://hunter2@example.org/x.gguf",
    "http://user:hunter2@example.org/x.gguf",
    "HTTPS://user:hunter2@example.org/x.gguf",
    "ftp://user:hunter2@example.org/x",
    "https://example.org/x?Signature=hunter2",
    "http://example.org/x.gguf?Signature=hunter2",
    "https://example.org/x.gguf?Signature=hunter2#hunter2",
]


@pytest.mark.parametrize("text", SECRETS)
def test_no_secret_is_repeated(text: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        parse(text)
    assert "hunter2" not in str(caught.value)


def test_a_url_is_shown_without_its_query() -> None:
    spec = parse("https://example.org/a/x.gguf?Signature=hunter2")
    assert isinstance(spec, Url)
    assert (spec.shown, spec.file) == ("https://example.org/a/x.gguf", "x.gguf")
    assert "hunter2" not in repr(spec)


def test_aliases_stand_for_specs() -> None:
    for name, known in ALIASES.items():
        assert known.description
        assert known.size.endswith(("MB", "GB"))
        if not isinstance(known.source, Source):
            assert parse(str(known.source)) == known.source
        assert parse(name) == Alias(name)
    names = {
        "smollm2:135m",
        "llama3.2:1b",
        "llama3.2:3b",
        "llama3.1:8b",
        "qwen2.5:0.5b",
        "qwen3:0.6b",
        "tinyllama:1.1b",
    }
    assert set(ALIASES) == names | {"mistral:7b", "gpt2"}
