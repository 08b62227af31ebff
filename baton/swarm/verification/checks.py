"""Checks the shapes, value ranges, versions, numbers of tokens and endings of a report. These checks need no model.

The checks are pure functions. Every engine that follows `rollout/engines/slot_table.py` passes the checks. After a
network failure, a correct worker may send repeated or late reports. The lease broker recognises such reports by their
token offset and drops them. The broker therefore checks only reports whose tokens it is about to append. The cheapest
checks come first, so an oversized report costs only the check of its length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec
import numpy as np

from baton.rollout.engines.slot_table import StopText
from baton.types import Author, FinishReason, Lease, Report, Segment, Trajectory, kept_dtype

MAX_LOGPROB = 1e-4
"""Maximum of a reported log-probability, above 0 to allow for rounding."""


@dataclass(frozen=True, slots=True)
class ReportLimits:
    """Limits that all engines of a run share."""

    vocabulary: int
    """Size of the vocabulary. All token ids are below this number."""
    max_context_tokens: int
    """Maximum number of tokens of prompt and response together."""
    end_ids: tuple[int, ...] = ()
    """Token ids that end a trajectory, in addition to the lease's stop_token_ids."""
    routing_bytes: int = 0
    """Bytes per token of reported routing (the experts that processed the token); 0 if not reported."""
    num_experts: int = 0
    """Number of experts of each router. In a report, an expert's index takes one byte, or two above 256 experts."""
    max_segments: int = 64
    """Maximum number of segments of a report. A report has a segment for each version that the worker has served since
    the previous report."""


def check_report(
    lease: Lease,
    report: Report,
    limits: ReportLimits,
    *,
    grown: Trajectory,
    newest_version: int,
    text: Callable[[Sequence[int]], str],
) -> str | None:
    """Return a sentence that names the violation in a report, or None if a correct worker may have sent the report.

    `grown`: the lease's unfinished trajectory before the report; the report's tokens follow its last token.
    `newest_version`: number of the newest published version. `text`: function that decodes token ids to text that
    includes special tokens; called only if the lease has stop strings."""
    # number of tokens after the prompt at which the trajectory ends because of its length
    budget = min(lease.sampling.max_new_tokens, limits.max_context_tokens - len(lease.trajectory.prompt_ids))
    num_new = sum(len(segment.token_ids) for segment in report.segments)
    return (
        _too_much(report, limits, grown.num_tokens + num_new, budget)
        or _wrong_segments(report, limits, lease.sampling.max_kept)
        or _wrong_versions(lease, report, grown, newest_version)
        or _wrong_end(lease, report, limits, grown.num_tokens + num_new, budget)
        or _wrong_stop(lease, report, limits, grown, text)
    )


def _too_much(report: Report, limits: ReportLimits, length: int, budget: int) -> str | None:
    if len(report.segments) > limits.max_segments:
        return f"the report has {len(report.segments)} segments; at most {limits.max_segments} are allowed"
    if report.segments and length > budget:
        return f"the trajectory would have {length} tokens; its budget is {budget}"
    return None


def _wrong_segments(report: Report, limits: ReportLimits, max_kept: int) -> str | None:
    place = report.token_offset
    for segment in report.segments:
        if segment.author is not Author.POLICY:
            return (
                f"the segment at token {place} has the author {segment.author}; a worker may report only the policy's"
            )
        if not segment.token_ids or len(segment.token_ids) != len(segment.behavior_logprobs):
            return (
                f"the segment at token {place} has {len(segment.token_ids)} ids and "
                f"{len(segment.behavior_logprobs)} behavior logprobs; it needs equally many, and at least one"
            )
        if violation := _wrong_values(segment, limits, place) or _wrong_masks(segment, limits, place, max_kept):
            return violation
        place += len(segment.token_ids)
    return None


