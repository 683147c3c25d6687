"""A machine's place at the table of a run that it joins, before it has a stage."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import redis
from redis.asyncio import Redis
from redis.exceptions import LockError

from pptasks.config import BROKER_GRACE_S
from pptasks.errors import BrokerError, NotReady, StageTaken
from pptasks.guests import Guest
from pptasks.keys import Keys
from pptasks.membership import LEASE_GRACE_S, TTL_S

TAKE_S, TAKE_PAUSE_S = 5.0, 0.1  # less than BROKER_GRACE_S: whoever is there bears it
LEAVE_S = 2.0


class Seat:
    """A lock, and a record of what we are, both renewed by `beat`."""

    def __init__(self, client: Redis, keys: Keys, number: int):
        self.guest = Guest(number, socket.gethostname(), "probe")
        self.stage: bytes | None = None  # our assignment, as it came
        self.count = b""  # how many are ready, and of how many: "2/3"
        self._client, self._keys, self._number = client, keys, number
        self._lock = client.lock(keys.guest_lock(number), timeout=TTL_S, blocking=False, thread_local=False)
        self._broker_seen = self._lease_seen = time.monotonic()

    async def take(self) -> None:
        """Raises StageTaken as soon as may be: of two machines with one ticket, each puts the other's link out and
        dials again, until one of them has learnt that it is the second. Raises BrokerError."""
        until = time.monotonic() + TAKE_S
        while True:
            try:
                async with self._dismissal():
                    if await self._acquire():
                        return
                    other = await self._other()
            except (redis.RedisError, OSError):
                if time.monotonic() > until:
                    raise BrokerError(
                        "the run's broker does not answer through the link: try again, with this ticket on one machine"
                    ) from None
                await asyncio.sleep(TAKE_PAUSE_S)
            else:
                raise StageTaken(
                    f"seat {self._number} is taken by {other}: a ticket is for one machine; "
                    f"if that one is gone for good, try again in {TTL_S:.0f} s"
                )

    async def beat(self) -> None:
        """Say what we are, and hear what there is. Raises StageTaken, BrokerError, or NotReady if the run is gone."""
        now = time.monotonic()
        try:
            async with self._dismissal():
                await self._hold_lock()
                lease = await self._exchange()
            self._broker_seen = now
            if lease:
                self._lease_seen = now
        except (redis.RedisError, OSError):
            self._lease_seen = now  # whether the lease is there, nobody knows
        if now - self._broker_seen > BROKER_GRACE_S:
            raise BrokerError("the run cannot be reached any more: it has ended, or this seat was dismissed")
        if now - self._lease_seen > LEASE_GRACE_S:
            raise NotReady("the run is gone: whoever started it has ended it; ask for a new ticket")

    async def leave(self) -> None:
        """Make room for the next at once, if the seat is ours. A failure stays readable for a TTL."""
        with contextlib.suppress(redis.RedisError, LockError, OSError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                if not await self._lock.owned():
                    return
                if self.guest.phase == "failed":
                    await self._publish()
                else:
                    await self._client.delete(self._keys.guest(self._number))
                await self._lock.release()

    @contextlib.asynccontextmanager
    async def _dismissal(self) -> AsyncIterator[None]:
        try:
            yield
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError):
            raise BrokerError(
                f"seat {self._number} is not ours: it was dismissed, or its machine has a stage already; "
                "ask whoever started the run for a new ticket"
            ) from None

    async def _acquire(self) -> bool:
        """Is not cancelled half way: `leave` must know whether the lock is ours."""
        acquiring = asyncio.create_task(self._lock.acquire())
        try:
            return await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            await asyncio.gather(acquiring, return_exceptions=True)
            raise

    async def _hold_lock(self) -> None:
        """Renew the lock; take it again if the broker forgot it."""
        try:
            await self._lock.extend(TTL_S, replace_ttl=True)
        except LockError:
            if not await self._lock.acquire():
                raise StageTaken(f"seat {self._number} was taken by {await self._other()}") from None

    async def _exchange(self) -> bool:
        """Whether the run's lease is there."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.set(self._keys.guest(self._number), self.guest.to_json(), px=int(TTL_S * 1000))
            pipe.get(self._keys.guest_stage(self._number))
            pipe.get(self._keys.guests)
            pipe.exists(self._keys.lease)
            _, self.stage, count, lease = await pipe.execute()
        self.count = count or b""
        return bool(lease)

    async def _publish(self) -> None:
        await self._client.set(self._keys.guest(self._number), self.guest.to_json(), px=int(TTL_S * 1000))

    async def _other(self) -> str:
        raw = await self._client.get(self._keys.guest(self._number))
        with contextlib.suppress(ValueError):
            return Guest.from_json(raw or b"").host
        return "another machine"
