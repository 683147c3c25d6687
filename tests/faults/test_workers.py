"""What real workers on rented machines may fail at before they are ready, and an answer that is empty."""

import re
from functools import partial
from pathlib import Path

import pytest

from orchestrator.watch import Patience
from pptasks.errors import NotReady, PlanError, StageFailed
from tests.fake_hub import FakeHub
from tests.fake_hub import Fault as HubFault
from tests.fake_vast.machine import Start
from tests.faults.conftest import MODEL, Open, warm
from tests.faults.light import Light, Nameless
from tests.faults.programs import changed
from tests.faults.scene import WORKING, Ground, by_stage, first_only, image


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def test_disagreeing_digests(scene: Open, ground: Ground, node: Start) -> None:
    """An image that was told another context makes another plan."""
    with scene("disagreeing digests", by_stage(node, image(ground.cache_home, PP_CONTEXT="64"))) as it:
        words = r"stage 1 .* has plan [0-9a-f]{8} .*, this run [0-9a-f]{8} .*: start every stage with the same model"
        with pytest.raises(PlanError, match=words), it.fleet(WORKING):
            pass
        assert len(it.rented) == 2


def test_a_device_that_cannot_multiply_is_replaced(scene: Open, ground: Ground, node: Start, programs: Path) -> None:
    """No layer goes to it, and the run answers."""
    with scene("probe failed", first_only(image(ground.cache_home, changed("wrong product", programs)), node)) as it:
        with it.fleet(WORKING) as fleet:
            assert it.ask(fleet, n=5)["token_ids"]
        assert len(it.rented) == 3
        assert re.search(r"stage 1: machine 702 .* failed: .* computes wrongly: the .* product.*; taking", it.told)


def test_a_device_that_says_another_product_is_replaced(scene: Open) -> None:
    with scene("probe failed", first_only(partial(Light, probe="0" * 16), Light)) as it:
        with it.fleet(WORKING):
            pass
        assert len(it.rented) == 3
        assert re.search(r"stage 1: machine 702 .* multiplies matrices wrongly \(probe\); taking", it.told)


def test_devices_that_cannot_multiply(scene: Open) -> None:
    with scene("probe failed", partial(Light, probe="0" * 16)) as it:
        words = r"stage [01] on machine .* multiplies matrices wrongly \(probe\)"
        with pytest.raises(StageFailed, match=words), it.fleet(WORKING):
            pass
        assert len(it.rented) > 3


def test_a_worker_that_raises_while_it_loads(scene: Open, ground: Ground, node: Start, programs: Path) -> None:
    """It is a fault of the program, so no machine is replaced; its traceback is shown."""
    with scene("worker never ready", by_stage(node, image(ground.cache_home, changed("raises", programs)))) as it:
        words = r"stage 1 on machine 702 .* failed: RuntimeError: the disk is on fire"
        with pytest.raises(StageFailed, match=words) as caught, it.fleet(WORKING):
            pass
        log = "\n".join(caught.value.log)
        assert "Traceback (most recent call last)" in log
        assert "RuntimeError: the disk is on fire" in log
        assert len(it.rented) == 2


def test_a_model_that_a_worker_does_not_find(scene: Open, ground: Ground, node: Start) -> None:
    """Its own one line says it all."""
    bad = image(ground.cache_home, MODEL="/no/such/model.gguf")
    words = r"stage 1 on machine 702 .* failed: .*/no/such/model.gguf"
    with (
        scene("worker never ready", by_stage(node, bad)) as it,
        pytest.raises(StageFailed, match=words),
        it.fleet(WORKING),
    ):
        pass


def test_a_worker_that_the_machine_kills(scene: Open, ground: Ground, node: Start) -> None:
    """Out of memory, as it looks from outside: the next machine may have more."""
    killed = image(ground.cache_home, script="python -m workers.node & sleep 1.5; pkill -9 -P $!; wait $!")
    with scene("worker never ready", first_only(killed, node)) as it:
        with it.fleet(WORKING):
            pass
        assert len(it.rented) == 3
        assert re.search(r"stage 1: machine 702 .* its machine has ended \(exited: exit code 1\); taking", it.told)


def test_names_that_never_resolve(scene: Open) -> None:
    nameless = by_stage(Light, partial(Light, membership=Nameless))
    words = "every stage is ready, but their names do not resolve"
    patience = Patience(start_s=40.0, step_s=1.5, lost_s=8.0)
    with scene("names never resolve", nameless) as it, pytest.raises(NotReady, match=words), it.fleet(patience):
        pass


@pytest.mark.parametrize("phase", ["download", "load"])
def test_a_stage_that_is_stuck_is_replaced(scene: Open, phase: str) -> None:
    with scene(f"{phase} stuck", first_only(partial(Light, phase=phase), Light)) as it:
        with it.fleet(Patience(start_s=40.0, step_s=2.5, lost_s=8.0)):
            pass
        assert len(it.rented) == 3
        assert re.search(rf"stage 1: machine 702 .* is stuck in {phase}: nothing for 2 s; taking", it.told)


def test_a_download_under_the_floor_is_replaced(scene: Open, goldens: Path, tmp_path: Path) -> None:
    """Of bytes a minute: 16 KiB a second are too few."""
    repos = {MODEL: goldens / "llama-untied-sharded-bf16"}
    with FakeHub(repos) as hub, FakeHub(repos) as far:
        own = Ground(hub, MODEL, warm(tmp_path / "ours"))
        good, bad = (image(warm(tmp_path / name), HF_ENDPOINT=at.url) for name, at in (("good", hub), ("bad", far)))
        far.faults.append(HubFault("slow", "/lfs/", times=10**6, seconds=1.0))
        with scene("download stuck", first_only(bad, good), ground=own) as it:
            with it.fleet(Patience(start_s=40.0, step_s=4.0, lost_s=8.0)):
                pass
            assert len(it.rented) == 3
            assert re.search(
                r"stage 1: machine 702 .* is stuck in download: \d+\.\d MB a minute, less than 30", it.told
            )
