"""The parameters of both completion endpoints, and how each is read. Pure.

A parameter is one of three kinds. Those that are *served* are read by openai_ask.py with the functions below. Those in
`NEUTRAL` change nothing here, or would ask for what this server lacks: they are accepted with the values in the table,
which ask for nothing, as OpenAI's clients send them by default, and refused by name with any other. Everything else is
unknown, and refused by name too: a parameter that was dropped silently would give an answer to another question.

null always means "not given".
"""

import json
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from orchestrator.serve.openai_errors import ApiError, bad

Fields = Mapping[str, Any]


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(v) and value == v for v in values)


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


_EMPTY = _one_of([], {})
_NEVER = _one_of()

NEUTRAL: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        # For the provider's own books: nothing is kept here, so there is nothing to tell apart.
        "user": _is(str),
        "safety_identifier": _is(str),
        "prompt_cache_key": _is(str),
        "prompt_cache_retention": _is(str),
        "metadata": _is(dict),
        "store": _one_of(False),
        "service_tier": _one_of("auto", "default"),
        # Only text comes in, and only text goes out.
        "modalities": _one_of(["text"]),
        "response_format": _one_of({"type": "text"}),
        "audio": _NEVER,
        "prediction": _NEVER,
        "web_search_options": _NEVER,
        "moderation": _NEVER,
        # Tools.
        "tools": _EMPTY,
        "tool_choice": _one_of("none"),
        "parallel_tool_calls": _is(bool),
        "functions": _EMPTY,
        "function_call": _one_of("none"),
        # Sampling that we do not have.
        "logit_bias": _EMPTY,
        "best_of": _one_of(1),
        "suffix": _one_of(""),
        "reasoning_effort": _one_of("none"),
        "verbosity": _one_of("medium"),
        "min_p": _one_of(0, 0.0),
        "repetition_penalty": _one_of(1, 1.0),
    }
)


def check_names(fields: Fields, served: Collection[str], within: str = "") -> None:
    """Raises ApiError for the first parameter that is neither served nor neutral. `within`: the object they are in."""
    for name, value in fields.items():
        if name in served or value is None:
            continue
        where = f"{within}{name}"
        neutral = None if within else NEUTRAL.get(name)
        if neutral is None:
            raise bad(f"unknown parameter {shown(where)}", shown_name(where), "unknown_parameter")
        if not neutral(value):
            value_too = "" if isinstance(value, (list, dict)) else f" with the value {shown(value)}"
            raise bad(f"{name} is not supported{value_too}: leave it out", name, "unsupported_parameter")


def whole(fields: Fields, name: str, low: int, high: int, default: int | None = None) -> int | None:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise _wrong(name, value, f"a whole number from {low} to {high}")
    return value


def real(fields: Fields, name: str, low: float, high: float, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not low <= value <= high:  # which NaN and infinity are not
        raise _wrong(name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def flag(fields: Fields, name: str) -> bool:
    value = fields.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def text(name: str, value: Any) -> str:
    """A string that can be encoded: JSON may hold half a surrogate."""
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise bad(f"{name} holds a lone surrogate: it is not valid Unicode text", name, "invalid_value") from None
    return value


def items(name: str, value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _wrong(name, value, "a list that is not empty")
    if len(value) > most:
        raise bad(f"{name} has {len(value)} entries; at most {most}", name, "array_above_max_length")
    return value


def record(name: str, value: Any) -> Fields:
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object")
    return value


def stops(fields: Fields, most: int, longest: int) -> tuple[str, ...]:
    """The stop texts: a string or a list of them."""
    value = fields.get("stop")
    if value is None or value == []:
        return ()
    found = tuple(text("stop", s) for s in (items("stop", value, most) if isinstance(value, list) else [value]))
    for stop in found:
        if not 1 <= len(stop) <= longest:
            raise bad(f"a stop text has {len(stop)} characters; give 1 to {longest}", "stop", "invalid_value")
    return found


def shown(value: Any) -> str:
    """A value that somebody sent, short enough for a message, and whatever it is."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge number"
    if isinstance(value, str):
        return ascii(value if len(value) <= 40 else f"{value[:37]}...")
    return str(json.dumps(value))


def shown_name(name: str) -> str:
    return name if len(name) <= 64 else f"{name[:61]}..."


def _wrong(name: str, value: Any, wanted: str) -> ApiError:
    return bad(f"{name} is {shown(value)}: give {wanted}", name, "invalid_value")
