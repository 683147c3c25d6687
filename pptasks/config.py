"""One frozen Settings, validated once. The only place that reads the environment, but for the link's own (peers.py).

A worker is told what it is by its environment, so that the same command starts it anywhere:

| variable | meaning | default |
|---|---|---|
| STAGE | index of this worker's stage, 0 is the head | none: a client |
| NUM_STAGES | how many stages the pipeline has | 2 |
| MODEL | what `spec.parse` takes: alias, owner/name, hf:..., https://..., folder, .gguf file | smollm2:135m |
| PP_BROKER | broker URL, password included | redis://127.0.0.1:6379/0 |
| PP_RUN | name of the run: the prefix of all its keys | default |
| PP_SECRET | 64 hex digits that authenticate the run's frames | none; a worker needs it |
| PP_SPLIT | even, auto, or blocks per stage "a,b,..." | even |
| PP_WIRE | dtype of the hidden state on the wire: bf16, f16, f32 | bf16 |
| PP_READOUT | auto, first (ring) or last (line) | auto |
| PP_CONTEXT | positions that a slot holds | 2048, or the model's if that is less |
| PP_SLOTS | sequences that the KV cache holds, where memory allows | up to 16 |
| PP_KV_BYTES | most bytes of a stage's KV cache, such as 2G | what is free |
| PP_MEMORY_SHARE | part of the free memory that this worker may count on | 1 |
| PP_LANES | most sequences of a lap | 32 |
| PP_IN_FLIGHT | laps that are under way at once | as many as stages |
| PP_MAX_WAITING | requests that may wait for a slot | 1024 |
| PP_PREFILL_CHUNK | most rows of a frame | 128 |
| PP_MEMORY | bytes of each stage "8G,24G", for PP_SPLIT=auto and a check | none |
| PP_WEIGHTS | how quantised weights are held: 16bit, quantized | 16bit |
| PP_VERIFY | 1: requests may ask the head to compute their answers again | 0 |
| PP_AUDIT_RATE | share of steps in which a live product is recomputed | 0.01 |
| PP_KERNELS | auto, or tinygrad (no C kernels) | auto |
| PP_LAP_DEADLINE | seconds after which a lap is sent again | 20 |
| PP_BROKER_GRACE | seconds without a broker after which a worker with a lease leaves | 7 |
| PP_LEASE | 1: leave when the run's lease is gone | 0 |
| PP_CACHE | folder for models and compiled kernels | the user's cache folder |
| CC | C compiler of the CPU device | clang, else ziglang's |
| HF_ENDPOINT, HF_TOKEN, HF_HOME | where models come from, as huggingface_hub has them | the Hub, none, its own |
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import platformdirs

from pptasks.errors import ConfigError
from pptasks.keys import stage_name, stage_queue

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
MAX_STAGES = 1024
MAX_SLOTS = 1024
MAX_IN_FLIGHT = 64
MAX_WAITING = 1 << 16
MAX_CHUNK = 4096
MAX_CONTEXT = 1 << 20
BROKER_GRACE_S = 7.0  # without a broker for that long, the run is gone; a broker that restarts needs less


def _env(name: str) -> dict[str, str]:
    return {"env": name}


@dataclass(frozen=True)
class Hub:
    """Where models are fetched from, and as whom. `home`: huggingface_hub's folder, its token and its cache in it."""

    endpoint: str = "https://huggingface.co"
    token: str = field(default="", repr=False)
    home: Path | None = None


