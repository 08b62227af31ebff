"""Export a trace in Chrome's Trace Event Format, for ui.perfetto.dev, chrome://tracing and speedscope."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from baton.records.trace.spans import ASIDE, Span, actors_of

_US = 1e6


def chrome_trace(spans: Sequence[Span]) -> bytes:
    """Return the JSON of a trace: actors are processes, lanes threads, spans complete events, marks instants.

    Times are whole microseconds since the first span; both ends are rounded, so adjacent spans stay adjacent. Source:
    "Trace Event Format", Chromium project.
    """
    others, workers = actors_of(spans)
    pids = {actor: pid for pid, actor in enumerate([*others, *workers], start=1)}
    zero_s = min((span.begin_s for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for actor, pid in pids.items():
        events.append(_name("process_name", pid, 0, name=actor))
        events.append(_name("process_sort_index", pid, 0, sort_index=pid))
    for actor, lane in sorted({(span.actor, span.lane) for span in spans}, key=lambda at: (pids[at[0]], at[1])):
        events.append(_name("thread_name", pids[actor], _tid(lane), name=_lane_name(actor in workers, lane)))
        events.append(_name("thread_sort_index", pids[actor], _tid(lane), sort_index=_tid(lane)))
    for span in sorted(spans, key=lambda span: span.begin_s):
        begin, end = round((span.begin_s - zero_s) * _US), round((span.end_s - zero_s) * _US)
        place = {"name": span.name, "ts": begin, "pid": pids[span.actor], "tid": _tid(span.lane), "args": span.facts}
        if span.end_s > span.begin_s:
            events.append({**place, "ph": "X", "cat": "baton", "dur": end - begin})
        else:
            events.append({**place, "ph": "i", "s": "p"})
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _name(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _tid(lane: int) -> int:
    return lane - ASIDE


def _lane_name(is_worker: bool, lane: int) -> str:
    if lane == ASIDE:
        return "weights"
    return f"slot {lane}" if is_worker else "at work" if not lane else f"lane {lane}"
