"""What never reaches a shell: odd hosts, ids, labels and variables; and what is told of a host."""

import subprocess

import pytest

from orchestrator import hosts
from orchestrator.hosts import Hosts
from orchestrator.provider import Offer, Order
from pptasks.errors import OfferGone, ProviderError, UsageError

OFFER = Offer("local-0", "local-0", "local", "CPU", 1, 1, 0.0, 1.0, 99.0, 0.0, 0.0, 1.0, "")


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may start one."""

    def refuse(*args: object, **kwargs: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.parametrize(
    "host",
    [
        "", "-oProxyCommand=touch x", "user@-oProxyCommand=x", "-l@a", "a b", "a;b", "$(x)", "a\nb", "u$x@a", "a/b",
        "a@b@c", "\u0430", "a'b",
    ],
)  # fmt: skip
def test_odd_hosts_are_refused(host: str) -> None:
    with pytest.raises(UsageError, match="no host"):
        Hosts.ssh([host])


@pytest.mark.parametrize("host", ["a", "user@a", "user@10.0.0.1", "::1", "u@fe80::1%eth0", "my-box.example.org"])
def test_hosts_as_people_write_them(host: str) -> None:
    provider = Hosts.ssh([host, host])
    assert provider.name == "ssh"
    assert provider._parse(f"ssh:{host}:pptasks-x-1") == (provider._hosts[host], "pptasks-x-1")
    assert len(provider._hosts) == 1  # one machine, however often it is named


def test_the_host_comes_after_all_options() -> None:
    host = Hosts.ssh(["a"], ["-p", "22"])._hosts["a"]
    assert host.argv[-5:] == ("-p", "22", "--", "a", "sh -s")


@pytest.mark.parametrize(
    "instance_id",
    [
        "", "local:", "local", "pptasks-1", "17", "ssh:a:pptasks-1", "local:..", "local:.", "local:/etc", "local:../x",
        "local:a b", "local:a;b", "local:$(x)", "local:-rf", "local:a\n", "local:x:y", "local:" + "a" * 129,
    ],
)  # fmt: skip
def test_ids_of_others_are_refused(instance_id: str) -> None:
    provider = Hosts.local(1)
    for call in (provider.get, provider.destroy, lambda id: provider.logs(id, 1)):
        with pytest.raises(ProviderError, match="is no node of this machine"):
            call(instance_id)


@pytest.mark.parametrize("instance_id", ["local:x", "ssh:x", "ssh::x", "ssh:b:x", "ssh:a:../x", "ssh:a:", "ssh:a:-x"])
def test_ids_of_hosts_that_were_not_given_are_refused(instance_id: str) -> None:
    with pytest.raises(ProviderError, match="is no node of a"):
        Hosts.ssh(["a"]).destroy(instance_id)


@pytest.mark.parametrize(
    ("label", "command", "env"),
    [
        ("../x", "true", {}),
        ("", "true", {}),
        ("a;b", "true", {}),
        ("x", "true\0", {}),
        ("x", "true", {"A;touch x": "1"}),
        ("x", "true", {"1A": "1"}),
        ("x", "true", {"A\n": "1"}),
        ("x", "true", {"A": "hidden\0"}),
        ("x", "true", {"A": "hidden" * hosts.MAX_ORDER}),
    ],
)
def test_odd_orders_are_refused(label: str, command: str, env: dict[str, str]) -> None:
    with pytest.raises(UsageError) as error:
        Hosts.local(1).create(OFFER, Order("", label, command, env, 1))
    assert "hidden" not in str(error.value)


def test_an_offer_of_another_host() -> None:
    with pytest.raises(OfferGone, match="none of the hosts"):
        Hosts.ssh(["a"]).create(OFFER, Order("", "x", "true", {}, 1))


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("exec pp-node", "pp-node"),
        ("exec /opt/x/python -m workers.node", "/opt/x/python"),
        ("~/venv/bin/pp-node --x", "~/venv/bin/pp-node"),
        ("cd x; y", "cd"),
        ("$X", None),
        ("a;b", None),
        ("A=1 b", None),
        ("exec 'a b' c", "exec"),
        ("", None),
    ],
)
def test_the_program_of_a_command(command: str, program: str | None) -> None:
    """Only what a shell takes as it is, is looked for."""
    assert hosts._check(command) == (f"check {program}\n" if program else "")


def test_what_a_host_tells_of_itself() -> None:
    provider, text = Hosts.ssh(["u@a"]), "taken 0\nmemory 1000\ndisk 2000000\n"
    host = provider._hosts["u@a"]
    (cpu,) = provider._offers(host, text)
    assert (cpu.id, cpu.machine_id, cpu.host_id) == ("u@a", "u@a", "u@a")
    assert (cpu.gpu_name, cpu.vram_bytes, cpu.price_usd_hour) == ("CPU", 1000 * 1024, 0.0)
    assert cpu.disk_gb == 2000000 * 1024 / 1e9
    (gpu,) = provider._offers(host, "gpu NVIDIA \x1b[31mRTX, 4090, 24564\ngpu Other, 1\n" + text)
    assert (gpu.gpu_name, gpu.vram_bytes) == ("NVIDIA [31mRTX, 4090", 24564 << 20)
    (odd,) = provider._offers(host, "gpu NVIDIA-SMI has failed\ngpu X, [N/A]\n" + text)
    assert odd.gpu_name == "CPU"
    assert provider._offers(host, "taken 1\n" + text[8:]) == []


def test_every_place_of_this_machine_is_an_offer_of_its_own() -> None:
    provider = Hosts.local(3)
    offers = provider._offers(provider._hosts[""], "taken 1\nmemory 1\n")
    assert [offer.machine_id for offer in offers] == ["local-0", "local-1"]
