"""kombu's Redis transport, with one more kind of message: the hop, a bare frame on the queue.

Set it with `broker_transport = "pptasks.transport:Transport"`. A list item on Redis is either

- a frame, which begins with `wire.MAGIC`: no envelope, no base64, the bytes that `wire.encode` made. It reaches Celery
  as a message for the task `HOP_TASK` with the frame as its raw body; or
- kombu's own JSON envelope, which begins with `{`: tasks, replies, broadcasts and events pass exactly as in the stock
  transport.

Anything else, and anything whose handling raises something other than a broken connection, is counted in `dropped`,
logged at most every few seconds, and forgotten: what a stranger writes to a queue never stops a worker. Message
contents are not logged.

Delivery is at most once (no acknowledgement emulation): the head repeats a lap that is lost. `sender.HopSender` sends
frames with the least delay.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import Empty
from typing import Any

import redis
from kombu.log import get_logger
from kombu.transport import redis as stock
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads

from pptasks.errors import MalformedFrame
from pptasks.wire import MAGIC, MAX_FRAME_BYTES

HOP_CONTENT_TYPE = "application/x-pptasks-frame"
HOP_TASK = "pptasks.hop"
MAX_ENVELOPE_BYTES = 16 << 20
RECEIVE_AHEAD = 4  # messages that a worker has asked for at any time

# Both timeouts together find a half-open TCP connection in seconds; one alone takes a minute or for ever. BRPOP asks in
# slices of 1 s.
OPTIONS = {"socket_timeout": 5.0, "socket_connect_timeout": 5.0, "socket_keepalive": True, "health_check_interval": 3}

# kombu counts KeyError as a lost connection too; here it is a message that lacks something.
CONNECTION_ERRORS: tuple[type[Exception], ...] = tuple(
    e for e in stock.Transport.connection_errors if e is not KeyError
)
_FROM_REDIS: tuple[type[Exception], ...] = (Empty, redis.RedisError, *CONNECTION_ERRORS)

logger = get_logger(__name__)


class Dropped:
    """How many messages this process has dropped; logs one line per `interval_s` at most."""

    def __init__(self, interval_s: float = 10.0):
        self.count = 0
        self._interval_s, self._quiet_until = interval_s, 0.0

    def add(self, queue: str, reason: str, error: Exception | None = None) -> None:
        self.count += 1
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + self._interval_s
            logger.warning("dropped a message on %s: %s (%d so far)", queue, reason, self.count, exc_info=error)


dropped = Dropped()


class Channel(stock.Channel):
    ack_emulation = False
    priority_steps = (0,)
    _kept: redis.Redis | None = None
    _asked = 0  # BRPOPs whose reply has not been read

    @contextmanager
    def conn_or_acquire(self, client: redis.Redis | None = None) -> Iterator[redis.Redis]:
        """One client for the life of the connection pool; the stock channel makes one for each command."""
        if client is None:
            if self._kept is None or self._kept.connection_pool is not self._pool:
                self._kept = self._create_client()
            client = self._kept
        yield client

    def hop_key(self, queue: str) -> bytes:
        """The Redis key of a queue, for those who do not go through kombu's client, which puts the prefix before it."""
        return f"{self.global_keyprefix}{queue}".encode()

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        if message["content-type"] != HOP_CONTENT_TYPE:
            super()._put(queue, message, **kwargs)
            return
        frame = check_frame(self.decode_body(message["body"], message["properties"].get("body_encoding")))
        with self.conn_or_acquire() as client:
            client.lpush(queue, frame)

    def _brpop_start(self, timeout: float | None = None) -> None:
        """A worker asks for several messages, which the broker gives one after the other: with one request at a time it
        would get at most one message in a round trip. Others, who come and go, ask for one."""
        if not self._in_poll:  # the connection is a new one, or nothing was asked on it
            self._asked = 0
        while self._asked < (RECEIVE_AHEAD if self.connection.on_frame is not None else 1):
            super()._brpop_start(timeout)
            if not self._in_poll:  # there is no queue
                return
            self._asked += 1

    def _brpop_read(self, **options: Any) -> bool:
        """Read the replies to BRPOP that have come, and deliver what they hold. Raises Empty when that is nothing."""
        delivered = self._read_reply(**options)
        while self._asked and self.qos.can_consume() and self.client.connection.can_read(timeout=0):
            delivered |= self._read_reply(**options)
        if self._asked and not self._closing and self.qos.can_consume():
            self._brpop_start()
        if not delivered:
            raise Empty()
        return True

    def _read_reply(self, **options: Any) -> bool:
        """Whether there was a message in it."""
        try:
            reply = self.client.parse_response(self.client.connection, "BRPOP", **options)
        except BaseException:
            self._in_poll, self._asked = None, 0
            self.client.connection.disconnect()  # the next poll connects again
            raise
        self._asked -= 1
        self._in_poll = self.client.connection if self._asked else None
        self._brpop_sent_at = time.monotonic()  # of the next one the broker has just begun
        self._flush_brpop_reauth()
        if not reply:
            return False
        queue, item = bytes_to_str(reply[0]), reply[1]
        self._queue_cycle.rotate(queue)
        if item.startswith(MAGIC) and self.connection.on_frame is not None:
            self._deliver_guarded(queue, self.connection.on_frame, item)
            return True
        try:
            message = self._incoming(queue, item)
        except MalformedFrame as error:
            dropped.add(queue, str(error))
        else:
            self.connection._deliver(message, queue)
        return True

    def _incoming(self, queue: str, item: bytes) -> dict[str, Any]:
        """The kombu message in a list item. Raises MalformedFrame."""
        if not item.startswith(MAGIC):
            return parse_envelope(item)
        return {
            "body": check_frame(item),
            "content-type": HOP_CONTENT_TYPE,
            "content-encoding": "binary",
            "headers": {"task": HOP_TASK, "id": HOP_TASK, "lang": "py"},
            "properties": {
                "delivery_tag": self._next_delivery_tag(),
                "delivery_info": {"exchange": "", "routing_key": queue},
            },
        }

    def _receive_one(self, client: redis.client.PubSub) -> bool | None:
        """Read and deliver one broadcast."""
        try:
            return super()._receive_one(client)
        except _FROM_REDIS:
            raise
        except Exception as error:
            dropped.add("a broadcast channel", f"{type(error).__name__}, no message for a worker")
            return None

    def _deliver_fanout_message(self, message: Any, exchange: str) -> bool:
        return super()._deliver_fanout_message(check_envelope(message), exchange)

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[..., Any], consumer_tag: str, **kwargs: Any
    ) -> None:
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        callbacks = self.connection._callbacks
        callbacks[queue] = partial(self._deliver_guarded, queue, callbacks[queue])

    def _deliver_guarded(self, queue: str, deliver: Callable[[Any], Any], raw: Any) -> None:
        """Hand a message to its consumer. One that it cannot take is dropped and gives its prefetch slot back."""
        try:
            deliver(raw)
        except CONNECTION_ERRORS:
            raise
        except Exception as error:
            dropped.add(queue, f"the consumer raised {type(error).__name__}", error)
            self._forget(raw)

    def _forget(self, raw: Any) -> None:
        try:
            tag = raw["properties"]["delivery_tag"]
            self.qos.get(tag)
        except (KeyError, TypeError):
            return  # it never got as far as to hold a prefetch slot
        self.basic_ack(tag)


