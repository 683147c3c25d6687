"""Small tokenizers, trained on the spot, in the shapes in which the model families publish theirs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = (
    "The cat sat on the mat, and then the other cat sat there too.",
    "Numbers such as 12, 345 and 6789 are split; don't they'll say that it's so?",
    'for (int i = 0; i < 10; i++) { printf("%d\\n", i); }  // spaces    and\n\n\ttabs',
    "HelloWorld camelCase snake_case; été, naïve, straße, привет мир, 你好世界",
    "[INST] instructions [/INST] <s> </s> < s > </ s > user assistant system",
)
SPM_CONTROL = ("<unk>", "<s>", "</s>")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _pieces() -> tuple[list[str], list[tuple[str, str]]]:
    """Entries and merges of characters, spaces as "▁"; the single characters come last, as SentencePiece has them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    merged = [left + right for left, right in merges]
    return [*dict.fromkeys(merged), *sorted(set(model["vocab"]) - set(merged))], merges


PIECES, MERGES = _pieces()
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def write_spm(path: Path, extra: Sequence[tuple[str, int]] = (), scores: Sequence[float] = (), **settings: Any) -> Path:
    """A GGUF file that holds a vocabulary of kind "llama" alone. `extra`: entries and their types, at the end.

    `scores`, repeated, in place of those that order the merges. `settings` are further `tokenizer.*` values, by the
    key's last part.
    """
    tokens = [*SPM_CONTROL, *BYTES, *PIECES, *(token for token, _ in extra)]
    types = [2, 3, 3, *[6] * len(BYTES), *[1] * len(PIECES), *(kind for _, kind in extra)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    ordered = [0.0 if t != 1 else -float(i) for i, t in enumerate(types)]
    writer.add_token_scores([scores[i % len(scores)] for i in range(len(types))] if scores else ordered)
    writer.add_token_types(types)
    for key, value in settings.items():
        name = f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}"
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def llama2() -> Tokenizer:
    """A space is put before every text by the normalizer."""
    tokenizer = _sentencepiece()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def mistral3() -> Tokenizer:
    """A space is put before the first text only, by the pre-tokenizer."""
    tokenizer = _sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def _sentencepiece() -> Tokenizer:
    vocab = {token: i for i, token in enumerate([*SPM_CONTROL, *BYTES, *PIECES])}
    tokenizer = Tokenizer(models.BPE(vocab, MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPM_CONTROL])
    tokenizer.post_processor = _bos("<s>", 1)
    return tokenizer


def _bos(token: str, i: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(f"{token} $A", f"{token} $A {token} $B", [(token, i)])


def _byte_level(pre_tokenizer: Any, control: Sequence[str], **model: Any) -> Tokenizer:
    """Control tokens come after the others, as in most families."""
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _split(pattern: str) -> pre_tokenizers.Sequence:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def gpt2() -> Tokenizer:
    tokenizer = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def llama3() -> Tokenizer:
    control = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = _byte_level(_split(WORDS), control, ignore_merges=True)
    bos = _bos(control[0], tokenizer.token_to_id(control[0]))
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    return tokenizer


def qwen2() -> Tokenizer:
    tokenizer = _byte_level(_split(WORDS.replace("{1,3}", "")), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def tekken() -> Tokenizer:
    from pptasks.vocab_gguf import PRESETS

    control = [*SPM_CONTROL, "[INST]", "[/INST]"]
    tokenizer = _byte_level(PRESETS["tekken"].pre_tokenizer(), control, ignore_merges=True)
    tokenizer.post_processor = _bos("<s>", tokenizer.token_to_id("<s>"))
    return tokenizer


def write_hf(folder: Path, tokenizer: Tokenizer, **files: Mapping[str, Any]) -> Path:
    """A folder with tokenizer.json and further JSON files: `tokenizer_config`, `generation_config`, `config`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder
