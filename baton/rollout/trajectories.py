"""What a trajectory takes: a prompt that leaves room for a response, and reports that continue it."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import UserError
from baton.types import Report, Trajectory


def check_room(group_id: int, prompt_ids: Sequence[int], max_context_tokens: int | None) -> None:
    """Raise UserError for a prompt that leaves no room for a response."""
    if max_context_tokens is not None and len(prompt_ids) >= max_context_tokens:
        raise UserError(
            f"a prompt of {len(prompt_ids)} tokens (group {group_id}) does not fit: engine.max_context_tokens is "
            f"{max_context_tokens} for prompt and response together; raise it, or leave such prompts out"
        )


def append_report(trajectory: Trajectory, report: Report) -> Trajectory:
    """Append a report's segments where its offset is the trajectory's length; return it unchanged where it is not."""
    if report.token_offset != trajectory.num_tokens:
        return trajectory
    return trajectory.extended(report.segments, report.finish_reason)
