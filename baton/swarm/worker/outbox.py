"""Reports that the hub has not confirmed; they are sent again, unchanged, after a reconnection."""

from __future__ import annotations

from baton.types import Report


class Outbox:
    """Reports by lease, in order."""

    def __init__(self) -> None:
        self._unconfirmed: dict[int, list[Report]] = {}

    @property
    def leases(self) -> tuple[int, ...]:
        """Every lease that is running, or that has ended without confirmation by the hub."""
        return tuple(self._unconfirmed)

    def open(self, lease_id: int) -> None:
        """Add a lease that was granted."""
        self._unconfirmed.setdefault(lease_id, [])

    def add(self, report: Report) -> None:
        """Keep a report until the hub confirms it."""
        if report.lease_id in self._unconfirmed:
            self._unconfirmed[report.lease_id].append(report)

    def confirm(self, lease_id: int, length: int, *, has_ended: bool) -> None:
        """Drop the reports that the hub has confirmed, up to a length or to the end of the lease."""
        if has_ended:
            self.close(lease_id)
        elif lease_id in self._unconfirmed:
            kept = [report for report in self._unconfirmed[lease_id] if not _is_within(report, length)]
            self._unconfirmed[lease_id] = kept

    def close(self, lease_id: int) -> None:
        """Drop a lease with its reports."""
        self._unconfirmed.pop(lease_id, None)

    def clear(self) -> None:
        """Drop all leases."""
        self._unconfirmed.clear()

    def again(self) -> list[Report]:
        """Reports to be sent again."""
        return [report for reports in self._unconfirmed.values() for report in reports]


def _is_within(report: Report, length: int) -> bool:
    """Whether all tokens of a report are within a length; False for the last report of a lease, which also has its
    end."""
    if report.finish_reason is not None or report.is_aborted:
        return False
    return report.token_offset + sum(len(segment.token_ids) for segment in report.segments) <= length
