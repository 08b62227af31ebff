"""The trace: which part of a run did what, when, and under which policy version. Numbers by step are in the metrics.

A span is a period of work of one actor in one of its lanes; the spans of a lane never overlap. A live run and a
simulation use the same names:

    trainer                   wait_for_batch, train, publish, eval, checkpoint
    judges                    judge: while at least one reward is pending
    engine process 0, node#3  generate: one lease in one slot; in the lane for weights, fetch: transfer of a version
    hub, examiner             publish, check

`chrome_trace` exports to Perfetto and Chrome's tracing page; `views/pages/slots.py` draws the trace in `baton report
--html`.
"""

from baton.records.trace.chrome import chrome_trace as chrome_trace
from baton.records.trace.clock import StageTimer as StageTimer
from baton.records.trace.file import TraceWriter as TraceWriter
from baton.records.trace.file import read_trace as read_trace
from baton.records.trace.leases import LeaseTrace as LeaseTrace
from baton.records.trace.spans import ASIDE as ASIDE
from baton.records.trace.spans import BEGIN as BEGIN
from baton.records.trace.spans import Span as Span
from baton.records.trace.spans import Tracer as Tracer