@dataclass(frozen=True)
class Settings:
    """What one process of a run knows. `repr` never shows the broker's password or the run's secret.

    Raises ConfigError, naming the variable, for a value that does not hold.
    """

    stage: int | None = field(default=None, metadata=_env("STAGE"))
    num_stages: int = field(default=2, metadata=_env("NUM_STAGES"))
    model: str = field(default="smollm2:135m", metadata=_env("MODEL"))
    broker: str = field(default="redis://127.0.0.1:6379/0", metadata=_env("PP_BROKER"), repr=False)
    run: str = field(default="default", metadata=_env("PP_RUN"))
    secret: str = field(default="", metadata=_env("PP_SECRET"), repr=False)
    split: str = field(default="even", metadata=_env("PP_SPLIT"))
    wire: str = field(default="bf16", metadata=_env("PP_WIRE"))
    readout: str = field(default="auto", metadata=_env("PP_READOUT"))
    context: int | None = field(default=None, metadata=_env("PP_CONTEXT"))
    slots: int | None = field(default=None, metadata=_env("PP_SLOTS"))
    kv_bytes: str | None = field(default=None, metadata=_env("PP_KV_BYTES"))
    memory_share: float = field(default=1.0, metadata=_env("PP_MEMORY_SHARE"))
    lanes: int = field(default=32, metadata=_env("PP_LANES"))
    in_flight: int | None = field(default=None, metadata=_env("PP_IN_FLIGHT"))
    max_waiting: int = field(default=1024, metadata=_env("PP_MAX_WAITING"))
    prefill_chunk: int = field(default=128, metadata=_env("PP_PREFILL_CHUNK"))
    memory: str | None = field(default=None, metadata=_env("PP_MEMORY"))
    weights: str = field(default="16bit", metadata=_env("PP_WEIGHTS"))
    verify: bool = field(default=False, metadata=_env("PP_VERIFY"))
    audit_rate: float = field(default=0.01, metadata=_env("PP_AUDIT_RATE"))
    kernels: str = field(default="auto", metadata=_env("PP_KERNELS"))
    lap_deadline_s: float = field(default=20.0, metadata=_env("PP_LAP_DEADLINE"))
    broker_grace_s: float = field(default=BROKER_GRACE_S, metadata=_env("PP_BROKER_GRACE"))
    lease: bool = field(default=False, metadata=_env("PP_LEASE"))
    cache: Path = field(default=platformdirs.user_cache_path("pptasks", appauthor=False), metadata=_env("PP_CACHE"))
    cc: str | None = field(default=None, metadata=_env("CC"))
    hf_endpoint: str = field(default=Hub.endpoint, metadata=_env("HF_ENDPOINT"))
    hf_token: str = field(default="", metadata=_env("HF_TOKEN"), repr=False)
    hf_home: Path | None = field(default=None, metadata=_env("HF_HOME"))

    def __post_init__(self) -> None:
        _range("NUM_STAGES", self.num_stages, 1, MAX_STAGES)
        if self.stage is not None:
            _range("STAGE", self.stage, 0, self.num_stages - 1)
        for variable, value in (("MODEL", self.model), ("PP_BROKER", self.broker), ("PP_SPLIT", self.split)):
            if not value:
                raise ConfigError(f"{variable} is empty")
        if not _RUN_NAME.fullmatch(self.run):
            raise ConfigError(f"PP_RUN is {self.run!r}: use up to 64 letters, digits, '.', '_' or '-'")
        if self.secret and not re.fullmatch(r"[0-9a-fA-F]{64}", self.secret):
            raise ConfigError("PP_SECRET must be 64 hex digits (32 bytes), the same for all stages of the run")
        _choice("PP_WIRE", self.wire, ("bf16", "f16", "f32"))
        _choice("PP_READOUT", self.readout, ("auto", "first", "last"))
        _choice("PP_WEIGHTS", self.weights, ("16bit", "quantized"))
        _choice("PP_KERNELS", self.kernels, ("auto", "tinygrad"))
        if self.context is not None:
            _range("PP_CONTEXT", self.context, 1, MAX_CONTEXT)
        if self.slots is not None:
            _range("PP_SLOTS", self.slots, 1, MAX_SLOTS)
        if self.in_flight is not None:
            _range("PP_IN_FLIGHT", self.in_flight, 1, MAX_IN_FLIGHT)
        _range("PP_LANES", self.lanes, 1, MAX_SLOTS)
        _range("PP_MAX_WAITING", self.max_waiting, 1, MAX_WAITING)
        _range("PP_PREFILL_CHUNK", self.prefill_chunk, 1, MAX_CHUNK)
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"PP_MEMORY_SHARE is {self.memory_share}: give a part between 0 and 1")
        if not 0 <= self.audit_rate <= 1:
            raise ConfigError(f"PP_AUDIT_RATE is {self.audit_rate}: give a share of steps between 0 and 1")
        if not 0.1 <= self.lap_deadline_s <= 3600:
            raise ConfigError(f"PP_LAP_DEADLINE is {self.lap_deadline_s}: give seconds between 0.1 and 3600")

        if not 1 <= self.broker_grace_s <= 3600:
            raise ConfigError(f"PP_BROKER_GRACE is {self.broker_grace_s}: give seconds between 1 and 3600")

    @property
    def hub(self) -> Hub:
        return Hub(self.hf_endpoint, self.hf_token, self.hf_home)

    @property
    def secret_bytes(self) -> bytes:
        """The key that authenticates the run's frames, 32 bytes. Raises ConfigError when there is none."""
        if not self.secret:
            raise ConfigError("PP_SECRET is not set: give every stage of the run the same 64 hex digits")
        return bytes.fromhex(self.secret)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        """Settings of this process. An empty variable counts as not set."""
        environ = os.environ if environ is None else environ
        given = {
            f.name: _parse(f.metadata["env"], f.name, raw)
            for f in fields(cls)
            if (raw := environ.get(f.metadata["env"]))
        }
        return cls(**given)  # type: ignore[arg-type]

    @classmethod
    def of_this_machine(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        """Defaults, and what the environment says of this machine; not what it says of a stage or a run."""
        environ = os.environ if environ is None else environ
        return cls.from_env({name: environ[name] for name in _OF_THE_MACHINE if name in environ})

    def to_env(self) -> dict[str, str]:
        """The variables from which `from_env` makes these settings again; what a worker process is started with."""
        values = {f.metadata["env"]: getattr(self, f.name) for f in fields(self)}
        return {k: str(int(v) if isinstance(v, bool) else v) for k, v in values.items() if v is not None and v != ""}


_OF_THE_MACHINE = ("PP_CACHE", "CC", "PP_LAP_DEADLINE", "HF_ENDPOINT", "HF_TOKEN", "HF_HOME")
_PARSERS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(
        ("stage", "num_stages", "context", "slots", "prefill_chunk", "lanes", "in_flight", "max_waiting"), int
    ),
    **dict.fromkeys(("lap_deadline_s", "audit_rate", "broker_grace_s", "memory_share"), float),
    **dict.fromkeys(("cache", "hf_home"), Path),
    **dict.fromkeys(("lease", "verify"), lambda raw: {"0": False, "1": True}[raw]),
}


