"""A simulated connection is silent as long as its session allows, also when a message changes this limit."""

from __future__ import annotations

from baton.simulator.clock import VirtualClock
from baton.simulator.network import SimulatedConnection


def test_a_limit_of_silence_that_a_message_shortens_applies_at_once() -> None:
    clock, limits, silent_s = VirtualClock(), [60.0], list[float]()
    connection = SimulatedConnection(clock, 0.5, limits.append, lambda: None)

    def on_silence() -> None:
        silent_s.append(clock.now_s)
        connection.cut()

    connection.watch(lambda: limits[-1], on_silence)
    connection.send(5.0)
    connection.send(5.0)
    while clock.fire():
        pass
    assert silent_s == [5.5]


def test_every_message_begins_the_limit_anew_and_a_cut_ends_it() -> None:
    clock, silent_s = VirtualClock(), list[float]()
    connection = SimulatedConnection(clock, 0.0, lambda message: None, lambda: None)
    connection.watch(lambda: 3.0, lambda: silent_s.append(clock.now_s))
    for at_s in (1.0, 2.0):
        clock.at(at_s, connection.send, "message")
    clock.wait(9.0)
    assert silent_s == [5.0, 8.0], "the connection stays, so it is silent again"
    connection.cut()
    clock.wait(100.0)
    assert silent_s == [5.0, 8.0]
