"""Print recorded trajectories. Texts of models and environments are untrusted, so they are escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group as Stack
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from baton.console import Console, visible
from baton.run.trajectories import ReadableTrajectory, Sample, TextPiece

if TYPE_CHECKING:
    from baton.run.preview import Preview


def print_preview(console: Console, preview: Preview) -> None:
    """Print the responses with the highest and the lowest reward to each prompt, and the findings of the preview."""
    groups: dict[int, list[ReadableTrajectory]] = {}
    for reading in preview.responses:
        groups.setdefault(reading.shown.group_id, []).append(reading)
    for number in sorted(groups):
        best, *_, worst = sorted(groups[number], key=lambda reading: -reading.shown.reward)
        print_trajectories(console, [best, worst] if best.shown.reward > worst.shown.reward else [best])
    console.print(
        f"{len(preview.responses)} responses; for each prompt, those with the highest and the lowest reward are shown, "
        "or one if all rewards are equal"
    )
    for line in preview.findings:
        console.print(line)


def print_trajectories(console: Console, readings: Sequence[ReadableTrajectory]) -> None:
    """Print each trajectory in a panel, with special tokens dimmed, and a table of each multi-turn group's members."""
    if not readings:
        console.print("no trajectory matches")
    groups = set()
    for r in readings:
        t = r.shown
        if t.siblings and t.group_id not in groups:
            groups.add(t.group_id)
            console.print(_siblings(t))
        parts = ", ".join(f"{name} {value:g}" for name, value in t.parts.items()) if len(t.parts) > 1 else ""
        colour = "yellow" if t.failure is not None else "green" if t.is_correct else "red"
        facts = Text(style=colour)
        compared = "" if t.turns else f": answer {t.parsed!r}, reference {t.reference!r}"
        facts.append(visible(f"{t.verdict}{compared}", keep="") + "\n")
        turns = f"{len(t.turns)} turns, " if t.turns else ""
        facts.append(
            visible(
                f"reward {t.reward:g}{f' ({parts})' if parts else ''}, {turns}{t.num_tokens} tokens, "
                f"ended by {t.finish_reason}, version {t.versions}, mean logprob {t.mean_logprob:.3f}"
                f"{f', attempt {t.attempt + 1}' if t.attempt else ''}"
            )
        )
        body = _turns(r) if t.turns else (Rule(style="dim"), _text(r.response))
        console.print(
            Panel(
                Stack(_text(r.prompt), *body, Text(), facts),
                title=Text(visible(f"step {t.step}, trajectory {t.group_id}/{t.sample_index}, {t.task}")),
                title_align="left",
                border_style=colour,
            ),
            soft_wrap=False,
        )


def _turns(reading: ReadableTrajectory) -> Iterator[Text | Padding]:
    """Yield the transcript. The texts are indented, so that none of them can look like a heading."""
    path = 0
    for turn, (text, observation) in zip(reading.shown.turns, reading.turns, strict=True):
        if turn.path != path:
            path = turn.path
            yield Text(turn.path_heading, style="bold yellow")
        yield Text(turn.heading, style="bold cyan")
        yield Padding(_text(text), (0, 0, 0, 2))
        if turn.observation is not None:
            yield Text(visible(turn.answer_heading), style="bold magenta")
            yield Padding(_text(observation), (0, 0, 0, 2))


def _siblings(trajectory: Sample) -> Table:
    """Return one row per member of a group, with the reward of each turn."""
    title = Text(f"step {trajectory.step}, group {trajectory.group_id}")
    right = (Column(name, justify="right") for name in ("sample", "reward", "turns", "tokens", "attempt"))
    columns: tuple[Column | str, ...] = (*right, "ended by", "", "rewards by turn")
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for s in trajectory.siblings:
        counts = (s.sample_index, f"{s.reward:g}", len(s.turn_rewards), s.num_tokens, s.attempt + 1)
        numbers = map(str, counts)
        words = (s.finish_reason, s.verdict, "  ".join(f"{reward:g}" for reward in s.turn_rewards))
        table.add_row(*map(Text, numbers), *(Text(visible(word, keep="")) for word in words))
    return table


def _text(pieces: Sequence[TextPiece]) -> Text:
    text = Text()
    for piece in pieces:
        text.append(visible(piece.text), style="dim" if piece.is_special else "default")
    return text
