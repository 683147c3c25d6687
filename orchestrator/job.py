"""The main job: put a cluster up, submit one request, hand its text on as it comes, tell how it went."""

import time
from collections.abc import Callable
from typing import Any

from orchestrator.signals import check, held
from orchestrator.stages import Cluster
from pptasks.answer import TIMINGS
from pptasks.app import make_app
from pptasks.client import Client
from pptasks.errors import RequestFailed
from pptasks.modelinfo import Model
from pptasks.request import Request
from pptasks.stream import TokenLogprobs, logprobs_of


class Job:
    """Requests to one cluster, one after the other."""

    def __init__(self, cluster: Cluster, timeout_s: float):
        self._cluster, self._timeout_s = cluster, timeout_s
        self._client = Client(make_app(cluster.settings))

    def run(self, request: Request, on_text: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
        """Wait for the whole answer, and return the head's own account of it; `on_text` gets its pieces.

        Raises what the head raised, StageFailed when a worker ends, RequestFailed when nothing comes for `timeout_s`.
        On an interrupt the request is cancelled, and the answer is what had come.
        """
        with held():  # an interrupt finds what it is to cancel
            request_id = self._client.submit(request)
        ids: list[int] = []
        text: list[str] = []
        try:
            check()
            self._follow(request_id, request.max_tokens, ids, text, on_text)
            return self._client.result(request_id)
        except KeyboardInterrupt:
            self._client.cancel(request_id)
            return cancelled(ids, text)
        except OSError:  # whoever reads the text has gone
            self._client.cancel(request_id)
            raise

    def _follow(
        self, request_id: str, most: int, ids: list[int], text: list[str], on_text: Callable[[str], None]
    ) -> None:
        heard, at = time.monotonic(), self._cluster.stages.progress()
        for piece in self._client.stream(request_id):
            self._cluster.check()
            if piece is not None:
                heard = time.monotonic()
                ids.extend(piece.ids)
                if len(ids) > most:
                    self._client.cancel(request_id)
                    raise RequestFailed(f"more than the {most} tokens that were asked for came: stage 0 is not honest")
                text.append(piece.text)
                on_text(piece.text)
            elif (now_at := self._cluster.stages.progress()) != at:  # a verification fetches and loads layers
                at, heard = now_at, time.monotonic()
            elif time.monotonic() - heard > self._timeout_s:
                self._client.cancel(request_id)
                raise RequestFailed(
                    f"no token came for {self._timeout_s:g} s: look at {self._cluster.folder}, or raise --timeout"
                )


def describe(cluster: Cluster, model: Model, result: dict[str, Any]) -> dict[str, Any]:
    """The one JSON object of `pp run --json`."""
    members = cluster.stages.refresh()
    return {
        "text": result["text"],
        "token_ids": result["token_ids"],
        "prompt_token_ids": result["prompt_token_ids"],
        "finish_reason": result["finish_reason"],
        "cached_tokens": result["cached_tokens"],
        "logprobs": None if result["logprobs"] is None else [_of_token(logprobs_of(t)) for t in result["logprobs"]],
        "model": {"name": model.name, "architecture": model.config.architecture, "fingerprint": model.fingerprint},
        "plan": cluster.plan.to_json(),
        "stages": [
            {
                "stage": i, "pid": m.pid, "span": list(m.span or ()), "device": m.device, "kernels": m.kernels,
                "gate_failure": m.gate_failure, "weights_bytes": m.weights_bytes, "rss_bytes": m.rss_bytes,
                "slots": m.slots, "kv_bytes": m.kv_bytes, "compiles": m.compiles,
            }
            for i, m in sorted(members.items())
        ],
        "timings": {"ready_s": cluster.ready_s, **result["timings"]},
        "seed": result["seed"],
    }  # fmt: skip


def _of_token(token: TokenLogprobs) -> dict[str, Any]:
    top = [{"id": i, "text": text, "logprob": logprob} for i, text, logprob in token.top]
    return {"id": token.id, "text": token.text, "bytes": [*token.raw], "logprob": token.logprob, "top": top}


def cancelled(ids: list[int], text: list[str]) -> dict[str, Any]:
    """The account of an answer that was stopped when so much of it had come."""
    return {
        "text": "".join(text),
        "token_ids": ids,
        "prompt_token_ids": [],
        "finish_reason": "cancelled",
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "completion_tokens": len(ids),
        "logprobs": None,
        "seed": None,
        "timings": dict.fromkeys(TIMINGS),
    }
