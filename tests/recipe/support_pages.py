"""Render `support.toml` for docs/support.md and docs/gaps.md."""

from __future__ import annotations

import string
import textwrap

from baton.recipe.support import SupportEntry, is_single, support_table

MAX_ARCHITECTURES = 6
"""Maximum number of architectures that docs/gaps.md lists per refusal; docs/support.md lists all of them."""


def support_page() -> str:
    """Render the tables of docs/support.md."""
    table = support_table()
    lines = []
    for axis in table.axis:
        lines += [f"### {axis.title}", "", "| value | status | test or reason |", "|---|---|---|"]
        lines += [
            f"| {_named(entry.when[axis.name], axis.default)} | {_status(entry)} | {_reason(entry)} |"
            for entry in table.support
            if is_single(entry, axis.name)
        ]
        lines.append("")
    lines += ["### Combinations", "", "| combination | status | test or reason |", "|---|---|---|"]
    for entry in (entry for entry in table.support if not any(is_single(entry, axis) for axis in entry.when)):
        when = "; ".join(f"{axis}: {_named(values)}" for axis, values in entry.when.items())
        lines.append(f"| {when} | {_status(entry)} | {_reason(entry)} |")
    return "\n".join(lines) + "\n"


def support_gaps() -> str:
    """Render the list of docs/gaps.md: experimental and refused values, and refused architectures."""
    lines = []
    for entry in support_table().support:
        (axis, values), *others = entry.when.items()
        if "architecture" in entry.when and entry.refused:
            names = entry.when["architecture"]
            more = ", …" if len(names) > MAX_ARCHITECTURES else ""
            lines.append(f"{_named(names[:MAX_ARCHITECTURES])}{more}: {_without_key(_reason(entry))}")
        elif not entry.test and not others:
            lines.append(f"{axis} {_named(values)}: {_without_key(_reason(entry))}")
    return "".join(
        textwrap.fill(line, 100, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False) + "\n"
        for line in lines
    )


def _named(values: tuple[str, ...], default: str = "") -> str:
    return ", ".join(f"`{value}`{' (default)' if value == default else ''}" for value in values)


def _without_key(sentence: str) -> str:
    """Return a sentence without the recipe key or option at its start."""
    key, _, rest = sentence.partition(": ")
    return sentence if " " in key else rest


def _status(entry: SupportEntry) -> str:
    return "refused" if entry.refused else "experimental" if entry.experimental else "tested"


def _reason(entry: SupportEntry) -> str:
    """Return the test's name as Markdown code, or the sentence with words in place of its placeholders."""
    if entry.test:
        return f"`{entry.test}`"
    words = {field: f"this {field}" for _, field, _, _ in string.Formatter().parse(entry.refused) if field}
    return entry.experimental or entry.refused.format(**words)
