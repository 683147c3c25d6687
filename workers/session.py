"""One request in the head's hands: from what was asked to token ids at the door, and from ids to text on the way out.

Knows text and the account of an answer; nothing of batches, frames or other requests.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pptasks.errors import PromptTooLong, RequestError
from pptasks.request import Request, is_stream_name
from pptasks.stops import StopFilter
from pptasks.stream import Piece, TokenLogprobs
from pptasks.text import Decoder, Text
from workers.sample import Token
from workers.scheduler import Sequence

CHARS_AT_ONCE = 1 << 16  # are tokenized in some 50 ms
RECENT_HOPS = 4096
MAX_ID = 255


@dataclass
class Session:
    """Celery's side of a request, its sequence, its text, its times (monotonic seconds)."""

    celery: Any  # celery.worker.request.Request
    sequence: Sequence
    decoder: Decoder
    stops: StopFilter
    reply: str  # name of the stream that its pieces go to
    logprobs: list[TokenLogprobs] | None  # None: not asked for
    started_at: float = 0.0
    first_at: float = 0.0
    text: list[str] = field(default_factory=list)
    hops_us: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_HOPS))

    def take(self, token: Token, text: Text) -> tuple[Piece, str | None]:
        """A token that was sampled: what to tell of it, and the finish reason if it is the last."""
        sequence = self.sequence
        if not sequence.n_generated:
            self.first_at = time.monotonic()
        sequence.append(token.id)
        shown = self.stops.push(self.decoder.push(token.id))
        reason = "stop" if self.stops.is_hit else sequence.finish_reason
        if reason is not None:
            shown += self.stops.push(self.decoder.finish())
            reason = "stop" if self.stops.is_hit else reason
            shown += self.stops.finish()
        self.text.append(shown)
        logprobs = () if self.logprobs is None else (_logprobs(token, text),)
        if self.logprobs is not None:
            self.logprobs += logprobs
        return Piece(sequence.request_id, (token.id,), shown, logprobs), reason

    def result(self, finish_reason: str) -> dict[str, Any]:
        """What the task's result is; `answer.checked` names its fields."""
        sequence, now = self.sequence, time.monotonic()
        n = sequence.n_generated
        decode_s = now - self.first_at if n else 0.0
        p50, p99 = np.percentile(self.hops_us, [50, 99]).tolist() if self.hops_us else (None, None)
        return {
            "text": "".join(self.text),
            "token_ids": sequence.generated,
            "prompt_token_ids": sequence.ids[: sequence.n_prompt],
            "finish_reason": finish_reason,
            "seed": sequence.sampling.seed,
            "prompt_tokens": sequence.n_prompt,
            "cached_tokens": sequence.n_cached,
            "completion_tokens": n,
            "logprobs": None if self.logprobs is None else [t.to_json() for t in self.logprobs],
            "timings": {
                "prefill_s": self.first_at - self.started_at if n else None,
                "decode_s": decode_s,
                "tokens_per_s": (n - 1) / decode_s if n > 1 and decode_s else None,
                "hop_us_p50": p50,
                "hop_us_p99": p99,
            },
        }


@dataclass(frozen=True)
class Door:
    """Makes a session of a request that can be served. `vocabulary`: ids that the model has; `context`: positions of a
    slot."""

    text: Text
    vocabulary: int
    context: int

    def open(self, celery_request: Any, short_id: bytes) -> Session:
        """short_id: 16 bytes that no other request has had. Raises RequestError for what anybody may have sent."""
        args, kwargs, _ = celery_request._payload
        if args:
            raise RequestError(
                "pptasks.generate takes keyword arguments only: prompt, messages or tokens, max_tokens, ..."
            )
        request = Request.from_kwargs(kwargs)
        ids = self._encode(request)
        if len(ids) > self.context:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, but the context holds {self.context}: "
                "shorten it, or raise --context"
            )
        sequence = Sequence(
            request_id=celery_request.id,
            short_id=short_id,
            ids=ids,
            n_prompt=len(ids),
            max_tokens=min(request.max_tokens, self.context - len(ids) + 1),
            stop_ids=self.text.stop_ids,
            sampling=request.sampling,
            traced=request.verify,
        )
        return Session(
            celery_request, sequence, self.text.decoder(), StopFilter(request.stop),
            request.reply or celery_request.id, None if request.logprobs is None else [],
        )  # fmt: skip

    def _encode(self, request: Request) -> list[int]:
        ids = list(request.tokens) if request.tokens is not None else self._tokenize(request)
        if not ids:
            raise RequestError("the prompt is empty: it has no tokens")
        if (largest := max(ids)) >= self.vocabulary:
            raise RequestError(f"token id {largest} is outside the vocabulary of {self.vocabulary}")
        return ids

    def _tokenize(self, request: Request) -> list[int]:
        self._check_length(request)
        if request.messages is not None:
            return self.text.encode_chat([dict(m) for m in request.messages])
        if request.raw:
            return self.text.encode(request.prompt or "")
        return self.text.encode_chat([{"role": "user", "content": request.prompt or ""}])

    def _check_length(self, request: Request) -> None:
        """A text that no context could hold is refused before it is tokenized, which would hold every request up."""
        chars = len(request.prompt or "") + sum(len(message["content"]) for message in request.messages or ())
        least = chars // self.text.longest_token
        if chars > CHARS_AT_ONCE and least > self.context:
            raise PromptTooLong(
                f"the prompt has at least {least} tokens, but the context holds {self.context}: shorten it"
            )


def is_id(value: object) -> bool:
    """Whether a request with that task id can be told of: anybody may have sent it."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ID and value.isprintable()


def reply_of(celery_request: Any) -> str:
    """Where a request that is refused wants to hear of it, as far as it can be read."""
    try:
        name = celery_request._payload[1].get("reply")
    except Exception:  # anything may have been sent
        name = None
    return str(name) if is_stream_name(name) else str(celery_request.id)


def _logprobs(token: Token, text: Text) -> TokenLogprobs:
    raw = text.of_token(token.id)
    top = tuple((i, text.of_token(i).decode(errors="replace"), p) for i, p in token.top)
    return TokenLogprobs(token.id, raw.decode(errors="replace"), raw, token.logprob or 0.0, top)
