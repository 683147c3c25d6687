"""The offers of the fake, and its search."""

import operator
from collections.abc import Callable, Mapping, Sequence

MAX_OFFERS = 64
_OPERATORS: dict[str, Callable[[object, object], object]] = {
    "eq": operator.eq,
    "neq": operator.ne,
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
    "in": lambda value, wanted: value in wanted,
    "notin": lambda value, wanted: value not in wanted,
}
_OPTIONS = ("order", "type", "limit", "allocated_storage")
_PLACES = ("Sweden, SE", "Norway, NO", "Sweden, SE", "Texas, US", "Japan, JP")


class BadQuery(Exception):
    pass


def offers(n: int, **changes: object) -> list[dict[str, object]]:
    """n offers on machines of their own, the first the cheapest. `changes` is for all of them."""
    return [_offer(i) | changes for i in range(n)]


def _offer(i: int) -> dict[str, object]:
    return {
        "id": 5000 + i,
        "machine_id": 700 + i,
        "host_id": 90 + i,
        "gpu_name": ("RTX 3090", "RTX 4090", "RTX A5000")[i % 3],
        "num_gpus": 1,
        "gpu_ram": 24564,
        "dph_total": round(0.1 + 0.01 * i, 4),
        "min_bid": round(0.05 + 0.01 * i, 4),
        "reliability2": 0.99,
        "cuda_max_good": 12.8,
        "inet_up": 500.0,
        "inet_down": 900.0,
        "disk_space": 200.0,
        "geolocation": _PLACES[i % len(_PLACES)],
        "rentable": True,
        "rented": False,
        "external": False,
        "verified": True,
        "verification": "verified",
    }


def search(market: Sequence[Mapping[str, object]], query: object, ignored: frozenset[str]) -> list[dict[str, object]]:
    """What the API answers with; filters on the fields `ignored` are not applied. BadQuery: `invalid_args`."""
    if not isinstance(query, dict) or query.get("type", "on-demand") not in ("on-demand", "bid"):
        raise BadQuery("type")
    limit = query.get("limit", MAX_OFFERS)
    if not isinstance(limit, int) or not 0 < limit <= MAX_OFFERS:
        raise BadQuery("limit")
    found = [dict(offer) for offer in market if _matches(offer, query, ignored)]
    if query.get("type") == "bid":
        for offer in found:
            offer["dph_total"] = offer["min_bid"]
    for name, direction in reversed(query.get("order", [])):
        found.sort(key=lambda offer, name=name: offer[name], reverse=direction == "desc")
    return found[:limit]


def _matches(offer: Mapping[str, object], query: Mapping[str, object], ignored: frozenset[str]) -> bool:
    for name, conditions in query.items():
        if name in _OPTIONS:
            continue
        if name not in offer or not isinstance(conditions, dict) or not conditions.keys() <= _OPERATORS.keys():
            raise BadQuery(name)
        value = str(offer[name]).rsplit(", ")[-1] if name == "geolocation" else offer[name]
        if name == "dph_total" and query.get("type") == "bid":
            value = offer["min_bid"]
        if name not in ignored and not all(_OPERATORS[op](value, wanted) for op, wanted in conditions.items()):
            return False
    return True
