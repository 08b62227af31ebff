"""Times the stages of a train step, for the metrics and the trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.records.trace.file import TraceWriter


@dataclass(slots=True)
class StageTimer:
    """Seconds by stage since the last `take`; each stage is also written to the trace."""

    trace: TraceWriter = field(default_factory=TraceWriter)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, step: int, span: str = "") -> Iterator[None]:
        """Add the duration of the context to a stage. `span` is the name in the trace if it differs."""
        begin_s = time.monotonic()
        try:
            yield
        finally:
            end_s = time.monotonic()
            self.seconds[name] = self.seconds.get(name, 0.0) + end_s - begin_s
            self.trace.span(span or name, "trainer", 0, begin_s, end_s, step=step)

    def take(self) -> dict[str, float]:
        """Return the seconds by stage and reset them."""
        taken, self.seconds = self.seconds, {}
        return taken
