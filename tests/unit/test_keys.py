"""Names: all under the run's prefix, and no two of them alike."""

import pytest

from pptasks.keys import ENTRY, EXIT, Keys, names_of, stage_name, stage_queue


def all_keys(run: str) -> list[str]:
    keys = Keys(run)
    per_stage = [of(stage) for stage in range(12) for of in (keys.lock, keys.member, keys.log)]
    per_seat = [of(seat) for seat in range(1, 12) for of in (keys.guest, keys.guest_lock, keys.guest_stage)]
    names = [keys.name(name) for stage in range(3) for name in names_of(stage, 3)]
    return [keys.lease, keys.owner, keys.guests, *per_stage, *per_seat, *names, keys.stream("1"), keys.stream("lease")]


def test_every_key_carries_the_runs_prefix() -> None:
    assert Keys("demo").prefix == "pp:demo:"
    assert all(key.startswith("pp:demo:") for key in all_keys("demo"))


def test_no_two_keys_are_alike() -> None:
    queues = [Keys("demo").prefix + stage_queue(stage) for stage in range(12)]  # as kombu stores them
    found = [*all_keys("demo"), *queues]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("other", ["demo2", "dem", "demo.lock", "demo-0", "pp", "Demo"])
def test_two_runs_do_not_meet(other: str) -> None:
    assert not set(all_keys("demo")) & set(all_keys(other))
    assert not Keys(other).prefix.startswith(Keys("demo").prefix)
    assert not Keys("demo").prefix.startswith(Keys(other).prefix)


def test_the_ends_have_a_name_of_their_own() -> None:
    assert names_of(0, 3) == (stage_name(0), ENTRY)
    assert names_of(1, 3) == (stage_name(1),)
    assert names_of(2, 3) == (stage_name(2), EXIT)
    assert names_of(0, 1) == (stage_name(0), ENTRY, EXIT)
    assert (stage_name(2), ENTRY, EXIT) == ("pp-stage-2", "pp-entry", "pp-exit")


def test_a_stages_queue_is_what_a_worker_is_started_with() -> None:
    assert [stage_queue(stage) for stage in (0, 1, 11)] == ["stage0", "stage1", "stage11"]
