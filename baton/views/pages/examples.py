"""Select example trajectories: the best, worst and longest of the first and of the last recorded train step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from baton.console import visible
from baton.policy.tokenizer import load_tokenizer
from baton.records.run_directory import RunDirectory
from baton.views.terminal.trajectories import ORDERS, ShownTrajectory, TextPiece, ordered, reading

PER_ORDER = 2
"""Number of examples for each order and train step."""
MAX_CHARACTERS = 12_000
"""Maximum length of a text on the page; a note replaces the middle of a longer text."""


class Example(msgspec.Struct, frozen=True):
    """A trajectory that is first, or among the first, in one order."""

    kind: str
    """The order, an element of `ORDERS`."""
    shown: ShownTrajectory
    prompt: list[TextPiece]
    """Text of the prompt with escaped control characters."""
    response: list[TextPiece]
    """Text of the response with escaped control characters."""


def choose_examples(run: RunDirectory) -> Iterator[Example]:
    """Yield examples of the first and the last recorded train step.

    No trajectory is yielded twice, and the examples of one order and step have different prompts.
    """
    steps = run.recorded_steps()
    tokenizer = load_tokenizer(str(run.tokenizer)) if steps else None
    for step in dict.fromkeys((steps[0], steps[-1]) if steps else ()):
        assert tokenizer is not None
        members = [(group, member) for group in run.groups(step) for member in group.members]
        taken: set[str] = set()
        for order in ORDERS:
            num_taken = 0
            groups: set[int] = set()
            for group, member in ordered(members, order):
                if num_taken == PER_ORDER:
                    break
                if member.trajectory.name in taken or group.group_id in groups:
                    continue
                taken.add(member.trajectory.name)
                groups.add(group.group_id)
                num_taken += 1
                found = reading(tokenizer, step, group, member)
                yield Example(order, found.shown, list(_readable(found.prompt)), list(_readable(found.response)))


def _readable(pieces: Iterable[TextPiece]) -> Iterator[TextPiece]:
    """Escape control characters, and replace the middle of a long text by a note."""
    for piece in pieces:
        text = visible(piece.text)
        if len(text) > MAX_CHARACTERS:
            half = MAX_CHARACTERS // 2
            yield TextPiece(text[:half], piece.is_special)
            yield TextPiece(f" … {len(text) - 2 * half:,} characters omitted … ", True)
            yield TextPiece(text[-half:], piece.is_special)
        else:
            yield TextPiece(text, piece.is_special)
