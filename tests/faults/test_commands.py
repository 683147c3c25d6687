"""The whole command: what it says and how it ends, where the fault is in the answer or in what a server repeats."""

import base64
import json
import shutil
from pathlib import Path

import pytest

from tests.fake_hub import FakeHub
from tests.fake_vast import Fault
from tests.fake_vast.machine import Start
from tests.faults.command import Rented
from tests.faults.conftest import MODEL, Open
from tests.faults.scene import Ground, image
from tests.integration.run import assert_one_line

FIRST = 245  # the token that llama-tied begins its answer to "Say hello" with


@pytest.fixture
def silent(goldens: Path, tmp_path: Path) -> Path:
    """A model whose texts end with the first token."""
    folder = Path(shutil.copytree(goldens / "llama-tied", tmp_path / "silent"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (spelling,) = [text for text, i in tokenizer["model"]["vocab"].items() if i == FIRST]
    added = tokenizer["added_tokens"][0] | {"id": FIRST, "content": spelling, "special": True}
    tokenizer["added_tokens"].append(added)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": spelling}))
    return folder


def test_an_empty_reply(scene: Open, node: Start, silent: Path, tmp_path: Path, ground: Ground) -> None:
    with FakeHub({MODEL: silent}) as hub:
        own = Ground(hub, MODEL, ground.cache_home)
        with scene("empty reply", node, ground=own) as it, Rented(it, tmp_path) as command:
            ended = command.end()
            assert ended.code == 1
            assert_one_line(ended.stderr, "the reply is empty")


def test_no_secret_is_shown_wherever_it_is_repeated(scene: Open, ground: Ground, tmp_path: Path) -> None:
    """Every call fails once with an answer that shows the key; a container's log shows its whole environment."""
    script = "env | grep -E 'SECRET|KEY|TICKET|BROKER'; exec sleep 600"
    shows = image(ground.cache_home, script=script, KEY_OF_ANOTHER=KEY)
    with scene("answers that show the key", shows, n=5, key=KEY) as it:
        kinds = ("search", "list", "show", "destroy", "logs")
        for i, body in enumerate(BODIES):
            it.fake.faults += [Fault(kind, 500, body, {"X_Key": KEY}, skip=2 * i) for kind in kinds]
            it.fake.faults.append(Fault("create", 400, body, {"X_Key": KEY}, skip=2 * i, times=i < 3))
        with Rented(it, tmp_path, "smoke", "--timeout", "2") as command:
            ended = command.end()
        assert ended.code == 1
        assert_one_line(ended.stderr, "says no hello")
        assert "PP_SECRET=***" in ended.stderr, "the log is shown"
        assert sum(fault.times == 0 for fault in it.fake.faults) >= 8
        shown = (ended.stdout + ended.stderr).lower()
        for secret in it.secrets() | {base64.b64encode(KEY.encode()).decode(), KEY[32:]}:
            assert secret[:12].lower() not in shown


KEY = "0123456789abcdef" * 4
BODIES = [
    {"error": KEY, "msg": f"Authorization: Bearer {KEY}"}, f"you sent {KEY}", {"detail": {"token": KEY}}, [KEY],
    f"Basic {base64.b64encode(KEY.encode()).decode()}", f"{KEY[:32]}\n{KEY[32:]}", KEY.upper(), f"?k=%22{KEY}%22",
]  # fmt: skip
