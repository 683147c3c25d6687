"""Who rents out machines, as the rest of the orchestrator sees them: one protocol and the values that cross it.

No value of these types shows a secret in its `repr`, and no text in them holds a control character.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


@dataclass(frozen=True)
class Need:
    """What each machine of a run must have."""

    min_vram_bytes: int
    count: int = 1  # machines; a provider that has a market shows all of it
    disk_gb: float = 20.0
    min_down_mbps: float = 100.0
    max_price_usd_hour: float = 1.0
    region: str = ""  # a country's two letters, or a name of offers.REGIONS; "": anywhere
    gpu: str = ""  # part of a name, preferred where there is a choice
    spot: bool = False  # may be taken away at any time, for a lower price
    min_reliability: float = 0.95
    min_cuda: float = 12.4


@dataclass(frozen=True)
class Offer:
    """One machine that can be rented now, with one price."""

    id: str
    machine_id: str
    host_id: str
    gpu_name: str
    n_gpus: int
    vram_bytes: int  # of one GPU
    price_usd_hour: float  # with the disk that was asked for
    reliability: float  # 0..1
    cuda: float  # newest version that its driver runs
    up_mbps: float
    down_mbps: float
    disk_gb: float
    geolocation: str  # "Sweden, SE"; "" where it is not known


@dataclass(frozen=True)
class Order:
    """What a rented machine is to run."""

    image: str
    label: str
    command: str = field(repr=False)  # for /bin/sh -c
    env: Mapping[str, str] = field(repr=False)
    disk_gb: float
    spot_price_usd_hour: float | None = None


# What providers say of an image that no machine can pull.
IMAGE_FAULTS = ("manifest unknown", "pull access denied", "failed to resolve reference", "unauthorized:")


class State(Enum):
    """Where a machine stands. It costs money in every state; only `destroy` ends that."""

    CREATING = "creating"
    LOADING = "loading"  # its image is pulled; for ever on some hosts
    RUNNING = "running"
    ENDED = "ended"  # exited, out of reach, or an image that cannot run: it will not do its job any more
    UNKNOWN = "unknown"  # a word of the provider's that we do not know


@dataclass(frozen=True)
class Instance:
    """A rented machine, as the provider describes it."""

    id: str
    label: str
    state: State
    status: str  # the provider's own words
    price_usd_hour: float
    started_at: float | None  # Unix time


Offers = list[Offer]
Instances = list[Instance]


class Provider(Protocol):
    """Every method may be called from several threads at once, and raises ProviderError."""

    @property
    def name(self) -> str: ...

    def search(self, need: Need) -> Offers:
        """What could be rented now. A provider may ignore parts of `need`: `offers.choose` checks all of it."""

    def create(self, offer: Offer, order: Order) -> str:
        """Rent; the new instance's id, which no other provider uses.

        OfferGone: take another. CreatedAnyway: it was refused, but a machine bills; destroy it. NoAnswer: nothing with
        the order's label is there so far, but may come up later; never repeat a label.
        """

    def get(self, instance_id: str) -> Instance | None:
        """None: it does not exist (any more)."""

    def list(self, label_prefix: str) -> Instances:
        """All instances whose label begins so, or an error: never a part of them."""

    def destroy(self, instance_id: str) -> None:
        """End it. Returns when it is confirmed to be gone, or never was; otherwise raises an error."""

    def logs(self, instance_id: str, lines: int) -> str:
        """The last lines that its container wrote, oldest first."""