def _wrong_values(segment: Segment, limits: ReportLimits, place: int) -> str | None:
    ids, logprobs = segment.token_ids, segment.behavior_logprobs
    if min(ids) < 0 or max(ids) >= limits.vocabulary:
        i, token = next((i, token) for i, token in enumerate(ids) if not 0 <= token < limits.vocabulary)
        return f"token {place + i} has the id {token}; allowed are 0 to {limits.vocabulary - 1}"
    # the sum is finite only if all values are finite; `max` may ignore a NaN
    for i, logprob in enumerate(() if max(logprobs) <= MAX_LOGPROB and math.isfinite(sum(logprobs)) else logprobs):
        if not (math.isfinite(logprob) and logprob <= MAX_LOGPROB):
            return f"token {place + i} has the behavior logprob {logprob}; allowed are finite values up to 0"
    needed = len(segment.token_ids) if limits.routing_bytes else 0
    if len(segment.routing) not in {0, needed}:
        return f"the segment at token {place} has the routing of {len(segment.routing)} tokens; allowed are {needed}"
    if any(len(routing) != limits.routing_bytes for routing in segment.routing):
        return f"the segment at token {place} has routing data that is not {limits.routing_bytes} bytes for each token"
    experts = chain.from_iterable(
        memoryview(routing).cast("B" if limits.num_experts <= 256 else "H") for routing in segment.routing
    )
    if max(experts, default=-1) >= limits.num_experts:
        return f"the segment at token {place} names an unknown expert; allowed are 0 to {limits.num_experts - 1}"
    return None


def _wrong_masks(segment: Segment, limits: ReportLimits, place: int, max_kept: int) -> str | None:
    """Check that each sampling mask contains 1 to `max_kept` different token ids in ascending order, including the id
    of the sampled token. Return a sentence that names the first error, or None if there is none."""
    needed, dtype = len(segment.token_ids) if max_kept else 0, np.dtype(kept_dtype(limits.vocabulary))
    if len(segment.kept) != needed:
        return f"the segment at token {place} has the sampling masks of {len(segment.kept)} tokens; it needs {needed}"
    for i, (token, mask) in enumerate(zip(segment.token_ids, segment.kept, strict=False), place):
        if len(mask) % dtype.itemsize or not 1 <= len(mask) // dtype.itemsize <= max_kept:
            allowed = f"1 to {max_kept} ids of {dtype.itemsize} bytes"
            return f"token {i} has a sampling mask of {len(mask)} bytes; allowed are {allowed}"
        ids = np.frombuffer(mask, dtype).astype(np.int64)
        if (ids[1:] <= ids[:-1]).any() or ids[-1] >= limits.vocabulary:
            return f"token {i} has a sampling mask that is not ascending ids from 0 to {limits.vocabulary - 1}"
        if token not in ids:
            return f"token {i} has the id {token}, which is not in its own sampling mask"
    return None


def _wrong_versions(lease: Lease, report: Report, grown: Trajectory, newest_version: int) -> str | None:
    last = grown.segments[-1].policy_version if grown.segments else None
    for segment in report.segments:
        version = segment.policy_version
        if lease.is_exact and version != lease.version:
            return f"tokens of version {version} on a lease that requires exactly version {lease.version}"
        if not lease.version <= version <= newest_version:
            return (
                f"tokens of version {version}; the lease allows versions {lease.version} to {newest_version}"
                " (the newest)"
            )
        if last is not None and version < last:
            return f"tokens of version {version} after tokens of version {last}"
        last = version
    return None


def _wrong_end(lease: Lease, report: Report, limits: ReportLimits, length: int, budget: int) -> str | None:
    reason = report.finish_reason
    if reason is FinishReason.ENVIRONMENT:
        return "finished by the environment, which a worker cannot report"
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
        return "finished by stop, but " + ("its last token is no end id" if ids else "the report has no token")
    if reason is FinishReason.LENGTH and length < budget:
        return f"finished by length at {length} tokens of a budget of {budget}"
    if reason is None and length >= budget:
        return f"the trajectory has used its budget of {budget} tokens, but is not reported as finished"
    return None


def _wrong_stop(
    lease: Lease, report: Report, limits: ReportLimits, grown: Trajectory, text: Callable[[Sequence[int]], str]
) -> str | None:
    """Search for stop strings token by token, as an engine does. If a token completes a stop string, it must be the
    last token of its report, and the finish reason must be `stop`. If the finish reason is `stop`, the last token must
    complete a stop string or be a token that ends a trajectory. Return a sentence that names the first violation, or
    None if there is none."""
    if not lease.sampling.stop:
        return None
    watch = StopText(msgspec.structs.replace(lease, trajectory=grown), text)
    ids = [token for segment in report.segments for token in segment.token_ids]
    end_ids = {*limits.end_ids, *lease.sampling.stop_token_ids}
    for i, token in enumerate(ids):
        is_complete, is_last = watch.ends_with(token), i == len(ids) - 1
        if is_complete and not (is_last and report.finish_reason is FinishReason.STOP):
            return f"token {report.token_offset + i} completes a stop string, but is not the last token"
        if not is_complete and is_last and report.finish_reason is FinishReason.STOP and token not in end_ids:
            return "finished by stop, but its last token is no end id and completes no stop string"
    return None
