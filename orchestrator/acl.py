"""A Redis user for each worker, with the least rights that its stage needs: what a rented machine can do to the broker.

A worker reads its own queue, writes to the next one and to the head's, and keeps what says that it is there. It
neither reads another stage's frames nor takes its place, sees no other run, and administers nothing. Scripts are the
way around such rules (an endless one stops the broker), so a worker may run those that `create_user` has loaded and
load none.

Redis 7.2, Valkey 7.2, or newer. Users live as long as the server: after a restart, make them again with the same
password. What a worker sends was taken down with MONITOR; tests/integration/test_acl.py finds what is refused to it.
"""

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit, urlunsplit

import redis
from kombu.transport.redis import REFRESH_BINDING, SWEEP_BINDINGS
from redis.lock import Lock

from pptasks.connect import explain
from pptasks.errors import BrokerError
from pptasks.keys import Keys, names_of, stage_name, stage_queue

SCRIPTS = (Lock.LUA_EXTEND_SCRIPT, Lock.LUA_RELEASE_SCRIPT, REFRESH_BINDING, SWEEP_BINDINGS)
# AUTH and HELLO need no right. CLIENT SETINFO and SELECT come with each connection.
_GUEST_ROOT = "+ping +select +script|exists +client|setinfo"
_ROOT = f"{_GUEST_ROOT} +time +multi +exec"
# The exchanges of remote control and events. Workers refresh and sweep kombu's tables of them; those of the queues,
# which no sweep touches, are not among them: without one, a client's requests would be lost.
_EXCHANGES = ("celery.pidbox", "reply.celery.pidbox", "celeryev")


@dataclass(frozen=True)
class User:
    """Who a worker is to the broker."""

    name: str
    password: str = field(repr=False)

    def login(self, url: str) -> str:
        """The broker's URL for this user."""
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit(parts._replace(netloc=f"{self.name}:{quote(self.password, safe='')}@{host}"))


def user_name(run: str, stage: int) -> str:
    return f"pp-{run}-{stage}"


def guest_name(run: str, seat: int) -> str:
    return f"pp-{run}-g{seat}"


def guest_rules(run: str, seat: int) -> list[str]:
    """As `rules`, for a machine that has a seat and no stage yet: its own keys, and whether the run is there. Pure."""
    keys = Keys(run)
    own = (keys.guest(seat), keys.guest_lock(seat))
    guest = [
        _selector((f"%RW~{key}" for key in own), "set get del evalsha pttl pexpire"),
        _selector((f"%R~{keys.guest_stage(seat)}", f"%R~{keys.guests}"), "get"),
        _selector((f"%R~{keys.lease}",), "exists"),
    ]
    return ["-@all", "resetkeys", "resetchannels", *_GUEST_ROOT.split(), *guest]


def rules(run: str, stage: int, n_stages: int, db: int = 0) -> list[str]:
    """What follows the name in ACL SETUSER. Pure. db: of the broker's URL; kombu puts it into its channels' names.

    Each selector, in parentheses, allows some commands on some keys and channels, and only together.
    """
    keys = Keys(run)
    own = [keys.lock(stage), keys.member(stage), *(keys.name(name) for name in names_of(stage, n_stages))]
    receivers = {stage_queue((stage + 1) % n_stages), stage_queue(0)} - {stage_queue(stage)}
    names = [f"_kombu.{table}.{exchange}" for table in ("binding", "binding_permanent") for exchange in _EXCHANGES]
    channel = f"&{keys.prefix}/{db}."

    def kombu(mode: str, *names: str) -> Iterable[str]:
        return (f"{mode}~{keys.prefix}{name}" for name in names)

    queue = stage_queue(stage)
    worker = [
        _selector((f"%RW~{key}" for key in own), "set get getrange del evalsha pttl pexpire"),
        _selector((f"%RW~{keys.log(stage)}",), "rpush ltrim expire"),  # apart: no list can take a record's place
        _selector((f"%R~{keys.lease}",), "exists"),
        _selector(kombu("%RW", queue), "brpop llen lpush"),  # a push gives back what was not begun
        *(_selector(kombu("%W", receiver), "lpush") for receiver in sorted(receivers)),
        _selector(kombu("%RW", f"_kombu.binding.{queue}", f"_kombu.binding_permanent.{queue}"), "sadd smembers"),
        _selector(kombu("%RW", f"{stage_name(stage)}@*.celery.pidbox"), "llen del"),
        _selector(
            kombu("%RW", *names, "_kombu.binding_deadlines"),
            "evalsha sadd srem smembers del exists zadd zrem zrangebyscore",
        ),
        _selector(kombu("%W", "*.reply.celery.pidbox"), "lpush"),
        _selector((f"{channel}celery.pidbox",), "psubscribe punsubscribe"),
        _selector((f"{channel}celeryev/worker.*",), "publish"),
    ]
    head = [
        _selector((f"%R~{keys.prefix}member:*",), "get getrange"),
        _selector((f"%RW~{keys.stream('*')}",), "xadd expire del"),
        _selector((f"%RW~{keys.prefix}celery-task-meta-*", f"&{keys.prefix}celery-task-meta-*"), "get setex publish"),
        _selector((f"{channel}celeryev/*",), "publish"),
    ]
    return ["-@all", "resetkeys", "resetchannels", *_ROOT.split(), *worker, *(head if stage == 0 else ())]


