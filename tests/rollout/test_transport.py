"""The transport of an engine in this process: how many steps one call of `receive` runs."""

from __future__ import annotations

from baton.rollout import transport
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.fake import FakeEngine
from baton.rollout.transport import LocalTransport
from baton.types import Lease, PolicyVersion, Report, SamplingParams, Trajectory


def running(num_steps: int) -> LocalTransport:
    """A transport with two leases, of 2 and of 5 tokens."""
    engine = FakeEngine(EngineSettings(slots=8, max_context_tokens=64), PolicyVersion("a", 0), lambda g, s: 60)
    port = LocalTransport(engine, num_steps=num_steps)
    for lease_id, tokens in enumerate((2, 5)):
        port.send(Lease(lease_id, Trajectory(0, lease_id, (1, 2)), SamplingParams(tokens), 1, 0))
    return port


def test_a_call_runs_its_steps_and_returns_their_messages_in_order(monkeypatch):
    monkeypatch.setattr(transport, "STEPS_S", 60.0)
    port = running(5)
    assert [(m.lease_id, m.token_offset) for m in port.receive(1.0) if isinstance(m, Report)] == [(0, 0), (1, 0)]
    assert port.stats().decode_steps == 5


def test_no_further_step_starts_after_the_time_of_a_call(monkeypatch):
    monkeypatch.setattr(transport, "STEPS_S", 0.0)
    port = running(5)
    assert not port.receive(1.0)
    assert port.stats().decode_steps == 1


def test_a_flush_reports_all_tokens_and_generates_none(monkeypatch):
    monkeypatch.setattr(transport, "STEPS_S", 60.0)
    port = running(3)
    assert [m.lease_id for m in port.receive(1.0)] == [0]
    (grown,) = port.flush()
    assert isinstance(grown, Report)
    assert (grown.lease_id, len(grown.segments[0].token_ids), grown.is_aborted) == (1, 3, False)
    assert not port.flush()
    assert port.stats().decode_steps == 3
    assert [m.lease_id for m in port.receive(1.0)] == [1]
