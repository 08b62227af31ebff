"""All output of the commands. Untrusted text is escaped before it is printed.

Worker names, error messages, model responses and dataset rows may contain escape sequences, characters that reorder
displayed text, and rich's markup. A `Console` escapes the first two and does not interpret markup, whatever is printed;
our own styles are given as `style=` or `rich.text.Text`. tests/test_architecture.py allows no other way to print.
"""

from __future__ import annotations

import json
import logging
import os
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_SEPARATORS = frozenset("\u2028\u2029")
"""Line separators that some programs interpret as line breaks. They are in no category that `_is_control` tests."""


def visible(text: str, *, keep: str = "\n\t") -> str:
    """Return text with its control, formatting and lone surrogate characters spelled out as `\\x1b`, but for `keep`.

    An escape sequence moves a terminal's cursor, a direction mark reorders what is read, and a lone surrogate cannot be
    written at all. keep="" makes one line of a text.
    """
    return _spelled(text, keep, _escape)


def print_json(value: Any) -> None:
    """Print a value as JSON, for scripts. Characters that `visible` escapes become JSON escapes."""
    text = msgspec.json.format(msgspec.json.encode(value, enc_hook=lambda settings: settings.model_dump())).decode()
    try:
        out.file.write(_spelled(text, "\n", lambda character: json.dumps(character)[1:-1]) + "\n")
        out.file.flush()
    except BrokenPipeError:
        out.on_broken_pipe()


class Console(rich.console.Console):
    """A console that prints any text safely."""

    ends_when_closed = True
    """Whether the command exits when its standard output is closed, as in `baton tasks | head`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Discard all further output because the reader closed the pipe. May raise SystemExit."""
        self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.file.fileno())  # buffered output is flushed there when the process exits
        os.close(null)
        if self.stderr:
            return
        if self.ends_when_closed:
            raise SystemExit(1)
        say("standard output is closed: the command goes on without printing to it")

    def render_str(self, text: str, **options: Any) -> Text:  # before the layout, so that escapes get their width
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


class LogFormatter(logging.Formatter):
    """One line per record, followed by its traceback if it has one. Control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


out = Console()
err = Console(stderr=True)


def say(text: str) -> None:
    """Print a line to standard error, without wrapping."""
    err.print(text, soft_wrap=True)


def wide_out() -> Console:
    """Return standard output; 120 columns wide if it is not a terminal, for wide tables."""
    return out if out.is_terminal else Console(width=120)


def _spelled(text: str, keep: str, spell: Callable[[str], str]) -> str:
    if text.isprintable():
        return text
    return "".join(c if c in keep or c.isprintable() or not _is_control(c) else spell(c) for c in text)


def _is_control(character: str) -> bool:
    return character in _SEPARATORS or unicodedata.category(character) in ("Cc", "Cf", "Cs")


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
