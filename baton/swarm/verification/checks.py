"""Checks of a report alone, without a model: shapes, ranges, versions, budgets, ends.

Pure, and strict: every engine that follows `rollout/engines/slot_table.py` passes. Repeated and late reports are a
matter of the network; the lease broker drops them by their offset, and only reports about to be appended come here. The
cheapest checks come first, so that an oversized report costs no more than the check of its length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from baton.rollout.engines.slot_table import StopText
from baton.types import Author, FinishReason, Lease, Report, Segment, Trajectory

MAX_LOGPROB = 1e-4
"""A log-probability may exceed 0 by this much because of rounding."""
MAX_SHOWN = 60
"""Maximum characters of a worker's value in a message."""


@dataclass(frozen=True, slots=True)
class ReportLimits:
    """Limits that all engines of a run share."""

    vocabulary: int
    """Token ids are below this."""
    max_context_tokens: int
    """Prompt plus response."""
    end_ids: tuple[int, ...] = ()
    """Ids that end a trajectory, in addition to a lease's own stop_token_ids."""
    routing_bytes: int = 0
    """Bytes of routing per token; 0 if the engines report none."""
    max_segments: int = 64
    """Per report: one per version that a worker may serve between two reports of a trajectory."""


def check_report(
    lease: Lease,
    report: Report,
    limits: ReportLimits,
    *,
    grown: Trajectory,
    newest_version: int,
    text: Callable[[Sequence[int]], str],
) -> str | None:
    """Return a sentence that names the violation, or None if a correct worker can have sent this report.

    grown: the lease's trajectory before the report. newest_version: the newest published one. text: converts ids to
    text, with special tokens; called only if the lease has stop strings.
    """
    budget = max_length(lease, limits)
    num_new = sum(len(segment.token_ids) for segment in report.segments)
    return (
        _wrong_place(lease, report, grown)
        or _too_much(report, limits, grown.num_tokens + num_new, budget)
        or _wrong_segments(report, limits)
        or _wrong_versions(lease, report, grown, newest_version)
        or _wrong_end(lease, report, limits, grown.num_tokens + num_new, budget)
        or _wrong_stop(lease, report, limits, grown, text)
    )


def max_length(lease: Lease, limits: ReportLimits) -> int:
    """Number of tokens after the prompt at which a lease's trajectory ends because of its length."""
    return min(lease.sampling.max_new_tokens, limits.max_context_tokens - len(lease.trajectory.prompt_ids))


def _wrong_place(lease: Lease, report: Report, grown: Trajectory) -> str | None:
    if report.lease_id != lease.lease_id:
        return f"a report of lease {report.lease_id} came for lease {lease.lease_id}"
    if grown.finish_reason is not None:
        return f"trajectory {grown.name} is finished ({grown.finish_reason}) and takes no more reports"
    if report.token_offset != grown.num_tokens:
        return f"the report begins at token {report.token_offset} of a trajectory of {grown.num_tokens}"
    return None


def _too_much(report: Report, limits: ReportLimits, length: int, budget: int) -> str | None:
    if len(report.segments) > limits.max_segments:
        return f"the report has {len(report.segments)} segments, allowed are {limits.max_segments}"
    if report.segments and length > budget:
        return f"the trajectory would have {length} tokens, its budget is {budget}"
    return None


def _wrong_segments(report: Report, limits: ReportLimits) -> str | None:
    place = report.token_offset
    for segment in report.segments:
        if segment.author is not Author.POLICY:
            return f"the segment at token {place} is by the {segment.author}; a worker reports the policy's own"
        if not segment.token_ids or len(segment.token_ids) != len(segment.behavior_logprobs):
            return (
                f"the segment at token {place} has {len(segment.token_ids)} ids and "
                f"{len(segment.behavior_logprobs)} behavior logprobs; it needs as many, and at least one"
            )
        if violation := _wrong_values(segment, limits, place):
            return violation
        place += len(segment.token_ids)
    return None


