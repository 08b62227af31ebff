"""Standard output and error of the commands, and JSON for scripts."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from rich.console import Console

out = Console()
err = Console(stderr=True)


def wide_out() -> Console:
    """Return standard output, 120 columns wide where it is no terminal: for wide tables."""
    return out if out.is_terminal else Console(width=120)


def print_json(value: Any) -> None:
    """Print a value as JSON, for scripts."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")
