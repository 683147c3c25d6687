"""Copies of the program with one thing changed: what an instance may have that is not as it should be."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("pptasks", "workers")
CHANGES = {  # name: file, what is in it, what is there instead
    "slow": (
        "workers/stage.py",
        "computed = x = self.slice.forward(x, slots, _positions(lanes))",
        "computed = x = (time.sleep(0.05), self.slice.forward(x, slots, _positions(lanes)))[1]",
    ),
    "wrong product": (
        "workers/probe.py",
        "return (Tensor(a) @ Tensor(b)).numpy()",
        "return (Tensor(a) @ Tensor(b)).numpy() * 1.001",
    ),
    "raises": (
        "workers/loader.py",
        "        self.plan: Plan = ",
        '        raise RuntimeError("the disk is on fire")\n        self.plan: Plan = ',
    ),
}


def changed(name: str, folder: Path) -> Path:
    """A folder with the program as CHANGES says; made once."""
    program = folder / name.replace(" ", "-")
    if program.exists():
        return program
    for part in PARTS:
        shutil.copytree(ROOT / part, program / part, ignore=shutil.ignore_patterns("__pycache__"))
    file, old, new = CHANGES[name]
    text = (program / file).read_text()
    assert text.count(old) == 1, (name, text.count(old))
    (program / file).write_text(text.replace(old, new))
    return program