def _wrong_values(segment: Segment, limits: ReportLimits, place: int) -> str | None:
    for i, token in enumerate(segment.token_ids):
        if type(token) is not int or not 0 <= token < limits.vocabulary:
            return f"token {place + i} has the id {_shown(token)}, allowed are 0 to {limits.vocabulary - 1}"
    for i, logprob in enumerate(segment.behavior_logprobs):
        if not (math.isfinite(logprob) and logprob <= MAX_LOGPROB):
            return f"token {place + i} has the behavior logprob {_shown(logprob)}, allowed are finite ones up to 0"
    needed = len(segment.token_ids) if limits.routing_bytes else 0
    if len(segment.routing) not in {0, needed}:
        return f"the segment at token {place} has the routing of {len(segment.routing)} tokens, allowed are {needed}"
    if any(len(routing) != limits.routing_bytes for routing in segment.routing):
        return f"the segment at token {place} has routing that is not {limits.routing_bytes} bytes for each token"
    return None


def _wrong_versions(lease: Lease, report: Report, grown: Trajectory, newest_version: int) -> str | None:
    last = grown.segments[-1].policy_version if grown.segments else None
    for segment in report.segments:
        version = segment.policy_version
        if lease.is_exact and version != lease.version:
            return f"tokens of version {_shown(version)} on a lease of exactly version {lease.version}"
        if not lease.version <= version <= newest_version:
            return (
                f"tokens of version {_shown(version)}; the lease allows versions {lease.version} to {newest_version}"
                " (the newest)"
            )
        if last is not None and version < last:
            return f"tokens of version {version} after tokens of version {last}"
        last = version
    return None


def _wrong_end(lease: Lease, report: Report, limits: ReportLimits, length: int, budget: int) -> str | None:
    reason = report.finish_reason
    if reason is FinishReason.ENVIRONMENT:
        return "finished by the environment, which is not a worker's to say"
    if reason is not None and report.is_aborted:
        return f"both finished ({reason}) and aborted"
    ids = [token for segment in report.segments for token in segment.token_ids]
    end_ids = {*limits.end_ids, *lease.sampling.stop_token_ids}
    at = next((i for i, token in enumerate(ids) if token in end_ids), None)
    if at is not None and at != len(ids) - 1:
        return f"{len(ids) - 1 - at} tokens after the end id {ids[at]} at token {report.token_offset + at}"
    if at is not None and reason is not FinishReason.STOP:
        return f"the trajectory ends with the end id {ids[at]}, but is reported as {reason or 'unfinished'}"
    if reason is FinishReason.STOP and at is None and not (ids and lease.sampling.stop):
        return "finished by stop, but its last token is no end id" + (", and there is none" if not ids else "")
    if reason is FinishReason.LENGTH and length < budget:
        return f"finished by length at {length} tokens of a budget of {budget}"
    if reason is None and length >= budget:
        return f"its budget of {budget} tokens is spent, but it is not reported as finished"
    return None


def _wrong_stop(
    lease: Lease, report: Report, limits: ReportLimits, grown: Trajectory, text: Callable[[Sequence[int]], str]
) -> str | None:
    """Search for stop strings as an engine does, token by token: the first token that completes one must be the
    last."""
    if not lease.sampling.stop:
        return None
    watch = StopText(msgspec.structs.replace(lease, trajectory=grown), text)
    ids = [token for segment in report.segments for token in segment.token_ids]
    end_ids = {*limits.end_ids, *lease.sampling.stop_token_ids}
    for i, token in enumerate(ids):
        is_complete, is_last = watch.ends_with(token), i == len(ids) - 1
        if is_complete and not (is_last and report.finish_reason is FinishReason.STOP):
            return f"token {report.token_offset + i} completes a stop string, but is not the last of a stopped answer"
        if not is_complete and is_last and report.finish_reason is FinishReason.STOP and token not in end_ids:
            return "finished by stop, but its last token is no end id and completes no stop string"
    return None


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"
