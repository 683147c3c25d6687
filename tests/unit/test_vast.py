"""What answers of the API mean, how calls are paced and repeated, and that the key is nowhere. No socket, no wait."""

import base64
import json
import logging
import os
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.provider import Need, Offer, Order, Provider, State
from orchestrator.vast import GAPS_S, LIMITS_S, Vast
from orchestrator.vastcalls import MAX_ANSWER, PATIENCE_S, Pacer, Scrubber, is_private
from orchestrator.vastshapes import read_instance
from pptasks.errors import (
    BadKey,
    ConfigError,
    CreatedAnyway,
    NoAnswer,
    NoCredit,
    OfferGone,
    PPError,
    ProviderError,
    UsageError,
)

KEY = "c0ffee11223344556677889900aabbccddeeff00112233445566778899aabbcc"
SECRET = "5ec4e7" * 10 + "abcd"  # of a run
Handler = Callable[[httpx.Request], httpx.Response]


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Api:
    """Answers in the order given, the last one again and again; or what a handler says."""

    def __init__(self, *answers: object):
        self.answers, self.requests, self.times = list(answers), list[httpx.Request](), list[float]()
        self.clock = Clock()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self.times.append(self.clock.now)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, Exception):
            raise answer
        if not isinstance(answer, httpx.Response):
            status, body = answer if isinstance(answer, tuple) else (200, answer)
            answer = httpx.Response(status, text=body) if isinstance(body, str) else httpx.Response(status, json=body)
        stream = httpx.ByteStream(answer.content)  # not read yet, as from a socket
        return httpx.Response(answer.status_code, headers=answer.headers, stream=stream, extensions=answer.extensions)

    @property
    def kinds(self) -> list[str]:
        return [f"{r.method} {r.url.path}" for r in self.requests]

    @property
    def vast(self) -> Vast:
        return Vast(KEY, transport=httpx.MockTransport(self), clock=self.clock, sleep=self.clock.sleep)


def offer(number: str = "5") -> Offer:
    return Offer(number, "7", "9", "RTX 3090", 1, 24 * 10**9, 0.2, 0.99, 12.8, 500, 900, 100, "Sweden, SE")


def order(**env: str) -> Order:
    return Order("image", "pptasks-run-0", "exec run", {"STAGE": "0", **env}, 20)


def instance(number: int = 31, **changes: object) -> dict[str, object]:
    return {"id": number, "label": "pptasks-run-0", "actual_status": "running", "status_msg": None, "dph_total": 0.2,
            "start_date": 1.5e9, **changes}  # fmt: skip


def listed(*instances: object, token: str | None = None) -> dict[str, object]:
    return {"success": True, "instances": list(instances), "next_token": token}


TIMED_OUT = httpx.ReadTimeout("")
MADE = {"success": True, "new_contract": 31}


def test_it_is_a_provider() -> None:
    provider: Provider = Api({}).vast
    assert provider.name == "vast"


def test_search_asks_with_operators_and_reads_offers() -> None:
    raw = {"id": 5, "machine_id": 7, "host_id": 9, "gpu_name": "RTX 3090", "num_gpus": 1, "gpu_ram": 24000,
           "dph_total": 0.2, "reliability2": 0.99, "cuda_max_good": 12.8, "inet_up": 500, "inet_down": 900,
           "disk_space": 100, "geolocation": "Sweden, SE", "rentable": True}  # fmt: skip
    bad = [{**raw, "id": 6, **c} for c in (
        {"rentable": False}, {"rented": True}, {"external": True}, {"verification": "unverified"}, {"id": "x"},
        {"id": None}, {"id": True}, {"id": "../7"}, {"machine_id": None},
    )]  # fmt: skip
    api = Api({"offers": [raw, *bad, "x", None]})
    need = Need(8 * 10**9 + 1, region="SE", spot=True, disk_gb=30, max_price_usd_hour=0.5)
    assert api.vast.search(need) == [offer()]
    query = json.loads(api.requests[0].content)
    assert api.kinds == ["POST /api/v0/bundles/"]
    assert query["gpu_ram"] == {"gte": 8001}
    assert query["dph_total"] == {"lte": 0.5}
    assert query["geolocation"] == {"in": ["SE"]}
    assert (query["type"], query["limit"], query["allocated_storage"]) == ("bid", 64, 30)
    assert query["num_gpus"] == query["num_gpus"] == {"eq": 1}
    assert "gpu_name" not in query


