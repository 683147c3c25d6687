"""What is believed of the account that a head stores of a request."""

import copy
from typing import Any

import pytest

from pptasks import errors
from pptasks.answer import TIMINGS, checked, told

CHECK = {"stage": 0, "max_abs_diff": None, "values_differ": 3, "first_position": 1, "worst": 0.5}
VERIFICATION = {
    "passed": False, "exact": True, "reason": "tokens differ", "token_ids": [1], "first_difference": 0,
    "stages": [CHECK],
}  # fmt: skip
TOKEN = [1, "h\ufffd", "68c3", -0.25, [[1, "h\ufffd", -0.25], [7, "", -3]]]
ACCOUNT: dict[str, Any] = {
    "text": "h\x1bi\n", "token_ids": [1, 2], "prompt_token_ids": [3], "finish_reason": "stop", "seed": 2**64 - 1,
    "prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 2, "logprobs": [TOKEN, [2, "i", "69", 0.0, []]],
    "timings": dict.fromkeys(TIMINGS, 0.5) | {"hop_us_p50": None, "prefill_s": 1}, "verification": VERIFICATION,
}  # fmt: skip


def test_an_account_is_taken_as_it_is() -> None:
    assert checked("r", ACCOUNT) == ACCOUNT
    without = {name: value for name, value in ACCOUNT.items() if name != "verification"}
    assert checked("r", without | {"mood": "good"}) == without
    assert checked("r", without | {"logprobs": None}) == without | {"logprobs": None}


def test_words_for_people_are_harmless() -> None:
    hostile = ACCOUNT | {"finish_reason": "st\x1b[2Jop" + "x" * 99}
    hostile["verification"] = VERIFICATION | {"reason": "a\nerror: b\x07"}
    account = checked("r", hostile)
    assert account["finish_reason"] == ("st[2Jop" + "x" * 99)[:40]
    assert account["verification"]["reason"] == "a error: b"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("text",), 5), (("text",), "\ud800"), (("token_ids",), "12"), (("token_ids",), [True]),
        (("token_ids",), [-1]), (("token_ids",), [10**30]), (("prompt_token_ids",), None), (("finish_reason",), None),
        (("prompt_tokens",), None), (("cached_tokens",), -1), (("completion_tokens",), 2.0),
        (("logprobs",), {}), (("logprobs",), [5]), (("logprobs", 0), TOKEN[:4]), (("logprobs", 0), [*TOKEN, 1]),
        (("logprobs", 0, 0), -1), (("logprobs", 0, 0), 1.0), (("logprobs", 0, 1), None), (("logprobs", 0, 1), "\ud800"),
        (("logprobs", 0, 2), "6"), (("logprobs", 0, 2), None), (("logprobs", 0, 3), 0.5),
        (("logprobs", 0, 3), float("nan")), (("logprobs", 0, 3), float("-inf")), (("logprobs", 0, 3), -(10**400)),
        (("logprobs", 0, 3), None), (("logprobs", 0, 3), False), (("logprobs", 0, 4), None),
        (("logprobs", 0, 4), [[1, "h"]]), (("logprobs", 0, 4, 1, 0), "7"), (("logprobs", 0, 4, 1, 1), "\udfff"),
        (("logprobs", 0, 4, 1, 2), 1),
        (("seed",), 0.5), (("timings",), []), (("timings", "decode_s"), "1"), (("timings", "decode_s"), float("nan")),
        (("timings", "tokens_per_s"), float("inf")), (("timings", "hop_us_p99"), 10**400), (("verification",), None),
        (("verification", "passed"), 1), (("verification", "reason"), None), (("verification", "stages"), [5]),
        (("verification", "stages", 0, "values_differ"), None), (("verification", "stages", 0, "max_abs_diff"), "0"),
    ],
)  # fmt: skip
def test_what_no_head_writes_is_no_answer(path: tuple[Any, ...], value: object) -> None:
    account = copy.deepcopy(ACCOUNT)
    inner: Any = account
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(errors.RequestFailed, match=f"^request r: .* no answer: {path[0]}"):
        checked("r", account)


@pytest.mark.parametrize("name", [name for name in ACCOUNT if name != "verification"])
def test_a_field_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(errors.RequestFailed, match=f"{name}: it is missing"):
        checked("r", {n: value for n, value in ACCOUNT.items() if n != name})


@pytest.mark.parametrize("stored", [None, 1, "text", [], [ACCOUNT]])
def test_what_is_no_object_is_no_answer(stored: object) -> None:
    with pytest.raises(errors.RequestFailed, match="no JSON object"):
        checked("r", stored)


@pytest.mark.parametrize(
    "kind", [errors.RequestError, errors.PromptTooLong, errors.RequestFailed, errors.Busy, errors.NeedsToken]
)
def test_a_heads_own_errors_stay_what_they_are(kind: type[errors.PPError]) -> None:
    error = told("r", kind("give less\x1b[2J\nerror: fake" + "x" * 9999))
    assert type(error) is kind
    assert str(error).startswith("give less[2J error: fakex")
    assert len(str(error)) == 2000


@pytest.mark.parametrize(
    "stored",
    [SystemExit(0), KeyboardInterrupt(), errors.StillBilling("run this", ("1",)), errors.UsageError("x"), ValueError()],
)
def test_any_other_error_is_a_request_that_failed(stored: BaseException) -> None:
    error = told("r", stored)
    assert type(error) is errors.RequestFailed
    assert str(error) == f"request r failed: {type(stored).__name__}"
