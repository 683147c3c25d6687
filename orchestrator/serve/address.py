"""Where a server listens."""

import ipaddress
import socket

from pptasks.errors import UsageError

_UNREAD_MS = 60_000  # a client that takes nothing of what it is sent for as long has gone


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that is bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet; port 0: a free one. Raises UsageError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as e:
        raise UsageError(f"--host {host}: {e.strerror}") from None
    # What a connection inherits: a client whose machine is gone is noticed.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
    try:
        bound.bind(address)
    except OSError as e:
        bound.close()
        raise UsageError(f"cannot listen on {host}, port {port}: {e.strerror}; give another --port") from None
    return bound


def url_of(bound: socket.socket, host: str) -> str:
    """How a client on this machine calls it."""
    port = bound.getsockname()[1]
    name = host if is_loopback(host) or host not in ("", "0.0.0.0", "::") else "127.0.0.1"
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"
