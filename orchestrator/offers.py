"""Which machines to rent: data in, data out. What the provider filtered is filtered here again."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.provider import Need, Offer
from pptasks.errors import ProviderError, UsageError

SPARES = 8
NEAR_PREMIUM = 1.5  # what all stages in one country, or in one region, may cost at most, times the cheapest anywhere
PULL_GBIT = 48.0  # what a machine downloads before it works: an image and a share of a model, 6 GB

REGIONS = {
    "europe": "AL AT BA BE BG BY CH CY CZ DE DK EE ES FI FR GB GR HR HU IE IS IT LT LU LV MD ME MK MT NL NO PL PT RO RS"
    " SE SI SK UA UK XK",
    "north-america": "CA MX US",
    "south-america": "AR BO BR CL CO EC GY PE PY SR UY VE",
    "asia": "AM AZ BD BN CN GE HK ID IN JP KG KH KR KZ LA LK MM MN MO MY NP PH PK SG TH TW UZ VN",
    "middle-east": "AE BH IL IQ JO KW LB OM QA SA TR YE",
    "africa": "AO BW CI CM DZ EG ET GH KE MA MU MZ NA NG RW SN TN TZ UG ZA ZM ZW",
    "oceania": "AU FJ NC NZ PG",
}
_REGION_OF = {country: region for region, countries in REGIONS.items() for country in countries.split()}


@dataclass(frozen=True)
class Choice:
    """One offer for each stage, and what may replace them, best first. All are on machines of their own."""

    stages: tuple[Offer, ...]
    spares: tuple[Offer, ...]
    near: str  # the country or the region of all stages; "" if they are wherever they are

    @property
    def price_usd_hour(self) -> float:
        """Of all stages."""
        return sum(offer.price_usd_hour for offer in self.stages)


@dataclass(frozen=True)
class _Filter:
    wanted: str
    remedy: str
    fits: Callable[[Offer], bool]  # written so that NaN does not


def choose(offers: Iterable[Offer], need: Need, n: int, spares: int = SPARES) -> Choice:
    """The n machines that `need` describes, and up to `spares` more.

    Cheapest first, where a price counts for more if the machine is unreliable or its download slow. A preferred GPU
    comes before others; all stages in one country, else in one region, before a lower price, up to NEAR_PREMIUM; owners
    that are not the same before a lower price. The order of `offers` does not matter. ProviderError if fewer than n
    machines fit: how many there are, and which filter is in the way.
    """
    offers = sorted(set(offers), key=repr)
    filters = _filters(need)
    fitting = sorted((o for o in offers if all(f.fits(o) for f in filters)), key=lambda offer: _order(offer, need))
    cheapest = _pick(fitting, n)
    if len(cheapest) < n:
        raise ProviderError(_too_few(offers, filters, fitting, n))
    near, stages = _nearest(fitting, cheapest, need)
    left = sorted(fitting, key=lambda offer: not (near and near in _places(offer)))  # stable: the order within stays
    return Choice(stages, _pick(left, spares, taken=stages), near)


def region_countries(region: str) -> frozenset[str]:
    """Two-letter codes of a region or of a country. UsageError for a name that is neither."""
    name = region.strip()
    if name.lower() in REGIONS:
        return frozenset(REGIONS[name.lower()].split())
    if len(name) == 2 and name.isascii() and name.isalpha():
        return frozenset((name.upper(),))
    raise UsageError(f"region {region[:40]!r}: give a country's two letters, or one of {', '.join(REGIONS)}")


def country(offer: Offer) -> str:
    """Two letters, from "Sweden, SE" or "SE"; "" if it is not known."""
    code = offer.geolocation.rsplit(",", 1)[-1].strip().upper()
    return code if len(code) == 2 and code.isascii() and code.isalpha() else ""


def _filters(need: Need) -> list[_Filter]:
    countries = region_countries(need.region) if need.region else None
    vram, price = need.min_vram_bytes, need.max_price_usd_hour
    return [
        _Filter("are one GPU", "there is no option for others", lambda o: o.n_gpus == 1),
        _Filter(f"have {vram / 1e9:.1f} GB of GPU memory", "lower --min-vram", lambda o: o.vram_bytes >= vram),
        _Filter(f"cost at most ${price:.3f}/h", "raise --max-price", lambda o: 0 < o.price_usd_hour <= price),
        _Filter(f"have {need.disk_gb:.0f} GB of disk", "lower --disk", lambda o: o.disk_gb >= need.disk_gb),
        _Filter(
            f"download {need.min_down_mbps:.0f} Mbit/s",
            "lower --min-down",
            lambda o: o.down_mbps > 0 and o.down_mbps >= need.min_down_mbps,
        ),
        _Filter(
            f"are in {need.region}", "give another --region", lambda o: countries is None or country(o) in countries
        ),
        _Filter(
            f"are {need.min_reliability:.0%} reliable",
            "try again later",
            lambda o: 0 < o.reliability <= 1 and o.reliability >= need.min_reliability,
        ),
        _Filter(f"run CUDA {need.min_cuda}", "try again later", lambda o: o.cuda >= need.min_cuda),
    ]


def _cost(offer: Offer) -> float:
    """$ for the first hour of work: the time until then is paid too, and what fails is paid again."""
    pull_h = PULL_GBIT * 1000 / offer.down_mbps / 3600
    return offer.price_usd_hour * (1 + pull_h) / offer.reliability


def _is_preferred(offer: Offer, need: Need) -> bool:
    return _plain(need.gpu) in _plain(offer.gpu_name)


def _plain(gpu: str) -> str:
    return "".join(letter for letter in gpu.lower() if letter.isalnum())


def _order(offer: Offer, need: Need) -> tuple[bool, float, float, str]:
    return not _is_preferred(offer, need), _cost(offer), -offer.cuda, offer.id


def _pick(ordered: Sequence[Offer], n: int, taken: Sequence[Offer] = ()) -> tuple[Offer, ...]:
    """The first n on machines that are neither taken nor each other's: of owners not yet seen, then of any."""
    machines, hosts = {offer.machine_id for offer in taken}, {offer.host_id for offer in taken}
    picked: list[Offer] = []
    for any_host in (False, True):
        for offer in ordered:
            if len(picked) < n and offer.machine_id not in machines and (any_host or offer.host_id not in hosts):
                picked.append(offer)
                machines.add(offer.machine_id)
                hosts.add(offer.host_id)
    return tuple(picked)


