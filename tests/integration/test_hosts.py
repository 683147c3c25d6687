"""The providers "local" and "ssh" with real processes; ssh is the system's client against a server of this test.

On the server a user name stands for a host: it has a home of its own, and maybe a fault.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.hosts import Hosts
from orchestrator.provider import Need, Order, State
from pptasks.errors import NoAnswer, OfferGone, ProviderError

NEED = Need(min_vram_bytes=1)
SECRET = "b2f1d98c0e7a46a5936d20cf1e0a8b7734f0c6d5"
WaitUntil = Callable[..., None]


def order(label: str, command: str, **env: str) -> Order:
    return Order("", label, command, env, 1)


def state_of(provider: Hosts, instance_id: str) -> State | None:
    node = provider.get(instance_id)
    return node.state if node else None


def marked(label: str) -> list[int]:
    """Living processes that carry the label."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"PPTASKS_NODE={label}".encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
        except OSError:
            continue
    return found


def argvs() -> bytes:
    """Of all processes now."""
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(cmdline.read_bytes())
        except OSError:
            continue
    return b"\n".join(found)


def contents(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of this machine's nodes, for one test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def local(home: Path) -> Iterator[Hosts]:
    provider = Hosts.local(3)
    yield provider
    for node in provider.list(""):
        provider.destroy(node.id)


def nodes_folder(home: Path) -> Path:
    return home / "pptasks" / "nodes" / os.uname().nodename


# The same for both providers


class Sampler:
    """Every argv that is there at some moment inside of the block."""

    def __init__(self) -> None:
        self.seen, self._stop = b"", threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            self.seen += argvs()

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def check_a_life(provider: Hosts, home: Path, tmp_path: Path, wait_until: WaitUntil) -> None:
    """From search to the end; and where the secret is not."""
    out = tmp_path / "out"
    odd = 'it\'s $(touch x) `y` "z"\n\\ \u00e9 \ud7ff'
    (offer, *_) = provider.search(NEED)
    assert offer.vram_bytes > 0
    command = 'printf %s "$ODD" >"$OUT"; echo "the secret is $PP_SECRET"; printf "\\033[2J"; exec sleep 300'
    with Sampler() as sampler:
        instance_id = provider.create(offer, order("pptasks-a-1", command, ODD=odd, OUT=str(out), PP_SECRET=SECRET))
    node = provider.get(instance_id)
    assert node is not None
    assert (node.id, node.label, node.state) == (instance_id, "pptasks-a-1", State.RUNNING)
    assert node.price_usd_hour == 0
    assert abs((node.started_at or 0) - time.time()) < 60
    wait_until(lambda: "secret" in provider.logs(instance_id, 5), what="the log")
    assert provider.logs(instance_id, 5) == "the secret is ***\n[2J"
    assert out.read_text() == odd
    assert [n.id for n in provider.list("pptasks-a")] == [instance_id]
    assert provider.list("pptasks-b") == []

    assert b"pptasks-node" in argvs()
    assert SECRET.encode() not in sampler.seen + argvs()
    log = nodes_folder(home) / "pptasks-a-1" / "log"
    assert SECRET in log.read_text()  # its own words; nobody else wrote it
    log.write_text("")
    assert SECRET.encode() not in contents(home)
    assert all(path.stat().st_mode & 0o077 == 0 for path in nodes_folder(home).rglob("*"))

    provider.destroy(instance_id)
    assert provider.get(instance_id) is None
    assert provider.list("") == []
    assert marked("pptasks-a-1") == []
    assert not (nodes_folder(home) / "pptasks-a-1").exists()
    provider.destroy(instance_id)
    assert provider.logs(instance_id, 5) == ""


def test_a_life_here(local: Hosts, home: Path, tmp_path: Path, wait_until: WaitUntil) -> None:
    check_a_life(local, home, tmp_path, wait_until)


# Processes


def test_sigterm_goes_to_the_command_alone(local: Hosts, tmp_path: Path, wait_until: WaitUntil) -> None:
    """It can say goodbye with the help of what it has started."""
    said = tmp_path / "said"
    command = f"trap 'kill -0 $! && echo bye >{said}; exit 0' TERM; sleep 300 & echo up; while :; do wait; done"
    instance_id = local.create(local.search(NEED)[0], order("pptasks-a-1", command))
    wait_until(lambda: "up" in local.logs(instance_id, 1), what="the command")
    began = time.monotonic()
    local.destroy(instance_id)
    assert said.read_text() == "bye\n"
    assert time.monotonic() - began < 5
    assert marked("pptasks-a-1") == []


def test_nothing_survives_the_end(local: Hosts, wait_until: WaitUntil) -> None:
    """Neither who ignores SIGTERM, nor a grandchild, nor one that has left its session; but the neighbour does."""
    offer = local.search(NEED)[0]
    neighbour = local.create(offer, order("pptasks-a-10", "exec sleep 300"))
    command = "trap '' TERM; (sleep 300 & sleep 300) & setsid sleep 300 & echo up; while :; do sleep 1; done"
    instance_id = local.create(offer, order("pptasks-a-1", command))
    wait_until(lambda: len(marked("pptasks-a-1")) >= 6, what="all of its processes")
    local.destroy(instance_id)
    assert marked("pptasks-a-1") == []
    assert state_of(local, instance_id) is None
    assert state_of(local, neighbour) is State.RUNNING
    assert len(marked("pptasks-a-10")) >= 2


def test_how_it_ended(local: Hosts, wait_until: WaitUntil) -> None:
    """The exit code and the log stay until it is destroyed. What the command leaves behind ends with it."""
    instance_id = local.create(local.search(NEED)[0], order("pptasks-a-1", "sleep 300 & echo no GPU >&2; exit 7"))
    wait_until(lambda: state_of(local, instance_id) is State.ENDED, what="its end")
    node = local.get(instance_id)
    assert node is not None
    assert node.status == "exit code 7"
    assert local.logs(instance_id, 9) == "no GPU\n"
    wait_until(lambda: not marked("pptasks-a-1"), what="the end of what it started")


def test_killed(local: Hosts, wait_until: WaitUntil) -> None:
    """Its first process is killed: it has ended, and what is left of it still ends with `destroy`."""
    instance_id = local.create(local.search(NEED)[0], order("pptasks-a-1", "sleep 300; true"))
    wait_until(lambda: len(marked("pptasks-a-1")) >= 2, what="its processes")
    os.kill(min(marked("pptasks-a-1")), signal.SIGKILL)
    wait_until(lambda: state_of(local, instance_id) is State.ENDED, what="its end")
    node = local.get(instance_id)
    assert node is not None
    assert node.status.startswith("killed")
    assert marked("pptasks-a-1")
    local.destroy(instance_id)
    assert marked("pptasks-a-1") == []


def test_a_process_id_that_is_another_process_now(local: Hosts, home: Path, wait_until: WaitUntil) -> None:
    instance_id = local.create(local.search(NEED)[0], order("pptasks-a-1", "exit 0"))
    wait_until(lambda: not marked("pptasks-a-1"), what="its end")
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as stranger:
        (nodes_folder(home) / "pptasks-a-1" / "node").write_text(f"{stranger.pid} 1700000000\n")
        assert state_of(local, instance_id) is State.ENDED
        local.destroy(instance_id)
        assert stranger.poll() is None
        stranger.kill()


def test_its_places(home: Path, local: Hosts) -> None:
    """However many ask at once. Who has ended takes no place."""
    one = Hosts.local(1)
    (offer,) = one.search(NEED)

    def create(i: int) -> str | None:
        try:
            return one.create(offer, order(f"pptasks-a-{i}", "exec sleep 300"))
        except OfferGone:
            return None

    with ThreadPoolExecutor(4) as pool:
        made = [instance_id for instance_id in pool.map(create, range(4)) if instance_id]
    assert [node.id for node in one.list("")] == made
    assert len(made) == 1
    with pytest.raises(OfferGone, match="this machine runs a node already: end it with pp down"):
        one.create(offer, order("pptasks-a-9", "exec sleep 300"))
    with pytest.raises(ProviderError, match="this machine: end them with pp down"):
        one.search(NEED)
    one.destroy(made[0])
    assert len(one.search(NEED)) == 1


def test_a_label_is_for_one_node(local: Hosts) -> None:
    offer = local.search(NEED)[0]
    instance_id = local.create(offer, order("pptasks-a-1", "exec sleep 300"))
    with pytest.raises(OfferGone, match="exists"):
        local.create(offer, order("pptasks-a-1", "exec sleep 300"))
    assert state_of(local, instance_id) is State.RUNNING


def test_no_folder_for_nodes(local: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = local.search(NEED)[0]
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", "/dev/null")
        with pytest.raises(OfferGone, match=r"this machine cannot start a node \(mkdir: .*Not a directory\)"):
            local.create(offer, order("pptasks-a-1", "exec sleep 300"))
    assert marked("pptasks-a-1") == []


# Over ssh


async def _relay(source: Any, sink: Any) -> None:
    while data := await source.read(65536):
        sink.write(data)
        await sink.drain()
    if isinstance(sink, asyncio.StreamWriter):
        sink.close()


class Server:
    """sshd for one key, on a port of 127.0.0.1. `homes`/NAME is the home of user NAME.

    commands: what was asked for. logins: what a user's shell does first. cuts: whose next connection breaks, "before"
    or "after" the script is run.
    """

    USERS = ("a", "noisy", "full", "user", "odd", "cut", "shared", "silent", "away", "stranger", "denied")

    def __init__(self, folder: Path):
        asyncssh = pytest.importorskip("asyncssh")
        self.folder, self.homes = folder, folder / "homes"
        self.commands: list[str | bytes | None] = []
        self.cuts: dict[str, str] = {}
        self._connections: list[Any] = []
        self.logins = {"noisy": "echo hello; echo warning >&2; ", "full": "trap '' XFSZ; ulimit -f 0; "}
        self._ssh, self._key = asyncssh, asyncssh.generate_private_key("ssh-ed25519")
        host_key = asyncssh.generate_private_key("ssh-ed25519")
        self._key.write_private_key(folder / "id")
        asyncssh.generate_private_key("ssh-ed25519").write_private_key(folder / "other")
        for key in ("id", "other"):  # or ssh does not read them
            (folder / key).chmod(0o600)
        self._key.write_public_key(folder / "authorized")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._do(self._listen(host_key))
        port = self._server.get_port()
        (folder / "known").write_text(f"[127.0.0.1]:{port} {host_key.export_public_key().decode()}")
        users = "".join(f"Host {user}\n User {user}\n" for user in self.USERS)
        host_keys = f" UserKnownHostsFile {folder / 'known'}\n GlobalKnownHostsFile /dev/null\n"
        (folder / "config").write_text(
            f"{users}Host stranger\n UserKnownHostsFile {folder / 'none'}\n"
            f"Host denied\n IdentityFile {folder / 'other'}\nHost !denied *\n IdentityFile {folder / 'id'}\n"
            "Host away\n Port 1\n"
            f"Host shared\n ControlMaster auto\n ControlPersist 60\n ControlPath {folder / 'master'}\n"
            f"Host *\n HostName 127.0.0.1\n Port {port}\n\n IdentitiesOnly yes\n IdentityAgent none\n"
            f"{host_keys}"
        )

    def close(self) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        """Its connections too, and whoever still talks through one."""
        self._server.close()
        for connection in self._connections:
            connection.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait([*tasks, asyncio.create_task(asyncio.sleep(0))], timeout=5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self, host_key: Any) -> Any:
        return await self._ssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[host_key],
            authorized_client_keys=str(self.folder / "authorized"),
            process_factory=self._serve,
            encoding=None,
        )

    def _do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    async def _serve(self, process: Any) -> None:
        user = process.get_extra_info("username")
        home = self.homes / user
        home.mkdir(parents=True, exist_ok=True)
        env = {"HOME": str(home), "PATH": os.environ["PATH"]}
        self.commands.append(process.command)
        self._connections.append(process.channel.get_connection())
        shell = await asyncio.create_subprocess_shell(
            self.logins.get(user, "") + process.command, stdin=-1, stdout=-1, stderr=subprocess.STDOUT, env=env
        )
        try:
            if cut := self.cuts.pop(user, None):
                await self._cut(process, shell, run=cut == "after")
            else:
                told = asyncio.create_task(_relay(process.stdin, shell.stdin))
                await _relay(shell.stdout, process.stdout)
                process.exit(await shell.wait())
                told.cancel()
        except (OSError, self._ssh.Error):
            await shell.wait()

    async def _cut(self, process: Any, shell: Any, *, run: bool) -> None:
        """The connection breaks when the script has arrived, before or after it is run."""
        shell.stdin.write(await process.stdin.readline())
        process.stdout.write(await shell.stdout.readline())
        script = b""
        while b" ends $?\nexit\n" not in script:
            script += await process.stdin.read(65536)
        shell.stdin.write(script if run else b"")
        shell.stdin.close()
        await shell.communicate()
        process.channel.get_connection().abort()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if shutil.which("ssh") is None:
        pytest.skip("needs the ssh client of OpenSSH")
    server = Server(tmp_path_factory.mktemp("ssh"))
    yield server
    server.close()


@pytest.fixture
def reach(server: Server) -> Iterator[Callable[..., Hosts]]:
    """reach("a", "b"): the provider of these hosts, whose nodes are ended after the test."""
    made: list[Hosts] = []

    def make(*hosts: str, command: str = "") -> Hosts:
        made.append(Hosts.ssh(hosts, ["-F", str(server.folder / "config")], command))
        return made[-1]

    yield make
    for provider in made:
        try:
            for node in provider.list(""):
                provider.destroy(node.id)
        except ProviderError:
            continue


Reach = Callable[..., Hosts]
REMEDY = "make this work without a question: ssh {0} true"


def test_a_life_over_ssh(reach: Reach, server: Server, tmp_path: Path, wait_until: WaitUntil) -> None:
    """The environment never leaves the script: every command that the server was asked for is the same."""
    check_a_life(reach("a"), server.homes / "a" / ".local" / "state", tmp_path, wait_until)
    assert set(server.commands) == {"sh -s"}


def test_several_hosts(reach: Reach) -> None:
    """One offer and one node each; what a login shell says beside it is nobody's answer."""
    hosts = reach("a", "noisy")
    a, noisy = hosts.search(NEED)
    assert (a.id, noisy.id) == ("a", "noisy")
    ids = [hosts.create(offer, order(f"pptasks-a-{offer.id}", "exec sleep 300")) for offer in (a, noisy)]
    assert ids == ["ssh:a:pptasks-a-a", "ssh:noisy:pptasks-a-noisy"]
    assert [(node.id, node.state) for node in hosts.list("pptasks-")] == [(id, State.RUNNING) for id in ids]
    with pytest.raises(OfferGone, match="a runs a node already: end it with pp down"):
        hosts.create(a, order("pptasks-a-2", "exec sleep 300"))
    with pytest.raises(ProviderError, match="nodes run already on a, noisy"):
        hosts.search(NEED)
    hosts.destroy(ids[0])
    assert [offer.id for offer in hosts.search(NEED)] == ["a"]
    assert [node.id for node in hosts.list("")] == ids[1:]


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("away", "Connection refused"),
        ("stranger", "Host key verification failed"),
        ("denied", "Permission denied"),
    ],
)
def test_a_host_that_cannot_be_reached(reach: Reach, host: str, why: str) -> None:
    """It is named in every error, with what ssh says and what to do; and no list is a part of the list."""
    hosts = reach("a", host)
    (offer,) = reach("a").search(NEED)
    told = rf"^{host} cannot be reached \(.*{why}.*\): {REMEDY.format(host)}$"
    with pytest.raises(ProviderError, match=told):
        hosts.search(NEED)
    with pytest.raises(ProviderError, match=told):
        hosts.list("")
    with pytest.raises(ProviderError, match=told):
        hosts.get(f"ssh:{host}:x")
    with pytest.raises(NoAnswer, match=rf"^the end of ssh:{host}:x is not confirmed: {told[1:]}"):
        hosts.destroy(f"ssh:{host}:x")
    with pytest.raises(OfferGone, match=told):  # it is certain that nothing was started
        hosts.create(replace(offer, id=host, host_id=host), order("pptasks-a-1", "exec sleep 300"))


