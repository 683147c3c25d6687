"""Text to token ids and back, as a model's own files say. Only the head needs this: all below it know ids alone.

text = open_text(model)
ids = text.encode_chat([{"role": "user", "content": "Say hello"}])
decoder = text.decoder()
for i in generated: print(decoder.push(i), end="")
print(decoder.finish())
"""

import codecs
from threading import Lock

from pptasks import chat, vocab_gguf, vocab_hf
from pptasks.errors import RequestError
from pptasks.modelinfo import Model
from pptasks.vocab import Vocabulary


def open_text(model: Model) -> "Text":
    """Read the tokenizer and the chat template of `model`. Errors as `vocab_gguf.read`, `vocab_hf.read`.

    A tokenizer may have more entries than the model's embedding has rows: whoever uses an id checks it.
    """
    vocabulary = vocab_hf.read(model.path) if model.path.is_dir() else vocab_gguf.read(model.metadata, model.path)
    return Text(vocabulary)


class Text:
    """Safe to share between threads.

    `bos_id`: the token that begins a text, or None. `stop_ids`: the tokens that end one. `vocab_size`: highest id + 1
    of the tokenizer, at most the model's. `longest_token`: characters of the longest entry, so that a text of n of them
    is known to have about n / longest_token tokens at least, without tokenizing it.
    """

    def __init__(self, vocabulary: Vocabulary):
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos_id
        self.stop_ids = vocabulary.stop_ids
        self.longest_token = max(map(len, vocabulary.tokenizer.get_vocab()), default=1)
        self._vocabulary = vocabulary
        self._lock = Lock()  # `encode_special_tokens` is a state of the tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands, after bos if the model's files ask for it.

        A control token's spelling is text like any other. A character that the vocabulary cannot spell (some have no
        entry for rare bytes) is left out, as the reference tokenizers do. RequestError: `text` is no valid Unicode.
        """
        return self._with_bos(self._tokenize(text, control=False))

    def encode_chat(self, messages: chat.Messages) -> list[int]:
        """Token ids of the chat in the model's own template (`chat.render`), ready for the assistant's turn.

        Control tokens come from the template alone: what looks like one in a message stays text. Errors as
        `chat.render` and `encode`.
        """
        v = self._vocabulary
        rendered = chat.render(v.template, messages, v.control, v.names)
        if v.template is None:
            ids = self._tokenize(rendered.text, control=False)
        elif not rendered.disguise:
            ids = self._tokenize(rendered.text, control=True)
        else:
            ids = self._tokenize_disguised(rendered)
        return self._with_bos(ids)

    def of_token(self, token: int) -> bytes:
        """The bytes of one token; empty for a control token, and for an id that has no entry."""
        return self._vocabulary.bytes_of(token)

    def decoder(self) -> "Decoder":
        """A decoder for one sequence of generated ids."""
        return Decoder(self._vocabulary)

    def decode(self, ids: list[int]) -> str:
        """The text of a whole sequence."""
        decoder = self.decoder()
        return "".join(map(decoder.push, ids)) + decoder.finish()

    def _tokenize_disguised(self, rendered: chat.Rendered) -> list[int]:
        """The control tokens that show are the template's; what lies between them is text, disguised or not."""
        control, ids, at = self._vocabulary.control, list[int](), 0
        for match in self._vocabulary.control_pattern.finditer(rendered.text):
            part = rendered.reveal(rendered.text[at : match.start()])
            ids += self._tokenize(part, control=False, continued=at > 0)
            ids.append(control[match.group() if match.group() in control else match.group().strip()])
            at = match.end()
        return ids + self._tokenize(rendered.reveal(rendered.text[at:]), control=False, continued=at > 0)

    def _tokenize(self, text: str, *, control: bool, continued: bool = False) -> list[int]:
        tokenizer = self._vocabulary.continued if continued else self._vocabulary.tokenizer
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise RequestError(f"the prompt is no valid Unicode: a lone surrogate at character {e.start}") from None
        with self._lock:
            tokenizer.encode_special_tokens = not control
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        """A template may have written bos already."""
        v = self._vocabulary
        return [v.bos_id, *ids] if v.add_bos and v.bos_id is not None and ids[:1] != [v.bos_id] else ids


class Decoder:
    """One sequence's ids to text, in pieces that never split a character; joined, they are the text of the whole."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = vocabulary.strip_first_space

    def push(self, token: int) -> str:
        """The text that `token` completes: "" for a control token, no entry, or the first bytes of a character."""
        return self._first(self._utf8.decode(self._vocabulary.bytes_of(token)))

    def finish(self) -> str:
        """What remains: U+FFFD for a character that was never completed, else ""."""
        return self._first(self._utf8.decode(b"", final=True))

    def _first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
