"""Which offers are taken, in cases that can be read; tests/property/test_offers.py has what holds of all."""

from dataclasses import replace

import pytest

from orchestrator.offers import REGIONS, choose, country, region_countries
from orchestrator.provider import Need, Offer
from pptasks.errors import ProviderError, UsageError

GB = 10**9
NEED = Need(min_vram_bytes=8 * GB)


def offer(i: int, **changes: object) -> Offer:
    """The i-th cheapest, on a machine of its own."""
    base = Offer(
        id=str(100 + i), machine_id=str(i), host_id=str(i), gpu_name="RTX 3090", n_gpus=1, vram_bytes=24 * GB,
        price_usd_hour=0.2 + 0.001 * i, reliability=0.99, cuda=12.8, up_mbps=500, down_mbps=900, disk_gb=100,
        geolocation="Sweden, SE",
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def ids(offers: tuple[Offer, ...]) -> list[int]:
    return [int(o.id) - 100 for o in offers]


def test_the_cheapest_and_the_spares_after_them() -> None:
    choice = choose([offer(i) for i in (5, 3, 1, 0, 4, 2)], NEED, 2, spares=3)
    assert (ids(choice.stages), ids(choice.spares), choice.near) == ([0, 1], [2, 3, 4], "SE")
    assert choice.price_usd_hour == pytest.approx(0.401)


def test_eight_spares_are_taken_if_there_are_so_many() -> None:
    assert len(choose([offer(i) for i in range(20)], NEED, 2).spares) == 8
    assert len(choose([offer(i) for i in range(5)], NEED, 2).spares) == 3


def test_one_machine_is_one_stage() -> None:
    offers = [offer(0), offer(1, machine_id="0"), offer(2, machine_id="0"), offer(3)]
    choice = choose(offers, NEED, 2)
    assert (ids(choice.stages), choice.spares) == ([0, 3], ())
    with pytest.raises(ProviderError, match=r"3 machines are needed; of 4 offers 4 fit, on 2 machines"):
        choose(offers, NEED, 3)


def test_owners_are_different_where_they_can_be() -> None:
    offers = [offer(0, host_id="a"), offer(1, host_id="a"), offer(2, host_id="b")]
    assert ids(choose(offers, NEED, 2).stages) == [0, 2]
    assert ids(choose(offers, NEED, 3).stages) == [0, 2, 1]


FILTERS: list[tuple[dict[str, object], str]] = [
    ({"vram_bytes": 8 * GB - 1}, r"have 8\.0 GB of GPU memory; lower --min-vram"),
    ({"price_usd_hour": 1.001}, r"cost at most \$1\.000/h; raise --max-price"),
    ({"price_usd_hour": 0.0}, "raise --max-price"),
    ({"price_usd_hour": -1.0}, "raise --max-price"),
    ({"price_usd_hour": float("nan")}, "raise --max-price"),
    ({"disk_gb": 19.9}, "have 20 GB of disk; lower --disk"),
    ({"down_mbps": 99.0}, "download 100 Mbit/s; lower --min-down"),
    ({"geolocation": "Texas, US"}, "be in SE; give another --region"),
    ({"geolocation": ""}, "be in SE; give another --region"),
    ({"reliability": 0.94}, "be 95% reliable"),
    ({"reliability": float("nan")}, "be 95% reliable"),
    ({"cuda": 12.3}, r"run CUDA 12\.4"),
    ({"n_gpus": 2}, "be one GPU"),
]


@pytest.mark.parametrize(("changes", "told"), FILTERS)
def test_what_does_not_fit_is_not_taken_and_the_reason_is_told(changes: dict[str, object], told: str) -> None:
    need = replace(NEED, region="SE")
    offers = [offer(0), *(offer(i, **changes) for i in (1, 2))]
    choice = choose(offers, need, 1)
    assert (ids(choice.stages), choice.spares) == ([0], ())
    with pytest.raises(ProviderError, match=rf"of 3 offers 1 fit, on 1 machines: 2 do not {told}"
                       if told.startswith(("have", "cost", "down", "be", "run")) else told):  # fmt: skip
        choose(offers, need, 2)


def test_the_filter_that_removed_most_is_named() -> None:
    offers = [offer(0, cuda=11.0), *(offer(i, price_usd_hour=3.0) for i in (1, 2, 3)), offer(4, disk_gb=1.0)]
    with pytest.raises(ProviderError, match=r"of 5 offers 0 fit, on 0 machines: 3 do not cost at most"):
        choose(offers, NEED, 1)


def test_no_offers_at_all() -> None:
    with pytest.raises(ProviderError, match=r"2 machines are needed; of 0 offers 0 fit, .* none is for rent now"):
        choose([], NEED, 2)


def test_one_country_before_a_lower_price_but_not_at_any_price() -> None:
    scattered = [offer(0, geolocation="Texas, US"), offer(1, geolocation="Japan, JP"), offer(2, geolocation="")]
    near = [offer(3, price_usd_hour=0.25), offer(4, price_usd_hour=0.26)]
    choice = choose(scattered + near, NEED, 2)
    assert (ids(choice.stages), ids(choice.spares), choice.near) == ([3, 4], [0, 1, 2], "SE")
    dear = [replace(o, price_usd_hour=0.5) for o in near]
    choice = choose(scattered + dear, NEED, 2)
    assert (ids(choice.stages), choice.near) == ([0, 1], "")


def test_one_region_where_no_country_has_enough() -> None:
    places = ["Texas, US", "Norway, NO", "Japan, JP", "Sweden, SE"]
    choice = choose([offer(i, geolocation=place) for i, place in enumerate(places)], NEED, 2)
    assert (ids(choice.stages), choice.near) == ([1, 3], "europe")


def test_a_preferred_gpu_comes_first_and_is_no_must() -> None:
    offers = [offer(0), offer(1), offer(2, gpu_name="RTX 4090", geolocation="Japan, JP", price_usd_hour=0.9)]
    need = replace(NEED, gpu="rtx4090")
    assert ids(choose(offers, need, 1).stages) == [2]
    assert ids(choose(offers, need, 2).stages) == [2, 0]
    assert ids(choose(offers, replace(NEED, gpu="H200"), 2).stages) == [0, 1]


def test_a_slow_or_an_unreliable_machine_must_be_cheaper() -> None:
    assert ids(choose([offer(0, down_mbps=100), offer(1)], NEED, 1).stages) == [1]
    assert ids(choose([offer(0, reliability=0.95), offer(1)], NEED, 1).stages) == [1]
    assert ids(choose([offer(0, down_mbps=100, price_usd_hour=0.1), offer(1)], NEED, 1).stages) == [0]


def test_a_newer_driver_decides_between_equals() -> None:
    assert ids(choose([offer(0), offer(1, price_usd_hour=0.2, cuda=13.0)], NEED, 1).stages) == [1]


@pytest.mark.parametrize(
    ("text", "code"),
    [("Sweden, SE", "SE"), ("se", "SE"), (", US", "US"), ("", ""), ("Sweden", ""), ("Korea, Republic of, KR", "KR")],
)
def test_country(text: str, code: str) -> None:
    assert country(offer(0, geolocation=text)) == code


def test_regions() -> None:
    assert region_countries("SE") == region_countries(" se ") == {"SE"}
    assert {"SE", "DE"} <= region_countries("Europe")
    codes = [code for countries in REGIONS.values() for code in countries.split()]
    assert len(codes) == len(set(codes))
    assert all(len(code) == 2 and code.isupper() for code in codes)
    with pytest.raises(UsageError, match="europe, north-america"):
        region_countries("Atlantis")
