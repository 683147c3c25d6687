"""What holds of every choice of offers."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.offers import Choice, choose, country, region_countries
from orchestrator.provider import Need, Offer
from pptasks.errors import ProviderError

numbers = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 2000)
few = st.integers(0, 8).map(str)
OFFERS = st.lists(
    st.builds(
        Offer,
        id=st.integers(1, 10**6).map(str),
        machine_id=few,
        host_id=few,
        gpu_name=st.sampled_from(["RTX 3090", "RTX 4090", ""]),
        n_gpus=st.sampled_from([1, 1, 1, 2]),
        vram_bytes=st.sampled_from([0, 8, 24]).map(lambda gb: gb * 10**9),
        price_usd_hour=st.floats(0.01, 1.2) | numbers,
        reliability=st.floats(0.9, 1) | numbers,
        cuda=st.sampled_from([12.8, 12.2, float("nan")]),
        up_mbps=numbers,
        down_mbps=st.floats(50, 1000) | numbers,
        disk_gb=st.floats(10, 100) | numbers,
        geolocation=st.sampled_from(["Sweden, SE", "Norway, NO", "Texas, US", "Japan, JP", "", "?"]),
    ),
    max_size=24,
)
NEEDS = st.builds(
    Need,
    min_vram_bytes=st.sampled_from([0, 8 * 10**9]),
    region=st.sampled_from(["", "", "SE", "europe"]),
    gpu=st.sampled_from(["", "4090"]),
)


def fits(offer: Offer, need: Need) -> bool:
    """Every filter, said once more."""
    return (
        offer.n_gpus == 1
        and offer.vram_bytes >= need.min_vram_bytes
        and 0 < offer.price_usd_hour <= need.max_price_usd_hour
        and offer.disk_gb >= need.disk_gb
        and offer.down_mbps >= need.min_down_mbps
        and need.min_reliability <= offer.reliability <= 1
        and offer.cuda >= need.min_cuda
        and (not need.region or country(offer) in region_countries(need.region))
    )


def chosen(offers: list[Offer], need: Need, n: int) -> Choice | str:
    try:
        return choose(offers, need, n)
    except ProviderError as error:
        return str(error)


@given(OFFERS, NEEDS, st.integers(1, 4), st.randoms())
@settings(max_examples=150, deadline=None)
def test_every_choice(offers: list[Offer], need: Need, n: int, random) -> None:  # type: ignore[no-untyped-def]
    choice = chosen(offers, need, n)
    machines = {offer.machine_id for offer in offers if fits(offer, need)}
    if isinstance(choice, str):
        assert len(machines) < n
        assert choice.startswith(f"{n} machines are needed; of {len(set(offers))} offers ")
    else:
        taken = [*choice.stages, *choice.spares]
        assert len(choice.stages) == n
        assert len(choice.spares) == min(8, len(machines) - n)
        assert all(fits(offer, need) for offer in taken)
        assert len({offer.machine_id for offer in taken}) == len(taken)
        assert set(taken) <= set(offers)
    shuffled = random.sample(offers, len(offers))
    assert chosen(shuffled, need, n) == choice


@given(OFFERS, NEEDS, st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_without_places_and_wishes_the_cheapest_of_equals_are_taken(offers: list[Offer], need: Need, n: int) -> None:
    plain = replace(need, gpu="", region="")
    same = [
        replace(o, id=str(i), machine_id=str(i), host_id=str(i), geolocation="", down_mbps=500.0, reliability=0.99)
        for i, o in enumerate(offers)
    ]
    choice = chosen(same, plain, n)
    if not isinstance(choice, str):
        prices = sorted(o.price_usd_hour for o in same if fits(o, plain))
        assert sorted(o.price_usd_hour for o in choice.stages) == prices[:n]
