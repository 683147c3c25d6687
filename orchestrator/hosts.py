"""Machines that the user owns already: this one ("local"), and any that ssh reaches ("ssh"). One implementation.

A host is an argv that runs the POSIX sh script on its stdin: `sh -s` here, `ssh HOST 'sh -s'` there. What is done on a
host is one such script. Secrets travel in the script alone: they are in no argv, and on no disk of the host.

A node is the process that we start on a host, with all that it starts. As in a container, these end when it ends, and
SIGTERM goes to it alone. Each has the node's label in its environment (PPTASKS_NODE): by that they are found again,
whatever their process ids, and told from all others. The host keeps a folder of each node until it is destroyed:

    ${XDG_STATE_HOME:-~/.local/state}/pptasks/nodes/HOSTNAME/LABEL/     several hosts may share a home
        log     what its processes write
        node    "PID START", the first process and Unix time; not there while it starts
        exit    the exit code, unless it was killed

Hosts run Linux and have setsid, flock, timeout and a grep that knows -z (GNU's or BusyBox's).
"""

import os
import re
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from shlex import quote
from typing import TypeVar

from orchestrator.hostscripts import CREATE, DESTROY, LIST, LOG, MISSING, PROLOGUE, SEARCH, TAKEN
from orchestrator.provider import Instance, Instances, Need, Offer, Offers, Order, State
from orchestrator.vastcalls import Scrubber
from pptasks.config import bare_environment
from pptasks.errors import NoAnswer, OfferGone, ProviderError, UsageError

ANSWER_S, END_S = 30.0, 50.0  # for one script; for the one that ends a node, which takes its time
TICK_S = 0.02
MAX_ORDER = 40_000  # bytes; with our script less than what a pipe holds, so that to write it never waits
MAX_ANSWER = 1 << 20  # bytes
MAX_LINES = 10_000  # of a log
THREADS = 16  # hosts that are asked at once
ANY_CUDA = 99.0  # what is installed there is the user's business
SSH = ("ssh", "-T", "-a", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ClearAllForwardings=yes")
_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_:][A-Za-z0-9_.:%-]*", re.ASCII)
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PROGRAM = re.compile(r"\s*(?:exec\s+)?([A-Za-z0-9_.+/~-]+)(?:\s|$)", re.ASCII)  # safe for a shell without quotes
_NODE = re.compile(r"node (\S+) (starting|running|ended) (\S+) (\S{1,12})", re.ASCII)
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Host:
    name: str  # as ssh knows it; "" for this machine
    argv: tuple[str, ...]
    places: int  # nodes that it takes

    def __str__(self) -> str:
        return self.name or "this machine"


