"""Of any mix of ledger rows and listed machines, what is chosen is ours, and everything of a dead run of ours is."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.labels import Label
from orchestrator.ledger import Rental
from orchestrator.provider import Instance, Instances, State
from orchestrator.sweep import leftovers

NOW, US, THEM = 1000.0, "00000001", "00000002"
PROVIDERS = ("vast", "local")
RUNS = ("run-a", "run-b", "run-c")
few = st.integers(1, 6).map(str)  # ids of two providers look alike
LABELS = st.builds(
    lambda owner, run, stage, deadline, nonce: str(Label(owner, run, stage, deadline, nonce)),
    owner=st.sampled_from([US, THEM]),
    run=st.sampled_from(RUNS),
    stage=st.integers(0, 1),
    deadline=st.sampled_from([0, 1, 999, 1000, 1001, 5000]),
    nonce=st.sampled_from(["0000", "0001"]),
)
LOOKALIKES = st.sampled_from(["", "pptasks", "pptasks-", "pptasks-evil", "pptasks-00000001-", "mine"]) | st.builds(
    lambda label, change: change(label),
    LABELS,
    st.sampled_from([
        str.upper, lambda s: s + " ", lambda s: s[:-1], lambda s: s.replace("pptasks", "pptasks2"),
        lambda s: "x" + s, lambda s: s + "-0000", lambda s: s.replace("-0-", "-+0-"),
    ]),
)  # fmt: skip
World = tuple[list[Rental], dict[str, Instances]]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A ledger and what is listed, with few labels and few ids for all of them."""
    texts = draw(st.lists(LABELS | LOOKALIKES, min_size=1, max_size=6, unique=True))
    rows = [
        Rental(
            label=text,
            run=parsed.run if (parsed := Label.parse(text)) else draw(st.sampled_from(RUNS)),
            stage=0,
            provider=draw(st.sampled_from([*PROVIDERS, "ssh"])),
            offer_id="5",
            deadline=parsed.deadline if parsed else draw(st.sampled_from([0.0, 999.0, 1001.0])),
            intended_at=0.0,
            instance_id=draw(st.none() | few),
            destroyed_at=draw(st.none() | st.just(900.0)),
        )
        for text in texts
        if draw(st.booleans())
    ]
    instances = st.builds(
        Instance,
        id=few,
        label=st.sampled_from(texts),
        state=st.sampled_from(State),
        status=st.just(""),
        price_usd_hour=st.just(0.1),
        started_at=st.none(),
    )
    lists = st.lists(instances, max_size=6, unique_by=lambda instance: instance.id)
    return rows, draw(st.dictionaries(st.sampled_from(PROVIDERS), lists))


def is_ours(provider: str, instance_id: str | None, text: str, rows: list[Rental], listed: Mapping[str, Instances],
            live: set[str], all_: bool, run: str | None) -> bool:  # fmt: skip
    """The definition, said once more."""
    row = next((r for r in rows if (r.provider, r.label) == (provider, text) and r.destroyed_at is None), None)
    shown = [i for i in listed.get(provider, []) if i.id == instance_id]
    if shown and shown[0].label != text:
        return False  # another machine
    if instance_id is None and any(i.label == text for i in listed.get(provider, [])):
        return False  # it is found, with its id
    if not shown and (row is None or row.instance_id != instance_id):
        return False  # nobody ever said that there is such a machine
    origin = row or Label.parse(text)
    if origin is None:
        return False
    ours = row is not None or (isinstance(origin, Label) and origin.owner == US)
    if run is not None:
        return ours and origin.run == run
    return (ours and (all_ or origin.run not in live)) or 0 < origin.deadline < NOW


@given(worlds(), st.sets(st.sampled_from(RUNS)), st.booleans(), st.none() | st.sampled_from(RUNS))
def test_ours_and_nothing_else(world: World, live: set[str], all_: bool, run: str | None) -> None:
    rows, listed = world
    found = leftovers(rows, listed, US, live.__contains__, NOW, all_=all_, run=run)
    chosen = [(x.provider, x.instance_id, x.label) for x in found]
    assert len(set(chosen)) == len(chosen)

    def ours(provider: str, instance_id: str | None, text: str) -> bool:
        return is_ours(provider, instance_id, text, rows, listed, live, all_, run)

    assert all(ours(*each) for each in chosen)
    there = [(provider, i.id, i.label) for provider, instances in listed.items() for i in instances]
    assert {each for each in there if ours(*each)} <= set(chosen)
    for row in rows:
        known = (row.provider, row.instance_id, row.label)
        found_by_label = row.instance_id is None and any(c[0] == row.provider and c[2] == row.label for c in chosen)
        assert known in chosen or found_by_label or not ours(*known)
    for x in found:
        assert x.listed == ((x.provider, x.instance_id, x.label) in there)


@given(worlds(), st.sets(st.sampled_from(RUNS)))
def test_a_living_run_keeps_what_it_uses(world: World, live: set[str]) -> None:
    rows, listed = world
    for x in leftovers(rows, listed, US, live.__contains__, NOW):
        assert x.run not in live or 0 < x.deadline < NOW


@given(worlds())
def test_a_row_that_is_closed_says_nothing(world: World) -> None:
    """But its label still does."""
    rows, listed = world
    still_open = [row for row in rows if row.destroyed_at is None]
    every = leftovers(rows, listed, US, lambda run: False, NOW)
    assert every == leftovers(still_open, listed, US, lambda run: False, NOW)