def test_numbers_of_the_wrong_type_fit_no_need() -> None:
    raw = {"id": 5, "machine_id": 7, "dph_total": "0.1", "gpu_ram": True, "inet_down": None, "reliability2": [],
           "cuda_max_good": 1e300, "gpu_name": 5, "geolocation": "a\x1b[31m\u202eb"}  # fmt: skip
    [found] = Api({"offers": [raw]}).vast.search(Need(0))
    assert (found.price_usd_hour, found.vram_bytes, found.down_mbps, found.reliability, found.cuda) == (0, 0, 0, 0, 0)
    assert found.geolocation == "a[31mb"


def test_an_unknown_region_asks_nothing() -> None:
    api = Api({})
    with pytest.raises(UsageError, match="Atlantis"):
        api.vast.search(Need(0, region="Atlantis"))
    assert not api.requests


def test_create() -> None:
    api = Api(MADE)
    assert api.vast.create(offer(), order(PP_SECRET=SECRET)) == "31"
    assert api.kinds == ["PUT /api/v0/asks/5/"]
    assert json.loads(api.requests[0].content) == {
        "image": "image", "disk": 20, "label": "pptasks-run-0", "runtype": "args", "onstart": "/bin/sh",
        "args": ["-c", "exec run"], "env": {"STAGE": "0", "PP_SECRET": SECRET}, "cancel_unavail": True,
    }  # fmt: skip
    assert SECRET not in repr(order(PP_SECRET=SECRET))


def test_a_small_disk_and_a_bid() -> None:
    api = Api(MADE)
    api.vast.create(offer(), Order("i", "l", "c", {}, 1, spot_price_usd_hour=0.07))
    body = json.loads(api.requests[0].content)
    assert (body["disk"], body["price"]) == (8, 0.07)


def test_a_variable_that_would_be_cut_short_asks_nothing() -> None:
    api = Api(MADE)
    with pytest.raises(ProviderError, match=r"^TICKET has 257 characters; vast.ai passes on 256$"):
        api.vast.create(offer(), order(TICKET="x" * 257))
    assert not api.requests


NO_SUCH_ASK = {"success": False, "error": "no_such_ask", "msg": "error 404/3603: no_such_ask"}
REFUSALS: list[tuple[int, object, type[ProviderError], str]] = [
    *((status, NO_SUCH_ASK, OfferGone, "offer 5 .* is gone") for status in (200, 400, 404, 410, 429, 500)),
    (404, "<html>", OfferGone, "offer 5 .* is gone"),
    (400, {"success": False, "error": "insufficient_credit", "msg": "lacks credit"}, NoCredit, "lacks credit.*add"),
    (402, {"detail": "pay"}, NoCredit, "no credit"),
    (400, {"success": False, "error": "invalid_args", "msg": "disk"}, ProviderError, "5 .400: invalid_args, disk"),
    (401, {"success": False, "error": "auth_error"}, BadKey, "refuses the key .*auth_error.*VAST_API_KEY"),
    (403, "forbidden", BadKey, "refuses the key"),
    (410, {"error": "deprecated_endpoint"}, ProviderError, "update pptasks"),
    (200, {"success": False, "msg": "not today"}, ProviderError, "not today"),
    (302, "", ProviderError, "302: no reason given"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "kind", "told"), REFUSALS)
def test_a_refused_create_is_told_apart_and_never_repeated(
    status: int, body: object, kind: type[ProviderError], told: str
) -> None:
    api = Api((status, body))
    with pytest.raises(ProviderError, match=told) as caught:
        api.vast.create(offer(), order())
    assert type(caught.value) is kind
    assert len(api.requests) == 1