def test_all_hosts_that_cannot_be_reached_are_named(reach: Reach) -> None:
    with pytest.raises(ProviderError, match=r"(?s)ssh stranger true.*ssh denied true"):
        reach("stranger", "a", "denied").search(NEED)


def test_a_command_that_is_not_there(reach: Reach) -> None:
    told = "a has no pp-nod: install pptasks there, or tell where it is with --node-command"
    with pytest.raises(ProviderError, match=told):
        reach("a", command="exec pp-nod").search(NEED)
    hosts = reach("a")
    with pytest.raises(OfferGone, match=told):
        hosts.create(hosts.search(NEED)[0], order("pptasks-a-1", "exec pp-nod"))
    assert hosts.list("") == []


def test_a_command_of_the_user(reach: Reach, server: Server, wait_until: WaitUntil) -> None:
    """In ~/.local/bin, where pip puts it, though no login shell looks there; or by its path from ~."""
    program = server.homes / "user" / ".local" / "bin" / "my-node"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho this is it\n")
    program.chmod(0o755)
    hosts = reach("user", command="exec my-node")
    (offer,) = hosts.search(NEED)
    for i, command in enumerate(("exec my-node", "exec ~/.local/bin/my-node")):
        instance_id = hosts.create(offer, order(f"pptasks-a-{i}", command))
        wait_until(lambda id=instance_id: hosts.logs(id, 1) == "this is it\n", what="its log")
        wait_until(lambda id=instance_id: state_of(hosts, id) is State.ENDED, what="its end")


