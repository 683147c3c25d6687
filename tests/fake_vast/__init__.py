"""A vast.ai in one process, over real HTTP: its shapes, states, limits and faults, what it bills, and a log.

    with FakeVast(offers(4), start=run_args) as fake:
        ... Vast(fake.key, fake.url, gaps_s=fake.gaps_s) ...
        fake.log, fake.too_fast, fake.billing, fake.cost_usd, fake.instances

`fake.faults.append(Fault("create", status=500, takes_effect=True))` makes the next create fail after it made an
instance; `fake.lives[machine_id] = NEVER_RUNS` says what becomes of instances on a machine. `python -m tests.fake_vast`
serves one until Ctrl-C and runs each instance's command as a process of this machine.
"""

from tests.fake_vast.fake import FakeVast
from tests.fake_vast.faults import Fault
from tests.fake_vast.machine import (
    BAD_IMAGE,
    EXITS,
    GOES_OFFLINE,
    NEVER_RUNS,
    OCI_FAILS,
    RUNS,
    VANISHES,
    Machine,
    Phase,
    Started,
    run_args,
)
from tests.fake_vast.market import offers

__all__ = [
    "BAD_IMAGE",
    "EXITS",
    "GOES_OFFLINE",
    "NEVER_RUNS",
    "OCI_FAILS",
    "RUNS",
    "VANISHES",
    "FakeVast",
    "Fault",
    "Machine",
    "Phase",
    "Started",
    "offers",
    "run_args",
]
