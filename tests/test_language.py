"""Texts are plain technical English: no refused phrase in them, and Markdown wraps at 100 columns."""

from __future__ import annotations

import ast
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/*.md", "benchmarks/*/README.md", "tests/*/README.md", "models/*/README.md")
"""Markdown: checked for phrases and for the width of its lines."""
TEXTS = (*PAGES, "Makefile", "pyproject.toml", "recipes/**/*.toml", "deploy/Dockerfile", "deploy/*/*")
TEXTS += ("baton/*.py", "baton/rollout/**/*.py", "baton/recipe/*.*")
TEXTS += ("baton/cli/*.py", "baton/views/**/*.*", "baton/run/*.py")
TEXTS += ("baton/rewards/settings.py", "baton/weights/*.py", "baton/policy/*.py", "baton/trainer/**/*.py")
"""Checked for phrases; of Python files only strings and comments. To be extended to `baton/**/*.py`."""
COLUMNS = 100
TEXTS += ("baton/cluster/**/*.py", "baton/records/*.py", "baton/rewards/*.py", "baton/tasks/*.py")
PYTHON_TEXT = {"STRING", "COMMENT", "FSTRING_MIDDLE"}
TEXTS += ("baton/swarm/*.py", "baton/swarm/[vw]*/*.py", "baton/swarm/hub/[!s]*.py", "baton/swarm/hub/se*.py")
TEXTS += (
    "baton/environments/*.py",
    "baton/specs/*.py",
    "baton/cost/*.py",
    "baton/profile/*.py",
    "baton/planner/*.py",
    "baton/simulator/*.py",
)


ONLY_A_REFERENCE = re.compile(r"\s*(see|cf\.|as|like)( also)? (`[^`]+`|[\w.]*[._]\w+|[A-Z]\w+)[\s.]*", re.IGNORECASE)
"""A docstring that says nothing of its own, such as "See `X`."."""


def refused_phrases() -> dict[str, str]:
    """Each phrase of tests/refused_phrases.txt with what to write instead."""
    lines = (ROOT / "tests" / "refused_phrases.txt").read_text(encoding="utf-8").splitlines()
    found = (line.partition(" → ") for line in lines if line and not line.startswith("#"))
    return {phrase: instead for phrase, _, instead in found}


INSTEAD = refused_phrases()
REFUSED = re.compile(r"\b(" + "|".join(r"\s+".join(map(re.escape, p.split())) for p in INSTEAD) + r")\b", re.IGNORECASE)


def files(globs: tuple[str, ...]) -> list[Path]:
    found = {path for pattern in globs for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.suffix != ".pyc")


def prose_lines(markdown: str) -> list[tuple[int, str]]:
    """(number, line) of what is neither a code block nor a table."""
    found, in_code = [], False
    for number, line in enumerate(markdown.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith("|"):
            found.append((number, line))
    return found


def text_of(path: Path) -> str:
    """The text that a reader sees. Code spans are left out: identifiers and quoted messages change with the code."""
    if path.suffix == ".py":
        with path.open("rb") as file:
            tokens = [t.string for t in tokenize.tokenize(file.readline) if tokenize.tok_name[t.type] in PYTHON_TEXT]
        return "\n".join(string for string in tokens if " " in string)  # one word alone is a name or a tag
    return re.sub(r"`[^`\n]+`", "`code`", path.read_text(encoding="utf-8"))


def refused_in(text: str) -> list[str]:
    phrases = (" ".join(match.group().split()) for match in REFUSED.finditer(text))
    return [f"{phrase!r}: write {INSTEAD[phrase.lower()]!r}" for phrase in phrases]


@pytest.mark.parametrize("path", files(TEXTS), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_text_has_no_refused_phrase(path: Path) -> None:
    assert not refused_in(text_of(path))


@pytest.mark.parametrize("path", files(PAGES), ids=lambda path: str(path.relative_to(ROOT)))
def test_markdown_wraps_at_100_columns(path: Path) -> None:
    lines = prose_lines(path.read_text(encoding="utf-8"))
    too_long = [number for number, line in lines if len(line) > COLUMNS and " " in line.strip()]
    assert not too_long, f"{path.name}: lines {too_long} have more than {COLUMNS} characters"


def test_a_phrase_is_found_across_a_line_break_and_in_any_case_but_not_within_a_word() -> None:
    assert refused_in("Rollouts that were Put\n  down are resumed.") == ["'Put down': write 'abort, aborted'"]
    assert not refused_in("an output downstream of prejudged input")


def test_strings_and_comments_of_python_are_text_and_its_names_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('"""Goes on."""\nanew = {"judged": f"{1} went on"}  # for ever\n')
    assert len(refused_in(text_of(path))) == 3


def bare_references(source: str) -> list[int]:
    """The lines of docstrings, of functions and of fields, that only name another place."""
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    constants = [text for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)]
    return [text.lineno for text in constants if ONLY_A_REFERENCE.fullmatch(text.value)]  # type: ignore[arg-type]


def test_a_docstring_does_not_only_name_another_place() -> None:
    paths = files(("baton/**/*.py", "tests/**/*.py", "benchmarks/**/*.py", "tools/**/*.py"))
    found = {str(path.relative_to(ROOT)): lines for path in paths if (lines := bare_references(path.read_text()))}
    assert not found, f"delete these docstrings, or say in them what the code does: {found}"


@pytest.mark.parametrize(
    "text", ["See `X`.", "See `X`", "See also `a.b`.", "see x.y.Z", "As `X.close`.", "\n  See Hub.\n"]
)
def test_a_docstring_that_only_names_another_place_is_found(text: str) -> None:
    assert bare_references(f"def f():\n    {text!r}")
    assert bare_references(f"class A:\n    a: int\n    {text!r}")
    assert not bare_references(f"def f():\n    'Close it. ' {text!r}\n    g('See `X`.')")