class Hosts:
    """The provider `name`: "local" or "ssh". Its machines cost nothing; Hosts.local and Hosts.ssh make one."""

    def __init__(self, name: str, hosts: Sequence[_Host], command: str = ""):
        self.name = name
        self._hosts, self._command = {host.name: host for host in hosts}, command
        self._scrubber, self._scrubbing = Scrubber(""), threading.Lock()

    @classmethod
    def local(cls, places: int) -> "Hosts":
        """This machine, for so many nodes, those of other runs among them."""
        return cls("local", [_Host("", ("sh", "-s"), places)])

    @classmethod
    def ssh(cls, hosts: Sequence[str], options: Sequence[str] = (), command: str = "") -> "Hosts":
        """One node on each. The user's ssh configuration, agent and known hosts apply; `options` go to ssh besides.

        command: what will be ordered; `search` looks whether it is there. Raises UsageError.
        """
        for host in hosts:
            if not _HOST.fullmatch(host):
                raise UsageError(f"{host[:80]!r} is no host: give HOST or USER@HOST; a port belongs in ~/.ssh/config")
        if not hosts:
            raise UsageError("no host is given: name at least one")
        return cls("ssh", [_Host(h, (*SSH, *options, "--", h, "sh -s"), 1) for h in dict.fromkeys(hosts)], command)

    def search(self, need: Need) -> Offers:
        """One offer for each free place, in the order of the hosts. What a host has is told, not compared with `need`.

        ProviderError: hosts that cannot be used; or if fewer than need.count places are free, hosts that run nodes.
        """
        body = _check(self._command) + SEARCH
        told = self._of_all(lambda host: self._must(host, body, "say what it has"))
        offers = [offer for host, text in told.items() for offer in self._offers(host, text)]
        taken = [str(host) for host, text in told.items() if _number(text, "taken")]
        if taken and len(offers) < need.count:
            raise ProviderError(f"nodes run already on {', '.join(taken)}: end them with pp down, or see pp ps")
        return offers

    def create(self, offer: Offer, order: Order) -> str:
        """Start the order's command. OfferGone tells why nothing was started. Raises UsageError for an odd order."""
        host = self._hosts.get(offer.host_id if self.name == "ssh" else "")
        if host is None:
            raise OfferGone(f"{offer.host_id[:80]!r} is none of the hosts that were given")
        script = _check(order.command) + _assignments(host, order) + CREATE
        with self._scrubbing:
            self._scrubber.add_environment(order.env)
        instance_id = self._id(host, order.label)
        try:
            self._must(host, script, "start a node")
        except NoAnswer:
            if self.get(instance_id) is None:
                raise
        except ProviderError as error:
            raise OfferGone(str(error)) from None
        return instance_id

    def get(self, instance_id: str) -> Instance | None:
        host, label = self._parse(instance_id)
        return next((node for node in self._nodes(host) if node.label == label), None)

    def list(self, label_prefix: str) -> Instances:
        found = self._of_all(self._nodes).values()
        return [node for nodes in found for node in nodes if node.label.startswith(label_prefix)]

    def destroy(self, instance_id: str) -> None:
        """SIGTERM, after 8 s SIGKILL for all that is left, then its folder. NoAnswer: its end is not confirmed."""
        host, label = self._parse(instance_id)
        try:
            self._must(host, f"label={quote(label)}\n{DESTROY}", "end a node", END_S)
        except ProviderError as error:
            raise NoAnswer(f"the end of {instance_id} is not confirmed: {error}") from None

    def logs(self, instance_id: str, lines: int) -> str:
        host, label = self._parse(instance_id)
        body = LOG.format(label=quote(label), size=MAX_ANSWER // 4, lines=min(max(lines, 1), MAX_LINES))
        text = self._must(host, body, "show a log")
        with self._scrubbing:
            return self._scrubber.log(text)

    def _nodes(self, host: _Host) -> Instances:
        matches = map(_NODE.fullmatch, self._must(host, LIST, "say what runs there").splitlines())
        return [self._instance(host, *m.groups()) for m in matches if m and _LABEL.fullmatch(m[1])]

    def _instance(self, host: _Host, label: str, word: str, code: str, start: str) -> Instance:
        state = {"starting": State.CREATING, "running": State.RUNNING, "ended": State.ENDED}[word]
        if state is State.ENDED:
            word = f"exit code {code}" if code.isdecimal() else "killed, or the host was started again"
        return Instance(self._id(host, label), label, state, word, 0.0, float(start) if start.isdecimal() else None)

    def _id(self, host: _Host, label: str) -> str:
        return ":".join(part for part in (self.name, host.name, label) if part)

    def _parse(self, instance_id: str) -> tuple[_Host, str]:
        """ProviderError for what is no id of ours, or of a host that was not given."""
        label = instance_id.rpartition(":")[2]
        for host in self._hosts.values():
            if _LABEL.fullmatch(label) and self._id(host, label) == instance_id:
                return host, label
        raise ProviderError(f"{instance_id[:160]!r} is no node of {', '.join(map(str, self._hosts.values()))}")

    def _offers(self, host: _Host, text: str) -> Offers:
        """What is free of a host, from what it tells. A GPU's memory is told in MiB, all else in KiB."""
        gpu = re.search(r"^gpu (.+), ([0-9]{1,9})$", text, re.MULTILINE)
        name, memory = (gpu[1], int(gpu[2]) << 20) if gpu else ("CPU", _number(text, "memory") << 10)
        with self._scrubbing:
            name = self._scrubber.message(name)
        free, disk_gb = host.places - _number(text, "taken"), _number(text, "disk") * 1024 / 1e9
        ids = [host.name] if host.name else [f"local-{i}" for i in range(host.places)]
        return [
            Offer(id, id, host.name or "local", name, 1, memory, 0.0, 1.0, ANY_CUDA, 0.0, 0.0, disk_gb, "")
            for id in ids[: max(0, free)]
        ]

    def _of_all(self, ask: Callable[[_Host], _T]) -> dict[_Host, _T]:
        """The answer of every host, in their order, or one error that names all hosts that gave none."""
        answers, errors = dict[_Host, _T](), []
        with ThreadPoolExecutor(min(THREADS, len(self._hosts)), thread_name_prefix="host") as pool:
            for host, future in [(host, pool.submit(ask, host)) for host in self._hosts.values()]:
                try:
                    answers[host] = future.result()
                except ProviderError as error:
                    errors.append(error)
        if errors:
            raise errors[0] if len(errors) == 1 else ProviderError("; ".join(map(str, errors)))
        return answers

    def _must(self, host: _Host, body: str, what: str, timeout_s: float | None = None) -> str:
        """What a script prints. OfferGone: there is no place. NoAnswer: we do not know what it did. ProviderError: it
        failed, or was never run."""
        mark = f"pptasks-{secrets.token_hex(8)}"
        script = f"(\n{PROLOGUE}{body}\n)\necho {mark} ends $?\nexit\n".encode(errors="surrogateescape")
        try:
            begun, said = _converse(host.argv, mark, script, timeout_s or ANSWER_S)
        except OSError as e:
            raise ProviderError(f"{host.argv[0]} cannot be run ({e.strerror}): install it") from None
        match = re.search(f"{mark} begins\n(.*){mark} ends ([0-9]+)\n", said, re.DOTALL)
        text, code = (match[1], int(match[2])) if match else (said.rpartition(f"{mark} begins\n")[2], -1)
        if code == 0:
            return text
        if code == TAKEN:
            raise OfferGone(f"{host} runs a node already: end it with pp down, or see pp ps")
        lines = [line for line in text.splitlines() if line.strip()] or ["it says nothing"]
        with self._scrubbing:
            last = self._scrubber.message(lines[-1])
        if code == MISSING:
            raise ProviderError(f"{host} has no {last}: install pptasks there, or tell where it is with --node-command")
        if match:
            raise ProviderError(f"{host} cannot {what} ({last}): put that right there")
        if begun:
            raise NoAnswer(f"{host} was cut off before it could {what} ({last}): try again later")
        remedy = f"make this work without a question: ssh {host} true" if host.name else "see to its sh"
        raise ProviderError(f"{host} cannot be reached ({last}): {remedy}")


def _converse(argv: Sequence[str], mark: str, script: bytes, timeout_s: float) -> tuple[bool, str]:
    """Whether the shell behind `argv` answered, which alone is told the script; and all that was said.

    Whatever a login shell or ssh says comes before or after the marks. Nobody waits for those who hold on to the output
    when `argv` has ended: ssh may leave a master of connections behind. Raises OSError if there is no such program.
    """
    deadline, begun = time.monotonic() + timeout_s, False
    with os.fdopen(os.memfd_create("answer"), "rb") as out, _start(argv, out.fileno()) as process:
        try:
            _write(process, f"echo {mark} begins\n".encode())
            while True:
                over = process.poll() is not None or time.monotonic() > deadline
                data = os.pread(out.fileno(), MAX_ANSWER, 0)
                said = data.decode(errors="replace")
                if over or len(data) >= MAX_ANSWER:
                    return begun, said
                if not begun and f"{mark} begins\n" in said:
                    begun = True
                    _write(process, script)
                time.sleep(TICK_S)
        finally:
            process.kill()


def _start(argv: Sequence[str], out: int) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is for us, not for an ssh that is about to end a node."""
    env = bare_environment()
    return subprocess.Popen(
        argv, bufsize=0, stdin=subprocess.PIPE, stdout=out, stderr=out, env=env, start_new_session=True
    )


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):  # it has ended, which `poll` tells
            process.stdin.write(data)


def _check(command: str) -> str:
    """A line of script that ends it where there is no such program; none for a command that is more than a call."""
    match = _PROGRAM.match(command)
    return f"check {match[1]}\n" if match else ""


def _assignments(host: _Host, order: Order) -> str:
    """What CREATE needs. UsageError for what a shell would take for something else."""
    bad = [name for name, value in order.env.items() if not _VARIABLE.fullmatch(name) or "\0" in value]
    if bad or not _LABEL.fullmatch(order.label) or "\0" in order.command:
        raise UsageError(f"no host can be given the label {order.label[:160]!r}, or the variables {bad}: change them")
    exports = "".join(f"export {name}={quote(value)}\n" for name, value in order.env.items())
    values = f"limit={host.places}\nlabel={quote(order.label)}\ncommand={quote(order.command)}\n"
    text = f"{values}environment() {{\n:\n{exports}}}\n"
    if len(text.encode(errors="surrogateescape")) > MAX_ORDER:
        raise UsageError(f"the order {order.label} is too long for {host}: at most {MAX_ORDER} bytes of environment")
    return text


def _number(text: str, name: str) -> int:
    match = re.search(rf"^{name} ([0-9]{{1,15}})$", text, re.MULTILINE)
    return int(match[1]) if match else 0