@pytest.mark.parametrize("status", [200, 400, 403, 429, 500])
def test_a_refusal_with_a_contract_names_the_machine_that_bills(status: int) -> None:
    api = Api((status, {"success": False, "msg": "odd", "new_contract": 31}))
    with pytest.raises(CreatedAnyway, match=r"refuses offer 5 \(odd\) and yet made instance 31") as caught:
        api.vast.create(offer(), order())
    assert caught.value.instance_id == "31"
    assert len(api.requests) == 1


LOST = [TIMED_OUT, httpx.RemoteProtocolError(""), httpx.WriteTimeout(""), (500, "x"), (503, "x"), {"success": True},
        (200, "<html>"), {"success": True, "new_contract": "x"}, (200, "x" * (MAX_ANSWER + 1))]  # fmt: skip


@pytest.mark.parametrize("lost", LOST, ids=range(len(LOST)))
def test_a_lost_create_is_looked_up_by_its_label_and_not_repeated(lost: object) -> None:
    others = [instance(30, label="pptasks-run-01"), instance(29, label=None)]
    api = Api(lost, listed(*others), listed(*others, instance(31)))
    assert api.vast.create(offer(), order()) == "31"
    assert api.kinds == ["PUT /api/v0/asks/5/"] + 2 * ["GET /api/v1/instances/"]
    api = Api(lost, listed(*others))
    with pytest.raises(NoAnswer, match="no instance has the label pptasks-run-0 so far, but one may come up"):
        api.vast.create(offer(), order())
    assert api.kinds == ["PUT /api/v0/asks/5/"] + 3 * ["GET /api/v1/instances/"]


@pytest.mark.parametrize("early", [(429, "slow"), httpx.ConnectError(""), httpx.ConnectTimeout("")])
def test_a_create_that_cannot_have_arrived_is_repeated(early: object) -> None:
    api = Api(early, early, MADE)
    assert api.vast.create(offer(), order()) == "31"
    assert len(api.requests) == 3


@pytest.mark.parametrize("answer", [
    (429, "too many"), (429, {"detail": "too many"}), (500, "x"), (502, "<html>"), TIMED_OUT, httpx.ConnectError("")
])  # fmt: skip
def test_idempotent_calls_are_repeated_with_growing_waits_and_not_for_ever(answer: object) -> None:
    api = Api(answer, answer, {"instances": instance()})
    found = api.vast.get("31")
    assert found is not None
    assert found.id == "31"
    assert len(api.requests) == 3
    api = Api(answer)
    with pytest.raises(NoAnswer, match="did not answer show"):
        api.vast.get("31")
    waits = [b - a for a, b in pairwise(api.times)]
    assert waits == sorted(waits)
    assert api.times[-1] - api.times[0] <= PATIENCE_S
    assert 5 < len(api.requests) < 15


def test_retry_after_is_honoured_up_to_our_patience() -> None:
    slow = httpx.Response(429, headers={"Retry-After": "37"}, text="slow")
    api = Api(slow, {"instances": instance()})
    api.vast.get("31")
    assert api.times[1] - api.times[0] >= 37
    api = Api(httpx.Response(503, headers={"Retry-After": "3600"}, text="down"))
    with pytest.raises(NoAnswer, match="asks for a pause of 3600 s"):
        api.vast.get("31")
    assert len(api.requests) == 1


STATES = [
    (None, "", State.CREATING), ("created", "", State.CREATING), ("loading", "Pulling", State.LOADING),
    ("rebooting", "", State.LOADING), ("running", "success, running", State.RUNNING), ("stopped", "", State.ENDED),
    ("exited", "", State.ENDED), ("offline", "", State.ENDED), ("unknown", "", State.ENDED),
    ("frozen", "", State.ENDED), ("scheduling", "", State.UNKNOWN), (["x"], "", State.UNKNOWN),
    ("loading", "Error: Manifest Unknown: x", State.ENDED), ("loading", "pull access denied for x", State.ENDED),
    ("created", "failed to resolve reference", State.ENDED), ("loading", "unauthorized: x", State.ENDED),
    ("created", "OCI runtime create failed: x", State.ENDED),
]  # fmt: skip


