"""Keeps reports until the hub confirms them, and returns them unchanged after a reconnection."""

from __future__ import annotations

from baton.types import Report


class Outbox:
    """The unconfirmed reports of each lease, in order."""

    def __init__(self) -> None:
        self._unconfirmed: dict[int, list[Report]] = {}

    @property
    def leases(self) -> tuple[int, ...]:
        """Ids of the running leases, and of the ended leases whose end the hub has not confirmed."""
        return tuple(self._unconfirmed)

    def open(self, lease_id: int) -> None:
        self._unconfirmed.setdefault(lease_id, [])

    def add(self, report: Report) -> None:
        """Add a report of a lease. Has no effect if the lease is not open."""
        if report.lease_id in self._unconfirmed:
            self._unconfirmed[report.lease_id].append(report)

    def confirm(self, lease_id: int, length: int, *, has_ended: bool) -> None:
        """Remove the reports that the hub has confirmed: up to a length, or all reports of an ended lease."""
        if has_ended:
            self.close(lease_id)
        elif lease_id in self._unconfirmed:
            kept = [report for report in self._unconfirmed[lease_id] if not _is_within(report, length)]
            self._unconfirmed[lease_id] = kept

    def close(self, lease_id: int) -> None:
        self._unconfirmed.pop(lease_id, None)

    def clear(self) -> None:
        self._unconfirmed.clear()

    def again(self) -> list[Report]:
        """Return the unconfirmed reports, which are sent again after a reconnection."""
        return [report for reports in self._unconfirmed.values() for report in reports]


def _is_within(report: Report, length: int) -> bool:
    """Return whether all tokens of a report are among the first `length` tokens of its lease. Return False for the last
    report of a lease, because a length does not confirm the end of the lease."""
    if report.finish_reason is not None or report.is_aborted:
        return False
    return report.token_offset + sum(len(segment.token_ids) for segment in report.segments) <= length
