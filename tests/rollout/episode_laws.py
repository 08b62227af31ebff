"""What holds for the tokens of episodes, whatever was aborted, replaced or killed."""

from __future__ import annotations

from collections import Counter

from baton.records.journal import Journal
from baton.types import Author, Episode, Trajectory

Token = tuple[int, int, int]
"""(path, id, version)"""


def tokens_of(paths: tuple[Trajectory, ...]) -> list[Token]:
    """The tokens of an episode, those of observations included."""
    return [
        (place, token, segment.policy_version)
        for place, path in enumerate(paths)
        for segment in path.segments
        for token in segment.token_ids
    ]


def recorded_tokens(journal: Journal) -> dict[tuple[int, int], tuple[int, list[Token]]]:
    """(Group id, sample index) → (attempt, tokens) of the open episodes that a killed process has left."""
    found = {}
    for group in journal.open_groups():
        for index, member in enumerate(group.members):
            episode = group.episodes.get(index, Episode())
            paths = (*episode.earlier, member)
            if index in group.judged:
                paths, episode = group.judged[index].paths, group.judged[index].episode or episode
            found[group.issued.group_id, index] = (episode.attempt, tokens_of(paths))
    return found


def version_changes(paths: tuple[Trajectory, ...]) -> Counter[str]:
    """Count the new versions in the middle of a turn, and between a turn and the next. Versions never decrease."""
    found: Counter[str] = Counter()
    for place, path in enumerate(paths):
        for before, after in zip(path.segments, path.segments[1:], strict=False):
            assert before.policy_version <= after.policy_version
            if before.policy_version < after.policy_version:
                found["turn" if before.author is Author.POLICY else "environment"] += 1
        if place:
            last, first = paths[place - 1].segments[-1].policy_version, path.segments[0].policy_version
            assert last <= first
            found["environment"] += last < first
    return found