class Transport(stock.Transport):
    """`on_frame` takes frames past kombu's and Celery's message layers, which would cost as much as the hop itself.

    The hop task's strategy sets it; without it a frame is a message like any other.
    """

    Channel = Channel
    on_frame: Callable[[bytes], None] | None = None

    def __init__(self, client: Any, **kwargs: Any):
        for name, value in OPTIONS.items():
            client.transport_options.setdefault(name, value)
        super().__init__(client, **kwargs)


def check_frame(frame: bytes) -> bytes:
    """The same bytes. Raises MalformedFrame for what a receiver would drop unread; `wire.decode` judges the rest."""
    if not frame.startswith(MAGIC):
        raise MalformedFrame(f"{len(frame)} bytes that do not begin as a frame")
    if len(frame) > MAX_FRAME_BYTES:
        raise MalformedFrame(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return frame


def parse_envelope(item: bytes) -> dict[str, Any]:
    """kombu's JSON envelope. Raises MalformedFrame for anything that cannot be one."""
    if len(item) > MAX_ENVELOPE_BYTES:
        raise MalformedFrame(f"a message of {len(item)} bytes is over the limit of {MAX_ENVELOPE_BYTES}")
    if not item.startswith(b"{"):
        raise MalformedFrame(f"{len(item)} bytes that are neither a frame nor an envelope")
    try:
        envelope = loads(bytes_to_str(item))
    except Exception as error:  # kombu's decoder calls constructors on what it finds, so anything can come out of it
        raise MalformedFrame(
            f"{len(item)} bytes that begin as an envelope and are none ({type(error).__name__})"
        ) from None
    return check_envelope(envelope)


def check_envelope(envelope: Any) -> dict[str, Any]:
    """The same envelope. Raises MalformedFrame for one that lacks what kombu needs.

    A compressed body is refused: it could unpack to any size.
    """
    try:
        headers, tag = envelope.get("headers") or {}, envelope["properties"]["delivery_tag"]
        if headers.get("compression"):
            raise MalformedFrame("an envelope with a compressed body")
    except (AttributeError, KeyError, TypeError):
        raise MalformedFrame("an envelope without headers, properties or delivery tag") from None
    if not isinstance(tag, str):
        raise MalformedFrame("an envelope whose delivery tag is no string")
    return dict(envelope)
