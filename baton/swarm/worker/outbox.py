"""What a worker has said and the hub has not confirmed: said again after a cut, in the same words."""

from __future__ import annotations

from baton.types import Report


class Outbox:
    """Reports by lease, in order."""

    def __init__(self) -> None:
        self._unconfirmed: dict[int, list[Report]] = {}

    @property
    def leases(self) -> tuple[int, ...]:
        """Every lease that is being grown, or has ended without the hub's knowledge."""
        return tuple(self._unconfirmed)

    def open(self, lease_id: int) -> None:
        """A lease has come."""
        self._unconfirmed.setdefault(lease_id, [])

    def add(self, report: Report) -> None:
        """A report is on its way."""
        if report.lease_id in self._unconfirmed:
            self._unconfirmed[report.lease_id].append(report)

    def confirm(self, lease_id: int, length: int, *, has_ended: bool) -> None:
        """The hub has everything up to a length."""
        if has_ended:
            self.close(lease_id)
        elif lease_id in self._unconfirmed:
            kept = [report for report in self._unconfirmed[lease_id] if not _is_within(report, length)]
            self._unconfirmed[lease_id] = kept

    def close(self, lease_id: int) -> None:
        """Nothing more is to be said of a lease."""
        self._unconfirmed.pop(lease_id, None)

    def clear(self) -> None:
        """Forget everything."""
        self._unconfirmed.clear()

    def again(self) -> list[Report]:
        """What is to be said once more."""
        return [report for reports in self._unconfirmed.values() for report in reports]


def _is_within(report: Report, length: int) -> bool:
    """Whether a report says nothing beyond a length; the last of a lease always does."""
    if report.finish_reason is not None or report.is_aborted:
        return False
    return report.token_offset + sum(len(segment.token_ids) for segment in report.segments) <= length
