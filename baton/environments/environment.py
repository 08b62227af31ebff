"""The interface of a multi-turn task. Users implement `Environment`; docs/environments.md shows how."""

from __future__ import annotations

from typing import Any, Literal, Protocol

Replay = Literal["log", "never"]
"""How an environment is rebuilt after its process ended. `log`: reset with the same seed, then repeat the recorded
actions. `never`: the episode starts again, because its actions have effects outside the process."""


class Environment(Protocol):
    """One episode of a multi-turn task. A new instance is made for each episode.

    A class may also define:

    * `replay: Replay`, a class attribute, by default "log";
    * `instructions: str`, an attribute: text that precedes the first observation in the prompt;
    * `canonical() -> str`: called after `reset`, returns a string that is equal for equivalent problems. The split into
      training and held-out problems uses a hash of this string. The default is the first observation;
    * `random_action(dice: random.Random) -> str`: called after `reset`, returns a random action of the right format.
      For the environments of Baton, `baton sft` generates demonstrations from such actions;
    * `close()`: releases resources;
    * `prepare(**args) -> str`, a classmethod: called with the constructor's arguments when a process loads the class.
      Returns a line that is shown to the user, such as a description of the isolation, or raises UserError.
    """

    def reset(self, *, seed: int, **row: Any) -> str:
        """Start the episode and return the first observation, which must depend only on the arguments. Called once.
        `seed` is in [0, 2³²); `row` holds the columns of the dataset row if the task has a dataset."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Execute the text of one turn; return (observation, reward, terminated, truncated, info). `info["success"]`
        (bool) tells whether the episode counts as correct, `info["tool"]` (str) names the tool that ran, and other
        numbers in `info` become metrics."""