def _places(offer: Offer) -> tuple[str, ...]:
    """Country and region, as far as they are known."""
    code = country(offer)
    return tuple(place for place in (code, _REGION_OF.get(code, "")) if place)


def _nearest(fitting: Sequence[Offer], cheapest: tuple[Offer, ...], need: Need) -> tuple[str, tuple[Offer, ...]]:
    """(place, the stages there): a country, else a region, else nowhere in particular and `cheapest`."""
    n, limit = len(cheapest), NEAR_PREMIUM * sum(map(_cost, cheapest))
    preferred = sum(_is_preferred(offer, need) for offer in cheapest)
    found = []
    for place in {place for offer in fitting for place in _places(offer)}:
        stages = _pick([offer for offer in fitting if place in _places(offer)], n)
        cost = sum(map(_cost, stages))
        as_wanted = sum(_is_preferred(offer, need) for offer in stages) >= preferred
        if len(stages) == n and cost <= limit and as_wanted:
            found.append((place in REGIONS, cost, place, stages))
    return min(found)[2:] if found else ("", cheapest)


def _too_few(offers: Sequence[Offer], filters: Sequence[_Filter], fitting: Sequence[Offer], n: int) -> str:
    """Names the filter that removed most."""
    machines = len({offer.machine_id for offer in fitting})
    counts = f"{n} machines are needed; of {len(offers)} offers {len(fitting)} fit, on {machines} machines"
    if not offers:
        return f"{counts}: none is for rent now; raise --max-price, lower --min-vram or --min-down, or try again later"
    removed = [(sum(not f.fits(offer) for offer in offers), f) for f in filters]
    most, worst = max(removed, key=lambda pair: pair[0])  # the first of equals
    if most == 0:
        return f"{counts}: ask for fewer stages, or try again later"
    return f"{counts}: {most} do not {_negated(worst.wanted)}; {worst.remedy}"


def _negated(wanted: str) -> str:
    """ "are in europe" -> "be in europe", to follow "do not"."""
    return "be" + wanted.removeprefix("are") if wanted.startswith("are ") else wanted
