"""Render pages: fill a template with escaped values, and return one HTML text without scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from baton.errors import UserError
from baton.files import check_output


def check_page(path: Path) -> None:
    """Raise UserError if matplotlib or jinja2 is missing, or if the page cannot be written to `path`."""
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"--html needs {' and '.join(missing)}, which {are} not installed: pip install 'baton-rl[report]'"
        )
    check_output(path)


def render_template(template: str, filters: Mapping[str, Callable[..., Any]] | None = None, /, **values: Any) -> str:
    """Fill a template of this folder with escaped values, and return the HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("baton.views.pages", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters or {}
    return environment.get_template(template).render(**values)
