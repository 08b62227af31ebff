"""Time, to be looked at: who did what, from when to when, under which policy version. Numbers go to metrics.

A span is one stretch of work of one actor in one of its lanes; in a lane spans follow each other and never overlap. A
live run and a simulation write the same names:

    trainer                   wait_for_batch, train, publish, eval, checkpoint
    judges                    judge: while any judgement is waited for
    engine process 0, node#3  generate: one lease in one slot; beside the slots, fetch: a version on its way there
    hub, examiner             publish, check

`chrome_trace` is for Perfetto and Chrome's tracing page; the picture of `baton report --html` is in
`views/pages/slots.py`.
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
