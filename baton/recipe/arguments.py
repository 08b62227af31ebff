"""Makes the sections of a recipe from Python objects: rows of data, and functions as rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, get_args

import msgspec
from blake3 import blake3

from baton.console import say
from baton.errors import UserError
from baton.files import make_directory, write_whole
from baton.rewards.dataset_columns import find_reference
from baton.rewards.functions import PASSED
from baton.rewards.settings import RewardSettings

Rows = str | Path | Iterable[Mapping[str, Any]]
"""A file or dataset by name, or rows: a list of dicts, or a `datasets.Dataset`."""
Reward = str | Callable[..., Any]
"""A function, or a string: a kind of [[reward]], the path of a function, or a URL. See docs/rewards.md#functions."""
KINDS = get_args(RewardSettings.model_fields["kind"].annotation)
NEEDS_KEYS = ("function", "http", "model")
"""Kinds of [[reward]] that need further keys."""


def task_section(
    data: Rows, rewards: Sequence[Mapping[str, Any]], directory: Path, played: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the [[task]] section for `data`. `played`: keys of the environment; they become a part of the section.

    Rows are written to a file in `directory`. The file name contains a digest of the rows, so a resumed run reads the
    same rows. Rows without reference answers get `scorer = "none"` if no reward needs a reference. Raises UserError for
    rows that are not dicts of JSON values.
    """
    if isinstance(data, (str, Path)):
        return {"name": Path(data).stem, "path": str(data), **played}
    if not _is_list(data):
        raise UserError(f"data: got {_kind(data)}, allowed is a file or dataset by name, or a list of dicts")
    rows = list(data)
    if not rows:
        raise UserError("data has no rows: give at least one")
    lines = b"".join(_line(number, row) for number, row in enumerate(rows, 1))
    path = directory / f"{blake3(lines).hexdigest(length=8)}.jsonl"
    if not path.exists():
        make_directory(directory)
        write_whole(path, lines)
    section = {"name": "data", "path": str(path), **played}
    if played:
        return section
    if all(r["kind"] in NEEDS_KEYS for r in rewards) and not any(find_reference(row) for row in rows):
        section["scorer"] = "none"
        columns = ", ".join(sorted({str(name) for row in rows for name in row}))
        say(
            f"data: none of its columns ({columns}) is a reference answer, so accuracy is the share of responses whose "
            "rewards are all at least 1; to compare answers, name the reference column 'answer'"
        )
    return section


def _line(number: int, row: Any) -> bytes:
    if not isinstance(row, Mapping):
        raise UserError(
            f"data: row {number} is {_kind(row)}, but a row must be a dict of columns; of a DatasetDict pass one "
            "split, such as data['train'], and of a DataFrame data.to_dict('records')"
        )
    try:
        return msgspec.json.encode(msgspec.to_builtins(dict(row), str_keys=True)) + b"\n"
    except (TypeError, ValueError) as error:
        raise UserError(f"data: row {number} has a value that JSON cannot hold: {error}; convert it first") from error


def environment_section(
    environment: str | type | None, tools: Sequence[Callable[..., Any]], reward: Any
) -> dict[str, Any]:
    """Return the keys of [[task]] for an environment, or for tools whose reward is a function. When the section is
    parsed, its classes and functions are replaced by their import paths. Raises UserError."""
    if not tools:
        return {} if environment is None else {"environment": environment}
    if not _is_list(tools):
        raise UserError(f"tools: got {_kind(tools)}, allowed is a list of functions")
    if environment is not None:
        raise UserError("environment, tools: give only one of them; tools are an environment of their own")
    if not (callable(reward) or (isinstance(reward, str) and ":" in reward)):
        raise UserError(f"reward: got {_kind(reward)}, but with tools the reward is a function of the last turn's text")
    return {"tools": list(tools), "params": {"reward": reward}}


def reward_sections(reward: Reward | Sequence[Reward]) -> list[dict[str, Any]]:
    """Return a [[reward]] section for each reward, and register each function under the path that its section states.
    Raises UserError for a value that is neither a function nor a known reward."""
    rewards: list[Any] = [reward] if callable(reward) or not _is_list(reward) else list(reward)
    sections: list[dict[str, Any]] = []
    for one in rewards:
        if callable(one):
            sections.append(_passed(one, {s["name"] for s in sections}))
        elif not isinstance(one, str):
            raise UserError(
                f"reward: got {_kind(one)}, allowed is a function, the name of a reward, or a list of these"
            )
        elif one.startswith(("http://", "https://")):
            sections.append({"kind": "http", "name": f"http_{len(sections)}", "url": one})
        elif ":" in one:
            sections.append({"kind": "function", "name": one.rpartition(":")[2], "function": one})
        elif one in KINDS and one not in NEEDS_KEYS:
            sections.append({"kind": one, "name": one})
        else:
            raise UserError(
                f"reward: got {one!r}, allowed is a function, 'module:name', 'file.py:name', a URL, or one of "
                f"{', '.join(kind for kind in KINDS if kind not in NEEDS_KEYS)}"
            )
    return sections


def _passed(function: Callable[..., Any], taken: set[str]) -> dict[str, Any]:
    """Return the [[reward]] section of a function, and register the function under the path in this section."""
    own = getattr(function, "__qualname__", type(function).__qualname__).rpartition(".")[2].strip("<>")
    name = next(n for k in count(1) if (n := own if k == 1 else f"{own}_{k}") not in taken)
    path = f"{getattr(function, '__module__', None) or '__main__'}:{name}"
    PASSED[path] = function
    return {"kind": "function", "name": name, "function": path, "isolate": False}


def _is_list(value: Any) -> bool:
    """Return whether a value is a list or another iterable, but not a text."""
    return not isinstance(value, str) and (hasattr(value, "__iter__") or hasattr(value, "__getitem__"))


def _kind(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"[:120]
