"""What goes to the API of vast.ai and what comes back, as values: no I/O. An unknown field is passed over, a number or
a text of the wrong type counts as none."""

import math
from typing import cast

from orchestrator.labels import Label
from orchestrator.offers import region_countries
from orchestrator.provider import IMAGE_FAULTS, Instance, Need, Offer, Order, State
from orchestrator.vastcalls import Scrubber
from pptasks.errors import ProviderError

MAX_OFFERS, MIN_DISK_GB, MAX_ENV = 64, 8, 256
MB = 10**6  # vast.ai tells MiB for some GPUs: we never count on memory that is not there

_STATES = {
    "provisioning": State.CREATING, "created": State.CREATING, "loading": State.LOADING, "rebooting": State.LOADING,
    "running": State.RUNNING,
} | dict.fromkeys(("stopped", "frozen", "exited", "offline", "unknown"), State.ENDED)  # fmt: skip
_FATAL = (*IMAGE_FAULTS, "oci runtime create failed")


def offer_query(need: Need) -> dict[str, object]:
    query: dict[str, object] = {
        "verified": {"eq": True},
        "rentable": {"eq": True},
        "rented": {"eq": False},
        "external": {"eq": False},
        "num_gpus": {"eq": 1},
        "gpu_ram": {"gte": math.ceil(need.min_vram_bytes / MB)},
        "disk_space": {"gte": need.disk_gb},
        "inet_down": {"gte": need.min_down_mbps},
        "dph_total": {"lte": need.max_price_usd_hour},
        "reliability2": {"gte": need.min_reliability},
        "cuda_max_good": {"gte": need.min_cuda},
        "order": [["dph_total", "asc"]],
        "type": "bid" if need.spot else "on-demand",
        "limit": MAX_OFFERS,
        "allocated_storage": need.disk_gb,
    }
    return query | ({"geolocation": {"in": sorted(region_countries(need.region))}} if need.region else {})


def order_body(order: Order) -> dict[str, object]:
    """ProviderError for a variable that would be cut short."""
    for name, value in order.env.items():
        if len(value) > MAX_ENV:
            raise ProviderError(f"{name} has {len(value)} characters; vast.ai passes on {MAX_ENV}")
    body: dict[str, object] = {
        "image": order.image,
        "disk": max(MIN_DISK_GB, order.disk_gb),
        "label": order.label,
        "runtype": "args",
        "onstart": "/bin/sh",
        "args": ["-c", order.command],
        "env": dict(order.env),
        "cancel_unavail": True,
    }
    return body if order.spot_price_usd_hour is None else body | {"price": order.spot_price_usd_hour}


def read_offer(raw: object, scrubber: Scrubber) -> Offer | None:
    """None for what cannot be rented, though the search asked for nothing else, or has no id."""
    if not isinstance(raw, dict) or raw.get("rentable") is False or raw.get("rented") or raw.get("external"):
        return None
    if raw.get("verification", "verified") != "verified":
        return None
    offer_id, machine_id = id_of(raw.get("id")), id_of(raw.get("machine_id"))
    if not offer_id or not machine_id:
        return None
    return Offer(
        id=offer_id,
        machine_id=machine_id,
        host_id=id_of(raw.get("host_id")),
        gpu_name=scrubber.message(str(raw.get("gpu_name") or "")),
        n_gpus=int(_number(raw.get("num_gpus"))),
        vram_bytes=int(_number(raw.get("gpu_ram"))) * MB,
        price_usd_hour=_number(raw.get("dph_total")),
        reliability=_number(raw.get("reliability2")),
        cuda=_number(raw.get("cuda_max_good")),
        up_mbps=_number(raw.get("inet_up")),
        down_mbps=_number(raw.get("inet_down")),
        disk_gb=_number(raw.get("disk_space")),
        geolocation=scrubber.message(str(raw.get("geolocation") or "")),
    )


def read_instance(raw: object, scrubber: Scrubber) -> Instance | None:
    """None if it has no id."""
    if not isinstance(raw, dict) or not (instance_id := id_of(raw.get("id"))):
        return None
    label = str(raw.get("label") or "")  # one of ours holds no secret, and must not be taken for another's
    word, message = str(raw.get("actual_status") or "provisioning"), str(raw.get("status_msg") or "")
    cannot_run = any(text in message.lower() for text in _FATAL)
    return Instance(
        id=instance_id,
        label=label if Label.parse(label) else scrubber.log(label),
        state=State.ENDED if cannot_run else _STATES.get(word, State.UNKNOWN),
        status=scrubber.message(f"{word}: {message}" if message else word),
        price_usd_hour=_number(raw.get("dph_total")),
        started_at=_number(raw.get("start_date")) or None,
    )


def id_of(value: object) -> str:
    """Digits, or an empty text for what is no id."""
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    return text if text.isascii() and text.isdigit() and len(text) <= 20 and text.strip("0") else ""


def _number(value: object) -> float:
    """0 for what is no number, and so fits no need."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e15:
        return 0.0
    return float(cast(float, value))
