"""Raw results as tables."""

from __future__ import annotations

from typing import Any


def make_table(found: dict[str, Any]) -> str:
    """Return one table for each part."""
    machine, device = found["machine"], found["device"]
    toy = " **Toy sizes: these numbers mean nothing.**" if found["is_tiny"] else ""
    lines = [
        f"{machine['device']}, {machine['torch']}, commit {machine['commit'][:12]}; memory "
        f"{device['bytes_per_s'] / 1e12:.2f} TB/s (a copy reaches {device['copied_bytes_per_s'] / 1e12:.2f}).{toy}",
        "",
        "| model | context | decode | step, ms | tokens/s | of the roofline | … of what it scans |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c['shape']} | {c['context']} | {c['way']} | {1000 * c['step_s']:.2f} | "
        f"{c['tokens_per_s']:,.0f} | {c['of_roofline']:.0%} | {c['of_roofline_as_scanned']:.0%} |"
        for c in found["decode"]
    ]
    lines += ["", "| model | train step, s | tokens/s | MFU | peak memory, GB |", "|---|---|---|---|---|"]
    lines += [
        f"| {t['shape']} | {t['step_s']:.2f} | {t['tokens_per_s']:,.0f} | "
        f"{'' if t['mfu'] is None else format(t['mfu'], '.0%')} | {t['peak_bytes'] / 1e9:.1f} |"
        for t in found["train"]
    ]
    lines += ["", "| model | longest | mode | tokens/s | × sync | × control | |", "|---|---|---|---|---|---|---|"]
    for case in found["modes"]:
        lines += [
            f"| {case['shape']} | {case['cap']} | {m['mode']} | {m['tokens_per_s']:,.0f} | {_ratio(m['over_sync'])} | "
            f"{_ratio(m['over_control'])} | measured |"
            for m in case["modes"]
        ]
    for case in found["simulated"]:
        lines += [
            f"| {case['shape']} | {case['cap']} | {name} | {rate:,.0f} | {_ratio(case['over_sync'][name])} | "
            f"{_ratio(case['over_control'][name])} | simulated |"
            for name, rate in case["tokens_per_s"].items()
        ]
    lines += ["", *(f"Not measured: {what}." for what in found["skipped"])]
    return "\n".join(lines).rstrip() + "\n"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