@pytest.mark.parametrize(("word", "message", "state"), STATES)
def test_states(word: object, message: str, state: State) -> None:
    found = Api({"instances": instance(actual_status=word, status_msg=message)}).vast.get("31")
    assert found is not None
    assert found.state is state
    assert message in found.status
    assert (found.price_usd_hour, found.started_at, found.label) == (0.2, 1.5e9, "pptasks-run-0")


def test_gone_is_only_what_is_said_to_be_gone() -> None:
    assert Api({"instances": None}).vast.get("31") is None
    assert Api((404, {"success": False, "error": "no_such_instance"})).vast.get("31") is None
    for odd in ({}, {"instances": {}}, {"instances": []}, {"success": False, "instances": None}, (200, "<html>"),
                (404, "<html>"), (410, {"error": "deprecated_endpoint"}), {"instances": instance(32)}):  # fmt: skip
        with pytest.raises(ProviderError):
            Api(odd).vast.get("31")


@pytest.mark.parametrize("bad", ["", "x", "-1", "1/../2", "1?x", "٣", "0", "9" * 21])
def test_an_id_that_is_none_asks_nothing(bad: str) -> None:
    api = Api({})
    for call in (api.vast.get, api.vast.destroy, lambda i: api.vast.logs(i, 5)):
        with pytest.raises(ProviderError, match="is no id of vast"):
            call(bad)
    assert not api.requests


def test_the_list_is_whole_and_ours() -> None:
    api = Api(
        listed(instance(33), instance(1, label="mine"), instance(2, label=None), token="t1"),
        listed(instance(31, label="pptasks-run-1"), instance(33), token="t2"),
        listed(),
    )
    assert [i.id for i in api.vast.list("pptasks-")] == ["31", "33"]
    assert [dict(r.url.params) for r in api.requests] == [
        {"limit": "25"}, {"limit": "25", "after_token": "t1"}, {"limit": "25", "after_token": "t2"}
    ]  # fmt: skip


@pytest.mark.parametrize("odd", [
    (410, {"error": "deprecated_endpoint"}), {}, {"instances": None}, {"instances": {}}, (404, {}), (200, "[]"),
    {"success": False, "instances": []}, listed(instance(31, id=None)), listed(token="again"),
])  # fmt: skip
def test_a_list_that_is_not_whole_is_an_error(odd: object) -> None:
    with pytest.raises(ProviderError):
        Api(odd).vast.list("pptasks-")


DESTROYED = {"success": True}
GONE = {"instances": None}


@pytest.mark.parametrize("answers", [
    [DESTROYED, GONE], [(404, {"error": "no_such_instance"})], [DESTROYED, {"instances": instance()}, GONE],
    [(429, "x"), (500, "x"), TIMED_OUT, DESTROYED, GONE], [{"success": False, "msg": "busy"}, GONE],
    [DESTROYED, *[{"instances": instance()}] * 4, DESTROYED, GONE], [(404, "<html>"), GONE],
    [(400, {"error": "x"}), {"instances": instance()}, DESTROYED, GONE],
])  # fmt: skip
def test_destroyed_is_what_is_confirmed(answers: list[object]) -> None:
    api = Api(*answers)
    api.vast.destroy("31")
    assert len(api.requests) == len(answers)


@pytest.mark.parametrize(("answers", "told"), [
    ([{"instances": instance()}], "it still exists"),
    ([{"success": False, "msg": "busy"}], "busy"),
    ([(500, "x")], "500"), ([TIMED_OUT], "ReadTimeout"), ([(404, "<html>")], "404"),
])  # fmt: skip
def test_a_destroy_that_is_not_confirmed_names_the_machine(answers: list[object], told: str) -> None:
    with pytest.raises(NoAnswer, match=rf"instance 31 is not confirmed to be destroyed \(.*{told}.*may bill"):
        Api(*answers).vast.destroy("31")


