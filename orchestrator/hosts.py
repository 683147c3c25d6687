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

from orchestrator.provider import Instance, Instances, Need, Offer, Offers, Order, State
from orchestrator.vastcalls import Scrubber
from pptasks.config import bare_environment
from pptasks.errors import NoAnswer, OfferGone, ProviderError, UsageError

ANSWER_S, END_S = 30.0, 50.0  # for one script; for the one that ends a node, which takes its time
TICK_S = 0.02
MAX_SCRIPT = 60_000  # bytes; a pipe holds that much, so that to write it never waits
MAX_ANSWER = 1 << 20  # bytes
MAX_LINES = 10_000  # of a log
THREADS = 16  # hosts that are asked at once
ANY_CUDA = 99.0  # what is installed there is the user's business
SSH = ("ssh", "-T", "-a", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ClearAllForwardings=yes")
_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_:][A-Za-z0-9_.:%-]*", re.ASCII)
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PROGRAM = re.compile(r"\s*(?:exec\s+)?([A-Za-z0-9_.+/~-]+)(?:\s|$)", re.ASCII)  # safe for a shell without quotes
_NODE = re.compile(r"node (\S+) (starting|running|ended) (\S+) (\S+)", re.ASCII)
_TAKEN, _MISSING = 3, 4  # exit codes of the scripts
_T = TypeVar("_T")

_PROLOGUE = rf"""
umask 077
PATH=$PATH:$HOME/.local/bin
nodes=${{XDG_STATE_HOME:-$HOME/.local/state}}/pptasks/nodes/$(uname -n)
can_look() {{  # else nothing is known of processes, and the script ends
    grep -qz . /proc/self/environ || {{ echo "cannot look at processes: needs Linux's /proc, grep -z"; exit 1; }}
}}
marked() {{  # processes of node $1
    grep -lszxF "PPTASKS_NODE=$1" /proc/[0-9]*/environ | tr -dc '0-9\n'
}}
lives() {{  # whether the first process of node $1 does; sets pid and start
    pid=- start=-
    read -r pid start 2>/dev/null <"$nodes/$1/node" && grep -qszxF "PPTASKS_NODE=$1" "/proc/$pid/environ"
}}
count() {{  # sets taken: nodes that live
    taken=0
    for folder in "$nodes"/*/; do
        folder=${{folder%/}}
        lives "${{folder##*/}}" && taken=$((taken + 1))
    done
}}
check() {{  # that there is a program $1
    (cd / && command -v "$1" >/dev/null) || {{ echo "$1"; exit {_MISSING}; }}
}}
"""

# $1: the order's command. When it ends, all that it has started is ended.
_FIRST_PROCESS = """
trap 'kill -s TERM "$child"' TERM
sh -c "$1" & child=$!
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
echo "$code" >exit
kill -s KILL 0
"""

# limit, label, command and a function `environment` are set. The node is known by its mark before it has its file.
_CREATE = f"""
can_look
mkdir -p "$nodes" || exit 1
exec 9>"$nodes/.lock"
flock -w 10 9 || exit 1
count
[ "$taken" -lt "$limit" ] || exit {_TAKEN}
mkdir "$nodes/$label" && cd "$nodes/$label" && : >log || exit 1
(
    exec 9>&-
    environment
    export PPTASKS_NODE="$label"
    exec setsid sh -c {quote(_FIRST_PROCESS)} pptasks-node "$command"
) </dev/null >log 2>&1 &
pid=$! tries=100
started() {{ grep -qszxF "PPTASKS_NODE=$label" "/proc/$pid/environ" || [ -e exit ]; }}  # in this order
until started || [ "$tries" -eq 0 ] || ! kill -0 "$pid" 2>/dev/null; do
    tries=$((tries - 1))
    sleep 0.05
done
started && echo "$pid $(date +%s)" >node && exit 0
kill -s KILL "$pid" $(marked "$label") 2>/dev/null
tail -n 1 log
cd / && rm -rf "$nodes/$label"
exit 1
"""

_LIST = """
[ -d "$nodes" ] || exit 0
can_look
for folder in "$nodes"/*/; do
    folder=${folder%/}
    [ -d "$folder" ] || continue
    state=starting code=
    if lives "${folder##*/}"; then
        state=running
    elif [ -e "$folder/node" ]; then
        state=ended
        read -r code 2>/dev/null <"$folder/exit"
    fi
    echo "node ${folder##*/} $state ${code:--} $start"
done
exit 0
"""

# label is set.
_DESTROY = """
can_look
if lives "$label"; then
    kill -s TERM "$pid"
    tries=80
    while lives "$label" && [ "$tries" -gt 0 ]; do
        tries=$((tries - 1))
        sleep 0.1
    done
fi
tries=50
while left=$(marked "$label") && [ -n "$left" ]; do
    [ "$tries" -gt 0 ] || { echo "these processes cannot be killed:" $left; exit 1; }
    tries=$((tries - 1))
    kill -s KILL $left 2>/dev/null
    sleep 0.1
done
rm -rf "$nodes/$label"
[ ! -e "$nodes/$label" ]
"""

