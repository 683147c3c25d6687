"""What all handlers of one server share."""

import time
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.serve.health import Health
from orchestrator.stages import Cluster
from pptasks.aio import AsyncClient
from pptasks.modelinfo import Model


class Observer(Protocol):
    """What is told of requests as they are served; see metrics.py."""

    def request(self, endpoint: str, status: int) -> None:
        """One was answered, or refused. `endpoint`: "chat.completions", "completions", "models"."""

    def first_token(self, seconds: float) -> None:
        """Since the request came."""

    def inter_token(self, seconds: float) -> None:
        """Between two pieces of one answer."""

    def ended(self, finish_reason: str, prompt_tokens: int, completion_tokens: int, seconds: float) -> None:
        """One answer: "stop", "length", "cancelled" or "failed"; how long it took since the request came."""


@dataclass(frozen=True)
class Limits:
    """`queue`: answers that are being made or waited for at once. `body`: bytes of one request, `bodies` of all that
    are being read. `silence_s`: the longest time without a token; `body_s`: for a body to come."""

    queue: int = 128
    body: int = 8 << 20
    bodies: int = 64 << 20
    silence_s: float = 120.0
    body_s: float = 30.0


@dataclass(frozen=True)
class Access:
    """`api_key`: what clients must send; None: nothing. `local_only`: requests must call this server by a name of this
    machine. `origins`: of the web pages elsewhere that may use it."""

    api_key: str | None = field(default=None, repr=False)
    local_only: bool = False
    origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServeState:
    cluster: Cluster
    model: Model
    client: AsyncClient
    observe: Observer
    health: Health = field(default_factory=Health)
    limits: Limits = field(default_factory=Limits)
    access: Access = field(default_factory=Access)
    started_at: float = field(default_factory=time.time)  # Unix time

    @property
    def api_key(self) -> str | None:
        return self.access.api_key

    @property
    def fingerprint(self) -> str:
        """Of all that the tokens depend on: the model, and how it is computed."""
        return f"fp_{self.cluster.plan.digest.hex()[:12]}"
