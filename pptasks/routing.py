"""Where a frame goes next. Pure: a plan and a frame's kind in, one stage out.

A lap starts on the head as an activation, visits stage after stage, and ends on the head: as tokens in a line, where
the last stage read them out, or as the hidden state coming back in a ring. The way back has its own kinds, so that a
frame that returns can never be taken for one that starts.
"""

from pptasks.errors import RoutingError
from pptasks.plan import Plan
from pptasks.wire import Kind

HEAD = 0


def produces(plan: Plan, stage: int) -> Kind:
    """The kind of frame that `stage` makes of an activation."""
    if stage < plan.n_stages - 1:
        return Kind.ACTIVATION
    return Kind.RETURN if plan.is_ring else Kind.TOKENS


def route(plan: Plan, stage: int, kind: Kind) -> int:
    """The stage to which `stage` sends a frame of `kind`. Raises RoutingError if there is none."""
    if not 0 <= stage < plan.n_stages:
        raise RoutingError(f"stage {stage} is not in a plan of {plan.n_stages} stages")
    if kind in (Kind.ERROR, Kind.TRACE):
        return HEAD
    if kind is not produces(plan, stage):
        raise RoutingError(
            f"stage {stage} of {plan.n_stages} cannot send {kind.name.lower()} "
            f"in a {'ring' if plan.is_ring else 'line'}"
        )
    return stage + 1 if kind is Kind.ACTIVATION else HEAD
