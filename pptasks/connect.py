"""A redis-py client for what is not a Celery message: members, leases, token streams."""

from urllib.parse import urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

SOCKET_TIMEOUT_S = 5.0


def connect(url: str) -> redis.Redis:
    """A client that notices a dead link within seconds and repeats no command by itself. Opens no connection yet."""
    return redis.Redis.from_url(
        url, socket_timeout=SOCKET_TIMEOUT_S, health_check_interval=3, retry=Retry(NoBackoff(), 0)
    )


def through(url: str, port: int | str) -> str:
    """The broker's URL, reached through a local port: same login, same database."""
    parts = urlsplit(url)
    login, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{login}{at}127.0.0.1:{port}"))


def explain(error: Exception) -> str:
    """A Redis error in one line that holds no password."""
    return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
