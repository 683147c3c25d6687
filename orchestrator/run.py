"""The orchestrator's end of one run: its name and secret, its broker, its lease, its logs, the link that it serves."""

import json
import logging
import os
import secrets
import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from orchestrator.broker import EmbeddedBroker, check_broker, purge, sweep
from orchestrator.folders import own_folder, state_folder
from orchestrator.process import Process, end_all, python
from pptasks.config import Settings, bare_environment
from pptasks.connect import connect
from pptasks.errors import BrokerError, LinkError, StorageError
from pptasks.keys import Keys
from pptasks.membership import Lease

if TYPE_CHECKING:
    from pptasks.peers import LinkSettings

log = logging.getLogger(__name__)

LINK_UP_S = 25.0
EMBEDDED = "embedded"
KEEP_LOGS_S = 7 * 24 * 3600


@dataclass(frozen=True)
class Options:
    """How a run is put up."""

    broker: str = EMBEDDED  # or a Redis URL
    broker_port: int | None = None
    link: str = "direct"  # or "iroh"
    relay: str = "none"
    timeout_s: float = 120.0  # without any progress


def is_live(run: str) -> bool:
    """Whether a living process of this user on this machine holds the run."""
    held = _held(run)
    if not held.exists():
        return False
    lock = FileLock(held)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    lock.release()
    return False


def _held(run: str) -> Path:
    return state_folder() / "runs" / run / "held"


class Run:
    """A context manager: inside it the broker answers and the lease is held; after it no key of the run is left.

    `settings` are the given ones with the run's name, secret and broker. Raises BrokerError, LinkError, StorageError.
    """

    def __init__(self, settings: Settings, options: Options):
        self._options = options
        self.settings = replace(
            settings,
            stage=None,
            lease=True,
            cache=settings.cache.resolve(),
            run=f"run-{secrets.token_hex(6)}",
            secret=secrets.token_hex(32),
        )
        self.keys = Keys(self.settings.run)
        self.folder = _held(self.settings.run).parent
        self._links: list[Process] = []
        self._broker: EmbeddedBroker | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Run":
        with ExitStack() as stack:
            self._make_folder()
            stack.push(self._drop_logs)
            self._hold(stack)
            stack.callback(end_all, self._links)
            self._start_broker(stack)
            self.redis = stack.enter_context(connect(self.settings.broker))
            stack.enter_context(Lease(self.settings.broker, self.keys))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def check(self) -> None:
        """Raises LinkError if a link has ended, BrokerError if the embedded broker has."""
        if self._broker is not None and not self._broker.is_running:
            raise BrokerError("the embedded broker has ended: start again, or give a Redis with --broker")
        for link in self._links:
            if link.returncode is not None:
                raise LinkError(f"{link.name} {link.how_it_ended}: {' | '.join(link.tail(3))}")

    def serve(self) -> "Gate":
        """Serve the broker to the peers that the gate admits."""
        from pptasks.peers import LinkSettings, new_key  # loads iroh, which a direct run does not need

        broker = urlsplit(self.settings.broker)
        if broker.hostname not in ("127.0.0.1", "localhost", "::1"):
            raise LinkError(
                f"a link serves a broker on this machine, not one at {broker.hostname}: "
                "run it there, or use --link direct"
            )
        target = f"{'[::1]' if broker.hostname == '::1' else '127.0.0.1'}:{broker.port or 6379}"
        allow, secret = self.folder / "allow", secrets.token_hex(32)
        gate = Gate(allow, secret, self._options.relay)
        served = LinkSettings(
            new_key()[0], secret, target=target, allow=str(allow), relay=gate.relay, die_with_parent=str(os.getpid())
        )
        gate.ticket = self.announced(self.start_link("serve", served, "link"))["ticket"]
        return gate

    def start_link(self, end: str, settings: "LinkSettings", name: str) -> Process:
        """A link's process; whatever it announces is still to be read."""
        argv, env = python("pptasks.link", end), bare_environment() | settings.to_environ()
        self._links.append(Process(name, argv, env, self.folder / f"{name}.log", cwd=self.folder, pipe=True))
        return self._links[-1]

    def announced(self, link: Process) -> dict[str, str]:
        line = link.read_line(LINK_UP_S)
        if not line:
            raise LinkError(
                f"{link.name} is not up after {LINK_UP_S:.0f} s: {' | '.join(link.tail(3)) or link.how_it_ended}"
            )
        return json.loads(line)

    def _make_folder(self) -> None:
        """The folder for this run's logs; those of failed runs go after a week."""
        try:
            own_folder(self.folder)
            for old in self.folder.parent.iterdir():
                if time.time() - old.stat().st_mtime > KEEP_LOGS_S and not is_live(old.name):
                    shutil.rmtree(old, ignore_errors=True)
        except OSError as e:
            raise StorageError(
                f"cannot use {self.folder} for logs: {e.strerror}; set XDG_STATE_HOME to a folder of yours"
            ) from None

    def _hold(self, stack: ExitStack) -> None:
        """Say that we live, see `is_live`."""
        held = _held(self.settings.run)
        stack.callback(held.unlink, missing_ok=True)
        stack.enter_context(FileLock(held, mode=0o600))

    def _start_broker(self, stack: ExitStack) -> None:
        if self._options.broker == EMBEDDED:
            self._broker = stack.enter_context(EmbeddedBroker(self._options.broker_port))
            url = self._broker.url
        else:
            url = self._options.broker
            check_broker(url)
            sweep(url)
            stack.callback(self._purge, url)
        self.settings = replace(self.settings, broker=url)

    def _purge(self, url: str) -> None:
        """Leave no key behind. That it fails must not hide why the run ended."""
        try:
            purge(url, self.keys)
        except BrokerError as e:
            log.warning("%s; the next run on it will", e)

    def _drop_logs(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Logs are kept for whoever asks why a run failed."""
        if kind is None or not issubclass(kind, Exception):
            shutil.rmtree(self.folder, ignore_errors=True)


class Gate:
    """Who may come through the link that a run serves. `ticket`: where it is; `secret`: what every peer must know."""

    def __init__(self, allow: Path, secret: str, relay: str):
        from pptasks.peers import write_allow

        self.secret, self.relay, self.ticket = secret, relay, ""
        self._allow, self._peers, self._write = allow, set[str](), write_allow
        self._write(allow, ())

    def admit(self, *peers: str) -> None:
        """By their ids, see peers.new_key()."""
        self._peers.update(peers)
        self._write(self._allow, sorted(self._peers))

    def dismiss(self, *peers: str) -> None:
        """Who is in is cut off within `link.ALLOW_POLL_S`."""
        self._peers.difference_update(peers)
        self._write(self._allow, sorted(self._peers))
