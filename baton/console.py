"""All output of the commands. Untrusted text is escaped before it is printed.

Worker names, error messages, model responses and dataset rows may contain escape sequences, characters that reorder the
displayed text, and rich's markup. `Console` escapes such sequences and characters, and never interprets markup. Baton's
own styles are passed as `style=` or as `rich.text.Text`. Lines are not wrapped. tests/test_architecture.py checks that
all modules print through `Console`.
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

_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of the characters that `visible` replaces: control and format characters, lone surrogates, and the
separators U+2028 and U+2029, which some programs display as line breaks."""


def visible(text: str, *, keep: str = "\n\t") -> str:
    """Return text in which escapes such as `\\x1b` replace control characters, format characters and lone surrogates.

    An escape sequence can move the terminal's cursor, a direction mark can reorder the displayed text, and a lone
    surrogate cannot be encoded. `keep`: characters that are not replaced; with keep="" the result is a single line.
    """
    return _spelled(text, keep, lambda character: character.encode("unicode_escape").decode())


def print_json(value: Any) -> None:
    """Print a value as JSON. Characters that `visible` would replace become JSON escapes; without UTF-8, so do all
    characters beyond ASCII."""
    text = msgspec.json.format(msgspec.json.encode(value, enc_hook=lambda settings: settings.model_dump())).decode()
    text = _spelled(text, "\n", lambda character: json.dumps(character)[1:-1])
    if not out.encoding.startswith("utf"):
        text = "".join(c if c.isascii() else json.dumps(c)[1:-1] for c in text)
    try:
        out.file.write(text + "\n")
        out.file.flush()
    except BrokenPipeError:
        out.on_broken_pipe()


class Console(rich.console.Console):
    """A console that escapes everything it prints, also characters that its output cannot encode."""

    ends_when_closed = True
    """Whether the command exits when its standard output is closed, as in `baton tasks | head`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, soft_wrap=True, **options)

    @property
    def encoding(self) -> str:  # rich assumes UTF-8 for standard output and standard error
        return (getattr(self.file, "encoding", None) or "utf-8").lower()

    def on_broken_pipe(self) -> None:
        """Discard all further output after the reader has closed the pipe. Raises SystemExit for standard output,
        unless `ends_when_closed` is False."""
        self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.file.fileno())  # at exit Python flushes its buffer, which would raise again
        os.close(null)
        if self.stderr:
            return
        if self.ends_when_closed:
            raise SystemExit(1)
        say("standard output is closed: the command continues without printing to it")

    def render_str(self, text: str, **options: Any) -> Text:  # escapes must be present when rich measures widths
        return super().render_str(self._encodable(visible(text)), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=self._encodable(visible(segment.text)))

    def _encodable(self, text: str) -> str:
        return text.encode(self.encoding, "backslashreplace").decode(self.encoding)


class LogFormatter(logging.Formatter):
    """A formatter that escapes control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


out = Console()
err = Console(stderr=True)


def say(text: str) -> None:
    """Print a line to standard error."""
    err.print(text)


def wide_out() -> Console:
    """Return the console for wide tables on standard output. Without a terminal, its lines have 120 columns."""
    return out if out.is_terminal else Console(width=120)


def _spelled(text: str, keep: str, spell: Callable[[str], str]) -> str:
    if text.isprintable():
        return text
    return "".join(spell(c) if unicodedata.category(c) in _ESCAPED and c not in keep else c for c in text)
