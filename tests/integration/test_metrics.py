"""/metrics and /api/pipeline of a real `pp serve`, and the dashboard that shows them."""

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import WaitUntil
from tests.integration.run import ROOT, Command

DASHBOARD = ROOT / "docker" / "grafana" / "pptasks.json"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Served:
    """What `pp serve` at `url` says of itself."""

    def __init__(self, command: Command, url: str):
        self.command, self.http = command, httpx.Client(base_url=url, timeout=60)

    def ask(self, **given: Any) -> httpx.Response:
        body = {"model": "llama-tied", "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, **given}
        return self.http.post("/v1/completions", json=body)

    def samples(self) -> Samples:
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}

    def sample(self, name: str, **labels: str) -> float | None:
        return self.samples().get((name, tuple(sorted(labels.items()))))

    def stages(self) -> list[dict[str, Any]]:
        return self.http.get("/api/pipeline").json()["stages"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, goldens: Path) -> Iterator[Served]:
    options = ("--port", "0", "--json", "--in-flight", "8", "--model", str(goldens / "llama-tied"))
    with Command(tmp_path_factory.mktemp("served"), "serve", *options) as command:
        assert command.process.stdout is not None
        line = command.process.stdout.readline()
        assert line, command.stderr
        served = Served(command, json.loads(line)["url"])
        with served.http:
            yield served
        command.signal(signal.SIGINT)
        command.wait()


def test_requests_and_tokens_are_counted(served: Served, wait_until: WaitUntil) -> None:
    before = served.samples()
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda n: served.ask(max_tokens=n), (5, 6, 7)))
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert served.ask(max_tokens=-1).status_code == 400
    usages = [answer.json()["usage"]["completion_tokens"] for answer in answers]
    assert usages == [5, 6, 7]
    generated = sum(usages)
    # The head's own counters come with its next heartbeat.
    wait_until(lambda: _more(served, before, "pptasks_generated_tokens_total") >= generated, 30, "tokens counted")
    wait_until(lambda: _more(served, before, "pptasks_pipeline_requests_total", end="answered") == 3, 30, "answers")
    assert _more(served, before, "pptasks_prompt_tokens_total") == 9
    assert _more(served, before, "pptasks_requests_total", endpoint="completions", status="200") == 3
    assert _more(served, before, "pptasks_requests_total", endpoint="completions", status="400") == 1
    assert _more(served, before, "pptasks_time_to_first_token_seconds_count") == 3
    assert _more(served, before, "pptasks_request_seconds_count") == 3
    assert _more(served, before, "pptasks_request_generated_tokens_sum") == generated
    assert _more(served, before, "pptasks_stage_rows_total", stage="1") > 0
    assert served.sample("pptasks_requests_running") == 0
    assert served.sample("pptasks_stage_queue_depth", stage="1") == 0


def _more(served: Served, before: Samples, name: str, **labels: str) -> float:
    key = (name, tuple(sorted(labels.items())))
    return served.samples().get(key, 0) - before.get(key, 0)


def test_the_pipeline_is_told_as_it_works(served: Served, wait_until: WaitUntil) -> None:
    reading = served.http.get("/api/pipeline").json()
    assert reading["model"]["name"].endswith("llama-tied")
    assert [stage["span"] for stage in reading["stages"]] == reading["plan"]["spans"]
    assert all(stage["weights_bytes"] > 0 < stage["kv_bytes"] for stage in reading["stages"])
    assert all(stage["slots"] > 0 < stage["rtt_ms"] for stage in reading["stages"])
    seen = list[tuple[str, float, float, float]]()

    def look() -> bool:
        reading = served.http.get("/api/pipeline").json()
        stage = reading["stages"][1]
        seen.append((stage["doing"], stage["rows_per_s"], stage["busy"], reading["head"]["tokens_per_s"]))
        return any(doing == "decode" and rows and busy and tokens for doing, rows, busy, tokens in seen)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: [served.ask(max_tokens=250).raise_for_status() for _ in range(4)])
        wait_until(look, 30, "a stage that decodes")
        asked.result()
    wait_until(lambda: [stage["doing"] for stage in served.stages()] == ["idle", "idle"], 30, "idle stages")


def test_names_follow_prometheus_conventions(served: Served) -> None:
    families = list(text_string_to_metric_families(served.http.get("/metrics").text))
    ours = {family.name: family.type for family in families if family.name.startswith("pptasks_")}
    assert len(ours) > 20
    assert all(family.documentation for family in families)
    assert [name for name in ours if re.search(r"_(ms|us|mb|count|ratio_total)$", name)] == []
    counters = {s.name for f in families if f.type == "counter" for s in f.samples if not s.name.endswith("_created")}
    assert [name for name in counters if not name.endswith("_total")] == []


def test_every_metric_of_the_dashboard_is_there(served: Served) -> None:
    served.ask()
    there = {name for name, _ in served.samples()}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    used = {name for expression in expressions for name in re.findall(r"\b(?:pptasks|process)_\w+", expression)}
    assert len(expressions) > 12
    assert used - there == set()


def test_a_queue_that_nobody_reads_is_seen(served: Served, wait_until: WaitUntil) -> None:
    worker = served.command.workers()[1]
    worker.suspend()
    try:
        with ThreadPoolExecutor(6) as pool:  # the first frames wait in the stage's own socket, more in its queue
            asked = []
            for first in range(6):
                asked.append(pool.submit(served.ask, prompt=[first + 1, 2, 3]))
                wait_until(lambda n=first: served.sample("pptasks_laps_in_flight") == n + 1, 30, "one more lap")
                if served.stages()[1]["queue_depth"] > 0:
                    break
            assert served.sample("pptasks_stage_queue_depth", stage="1") > 0
            assert served.sample("pptasks_requests_running") == len(asked)
            worker.resume()
            assert {request.result().status_code for request in asked} == {200}
    finally:
        worker.resume()
    wait_until(lambda: served.stages()[1]["queue_depth"] == 0, 30, "an empty queue")


def test_a_stage_that_has_gone_is_down(served: Served, wait_until: WaitUntil) -> None:
    """The last test here: nothing is served after it."""
    assert served.sample("pptasks_stage_up", stage="1") == 1
    served.command.workers()[1].kill()
    wait_until(lambda: served.sample("pptasks_stage_up", stage="1") == 0, 15, "a stage that is down")
    assert served.sample("pptasks_stage_up", stage="0") == 1
    assert [stage["doing"] for stage in served.stages()][1] == "away"
    assert served.sample("pptasks_stage_rows_total", stage="1") is None
