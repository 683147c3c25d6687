"""The fake's state: what its API does, without HTTP."""

import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.fake_vast.faults import LIMITS_S, SEARCH_WINDOW_S, SEARCHES, Fault, Limits, Refused
from tests.fake_vast.http import Request, Server
from tests.fake_vast.machine import RUNS, Life, Machine, Start
from tests.fake_vast.market import BadQuery, search

MAX_ENV, MIN_DISK_GB = 256, 8
PAGE = 25
TICK_S = 0.02


class FakeVast:
    """offers: as the search shows them. start: called when an instance runs, on a thread of the fake.

    scale: of the limits; 0 for none. gone: the status for an offer that is not there any more (400, 404, 410).
    """

    def __init__(
        self,
        offers: Sequence[Mapping[str, object]],
        *,
        start: Start | None = None,
        key: str = "0123456789abcdef" * 4,
        scale: float = 0.0,
        credit: bool = True,
        gone: int = 404,
        life: Life = RUNS,
        log_s: float = 0.0,
        ignored: frozenset[str] = frozenset(),
        port: int = 0,
    ):
        self.offers = {str(offer["id"]): dict(offer) for offer in offers}
        self.key, self.credit, self.gone, self.ignored = key, credit, gone, ignored
        self.life, self.lives = life, dict[int, Life]()  # of all machines, and of some by machine_id
        self.instances: dict[int, Machine] = {}  # all that there ever were
        self.faults: list[Fault] = []
        self.log: list[Request] = []
        self.limits = Limits(scale)
        self.lock = threading.RLock()
        self._start, self._log_s = start, log_s
        self._ids = itertools.count(31000000)
        self._results: dict[str, tuple[float, str]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="fake-vast-"))
        self._stopped = threading.Event()
        self._server = Server(self, port)
        self._threads = [threading.Thread(target=work) for work in (self._server.run, self._tick)]

    def __enter__(self) -> "FakeVast":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._server.stop()
        for thread in self._threads:
            thread.join()
        for machine in self.instances.values():
            machine.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    @property
    def gaps_s(self) -> dict[str, float]:
        """How long to wait between two calls of a kind."""
        limits = {**LIMITS_S, "search": SEARCH_WINDOW_S / SEARCHES, "logs": 0.0}
        return {kind: 1.05 * self.limits.scale * limit for kind, limit in limits.items()}

    @property
    def too_fast(self) -> list[tuple[str, float]]:
        return self.limits.too_fast

    @property
    def billing(self) -> list[Machine]:
        """Instances that cost money now."""
        with self.lock:
            return [machine for machine in self.instances.values() if machine.bills]

    @property
    def cost_usd(self) -> float:
        with self.lock:
            return sum(machine.cost_usd for machine in self.instances.values())

    def calls(self, kind: str) -> list[Request]:
        with self.lock:
            return [request for request in self.log if request.kind == kind]

    def fault(self, kind: str, path: str) -> Fault | None:
        with self.lock:
            return next((fault for fault in self.faults if fault.strikes(kind, path)), None)

    def search(self, query: object) -> object:
        with self.lock:
            market = [offer for offer in self.offers.values() if not self._is_rented(offer)]
        try:
            return {"offers": search(market, query, self.ignored)}
        except (BadQuery, TypeError, ValueError) as error:
            raise Refused(400, "invalid_args", f"cannot search by {error}") from None

    def create(self, offer_id: str, body: object) -> object:
        with self.lock:
            offer = self.offers.get(offer_id)
            if offer is None or self._is_rented(offer):
                raise Refused(self.gone, "no_such_ask", f"error 404/3603: no_such_ask {offer_id} is not available.")
            if not self.credit:
                raise Refused(400, "insufficient_credit", "Your account lacks credit; see the billing page.")
            machine = self._order(offer, body)
            self.instances[machine.id] = machine
            return {"success": True, "new_contract": machine.id}

    def rent_as_another(self, label: str | None = None) -> Machine:
        """An instance of the same account that somebody else made."""
        with self.lock:
            offer = next(offer for offer in self.offers.values() if not self._is_rented(offer))
            machine = self._order(offer, {"image": "another", "disk": 10, "label": label})
            self.instances[machine.id] = machine
            return machine

    def show(self, instance_id: str) -> object:
        with self.lock:
            machine = self.instances.get(int(instance_id))
            if machine is None:
                raise Refused(404, "no_such_instance")
            return {"instances": machine.shown() if machine.bills else None}

    def list(self, limit: str, token: str) -> object:
        with self.lock:
            if not 0 < int(limit) <= PAGE:
                raise Refused(400, "invalid_args", "limit")
            bills = sorted(self.billing, key=lambda machine: machine.id)
            rest = [machine for machine in bills if machine.id > int(token.removeprefix("after-") or 0)]
            page = rest[: int(limit)]
            following = f"after-{page[-1].id}" if len(rest) > len(page) else None
            shown = [machine.shown() for machine in page]
            return {
                "success": True,
                "instances_found": len(page),
                "total_instances": len(bills),
                "next_token": following,
                "instances": shown,
            }

    def destroy(self, instance_id: str) -> object:
        with self.lock:
            machine = self.instances.get(int(instance_id))
            if machine is None or not machine.bills:
                raise Refused(404, "no_such_instance", f"Instance {instance_id} not found.")
            machine.ended_at = time.time()
        machine.end()  # its process may take its time; others are served meanwhile
        return {"success": True}

    def request_logs(self, instance_id: str, body: object) -> object:
        """The answer names a URL by another host name, where the text is found after a while."""
        with self.lock:
            machine = self.instances.get(int(instance_id))
            if machine is None or not machine.bills:
                raise Refused(404, "no_such_instance")
            if not isinstance(body, dict) or not str(body.get("tail", "")).isdigit():
                raise Refused(400, "invalid_args", "tail")
            text = machine.log.read_text(errors="replace") if machine.log.exists() else ""
            lines = text.splitlines(keepends=True)[-int(body["tail"]) :]
            token = f"{instance_id}-{len(self._results)}"
            self._results[token] = time.monotonic() + self._log_s, "".join(lines)
            return {"success": True, "result_url": f"http://localhost:{self._server.port}/results/{token}?Signature=x"}

    def result(self, token: str) -> str | None:
        with self.lock:
            ready_at, text = self._results.get(token, (float("inf"), ""))
        return text if time.monotonic() >= ready_at else None

    def _is_rented(self, offer: Mapping[str, object]) -> bool:
        return any(machine.offer["machine_id"] == offer["machine_id"] for machine in self.billing)

    def _order(self, offer: Mapping[str, object], body: object) -> Machine:
        if not isinstance(body, dict) or not isinstance(body.get("image"), str):
            raise Refused(400, "invalid_args", "image")
        env, disk = body.get("env", {}), body.get("disk", MIN_DISK_GB)
        if not isinstance(env, dict) or not all(isinstance(v, str) and len(v) <= MAX_ENV for v in env.values()):
            raise Refused(400, "invalid_args", f"env {env}")
        if not isinstance(disk, int | float) or disk < MIN_DISK_GB:
            raise Refused(400, "invalid_args", "disk")
        contract = next(self._ids)
        return Machine(
            id=contract,
            offer=offer,
            label=body.get("label"),
            image=body["image"],
            onstart=body.get("onstart", ""),
            args=list(body.get("args", [])),
            env=env,
            price=float(body.get("price") or offer["dph_total"]),
            log=self._folder / f"{contract}.log",
            life=self.lives.get(offer["machine_id"], self.life),
        )

    def _tick(self) -> None:
        """Let time pass for the instances."""
        while not self._stopped.wait(TICK_S):
            with self.lock:
                for machine in self.billing:
                    machine.advance(self._start)
