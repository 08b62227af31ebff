"""`FakeEngine`: an engine without a model, for tests. Slots, queue and reports work as in a real engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton.rollout.engine import EngineSettings
from baton.rollout.engines.slot_table import RunningLease, SlotEngine
from baton.types import FromWorker, PolicyVersion

END_ID = 0
"""Last token of every scripted turn. No other token has this id."""


class FakeEngine(SlotEngine):
    """An `Engine` whose tokens are a pure function of (group id, sample index, position, version). Every turn of a
    trajectory has `length(group_id, sample_index)` tokens, including the end id. The text of a response consists of the
    decimal ids of its tokens, separated by spaces. Stop strings are searched in this text."""

    def __init__(self, settings: EngineSettings, version: PolicyVersion, length: Callable[[int, int], int]) -> None:
        super().__init__(settings, version, (END_ID,), lambda ids: " ".join(map(str, ids)))
        self._length = length

    def load_weights(self, tensors: Mapping[str, Any], version: PolicyVersion) -> None:
        """Serve a new version. The tensors are not used."""
        self._table.switch(version)

    def step(self) -> list[FromWorker]:
        """Admit waiting leases, append the next scripted token to each running lease, and return reports."""
        table = self._table
        reports = table.open_step()
        self._prefilled_tokens += sum(len(row.prefix_ids) for _, row in table.admit())
        if table.num_running:
            self._decode_steps += 1
            self._decoded_tokens += table.num_running
            self._decode_rows += table.num_running
            tokens = [self._token(row) if row is not None else END_ID for row in table.rows]
            reports += table.commit(tokens, [-(1 + token % 8) / 8 for token in tokens])
        return reports

    def _token(self, row: RunningLease) -> int:
        trajectory = row.lease.trajectory
        return fake_token(
            trajectory.group_id,
            trajectory.sample_index,
            row.length,
            self.version.number,
            length=trajectory.turn_offset + self._length(trajectory.group_id, trajectory.sample_index),
        )


def fake_token(group_id: int, sample_index: int, position: int, version: int, *, length: int) -> int:
    """Return the token of a `FakeEngine` at a position after the prompt. A token's logprob is -(1 + token % 8) / 8."""
    if position >= length - 1:
        return END_ID
    mixed = group_id * 1_000_003 + sample_index * 10_007 + position * 101 + version * 31
    return 1 + mixed * 2_654_435_761 % 4_294_967_291 % 99
