"""What goes wrong, as OpenAI's clients read it: a status, and {"error": {"message", "type", "param", "code"}}. Pure."""

import json
from collections.abc import Mapping
from types import MappingProxyType

from pptasks.errors import (
    BrokerError,
    Busy,
    LinkError,
    NoSuchCluster,
    NotReady,
    PPError,
    PromptTooLong,
    RequestError,
    StageFailed,
)

RETRY_S = 2  # what a client that is refused for now is told to wait
AGAIN: Mapping[str, str] = MappingProxyType({"retry-after": str(RETRY_S)})
_AWAY = (BrokerError, LinkError, NoSuchCluster, NotReady, StageFailed)
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}


class ApiError(PPError):
    """A request that gets an error for an answer. `param`: the parameter that is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def to_json(self) -> bytes:
        """The body; ASCII, so that nothing that a stranger sent can fail to be encoded."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def busy(message: str) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", headers=AGAIN)


def away(message: str) -> ApiError:
    return ApiError(503, message, code="unavailable", headers=AGAIN)


def no_model(name: str, served: str) -> ApiError:
    return ApiError(
        404, f"there is no model {name!a} here; this server has {served!a}", param="model", code="model_not_found"
    )


def of(error: PPError) -> ApiError:
    """What a client is told of an error of the pipeline's."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return bad(str(error), code="context_length_exceeded" if isinstance(error, PromptTooLong) else None)
    if isinstance(error, Busy):
        return busy(str(error))
    return away(str(error)) if isinstance(error, _AWAY) else ApiError(500, str(error))


def of_head(message: str, error_type: str) -> ApiError:
    """The same for an error that the head tells, by the name of its class."""
    for kind in (RequestError, PromptTooLong, Busy, *_AWAY):
        if error_type == kind.__name__:
            return of(kind(message))
    return ApiError(500, message or "the request failed")
