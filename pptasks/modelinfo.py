"""What a model is, to everyone else: three value objects from `models.open_model`, and what a stage loads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pptasks.errors import PlanError

EMBEDDING, OUTPUT_NORM, OUTPUT = "token_embd.weight", "output_norm.weight", "output.weight"


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
    interleaved_heads: int = (
        0  # > 0: rows are this many heads whose rotary pairs are (2i, 2i+1), as GGUF's llama export stores q and k
    )


@dataclass(frozen=True)
class Model:
    """A model on disk.

    Canonical tensor names: `token_embd.weight`, `output_norm.weight`, `output.weight` (absent when tied) and, for each
    block i, `blk.{i}.{attn_norm,attn_q,attn_k,attn_v,attn_output,ffn_norm,ffn_gate,ffn_up,ffn_down}.weight`.
    """

    name: str
    path: Path  # a .gguf file or a Hugging Face folder
    config: ModelConfig
    tensors: Mapping[str, TensorRef]
    fingerprint: (
        str  # hex sha256 over the configuration and each tensor's name, shape and type; the same on every machine
    )
    metadata: Mapping[str, Any]  # GGUF metadata (tokenizer.* included), {} for a folder

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, each tensor once."""
        return nbytes(self.tensors.values())

    def block_tensors(self, i: int) -> tuple[TensorRef, ...]:
        """The tensors of block `i`, in the family's order."""
        return self.stage_tensors(i, i + 1, embedding=False, readout=False)

    def stage_tensors(self, lo: int, hi: int, *, embedding: bool, readout: bool) -> tuple[TensorRef, ...]:
        """What a stage with the blocks [lo, hi) loads, each tensor once.

        `embedding` adds the embedding, `readout` the final norm and the output head, which is the embedding when tied.
        PlanError if the span is none of this model.
        """
        if not 0 <= lo <= hi <= self.config.n_blocks:
            raise PlanError(f"span [{lo}, {hi}) is outside the {self.config.n_blocks} blocks of {self.name}")
        spans = tuple(f"blk.{i}." for i in range(lo, hi))
        names = {name for name in self.tensors if spans and name.startswith(spans)}
        if embedding:
            names.add(EMBEDDING)
        if readout:
            names |= {OUTPUT_NORM, EMBEDDING if self.config.tied else OUTPUT}
        return tuple(ref for name, ref in self.tensors.items() if name in names)


def memory_bytes(tensors: Iterable[TensorRef]) -> int:
    """Their bytes as a stage holds them: vectors and F32 in 4 bytes an element, all else in 2 (workers/weights.py)."""
    return sum(prod(ref.shape) * (4 if len(ref.shape) == 1 or ref.dtype == "F32" else 2) for ref in tensors)


def nbytes(tensors: Iterable[TensorRef]) -> int:
    """Their bytes on disk, summed."""
    return sum(ref.nbytes for ref in tensors)
