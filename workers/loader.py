"""From a stage's settings to what it computes with: the model's headers, the plan, then the weights of a span.

Nothing here imports tinygrad before a slice is asked for: a worker says hello first.
"""

import os
from typing import TYPE_CHECKING

from pptasks.config import Settings
from pptasks.errors import ConfigError
from pptasks.modelinfo import Model, OnProgress
from pptasks.models import open_model
from pptasks.plan import Plan, Span, make_plan, slots_that_fit
from pptasks.routing import HEAD
from workers.clang import compiler, kernel_cache
from workers.memory import free_memory

if TYPE_CHECKING:
    from workers.model import Slice


def choose_compiler(settings: Settings) -> None:
    """Tell tinygrad, before it is imported, which C compiler to run and where to keep what that made.

    Raises ConfigError if the CPU is the device and there is no compiler.
    """
    try:
        os.environ["CC"] = cc = compiler({"CC": settings.cc or ""}, settings.cache)
        os.environ.setdefault("CACHEDB", str(kernel_cache(cc, settings.cache)))
    except ConfigError as e:
        from tinygrad import Device

        try:
            needs_compiler = Device.DEFAULT == "CPU"
        except RuntimeError:  # no device works, and the CPU does not for want of a compiler
            raise e from None
        if needs_compiler:
            raise


class Loader:
    """One model under one plan. Making it reads headers; `slice` fetches and loads, and nothing else does."""

    def __init__(self, settings: Settings, on_progress: OnProgress):
        self._settings, self._on_progress = settings, on_progress
        self.model: Model = open_model(settings.model, settings.cache, on_progress, settings.hub)
        self.plan: Plan = make_plan(self.model, settings)

    def stage(self, index: int) -> "Slice":
        """What stage `index` of the plan holds."""
        from tinygrad import Device

        plan = self.plan
        return self.slice(
            plan.spans[index],
            embedding=index == HEAD,
            readout=index == plan.readout_stage,
            n_slots=slots_that_fit(
                self.model, plan, index, int(free_memory(Device.DEFAULT) * self._settings.memory_share)
            ),
            context=plan.context,
            audit_rate=self._settings.audit_rate,
        )

    def slice(
        self, span: Span, *, embedding: bool, readout: bool, n_slots: int, context: int, audit_rate: float = 0.0
    ) -> "Slice":
        """Any span, its bytes fetched where they are not here yet."""
        from workers.model import Slice  # imports tinygrad, which takes a second

        refs = self.model.stage_tensors(span.lo, span.hi, embedding=embedding, readout=readout)
        self.model.source.fetch(refs, self._on_progress)
        return Slice(
            self.model,
            span,
            embedding=embedding,
            readout=readout,
            n_slots=n_slots,
            context=context,
            max_rows=self.plan.max_rows,
            kernels=self._settings.kernels,
            weights=self.plan.weights,
            audit_rate=audit_rate,
            on_progress=self._on_progress,
        )
