"""Send behind: put frames on queues without waiting for the broker's answer.

One `HopSender` belongs to one thread, the engine. A frame is one LPUSH on a connection that is kept; the answers are
read by `drain`, when there is nothing better to do, so a hop costs one trip to the broker and no round trip.

A frame counts as confirmed when its answer has been read. When the connection breaks, or an answer is overdue,
everything not yet confirmed is sent once more on a new connection. That can deliver a frame twice, which the stages
drop.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from celery import Celery
from kombu.log import get_logger
from redis.exceptions import ResponseError

from pptasks.errors import BrokerError
from pptasks.transport import CONNECTION_ERRORS, check_frame

MAX_UNCONFIRMED_BYTES = 64 << 20
DRAIN_AFTER_S = 0.05  # an answer that nobody read by then is read before the next frame is sent
ANSWER_TIMEOUT_S = 5.0
_PIECE_BYTES = 256 << 10  # the socket's timeout applies to each piece: a slow line is not a dead one

_CANNOT_CONNECT: tuple[type[Exception], ...] = (*CONNECTION_ERRORS, ResponseError)

logger = get_logger(__name__)


@dataclass(frozen=True)
class _Sent:
    command: bytes
    at: float  # monotonic seconds


class HopSender:
    """Sends frames to stage queues of `app`'s broker. Connects at once; raises BrokerError if that fails."""

    def __init__(self, app: Celery):
        self._broker = app.connection_for_write()
        self._unconfirmed: deque[_Sent] = deque()
        self._unconfirmed_bytes = 0
        try:
            self._broker.connect()
            self._channel = self._broker.channel()
            self._connection = self._channel.pool.get_connection()
        except _CANNOT_CONNECT as error:
            self._broker.release()
            raise BrokerError(f"cannot reach the broker at {self._where}: {error}") from None

    @property
    def _where(self) -> str:
        return f"{self._broker.hostname}:{self._broker.port}"

    def send(self, queue: str, frame: bytes) -> None:
        """Put `frame` on `queue` (its Celery name, without the prefix).

        Raises MalformedFrame for bytes that a receiver would drop, and BrokerError when the broker refused an earlier
        frame or cannot be reached. After a BrokerError this frame is not on its way, and unconfirmed ones may be lost.
        """
        command = _lpush(self._channel.hop_key(queue), check_frame(frame))
        now = time.monotonic()
        too_much = self._unconfirmed_bytes + len(command) > MAX_UNCONFIRMED_BYTES
        if self._unconfirmed and (too_much or now - self._unconfirmed[0].at > DRAIN_AFTER_S):
            self.drain()
        self._unconfirmed.append(_Sent(command, now))
        self._unconfirmed_bytes += len(command)
        try:
            self._write(command)
        except CONNECTION_ERRORS as error:
            self._send_again(error)

    def drain(self) -> None:
        """Read the answers that have come; wait for some only when too many bytes are unconfirmed.

        Raises BrokerError as `send` does. An engine that calls it now and then, also when it has nothing to send, finds
        a dead connection without waiting for a deadline.
        """
        try:
            while self._unconfirmed and (
                self._unconfirmed_bytes > MAX_UNCONFIRMED_BYTES or self._connection.can_read(timeout=0)
            ):
                self._read_answer()
            if self._unconfirmed and time.monotonic() - self._unconfirmed[0].at > ANSWER_TIMEOUT_S:
                raise TimeoutError(f"no answer for {ANSWER_TIMEOUT_S:.0f} s")
        except CONNECTION_ERRORS as error:
            self._send_again(error)

    def close(self) -> None:
        """Close the connection. Frames sent before are on their way; their answers are not awaited."""
        self._connection.disconnect()
        self._broker.release()

    def __enter__(self) -> "HopSender":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_answer(self) -> None:
        try:
            self._connection.read_response()
        except ResponseError as error:  # out of memory, read-only, not permitted: the connection itself is sound
            self._forget_first()
            logger.error("the broker at %s refused a frame: %s", self._where, error)
            raise BrokerError(f"the broker at {self._where} refused a frame: {error}") from None
        self._forget_first()

    def _forget_first(self) -> None:
        self._unconfirmed_bytes -= len(self._unconfirmed.popleft().command)

    def _send_again(self, cause: Exception) -> None:
        """Connect anew and send what is unconfirmed, once."""
        logger.warning(
            "lost the broker at %s (%s); connecting again to send %d frames", self._where, cause, len(self._unconfirmed)
        )
        try:
            self._connection.disconnect()
            self._connection.connect()
            commands = [sent.command for sent in self._unconfirmed]
            self._unconfirmed = deque(_Sent(command, time.monotonic()) for command in commands)
            for command in commands:
                self._write(command)
        except _CANNOT_CONNECT as error:
            lost = len(self._unconfirmed)
            self._unconfirmed.clear()
            self._unconfirmed_bytes = 0
            self._connection.disconnect()
            raise BrokerError(f"cannot reach the broker at {self._where}: {error}; {lost} frames may be lost") from None

    def _write(self, command: bytes) -> None:
        # No health check: it would wait for an answer behind the unconfirmed ones.
        self._connection.send_packed_command(_pieces(command), check_health=False)


def _lpush(key: bytes, frame: bytes) -> bytes:
    """LPUSH key frame, in the Redis protocol, as one buffer and so one packet when it is small."""
    return b"".join((b"*3\r\n$5\r\nLPUSH\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(frame)), frame, b"\r\n"))


def _pieces(command: bytes) -> Iterator[Any]:
    if len(command) <= _PIECE_BYTES:
        return iter((command,))
    view = memoryview(command)
    return (view[at : at + _PIECE_BYTES] for at in range(0, len(view), _PIECE_BYTES))
