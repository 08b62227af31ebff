"""What a run achieved, read from its directory: summarised, printed, or drawn as a page (`baton.report.page`)."""

from baton.report.printed import print_dry_run, print_evaluations, print_report
from baton.report.summary import Change, RunReport, summarise

__all__ = ["Change", "RunReport", "print_dry_run", "print_evaluations", "print_report", "summarise"]
