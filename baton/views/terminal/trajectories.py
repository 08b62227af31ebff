"""Print recorded trajectories. Texts of a model are untrusted, so they are escaped."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group as Stack
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from baton.console import Console, visible
from baton.run.trajectories import ReadableTrajectory, TextPiece


def print_trajectories(console: Console, readings: Sequence[ReadableTrajectory]) -> None:
    """Print each trajectory in a panel, with special tokens dimmed."""
    if not readings:
        console.print("no trajectory matches")
    for r in readings:
        t = r.shown
        parts = ", ".join(f"{name} {value:g}" for name, value in t.parts.items()) if len(t.parts) > 1 else ""
        colour = "yellow" if t.failure is not None else "green" if t.is_correct else "red"
        facts = Text(style=colour)
        facts.append(visible(f"{t.verdict}: answer {t.answer!r}, reference {t.reference!r}\n"))
        facts.append(
            visible(
                f"reward {t.reward:g}{f' ({parts})' if parts else ''}, {t.num_tokens} tokens, "
                f"ended by {t.finish_reason}, version {t.versions}, mean logprob {t.mean_logprob:.3f}"
            )
        )
        console.print(
            Panel(
                Stack(_text(r.prompt), Rule(style="dim"), _text(r.response), Text(), facts),
                title=Text(visible(f"step {t.step}, trajectory {t.group_id}/{t.sample_index}, {t.task}")),
                title_align="left",
                border_style=colour,
            )
        )


def _text(pieces: Sequence[TextPiece]) -> Text:
    text = Text()
    for piece in pieces:
        text.append(visible(piece.text), style="dim" if piece.is_special else "default")
    return text
