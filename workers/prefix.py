"""Which positions of a new sequence are in the KV cache already. Pure.

What a slot holds stays there after its sequence ended, until another takes the slot over. A system prompt, the history
of a chat, and the prompt of several answers to one question are thus computed once: every stage copies them from one
slot to another (`wire.Shared`). A position's keys and values depend on nothing but the ids up to it, and kernels sum in
one order, so the copy has the bits that computing would give.
"""

from collections.abc import Iterable, Sequence

MIN_SHARED = 16  # positions; fewer are computed sooner than copied


def common(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """How many of the first `most` ids are the same."""
    low, high = 0, min(most, len(a), len(b))
    if high == 0 or a[0] != b[0]:
        return 0
    while low < high:  # the first `low` are the same; slices compare in C
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def longest(ids: Sequence[int], held: Iterable[tuple[int, Sequence[int], int]]) -> tuple[int, int] | None:
    """(slot, positions) of the longest start of `ids` among (slot, ids, positions that it holds); None if none is worth
    it. The last id is never shared: somebody must compute what follows it."""
    best = max(((common(other, ids, min(n, len(ids) - 1)), -slot) for slot, other, n in held), default=(0, 0))
    return (-best[1], best[0]) if best[0] >= MIN_SHARED else None
