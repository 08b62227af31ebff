"""Hook of mkdocs: the README of each benchmark becomes a page, and links of the repository become links of the site.

Pages in docs/ and benchmarks/ link to each other and to sources by paths in the repository. On the site, a link to a
page stays a link; a link to another file leads to the repository that CI builds (GitHub or GitLab), and without one
becomes its text. A link to a file that does not exist is a warning, which `strict` turns into an error.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: Any) -> Files:
    """Add the benchmarks' pages and pictures."""
    for readme in sorted((ROOT / "benchmarks").glob("*/README.md")):
        for path in (readme, *sorted(readme.parent.rglob("*.png"))):
            uri = path.relative_to(ROOT).as_posix()
            is_page = path == readme
            file = File.generated(config, uri, abs_src_path=str(path))
            file.inclusion = InclusionLevel.NOT_IN_NAV if is_page else file.inclusion
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Translate the links of a page."""
    uri = page.file.src_uri
    source = uri if uri.startswith("benchmarks/") else f"docs/{uri}"
    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(lambda match: _link(match, source, uri, files), part) for part in parts[::2]]
    return "".join(parts)


def _link(match: re.Match[str], source: str, uri: str, files: Files) -> str:
    image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
    if "://" in target or target.startswith("mailto:"):
        return match[0]
    path = normpath(f"{source}/../{target}")
    site = path.removeprefix("docs/")
    if files.get_file_from_path(site) is not None and (path.startswith(("docs/", "benchmarks/"))):
        return f"{image}[{text}]({relpath(site, uri.rpartition('/')[0] or '.')}{anchor})"
    if not (ROOT / path).exists():
        log.warning("%s links to %s, which does not exist", source, path)
        return text
    repository = _repository()
    return f"[{text}]({repository}/{path}{anchor})" if repository else text


def _repository() -> str:
    """Return the address of the repository's files; empty outside CI."""
    for server, name, tree in (
        ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "blob/main"),
        ("CI_SERVER_URL", "CI_PROJECT_PATH", "-/blob/main"),
    ):
        if server in os.environ and name in os.environ:
            return f"{os.environ[server]}/{os.environ[name]}/{tree}"
    return ""