def _parse(variable: str, name: str, raw: str) -> object:
    try:
        return _PARSERS.get(name, str)(raw)
    except (ValueError, KeyError):
        kind = "0 or 1" if name in ("lease", "verify") else "a number"
        raise ConfigError(f"{variable} is {raw!r}: give {kind}") from None


def _range(variable: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{variable} is {value}: give a whole number from {low} to {high}")


def _choice(variable: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{variable} is {value!r}: give one of {', '.join(choices)}")


def without_account() -> dict[str, str]:
    """Our environment without keys to accounts that are not settings: for any process that we start."""
    return {k: v for k, v in os.environ.items() if k not in ("VAST_API_KEY", "HUGGING_FACE_HUB_TOKEN")}


def bare_environment() -> dict[str, str]:
    """Our environment without the settings' variables, secrets among them: for a process that needs none of them."""
    ours = {f.metadata["env"] for f in fields(Settings)}
    return {k: v for k, v in without_account().items() if k not in ours and not k.startswith("PP_")}


def child_environment(settings: Settings) -> dict[str, str]:
    """The environment of a worker process: ours, with the settings' variables and no other value of them."""
    return bare_environment() | settings.to_env()


def environment_elsewhere(settings: Settings) -> dict[str, str]:
    """What a worker on another machine is told: all but what only this machine knows, folders and a compiler."""
    ours = ("PP_CACHE", "CC", "HF_HOME")
    return {variable: value for variable, value in settings.to_env().items() if variable not in ours}


def worker_module(stage: int) -> tuple[str, ...]:
    """`python -m` this, in `child_environment`, is the worker of a stage."""
    name = ("-Q", stage_queue(stage), "-n", f"{stage_name(stage)}@%h", "--pool", "solo")
    return (
        "celery",
        "--quiet",
        "-A",
        "workers",
        "worker",
        *name,
        "-l",
        "WARNING",
        "--without-gossip",
        "--without-mingle",
    )
