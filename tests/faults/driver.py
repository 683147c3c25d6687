"""`python -m tests.faults.driver SCALE pp|smoke ARGUMENTS`: the command, with the waits of the real API made short.

Nothing else is changed: the limits between calls times SCALE, as the fake's, and shorter pauses before repeats.
"""

import sys

from orchestrator import sweep, vast, vastcalls
from orchestrator.cli import main, smoke_run


def hurry(scale: float) -> None:
    vast.GAPS_S.update({kind: scale * gap for kind, gap in vast.GAPS_S.items()})
    vast.CREATE_WAIT_S, sweep.LOOK_S = 0.1, 0.1
    vastcalls.FIRST_WAIT_S, vastcalls.MOST_WAIT_S, vastcalls.PATIENCE_S = 0.02, 0.1, 0.4
    sweep.end.__kwdefaults__["patience_s"] = 0.5


if __name__ == "__main__":
    scale, command, *sys.argv[1:] = sys.argv[1:]
    hurry(float(scale))
    (smoke_run if command == "smoke" else main)()
