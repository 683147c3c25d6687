"""Machines of vast.ai (https://docs.vast.ai/api-reference): what is asked, and what an answer means.

Nothing in an answer is taken on trust: an instance counts as gone only where the API says so in so many words, a list
is complete or an error, and a create of which we do not know what became is looked up by its label, never repeated.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import httpx

from orchestrator.provider import Instance, Instances, Need, Offer, Offers, Order
from orchestrator.vastcalls import Answer, Calls, Pacer
from orchestrator.vastshapes import id_of, offer_query, order_body, read_instance, read_offer
from pptasks.errors import BadKey, CreatedAnyway, NoAnswer, NoCredit, OfferGone, ProviderError

URL = "https://console.vast.ai"
# As published, but for the logs: a guess.
LIMITS_S = {"search": 6.0, "create": 4.5, "destroy": 3.0, "show": 2.0, "list": 1.0, "logs": 2.0}
GAPS_S = {kind: 1.05 * limit for kind, limit in LIMITS_S.items()}
PAGE, MAX_PAGES = 25, 200
CREATE_LOOKS, CREATE_WAIT_S = 3, 2.0  # for a machine that a lost create may have made
DESTROYS, DESTROY_LOOKS = 3, 4
LOG_LOOKS, LOG_WAIT_S, LOG_BYTES = 20, 1.0, 256 << 10
_NO_MONEY = ("credit", "balance", "insufficient funds", "insufficient_funds")


class Vast:
    """The provider "vast". `key`: of the account; shown to the API alone. Close it, or use it in a `with` block.

    pace: a folder that all processes share which use the account, so that they keep the limits together.
    """

    name = "vast"

    def __init__(
        self,
        key: str,
        url: str = URL,
        *,
        gaps_s: Mapping[str, float] = GAPS_S,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        pace: Path | None = None,
    ):
        self._calls = Calls(key, url, Pacer(gaps_s, clock, sleep, pace), transport)
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"Vast({self._calls!r})"

    def __enter__(self) -> "Vast":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._calls.close()

    def search(self, need: Need) -> Offers:
        answer = self._calls.call("search", "POST", "/api/v0/bundles/", body=offer_query(need))
        offers = answer.fields.get("offers")
        if not answer.ok or not isinstance(offers, list):
            raise self._refusal(answer, "search for offers")
        return [offer for raw in offers if (offer := read_offer(raw, self._calls.scrubber)) is not None]

    def create(self, offer: Offer, order: Order) -> str:
        path, body = f"/api/v0/asks/{_segment(offer.id)}/", order_body(order)
        self._calls.scrubber.add_environment(order.env)
        try:
            answer = self._calls.call("create", "PUT", path, body=body, once=True)
        except NoAnswer as error:
            try:
                return self._find(order.label, error)
            except BadKey as refusal:  # of the list, which says nothing of the create
                raise NoAnswer(f"{error}; {refusal}") from None
        made = id_of(answer.fields.get("new_contract"))
        if made and answer.ok:
            return made
        if made:
            said = self._calls.said(answer)
            raise CreatedAnyway(f"vast.ai refuses offer {offer.id} ({said}) and yet made instance {made}", made)
        if answer.ok:
            return self._find(order.label, NoAnswer(f"vast.ai does not say which instance offer {offer.id} became"))
        raise self._create_refusal(answer, offer)

    def get(self, instance_id: str) -> Instance | None:
        answer = self._calls.call("show", "GET", f"/api/v0/instances/{_segment(instance_id)}/")
        if _says_gone(answer):
            return None
        raw = answer.fields.get("instances")
        if not answer.ok or not isinstance(raw, dict):
            raise self._refusal(answer, f"show instance {instance_id}")
        instance = read_instance(raw, self._calls.scrubber)
        if instance is None or instance.id != instance_id:
            raise ProviderError(f"vast.ai shows another instance than {instance_id}, which was asked for")
        return instance

    def list(self, label_prefix: str) -> Instances:
        ours: dict[str, Instance] = {}
        for raw in self._pages():
            label = raw.get("label") if isinstance(raw, dict) else None
            if isinstance(label, str) and label.startswith(label_prefix):
                instance = read_instance(raw, self._calls.scrubber)
                if instance is None:
                    raise ProviderError("vast.ai lists an instance of ours without its id: look at its console")
                ours[instance.id] = instance
        return sorted(ours.values(), key=lambda instance: int(instance.id))

    def destroy(self, instance_id: str) -> None:
        path, why = f"/api/v0/instances/{_segment(instance_id)}/", "it still exists"
        for _ in range(DESTROYS):
            try:
                answer = self._calls.call("destroy", "DELETE", path)
                if _says_gone(answer):
                    return
                if not answer.ok:
                    why = f"{answer.status}: {self._calls.said(answer)}"
                for _ in range(DESTROY_LOOKS if answer.ok else 1):
                    if self.get(instance_id) is None:
                        return
            except BadKey:
                raise
            except ProviderError as error:
                why = str(error)
        raise NoAnswer(f"vast.ai instance {instance_id} is not confirmed to be destroyed ({why}): it may bill")

    def logs(self, instance_id: str, lines: int) -> str:
        path = f"/api/v0/instances/request_logs/{_segment(instance_id)}/"
        answer = self._calls.call("logs", "PUT", path, body={"tail": str(lines)})
        url = answer.fields.get("result_url")
        if not answer.ok or not isinstance(url, str):
            raise self._refusal(answer, f"give the logs of instance {instance_id}")
        for _ in range(LOG_LOOKS):
            data = self._calls.fetch(url, LOG_BYTES)
            if data is not None:
                shown = self._calls.scrubber.log(data.decode(errors="replace").replace("\r", "\n"))
                return "\n".join(shown.splitlines()[-lines:])
            self._sleep(LOG_WAIT_S)
        raise NoAnswer(f"vast.ai did not give the logs of instance {instance_id}; try again later")

    def _pages(self) -> Iterator[object]:
        """Every instance of the account, raw. The v0 list has ended; nothing but a list counts as one."""
        token, seen = "", set[str]()
        for _ in range(MAX_PAGES):
            params = {"limit": str(PAGE)} | ({"after_token": token} if token else {})
            answer = self._calls.call("list", "GET", "/api/v1/instances/", params=params)
            page, following = answer.fields.get("instances"), answer.fields.get("next_token")
            if not answer.ok or not isinstance(page, list):
                raise self._refusal(answer, "list instances")
            yield from page
            if not following:
                return
            token = str(following)
            if token in seen or self._calls.scrubber.log(token) != token:  # it goes into a URL: not with our key in it
                break
            seen.add(token)
        raise ProviderError("the list of instances of vast.ai does not end: look at its console for what bills")

    def _find(self, label: str, error: NoAnswer) -> str:
        """The instance that a create with an unknown outcome made, or NoAnswer."""
        for _ in range(CREATE_LOOKS):
            for instance in self.list(label):
                if instance.label == label:
                    return instance.id
            self._sleep(CREATE_WAIT_S)
        raise NoAnswer(f"{error}; no instance has the label {label} so far, but one may come up")

    def _refusal(self, answer: Answer, what: str) -> ProviderError:
        if "deprecated_endpoint" in answer.text:
            return ProviderError(f"vast.ai has ended the way to {what} that this version knows: update pptasks")
        said = self._calls.said(answer)
        return ProviderError(f"vast.ai does not {what} ({answer.status}: {said})")

    def _create_refusal(self, answer: Answer, offer: Offer) -> ProviderError:
        text = answer.text.lower()
        if "deprecated_endpoint" not in text:
            if "no_such_ask" in text or answer.status in (404, 410):
                return OfferGone(f"offer {offer.id} ({offer.gpu_name}) is gone: somebody else rented it")
            if answer.status == 402 or any(word in text for word in _NO_MONEY):
                return NoCredit(
                    f"the vast.ai account has no credit ({self._calls.said(answer)}): add some and try again"
                )
        return self._refusal(answer, f"rent offer {offer.id}")


def _says_gone(answer: Answer) -> bool:
    """That there is no such instance: said by the API itself, not by whatever else answers 404 for a lost path."""
    if answer.status == 404:
        return "no_such_" in answer.text or answer.fields.get("success") is False
    return answer.ok and "instances" in answer.fields and answer.fields["instances"] is None


def _segment(instance_or_offer: str) -> str:
    """An id, fit for a path."""
    if not id_of(instance_or_offer):
        raise ProviderError(f"{instance_or_offer[:40]!r} is no id of vast.ai: its ids are numbers")
    return instance_or_offer
