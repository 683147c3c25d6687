"""What a model is, to everyone else: value objects from `models.open_model`, and what a stage loads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

from pptasks.errors import PlanError

EMBEDDING, POSITIONS = "token_embd.weight", "position_embd.weight"
OUTPUT_NORM, OUTPUT_NORM_BIAS, OUTPUT = "output_norm.weight", "output_norm.bias", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"

OnProgress = Callable[[str, int, int], None]  # phase ("download", "check", "load"), done, total; bytes


@dataclass(frozen=True)
class Rope:
    """Rotary positions. Frequency i of a head (i < Hd/2) is theta^(-2i/Hd), changed as `scaling` says.

    "linear": divided by `factor`. "llama3": wave lengths above original_context / low are divided by `factor`, those
    below original_context / high are kept, and what lies between is mixed. A tensor `rope_freqs.weight` in the file
    divides the frequencies besides.
    """

    theta: float
    scaling: str = "none"  # none, linear, llama3
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_context: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a decoder-only transformer, whatever file they came from.

    Whether a linear layer has a bias, and a head's q and k a norm of their own, is told by the tensors that are there.
    """

    architecture: str  # a name in `families.FAMILIES`
    n_blocks: int
    dim: int  # D, width of the hidden state
    n_heads: int  # H
    n_kv_heads: int  # KV, divides H (GQA)
    head_dim: int  # Hd; D / H in most models
    ffn_dim: int  # F
    vocab_size: int  # V, rows of the embedding (may exceed the tokenizer's entries)
    context: int  # positions the model was trained for
    norm: str  # "rms" (RMSNorm) or "layer" (LayerNorm with a bias)
    norm_eps: float
    ffn: str  # "swiglu": down(silu(gate x) * up x); "gelu": down(gelu(up x)), gelu in its tanh form
    rope: Rope | None  # None: learned positions, `position_embd.weight`
    windows: tuple[int, ...]  # of each block: positions that a row attends over, its own included; 0: all before it
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
    transposed: bool = False  # stored as (in, out), as GPT-2's Conv1D layers are
    parts: tuple[tuple[str, int], ...] = ()  # of a fused tensor: name and rows of each tensor in it, in order


class Source(Protocol):
    """Where a model's bytes come from, beyond the headers that opening it read."""

    def fetch(self, refs: Sequence[TensorRef], on_progress: OnProgress) -> None:
        """Make the bytes of these tensors present in their files. Raises ModelError."""

    def fetch_text(self, on_progress: OnProgress) -> None:
        """Make the tokenizer's files present. Raises ModelError."""


class Here:
    """All of the model is on this machine."""

    def fetch(self, refs: Sequence[TensorRef], on_progress: OnProgress) -> None:
        pass

    def fetch_text(self, on_progress: OnProgress) -> None:
        pass


@dataclass(frozen=True)
class Model:
    """A model whose headers have been read.

    Canonical tensor names: `token_embd.weight`, `position_embd.weight` (learned positions), `output_norm.weight`,
    `output.weight` (absent when tied), `rope_freqs.weight` (some GGUF files) and, for each block i,
    `blk.{i}.{attn_norm,attn_q,attn_k,attn_v,attn_output,ffn_norm,ffn_gate,ffn_up,ffn_down}.weight`; `attn_qkv` where
    a file keeps the three fused; `attn_q_norm`, `attn_k_norm` and any `.bias` where the model has them.
    """

    name: str
    path: Path  # a .gguf file or a Hugging Face folder
    config: ModelConfig
    tensors: Mapping[str, TensorRef]
    fingerprint: str  # hex sha256, see `models.fingerprint`; the same on every machine
    metadata: Mapping[str, Any]  # GGUF metadata (tokenizer.* included), {} for a folder
    spec: str  # what opens the same model on another process or machine
    source: Source = field(default_factory=Here, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, each tensor once."""
        return nbytes(self.tensors.values())

    def block_tensors(self, i: int) -> tuple[TensorRef, ...]:
        """The tensors of block `i` alone, in the family's order."""
        return self._named(lambda name: name.startswith(f"blk.{i}."))

    def stage_tensors(self, lo: int, hi: int, *, embedding: bool, readout: bool) -> tuple[TensorRef, ...]:
        """What a stage with the blocks [lo, hi) loads, each tensor once.

        `embedding` adds the embeddings, `readout` the final norm and the output head, which is the embedding when
        tied. PlanError if the span is none of this model.
        """
        if not 0 <= lo <= hi <= self.config.n_blocks:
            raise PlanError(f"span [{lo}, {hi}) is outside the {self.config.n_blocks} blocks of {self.name}")
        spans = tuple(f"blk.{i}." for i in range(lo, hi))
        names = {ROPE_FACTORS} if spans else set()
        if embedding:
            names |= {EMBEDDING, POSITIONS}
        if readout:
            names |= {OUTPUT_NORM, OUTPUT_NORM_BIAS, EMBEDDING if self.config.tied else OUTPUT}
        return self._named(lambda name: name in names or name.startswith(spans))

    def _named(self, wanted: Callable[[str], bool]) -> tuple[TensorRef, ...]:
        return tuple(ref for name, ref in self.tensors.items() if wanted(name))


def memory_bytes(tensors: Iterable[TensorRef], weights: str = "16bit") -> int:
    """Their bytes as a stage holds them (workers/weights.py).

    Vectors and F32 in 4 bytes an element, the other floats in 2; a quantised type in 2, or as in its file when
    `weights` is "quantized".
    """
    return sum(_held(ref, weights) for ref in tensors)


def _held(ref: TensorRef, weights: str) -> int:
    if len(ref.shape) == 1 or ref.dtype == "F32":
        return 4 * prod(ref.shape)
    if weights == "quantized" and ref.dtype not in ("F16", "BF16"):
        return ref.nbytes
    return 2 * prod(ref.shape)


def nbytes(tensors: Iterable[TensorRef]) -> int:
    """Their bytes on disk, summed."""
    return sum(ref.nbytes for ref in tensors)