def test_a_destroy_with_a_refused_key() -> None:
    api = Api((401, {"error": "auth_error"}))
    with pytest.raises(BadKey):
        api.vast.destroy("31")
    assert len(api.requests) == 1


def test_logs_come_from_elsewhere_and_without_the_key() -> None:
    text = "a\nb\x1b[31m\rc\nlast " + KEY + "\n"
    api = Api({"success": True, "result_url": "https://s3.example/x?Signature=y"}, (403, ""), TIMED_OUT, (200, text))
    assert api.vast.logs("31", 3) == "b[31m\nc\nlast ***"
    assert json.loads(api.requests[0].content) == {"tail": "3"}
    assert [KEY in str(r.headers.raw) for r in api.requests] == [True, False, False, False]


@pytest.mark.parametrize("url", [
    "http://s3.example/x", "ftp://s3.example/x", "file:///etc/passwd", "//x", "", "https://", "https://u:p@h/x", "x",
    "http://localhost.evil.example/", "http://[::1", "https://\0",
])  # fmt: skip
def test_logs_from_a_place_that_others_can_read_are_refused(url: str) -> None:
    api = Api({"success": True, "result_url": url})
    with pytest.raises(ProviderError):
        api.vast.logs("31", 5)
    assert len(api.requests) == 1


def test_logs_that_do_not_come() -> None:
    with pytest.raises(NoAnswer, match="logs of instance 31"):
        Api({"success": True, "result_url": "https://s3.example/x"}, (404, "")).vast.logs("31", 5)
    with pytest.raises(ProviderError, match="does not give the logs"):
        Api({"success": False, "msg": "no"}).vast.logs("31", 5)


def test_a_long_log_is_read_from_its_end() -> None:
    lines = [f"line {i}" for i in range(200_000)]
    api = Api({"success": True, "result_url": "https://s3.example/x"}, (200, "\n".join(lines)))
    assert api.vast.logs("31", 2) == "\n".join(lines[-2:])


@pytest.mark.parametrize("body", ["x" * (MAX_ANSWER + 1), "[" * 100_000, '{"instances": ' + "9" * 5000 + "}", "\xff"])
def test_answers_that_are_too_long_or_too_deep(body: str) -> None:
    with pytest.raises(ProviderError):
        Api((200, body)).vast.get("31")


@pytest.mark.parametrize("key", ["", "a b", "a\n", "aé", "a\0"])
def test_a_malformed_key_is_not_repeated(key: str) -> None:
    with pytest.raises(BadKey) as caught:
        Vast(key)
    assert not key or key not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("url", ["http://console.vast.ai", "https://u:p@h", "", "ftp://x", "https://"])
def test_the_key_goes_over_no_open_line(url: str) -> None:
    with pytest.raises(ConfigError, match="https://"):
        Vast(KEY, url)
    assert not is_private(url)


# Pacing


KINDS = st.sampled_from(sorted(LIMITS_S))


@given(st.lists(st.tuples(KINDS, st.floats(0, 8), st.floats(0, 8), st.floats(0, 3)), max_size=40))
@settings(deadline=None)
def test_never_faster_than_the_limits(calls: list[tuple[str, float, float, float]]) -> None:
    """Calls at any time, of any duration; the request may reach the server at any moment within the call."""
    clock = Clock()
    pacer = Pacer(GAPS_S, clock, clock.sleep)
    arrivals: dict[str, list[float]] = defaultdict(list)
    for i, (kind, pause, duration, late) in enumerate(calls):
        clock.now += pause
        with pacer.turn(kind):
            arrivals[kind].append(clock.now + min(late, duration) * (i % 2))
            clock.now += duration
    for kind, times in arrivals.items():
        assert all(b - a >= LIMITS_S[kind] for a, b in pairwise(times))
    searches = arrivals["search"]
    assert all(b - a > 60 for a, b in zip(searches, searches[10:], strict=False))  # 10 a minute


