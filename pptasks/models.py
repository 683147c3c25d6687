"""Open a model: what its own files say, read from their headers alone.

No weight is read here. `workers/weights.py` reads the tensors of a span, `pptasks/text.py` the tokenizer; both start
from a `Model`. Before anyone reads a weight, every tensor that the configuration asks for is there, with the shape it
must have and a type that we know, and there is none that we would ignore.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

from pptasks import gguf, hub, stfile
from pptasks.errors import ModelFileError, ModelNotFound, Unsupported
from pptasks.families import FAMILIES, FLOATS, Family, Fields, TensorSpec, check, dims
from pptasks.modelinfo import Model, ModelConfig, TensorRef, nbytes

__all__ = ["Model", "ModelConfig", "OnProgress", "TensorRef", "fingerprint", "nbytes", "open_model"]

OnProgress = Callable[[str, int, int], None]  # what ("download"), done, total; bytes


def open_model(spec: str | Path, cache: Path, on_progress: OnProgress | None = None) -> Model:
    """Open an alias (`hub.ALIASES`, downloaded into `cache` unless there), a .gguf file, or a Hugging Face folder.

    ModelNotFound: no such alias, file or folder. ModelFileError: a file that is truncated or disagrees with itself.
    Unsupported: an architecture, a property of it, or a tensor type that we do not compute. ModelError: an alias that
    cannot be downloaded.
    """
    if isinstance(spec, str) and spec in hub.ALIASES:
        return replace(_open_gguf(hub.fetch(hub.ALIASES[spec], cache, on_progress)), name=spec)
    path = Path(spec).expanduser()
    try:
        if path.is_dir():
            return _open_folder(path)
        if path.exists():
            return _open_gguf(path)
    except (OSError, ValueError) as e:  # a name that is too long, a folder that may not be entered, a NUL
        raise ModelNotFound(f"model {str(spec)!r} cannot be opened: {e}") from e
    known = ", ".join(sorted(hub.ALIASES))
    raise ModelNotFound(f"no model {str(spec)!r}: give a known name ({known}), a .gguf file, or a Hugging Face folder")


def fingerprint(config: ModelConfig, tensors: Mapping[str, TensorRef]) -> str:
    """Hex sha256 over the configuration and the sorted (name, shape, type) of the tensors, wherever they lie.

    Two fine-tunes of one base have the same fingerprint: weights are not hashed, so that opening stays cheap.
    """
    layout = sorted((ref.name, ref.shape, ref.dtype) for ref in tensors.values())
    canonical = json.dumps([asdict(config), layout], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _open_gguf(path: Path) -> Model:
    if path.suffix == ".safetensors":
        raise ModelNotFound(f"{path}: give the folder that holds it, with its config.json")
    if not path.is_file():
        raise ModelFileError(f"{path}: is neither a file nor a folder")
    header = gguf.read_header(path)
    metadata = header.metadata
    general = Fields(path, metadata, "general.")
    architecture = general.get("architecture")
    if not isinstance(architecture, str):
        raise ModelFileError(f"{path}: general.architecture is missing")
    family = _family(path, architecture, {f.architecture: f for f in FAMILIES})
    general.neutral({"type": ("model",)})
    if metadata.get("split.count", 1) not in (0, 1):
        raise Unsupported(f"{path}: is one of {metadata['split.count']} parts; merge them into one file first")
    stored = {t.name: stfile.StoredTensor(path, t.offset, t.nbytes, t.dtype, t.shape) for t in header.tensors}
    shapes = {name: t.shape for name, t in stored.items()}
    config = check(family.config_from_gguf(Fields(path, metadata, f"{architecture}."), shapes), path)
    tensors = {}
    for spec in family.specs(config):
        heads = getattr(config, spec.rotary_heads) if spec.rotary_heads else 0
        tensors[spec.name] = _take(stored, spec.name, spec, config, path, heads)
    _refuse_others(path, stored)
    return _model(path.stem, path, config, tensors, metadata)


def _open_folder(folder: Path) -> Model:
    source = folder / "config.json"
    if not source.is_file():
        raise ModelNotFound(f"{folder}: holds no config.json; give a Hugging Face model folder or a .gguf file")
    fields = Fields(source, stfile.read_json(source))
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise ModelFileError(f"{source}: model_type is missing")
    family = _family(source, model_type, {f.hf_model_type: f for f in FAMILIES})
    fields.neutral({"architectures": ([family.hf_class],)})
    stored = stfile.read_tensors(folder)
    config = check(family.config_from_hf(fields, {name: t.shape for name, t in stored.items()}), source)
    tensors = {spec.name: _take(stored, spec.hf, spec, config, folder, 0) for spec in family.specs(config)}
    if config.tied:
        stored.pop(family.readout[-1].hf, None)  # a copy of the embedding that some exports keep
    _refuse_others(folder, {name: t for name, t in stored.items() if not name.endswith(family.hf_ignored)})
    return _model(folder.resolve().name, folder, config, tensors, {})


def _family(source: Path, architecture: str, known: Mapping[str, Family]) -> Family:
    if architecture not in known:
        raise Unsupported(f"{source}: has architecture {architecture[:60]!r}; supported: {', '.join(sorted(known))}")
    return known[architecture]


def _take(
    stored: dict[str, stfile.StoredTensor], name: str, spec: TensorSpec, config: ModelConfig, source: Path, heads: int
) -> TensorRef:
    """Take tensor `name` out of `stored`, checked against its spec."""
    tensor = stored.pop(name, None)
    if tensor is None:
        raise ModelFileError(f"{source}: tensor {name!r} is missing; copy or download the model again")
    sizes = dims(config)
    shape = tuple(sizes[d] for d in spec.shape)
    if tensor.shape != shape:
        raise ModelFileError(f"{source}: tensor {name!r} has shape {tensor.shape}; its configuration asks for {shape}")
    if len(shape) == 1 and tensor.dtype not in FLOATS:
        raise Unsupported(
            f"{source}: tensor {name!r} has type {tensor.dtype}; supported for a vector: {', '.join(FLOATS)}"
        )
    return TensorRef(spec.name, tensor.file, tensor.offset, tensor.nbytes, tensor.dtype, shape, heads)


def _refuse_others(source: Path, left: Mapping[str, stfile.StoredTensor]) -> None:
    """A tensor that nobody takes (a bias, rope_freqs.weight, an expert) would change the result."""
    if left:
        raise Unsupported(
            f"{source}: has tensor {min(left)!r}, which this architecture's support does not use ({len(left)} such)"
        )


def _model(
    name: str, path: Path, config: ModelConfig, tensors: dict[str, TensorRef], metadata: Mapping[str, object]
) -> Model:
    return Model(
        name, path, config, MappingProxyType(tensors), fingerprint(config, tensors), MappingProxyType(dict(metadata))
    )
