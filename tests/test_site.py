"""The documentation: the navigation has every page, links and anchors exist, and quoted messages and keys are real.

`make site` also builds the site and checks the same links with mkdocs, which these tests do not need.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s#]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


class SiteLoader(yaml.SafeLoader):
    """Reads mkdocs.yml, in which tags of mkdocs may occur."""


SiteLoader.add_multi_constructor("!", lambda loader, suffix, node: None)


def pages_of(nav: list[object]) -> list[str]:
    found: list[str] = []
    for entry in nav:
        assert isinstance(entry, dict)
        for value in entry.values():
            found += [value] if isinstance(value, str) else pages_of(value)
    return found


@cache
def anchors(page: Path) -> set[str]:
    """The ids that the site gives to the headings of a page."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    slugs = [re.sub(r"[^\w\s-]", "", each.encode("ascii", "ignore").decode()).strip().lower() for each in plain]
    return {re.sub(r"[-\s]+", "-", slug) for slug in slugs}


def test_the_navigation_has_every_page_once() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=SiteLoader)
    pages = pages_of(site["nav"])
    assert sorted(pages) == [page.name for page in DOCS]
    assert site["strict"] is True


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor[1:] in anchors(file), f"{page.name} links to {target}{anchor}"


@cache
def package_texts() -> str:
    """All string constants of the package, in the order of the files; parts of one message follow each other."""
    found = []
    for path in sorted((ROOT / "baton").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        found += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(found)


def quoted_messages() -> list[str]:
    """The messages in the first column of the tables of docs/troubleshooting.md, cut at `…`."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| `")]
    return [part for cell in cells for message in re.findall(r"`([^`]+)`", cell) for part in message.split("…")]


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    parts = [part.strip() for part in quoted_messages() if len(part.strip()) > 3]
    assert len(parts) > 30
    assert not [part for part in parts if part not in package_texts()]


def test_the_comparison_and_the_guides_name_keys_that_exist() -> None:
    from baton.recipe.keys import recipe_keys

    known = {f"{key.section.strip('[]')}.{key.key}" for key in recipe_keys()}
    sections = {name.partition(".")[0] for name in known}
    comparison = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0] for line in comparison.split("## Names")[1].splitlines() if line.startswith("| `")]
    pages = ("gpu-memory.md", "lora.md", "evaluation.md", "troubleshooting.md")
    rows += [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in pages]
    for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)[`= ]", " ".join(rows)):
        section = name.partition(".")[0]
        assert section not in sections or name in known or f"{name}.toml" in known, f"there is no key {name}"