def _selector(patterns: Iterable[str], commands: str) -> str:
    return f"({' '.join(patterns)} {' '.join(f'+{command}' for command in commands.split())})"


def create_user(admin: redis.Redis, run: str, stage: int, n_stages: int, password: str | None = None) -> User:
    """Make the user of a stage, with a new password unless one is given. Whoever was in under its name is out.

    Raises BrokerError.
    """
    db = admin.connection_pool.connection_kwargs.get("db") or 0
    return _create(admin, user_name(run, stage), rules(run, stage, n_stages, db), password)


def create_guest(admin: redis.Redis, run: str, seat: int) -> User:
    """Make the user of a seat, who can do no more than ask for a stage. Raises BrokerError."""
    return _create(admin, guest_name(run, seat), guest_rules(run, seat), None)


def _create(admin: redis.Redis, name: str, given: list[str], password: str | None) -> User:
    user = User(name, password or secrets.token_hex(24))
    digest = hashlib.sha256(user.password.encode()).hexdigest()  # the password itself is not sent
    try:
        for script in SCRIPTS:
            admin.script_load(script)
        with admin.pipeline() as pipe:
            pipe.execute_command("ACL DELUSER", user.name)
            pipe.execute_command("ACL SETUSER", user.name, "on", f"#{digest}", *given)
            pipe.execute()
    except redis.RedisError as e:
        raise BrokerError(
            f"cannot make the Redis user {user.name}: {explain(e)}; give a broker of version 7.2 or newer, "
            "and a user of it who may do ACL and SCRIPT"
        ) from None
    return user


def drop_user(admin: redis.Redis, run: str, stage: int) -> None:
    """Lock a stage's worker out at once: its connections are cut, and its password is void. Raises BrokerError."""
    _drop(admin, [user_name(run, stage)])


def drop_guest(admin: redis.Redis, run: str, seat: int) -> None:
    """`drop_user` for a seat."""
    _drop(admin, [guest_name(run, seat)])


def drop_users(admin: redis.Redis, run: str) -> int:
    """`drop_user` for all stages and seats of a run; how many there were. Raises BrokerError."""
    stem = user_name(run, 0).removesuffix("0")
    try:
        users = [name.decode() if isinstance(name, bytes) else name for name in admin.acl_users()]
    except redis.RedisError as e:
        raise BrokerError(f"cannot list the Redis users of run {run}: {explain(e)}") from None
    names = [name for name in users if name.startswith(stem) and name[len(stem) :].removeprefix("g").isdecimal()]
    _drop(admin, names)
    return len(names)


def _drop(admin: redis.Redis, names: list[str]) -> None:
    try:
        if names:
            admin.acl_deluser(*names)  # which kills their clients, too
    except redis.RedisError as e:
        raise BrokerError(f"cannot drop the Redis users {', '.join(names)}: {explain(e)}") from None