def test_a_disk_that_is_full(reach: Reach, server: Server) -> None:
    """A node that could not be found again is not started, and none is left."""
    hosts = reach("full")
    (offer,) = hosts.search(NEED)
    with pytest.raises(OfferGone, match="full cannot start a node"):
        hosts.create(offer, order("pptasks-full-1", "exec sleep 300"))
    assert marked("pptasks-full-1") == []
    assert hosts.list("") == []


def test_a_home_that_cannot_be_written(reach: Reach, server: Server) -> None:
    (server.homes / "odd" / ".local").mkdir(parents=True)
    (server.homes / "odd" / ".local" / "state").write_text("")
    hosts = reach("odd")
    with pytest.raises(OfferGone, match=r"odd cannot start a node \(mkdir: .*Not a directory\)"):
        hosts.create(hosts.search(NEED)[0], order("pptasks-a-1", "exec sleep 300"))


def test_cut_off_while_it_starts(reach: Reach, server: Server) -> None:
    """If the node is there then, it is ours; if not, nobody knows whether it comes up."""
    hosts = reach("cut")
    (offer,) = hosts.search(NEED)
    server.cuts["cut"] = "before"
    with pytest.raises(NoAnswer, match="cut was cut off before it could start a node"):
        hosts.create(offer, order("pptasks-a-1", "exec sleep 300"))
    assert marked("pptasks-a-1") == []
    server.cuts["cut"] = "after"
    instance_id = hosts.create(offer, order("pptasks-a-2", "exec sleep 300"))
    assert state_of(hosts, instance_id) is State.RUNNING
    server.cuts["cut"] = "before"
    with pytest.raises(NoAnswer, match=f"the end of {instance_id} is not confirmed: cut was cut off"):
        hosts.destroy(instance_id)
    assert state_of(hosts, instance_id) is State.RUNNING


def test_a_shared_connection(reach: Reach, server: Server) -> None:
    """The master that ssh leaves behind holds our output, and nobody waits for it."""
    began = time.monotonic()
    hosts = reach("shared")
    assert len(hosts.search(NEED)) == 1
    assert hosts.list("") == []
    assert time.monotonic() - began < 10
    leave = ["ssh", "-F", str(server.folder / "config"), "-O", "exit", "shared"]
    assert subprocess.run(leave, capture_output=True).returncode == 0  # there was one


def test_a_host_that_says_nothing(reach: Reach, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.hosts.ANSWER_S", 1.0)
    monkeypatch.setitem(server.logins, "silent", "sleep 3; ")
    began = time.monotonic()
    with pytest.raises(ProviderError, match="silent cannot be reached"):
        reach("silent").list("")
    assert time.monotonic() - began < 2.5