_LOG = 'log=$nodes/{label}/log; [ ! -e "$log" ] || tail -c {size} "$log" | tail -n {lines}'

_SEARCH = r"""
can_look
count
echo "taken $taken"
timeout 15 nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits 2>/dev/null | sed 's/^/gpu /'
sed -n 's/^MemAvailable: *\([0-9]*\) kB/memory \1/p' /proc/meminfo
df -Pk "$HOME" | tail -n 1 | { read -r _ _ _ free _; echo "disk $free"; }
exit 0
"""


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
        body = _check(self._command) + _SEARCH
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
        script = _check(order.command) + _assignments(host, order) + _CREATE
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
            self._must(host, f"label={quote(label)}\n{_DESTROY}", "end a node", END_S)
        except ProviderError as error:
            raise NoAnswer(f"the end of {instance_id} is not confirmed: {error}") from None

    def logs(self, instance_id: str, lines: int) -> str:
        host, label = self._parse(instance_id)
        body = _LOG.format(label=quote(label), size=MAX_ANSWER // 4, lines=min(max(lines, 1), MAX_LINES))
        text = self._must(host, body, "show a log")
        with self._scrubbing:
            return self._scrubber.log(text)

    def _nodes(self, host: _Host) -> Instances:
        matches = map(_NODE.fullmatch, self._must(host, _LIST, "say what runs there").splitlines())
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

    def _must(self, host: _Host, body: str, what: str, timeout_s: float = ANSWER_S) -> str:
        """What a script prints. OfferGone: there is no place. NoAnswer: we do not know what it did. ProviderError: it
        failed, or was never run."""
        mark = f"pptasks-{secrets.token_hex(8)}"
        script = f"(\n{_PROLOGUE}{body}\n)\necho {mark} ends $?\n".encode(errors="surrogateescape")
        if len(script) > MAX_SCRIPT:
            raise UsageError(f"an order of {len(script)} bytes is too long for {host}: at most {MAX_SCRIPT}")
        try:
            begun, said = _converse(host.argv, mark, script, timeout_s)
        except OSError as e:
            raise ProviderError(f"{host.argv[0]} cannot be run ({e.strerror}): install it") from None
        match = re.search(f"{mark} begins\n(.*){mark} ends ([0-9]+)\n", said, re.DOTALL)
        text, code = (match[1], int(match[2])) if match else (said.rpartition(f"{mark} begins\n")[2], -1)
        if code == 0:
            return text
        if code == _TAKEN:
            raise OfferGone(f"{host} runs a node already: end it with pp down, or see pp ps")
        lines = [line for line in text.splitlines() if line.strip()] or ["it says nothing"]
        with self._scrubbing:
            last = self._scrubber.message(lines[-1])
        if code == _MISSING:
            raise ProviderError(f"{host} has no {last}: install pptasks there, or tell where it is with --node-command")
        if match:
            raise ProviderError(f"{host} cannot {what} ({last}): put that right there")
        if begun:
            raise NoAnswer(f"{host} was cut off before it could {what} ({last}): try again later")
        remedy = f"make this work without a question: ssh {host} true" if host.name else "see to its sh"
        raise ProviderError(f"{host} cannot be reached ({last}): {remedy}")


def _converse(argv: Sequence[str], mark: str, script: bytes, timeout_s: float) -> tuple[bool, str]:
    """Whether the shell behind `argv` answered, which alone is told the script; and all that was said.

    Whatever a login shell or ssh says is before or after the marks. It is over when the script is, also if others hold
    on to its output: ssh may leave a master of connections behind. Raises OSError if there is no such program.
    """
    deadline, begun, end = time.monotonic() + timeout_s, False, re.compile(f"{mark} ends [0-9]+\n")
    with os.fdopen(os.memfd_create("answer"), "rb") as out, _start(argv, out.fileno()) as process:
        try:
            _write(process, f"echo {mark} begins\n".encode())
            while True:
                over = process.poll() is not None or time.monotonic() > deadline
                said = os.pread(out.fileno(), MAX_ANSWER, 0).decode(errors="replace")
                if over or end.search(said) or len(said) >= MAX_ANSWER:
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
    """What _CREATE needs. UsageError for what a shell would take for something else."""
    bad = [name for name, value in order.env.items() if not _VARIABLE.fullmatch(name) or "\0" in value]
    if bad or not _LABEL.fullmatch(order.label) or "\0" in order.command:
        raise UsageError(f"no host can be given the label {order.label[:160]!r}, or the variables {bad}: change them")
    exports = "".join(f"export {name}={quote(value)}\n" for name, value in order.env.items())
    return (
        f"limit={host.places}\nlabel={quote(order.label)}\ncommand={quote(order.command)}\n"
        f"environment() {{\n:\n{exports}}}\n"
    )


def _number(text: str, name: str) -> int:
    match = re.search(rf"^{name} ([0-9]{{1,15}})$", text, re.MULTILINE)
    return int(match[1]) if match else 0
