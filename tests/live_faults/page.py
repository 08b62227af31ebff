"""Render the list of faults for docs/reliability.md. `python -m tests.live_faults.page` writes it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.live_faults.faults import FAULTS

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BETWEEN = re.compile(r"(<!-- faults: [^\n]* -->\n).*?(<!-- /faults -->)", re.DOTALL)


def table() -> str:
    """One table for each part of the system."""
    lines = []
    for heading, faults in FAULTS.items():
        lines += [f"### {heading}", "", "| fault | injected | how | mode |", "|---|---|---|---|"]
        for fault in faults:
            how = fault.how if fault.is_real else f"{fault.how} (emulated)"
            lines.append(f"| {fault.name} | {fault.point} | {how} | `{fault.mode}` |")
        lines.append("")
    return "\n".join(lines)


def rendered(text: str) -> str:
    """Return the page with the list of today."""
    return BETWEEN.sub(lambda found: f"{found[1]}\n{table()}\n{found[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
