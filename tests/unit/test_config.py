"""Settings: read once from the environment, every refusal names its variable, no secret is shown."""

from pathlib import Path

import pytest

from pptasks.config import (
    MAX_CHUNK,
    MAX_CONTEXT,
    MAX_IN_FLIGHT,
    MAX_SLOTS,
    MAX_STAGES,
    MAX_WAITING,
    Settings,
    child_environment,
)
from pptasks.errors import ConfigError, UsageError

SECRET = "5e" * 32
FULL = Settings(
    stage=2,
    num_stages=3,
    model="/models/a b.gguf",
    broker="redis://:hunter2@127.0.0.1:7000/1",
    run="demo-1.x",
    secret=SECRET,
    split="1,14,15",
    wire="f32",
    readout="last",
    context=512,
    slots=9,
    kv_bytes="2G",
    lanes=8,
    in_flight=3,
    max_waiting=10,
    prefill_chunk=33,
    memory="8G,24G,24G",
    weights="quantized",
    verify=True,
    audit_rate=0.5,
    memory_share=0.5,
    kernels="tinygrad",
    lap_deadline_s=0.7,
    broker_grace_s=30.0,
    lease=True,
    cache=Path("/var/cache/pp"),
    cc="clang-19",
    hf_endpoint="https://hub.example",
    hf_token="hf_hunter2",
    hf_home=Path("/var/cache/hf"),
)


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = Settings.from_env({})
    assert settings == Settings()
    assert (settings.stage, settings.num_stages, settings.model) == (None, 2, "smollm2:135m")
    assert (settings.split, settings.wire, settings.readout) == ("even", "bf16", "auto")
    assert (settings.context, settings.slots, settings.prefill_chunk) == (None, None, 128)
    assert (settings.kv_bytes, settings.lanes, settings.in_flight, settings.max_waiting) == (None, 32, None, 1024)
    assert (settings.lap_deadline_s, settings.lease, settings.secret, settings.cc) == (20.0, False, "", None)


@pytest.mark.parametrize("settings", [Settings(), FULL, Settings(stage=0, num_stages=1)])
def test_settings_survive_the_environment(settings: Settings) -> None:
    environment = settings.to_env()
    assert Settings.from_env(environment) == settings
    assert all(isinstance(value, str) and value for value in environment.values())


def test_the_full_settings_differ_from_the_default_everywhere() -> None:
    default = Settings()
    assert all(getattr(FULL, name) != getattr(default, name) for name in Settings.__dataclass_fields__)


def test_what_is_not_set_is_not_passed_on() -> None:
    assert (
        not {"STAGE", "PP_SECRET", "PP_CONTEXT", "PP_SLOTS", "PP_KV_BYTES", "PP_IN_FLIGHT", "CC"}
        & Settings().to_env().keys()
    )


def test_an_empty_variable_counts_as_not_set() -> None:
    assert Settings.from_env(dict.fromkeys(FULL.to_env(), "")) == Settings()


def test_other_variables_are_ignored() -> None:
    assert Settings.from_env({"HOME": "/root", "stage": "1", "PP_OTHER": "x"}) == Settings()


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PP_RUN", "from-here")
    assert Settings.from_env().run == "from-here"


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("STAGE", ["-1", "2", "first", "0.5"]),
        ("NUM_STAGES", ["0", "-1", str(MAX_STAGES + 1), "two", "2.0", "9" * 5000]),
        ("PP_RUN", ["a:b", "a b", "-a", ".a", "a*", "a" * 65, "é", "a\n"]),
        ("PP_SECRET", ["abc", "5e" * 31, "5e" * 33, "5g" * 32, "5e" * 32 + "\n"]),
        ("PP_WIRE", ["f64", "BF16", "i32"]),
        ("PP_READOUT", ["middle", "FIRST"]),
        ("PP_KERNELS", ["fast"]),
        ("PP_CONTEXT", ["0", "-5", str(MAX_CONTEXT + 1), "long"]),
        ("PP_SLOTS", ["0", str(MAX_SLOTS + 1), "x"]),
        ("PP_LANES", ["0", "-1", str(MAX_SLOTS + 1), "x"]),
        ("PP_IN_FLIGHT", ["0", str(MAX_IN_FLIGHT + 1), "1.0"]),
        ("PP_MAX_WAITING", ["0", "-1", str(MAX_WAITING + 1), "many"]),
        ("PP_PREFILL_CHUNK", ["0", str(MAX_CHUNK + 1), "x"]),
        ("PP_LAP_DEADLINE", ["0", "0.05", "-1", "3601", "nan", "inf", "soon"]),
        ("PP_LEASE", ["yes", "true", "2", "-1"]),
    ],
)
def test_every_refusal_names_its_variable(variable: str, values: list[str]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{variable}\b"):
            Settings.from_env({variable: value})


def test_a_stage_outside_the_pipeline_is_told_the_range() -> None:
    with pytest.raises(ConfigError, match=r"^STAGE is 3: .*0 to 2"):
        Settings.from_env({"STAGE": "3", "NUM_STAGES": "3"})


def test_a_model_must_have_a_name() -> None:
    with pytest.raises(ConfigError, match=r"^MODEL"):
        Settings(model="")


def test_wrong_settings_are_wrong_use() -> None:
    assert issubclass(ConfigError, UsageError)
    assert ConfigError.exit_code == 2


def test_no_secret_is_shown() -> None:
    shown = repr(FULL) + str(FULL)
    assert "hunter2" not in shown
    assert SECRET not in shown
    assert "demo-1.x" in shown
    for wrong in ("hunter2" * 10, SECRET + "00"):
        with pytest.raises(ConfigError) as refusal:
            Settings(secret=wrong)
        assert wrong not in str(refusal.value)


def test_a_run_without_a_secret_authenticates_nothing() -> None:
    assert FULL.secret_bytes == bytes.fromhex(SECRET)
    with pytest.raises(ConfigError, match=r"^PP_SECRET is not set"):
        _ = Settings().secret_bytes


def test_a_child_sees_the_settings_and_no_leftover_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"STAGE": "1", "PP_CONTEXT": "64", "PP_STALE": "x", "CC": "gcc", "KEPT": "yes"}.items():
        monkeypatch.setenv(variable, value)
    environment = child_environment(Settings(num_stages=3, run="child"))
    assert Settings.from_env(environment) == Settings(num_stages=3, run="child")
    assert environment["KEPT"] == "yes"
    assert not {"STAGE", "PP_CONTEXT", "PP_STALE", "CC"} & environment.keys()
