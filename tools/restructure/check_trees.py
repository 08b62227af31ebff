"""Whether two commits have the same syntax trees, but for what a commit of their kind may change.

python tools/restructure/check_trees.py move BEFORE AFTER        imports, places, and names of moved modules in texts
python tools/restructure/check_trees.py language BEFORE AFTER    texts: strings, docstrings, comments
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path


def files(commit: str, folder: str) -> dict[str, ast.Module]:
    """Syntax trees of all Python files of a folder in a commit, by path."""
    data = subprocess.run(["git", "archive", commit, folder], capture_output=True, check=True).stdout
    found = {}
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        for member in archive:
            if member.name.endswith(".py") and member.isfile():
                file = archive.extractfile(member)
                assert file is not None, member.name
                found[member.name] = ast.parse(file.read())
    return found


class Moved(ast.NodeTransformer):
    """Leaves out what a move may change: imports, docstrings, old names of modules in strings."""

    def __init__(self, names: list[tuple[str, str]]) -> None:
        self._names = names

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if not isinstance(node.value, str):
            return node
        text = node.value
        for old, new in self._names:
            text = text.replace(new, old)
        return ast.Constant(text)


class Worded(ast.NodeTransformer):
    """Leaves out texts: docstrings wholly; other strings but for what an f-string puts into them."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        values = [self.visit(value) for value in node.values if isinstance(value, ast.FormattedValue)]
        return ast.Tuple(values) if values else ast.Constant("")

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        return ast.Tuple([self.visit(node.value)])


def names_of_moves() -> list[tuple[str, str]]:
    """Old and new names of modules and files, as they stand in texts."""
    table = tomllib.loads((Path(__file__).parent / "moves.toml").read_text())
    pairs = {**table["modules"], **{old: rule["default"] for old, rule in table["split"].items()}}
    found = []
    for old, new in sorted(pairs.items(), key=lambda pair: -len(pair[1])):
        old = old.removesuffix(".*")
        found += [(f"baton.{old}", f"baton.{new}"), (old.replace(".", "/") + ".py", new.replace(".", "/") + ".py")]
    return found


def compared(kind: str, before: str, after: str) -> tuple[Counter[str], Counter[str]]:
    """Top-level statements of two commits, with what may differ left out."""
    change: Callable[[], ast.NodeTransformer] = Worded
    if kind == "move":
        names = names_of_moves()
        change = lambda: Moved(names)  # noqa: E731
    sides = []
    for commit in (before, after):
        found: Counter[str] = Counter()
        for path, tree in files(commit, "baton").items():
            for node in tree.body:
                kept = change().visit(node)
                if kept is not None:
                    found[("" if kind == "move" else f"{path}: ") + ast.dump(kept)] += 1
        sides.append(found)
    return sides[0], sides[1]


if __name__ == "__main__":
    before, after = compared(*sys.argv[1:4])
    gone, come = before - after, after - before
    for mark, found in (("only before", gone), ("only after", come)):
        for text in found:
            print(f"{mark}: {text[:300]}")
    counts = [sum(found.values()) for found in (before, after, gone, come)]
    print("{} statements before, {} after; {} only before, {} only after".format(*counts))
    sys.exit(bool(gone or come))