def test_kinds_do_not_wait_for_each_other() -> None:
    clock = Clock()
    pacer = Pacer(GAPS_S, clock, clock.sleep)
    for kind in LIMITS_S:
        with pacer.turn(kind):
            pass
    assert clock.slept == []


def test_threads_take_turns() -> None:
    """In real time; an overlap, or a gap that is too short, would be seen."""
    pacer, spans = Pacer({"show": 0.02}), list[tuple[float, float]]()

    def call() -> None:
        for _ in range(4):
            with pacer.turn("show"):
                began = pacer.clock()
                pacer.sleep(0.005)
                spans.append((began, pacer.clock()))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans.sort()
    assert len(spans) == 16
    assert all(after[0] - before[1] >= 0.02 for before, after in pairwise(spans))


def test_a_429_holds_off_all_calls_of_its_kind_and_no_other() -> None:
    api = Api(httpx.Response(429, headers={"Retry-After": "3600"}, text="x"), {"instances": None})
    vast = api.vast
    with pytest.raises(NoAnswer):
        vast.get("31")
    with pytest.raises(ProviderError):
        vast.list("")
    assert api.clock.slept == []
    vast.get("32")
    assert api.times[-1] - api.times[0] == PATIENCE_S


# Secrets


ECHOES: list[Callable[[str], str]] = [
    lambda key: key, str.upper, lambda key: f"Bearer {key}", lambda key: repr(f"b'{key}'"), lambda key: key[:40],
    lambda key: key[20:], lambda key: f"{key[:9]}...", lambda key: "x" * 230 + key, lambda key: key * 50,
    lambda key: base64.b64encode(f"Bearer {key}".encode()).decode(), lambda key: key.encode().hex(),
    lambda key: f"{key}\u0130{key}",
]  # fmt: skip


def pieces(secret: str) -> list[str]:
    return [secret[i : i + 9] for i in range(len(secret) - 8)]


def all_calls(vast: Vast) -> list[Callable[[], object]]:
    return [
        lambda: vast.create(offer(), order(PP_SECRET=SECRET)), lambda: vast.search(Need(0)), lambda: vast.get("31"),
        lambda: vast.list(""), lambda: vast.destroy("31"), lambda: vast.logs("31", 100),
    ]  # fmt: skip


@pytest.mark.parametrize("echo", ECHOES, ids=range(len(ECHOES)))
@pytest.mark.parametrize("status", [200, 400, 401, 429])
def test_a_server_that_echoes_secrets_makes_us_tell_none(
    caplog: pytest.LogCaptureFixture, echo: Callable[[str], str], status: int
) -> None:
    """The key and the run's secret come back in bodies, headers, reasons and fields; each call's result and error is
    searched for nine characters in a row of either."""
    told = echo(KEY) + " " + echo(SECRET)
    plain = told.encode("ascii", "replace").decode()
    bodies = [
        told,
        {"success": False, "error": told, "msg": told, "detail": told},
        {"detail": [told, {told: told}]},
        {"instances": instance(status_msg=told, actual_status=told, label=f"x {told}"), "result_url": f"http://{plain}/"},
        {"instances": [instance(31, status_msg=told)], "next_token": told},
        {"offers": [{"id": 1, "machine_id": 2, "gpu_name": told, "geolocation": told}]},
        {"result_url": f"https://h/?{plain}"},
    ]  # fmt: skip
    caplog.set_level(logging.DEBUG)
    texts = []
    for body in bodies:
        content = body if isinstance(body, str) else json.dumps(body)
        headers = {"X-Echo": plain, "Location": f"https://h/{plain}", "Set-Cookie": f"a={plain}"}

        def answer(request: httpx.Request, content: str = content, headers: dict = headers) -> httpx.Response:
            reason = {"reason_phrase": plain[:200].encode()}
            return httpx.Response(status, text=content, headers=headers, extensions=reason)

        api = Api(answer)
        vast = api.vast
        texts.append(repr(vast) + repr(vars(vast)) + repr(vast._calls._client.headers))
        for call in all_calls(vast):
            try:
                texts.append(repr(call()))
            except PPError as error:
                texts.append("".join(traceback.format_exception(error)) + repr(error) + repr(vars(error)))
        assert all(KEY not in str(request.url) for request in api.requests)
    found = ("\n".join(texts) + caplog.text).lower()
    leaked = [piece for secret in (KEY, SECRET) for piece in pieces(secret) if piece in found]
    assert leaked == []


