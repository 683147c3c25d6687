"""The rules of a worker's Redis user: what each stage gets, and no more. Whether they hold: integration."""

import pytest

from orchestrator.acl import User, guest_name, rules, user_name

DANGEROUS = """
    acl config debug eval eval_ro fcall flushall flushdb function keys migrate module monitor replicaof rename restore
    scan script script|load script|flush shutdown slaveof swapdb client|kill client|list save bgsave subscribe rpop dump
"""


def selectors(stage: int, n_stages: int, **kwargs: int) -> list[tuple[set[str], set[str]]]:
    """(patterns, commands) of each selector."""
    parsed = []
    for rule in rules("r", stage, n_stages, **kwargs):
        if rule.startswith("("):
            words = rule.strip("()").split()
            parsed.append(({w for w in words if w[0] != "+"}, {w[1:] for w in words if w[0] == "+"}))
    return parsed


def may(stage: int, n_stages: int, command: str) -> set[str]:
    """What a stage may do `command` to."""
    return {p for patterns, commands in selectors(stage, n_stages) if command in commands for p in patterns}


@pytest.mark.parametrize(
    ("stage", "n_stages", "to"),
    [(0, 1, []), (0, 2, [1]), (1, 2, [0]), (0, 3, [1]), (1, 3, [0, 2]), (2, 3, [0])],
)
def test_a_stage_reads_its_queue_and_writes_to_the_next_and_to_the_head(
    stage: int, n_stages: int, to: list[int]
) -> None:
    assert may(stage, n_stages, "brpop") == {f"%RW~pp:r:stage{stage}"}
    written = {p for p in may(stage, n_stages, "lpush") if "pidbox" not in p}
    assert written == {f"%RW~pp:r:stage{stage}", *(f"%W~pp:r:stage{i}" for i in to)}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_pattern_belongs_to_the_run(stage: int) -> None:
    for patterns, commands in selectors(stage, 3):
        assert commands
        for pattern in patterns:
            assert pattern.lstrip("%RW").startswith(("~pp:r:", "&pp:r:")), pattern


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_no_rule_allows_a_dangerous_command_or_a_category(stage: int) -> None:
    given = rules("r", stage, 3)
    assert given[:3] == ["-@all", "resetkeys", "resetchannels"]
    allowed = {word for rule in given for word in rule.strip("()").split() if word.startswith("+")}
    assert not {f"+{command}" for command in DANGEROUS.split()} & allowed
    assert not [word for word in allowed if "@" in word]


def test_only_the_head_answers_requests_and_reads_all_records() -> None:
    assert any("celery-task-meta-" in p for p in may(0, 3, "setex"))
    assert "%R~pp:r:member:*" in may(0, 3, "get")
    for stage in (1, 2):
        assert not may(stage, 3, "setex") | may(stage, 3, "xadd")
        assert {p for p in may(stage, 3, "get") if "member" in p} == {f"%RW~pp:r:member:{stage}"}
        assert may(stage, 3, "publish") == {"&pp:r:/0.celeryev/worker.*"}


def test_entry_and_exit_are_names_of_the_ends() -> None:
    names = [{p for p in may(stage, 3, "set") if ":name:" in p} for stage in range(3)]
    assert names[0] == {"%RW~pp:r:name:pp-stage-0", "%RW~pp:r:name:pp-entry"}
    assert names[1] == {"%RW~pp:r:name:pp-stage-1"}
    assert names[2] == {"%RW~pp:r:name:pp-stage-2", "%RW~pp:r:name:pp-exit"}


def test_channels_carry_the_number_of_the_database() -> None:
    channels = {p for patterns, _ in selectors(1, 2, db=3) for p in patterns if p.startswith("&")}
    assert channels == {"&pp:r:/3.celery.pidbox", "&pp:r:/3.celeryev/worker.*"}


def test_names_of_users_differ() -> None:
    names = {of(run, n) for run in ("a", "a-1", "a-1-1") for n in (0, 1, 10, 11) for of in (user_name, guest_name)}
    assert len(names) == 24


def test_a_user_logs_in_and_does_not_show_the_password() -> None:
    user = User("pp-r-0", "a/b@c:d")
    assert user.login("redis://:admin@127.0.0.1:7000/1") == "redis://pp-r-0:a%2Fb%40c%3Ad@127.0.0.1:7000/1"
    assert user.login("redis://[::1]:7000/1") == "redis://pp-r-0:a%2Fb%40c%3Ad@[::1]:7000/1"
    assert "a/b@c:d" not in repr(user)
