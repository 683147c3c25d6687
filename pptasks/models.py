"""What a model's own files say, read from their headers alone: configuration, tensors, tokenizer, fingerprint.

No weight is read here. `workers/weights.py` reads the tensors of a span, `pptasks/text.py` the tokenizer; both start from a `Model`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a decoder-only transformer, whatever file they came from."""

    architecture: str  # "llama"
    n_blocks: int
    dim: int  # D, width of the hidden state
    n_heads: int  # H
    n_kv_heads: int  # KV, divides H (GQA)
    head_dim: int  # Hd, even
    ffn_dim: int  # F
    vocab_size: int  # V, rows of the embedding (may exceed the tokenizer's entries)
    context: int  # positions the model was trained for
    norm_eps: float
    rope_theta: float
    tied: bool  # the output head is the embedding


@dataclass(frozen=True)
class TensorRef:
    """Where one tensor's bytes lie. `shape` is row-major: (out, in) for a linear layer."""

    name: str  # canonical: "token_embd.weight", "blk.3.attn_q.weight", ...
    file: Path
    offset: int  # from the start of the file, bytes
    nbytes: int
    dtype: str  # "F32", "F16", "BF16", "Q4_1", ... as GGUF spells them
    shape: tuple[int, ...]
    interleaved_heads: int = 0  # > 0: rows are this many heads whose rotary pairs are (2i, 2i+1), as GGUF's llama export stores q and k


@dataclass(frozen=True)
class Model:
    """A model on disk.

    Canonical tensor names: `token_embd.weight`, `output_norm.weight`, `output.weight` (absent when tied) and, for each block i,
    `blk.{i}.{attn_norm,attn_q,attn_k,attn_v,attn_output,ffn_norm,ffn_gate,ffn_up,ffn_down}.weight`.
    """

    name: str
    path: Path  # a .gguf file or a Hugging Face folder
    config: ModelConfig
    tensors: Mapping[str, TensorRef]
    fingerprint: str  # hex sha256 over the configuration and each tensor's name, shape and type; the same on every machine
    metadata: Mapping[str, Any]  # GGUF metadata (tokenizer.* included), {} for a folder