def test_the_key_is_in_one_header_of_calls_to_the_api_only() -> None:
    api = Api(
        lambda request: {"offers": [], "new_contract": 3, "instances": None, "result_url": "https://s3.example/x"}
    )
    for call in all_calls(api.vast):
        try:
            call()
        except ProviderError:
            continue
    for request in api.requests:
        raw = [value.decode() for name, value in request.headers.raw if name.lower() != b"authorization"]
        assert KEY not in str(request.url) + "".join(raw) + request.content.decode()
        assert (request.headers.get("Authorization") == f"Bearer {KEY}") == (request.url.host == "console.vast.ai")
    assert {request.url.host for request in api.requests} == {"console.vast.ai", "s3.example"}


def test_errors_of_the_http_library_are_not_passed_on() -> None:
    class Leaky(httpx.ReadError):
        pass

    with pytest.raises(NoAnswer) as caught:
        Api(Leaky(f"sent {KEY}")).vast.get("31")
    assert KEY not in "".join(traceback.format_exception(caught.value))


@given(st.text(max_size=60), st.integers(0, 56), st.integers(8, 64), st.booleans(), st.text(max_size=60))
@settings(deadline=None)
def test_the_scrubber_lets_no_eight_characters_through(
    before: str, begin: int, length: int, upper: bool, after: str
) -> None:
    part = KEY[begin : begin + length]
    for scrub in (Scrubber(KEY).log, Scrubber(KEY).message):
        shown = scrub(before + (part.upper() if upper else part) + after).lower()
        assert not any(KEY[i : i + 8] in shown for i in range(len(KEY) - 7))


def test_the_scrubber_leaves_the_rest() -> None:
    text = "Traceback: pptasks.errors.StageFailed: stage 1 of llama3.2:1b ended\n\tat block 3"
    assert Scrubber(KEY).log(text) == text
    assert Scrubber("k").log("back") == "bac***"


def test_processes_that_share_a_folder_keep_the_gap_together(tmp_path: Path) -> None:
    clocks = [Clock(), Clock()]
    first, second = (Pacer({"show": 2.0}, clock, clock.sleep, tmp_path / "pace") for clock in clocks)
    with first.turn("show"):
        pass
    with second.turn("show"):
        pass
    assert 1.5 < sum(clocks[1].slept) <= 2.0  # it slept on its own clock, as the file is a moment old


def test_a_clock_that_was_set_back_delays_no_call_for_longer_than_the_gap(tmp_path: Path) -> None:
    clock = Clock()
    pacer = Pacer({"show": 2.0}, clock, clock.sleep, tmp_path)
    (tmp_path / "show.last").touch()
    os.utime(tmp_path / "show.last", (time.time() + 9999, time.time() + 9999))
    began = clock()
    with pacer.turn("show"):
        pass
    assert clock() - began == 2.0


def test_a_label_of_ours_is_shown_as_it_is_though_it_looks_like_the_key() -> None:
    label = f"pptasks-{KEY[:8]}-{KEY[8:20]}-0-1796086975-{KEY[20:24]}"
    instance = {"id": 7, "label": label, "actual_status": "running"}
    shown = read_instance(instance, Scrubber(KEY))
    other = read_instance(instance | {"label": f"mine {KEY}"}, Scrubber(KEY))
    assert shown is not None
    assert shown.label == label
    assert other is not None
    assert KEY[:16] not in other.label
