"""What the head of a pipeline stores of a request, as far as it can be believed: the head may be a rented machine.

Celery makes the stored exception anew, of whatever class it is said to have been; it is never raised as it is.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pptasks import errors
from pptasks.errors import PPError, RequestFailed
from pptasks.shown import line
from pptasks.stream import logprobs_of

# What a head that is asked for a text, or to verify one, may say of it.
_OF_A_HEAD = (
    PPError, errors.RequestError, errors.PromptTooLong, errors.RequestFailed, errors.Busy, errors.VerifyFailed,
    errors.NotReady, errors.BrokerError, errors.StorageError, errors.ModelError, errors.ModelNotFound,
    errors.ModelFileError, errors.Unsupported, errors.DownloadError, errors.NeedsToken, errors.ProbeFailed,
)  # fmt: skip
_MAX = (1 << 64) - 1  # of a seed
_MAX_WORD = 40
TIMINGS = ("prefill_s", "decode_s", "tokens_per_s", "hop_us_p50", "hop_us_p99")

Check = Callable[[Any], Any]  # gives the value as it may be used; raises ValueError


def told(request_id: str, stored: object) -> PPError:
    """The error to raise for a request that failed: of the head's own class and in its words if it may say that, else
    RequestFailed."""
    if type(stored) in _OF_A_HEAD:
        return type(stored)(line(str(stored)))  # type: ignore[call-arg, return-value]
    return RequestFailed(f"request {request_id} failed: {line(type(stored).__name__, _MAX_WORD)}")


def checked(request_id: str, stored: object) -> dict[str, Any]:
    """The account of a request that was answered, without anything that no head writes. Raises RequestFailed for what
    is none."""
    is_verified = isinstance(stored, dict) and "verification" in stored
    try:
        return _fields({**_ACCOUNT, "verification": _fields(_VERIFICATION)} if is_verified else _ACCOUNT)(stored)
    except ValueError as e:
        raise RequestFailed(f"request {request_id}: what its head stored is no answer: {e}") from None


def _fields(checks: Mapping[str, Check]) -> Check:
    """A JSON object with at least those fields."""

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
        found = {}
        for name, of_field in checks.items():
            try:
                found[name] = of_field(value[name])
            except (KeyError, ValueError) as e:
                raise ValueError(f"{name}: {'it is missing' if isinstance(e, KeyError) else e}") from None
        return found

    return check


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    value.encode()  # half a surrogate is no text either: UnicodeEncodeError
    return value


def _shown(value: Any) -> str:
    return line(_text(value))


def _word(value: Any) -> str:
    return line(_text(value), _MAX_WORD)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("neither true nor false")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX:
        raise ValueError("no count")
    return value


def _figure(value: Any) -> float | int:
    if type(value) not in (int, float) or not 0 <= value <= _MAX:  # which NaN is not
        raise ValueError("no figure")
    return value


def _list(check: Check) -> Check:
    def items(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise ValueError("no list")
        return [check(item) for item in value]

    return items


def _maybe(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _logprobs(value: Any) -> Any:
    try:
        logprobs_of(value)
    except TypeError:
        raise ValueError("no log-probability") from None
    return value


_ACCOUNT: Mapping[str, Check] = {
    "text": _text,
    "token_ids": _list(_whole),
    "prompt_token_ids": _list(_whole),
    "finish_reason": _word,
    "seed": _maybe(_whole),
    "prompt_tokens": _whole,
    "cached_tokens": _whole,
    "completion_tokens": _whole,
    "logprobs": _maybe(_list(_logprobs)),
    "timings": _fields(dict.fromkeys(TIMINGS, _maybe(_figure))),
}
_STAGE_CHECK: Mapping[str, Check] = {
    "stage": _whole,
    "max_abs_diff": _maybe(_figure),
    "values_differ": _whole,
    "first_position": _maybe(_whole),
    "worst": _maybe(_figure),
}
_VERIFICATION: Mapping[str, Check] = {
    "passed": _flag,
    "exact": _flag,
    "reason": _shown,
    "token_ids": _list(_whole),
    "first_difference": _maybe(_whole),
    "stages": _list(_fields(_STAGE_CHECK)),
}
