"""Whether every function and class of two commits has the same syntax tree, but for imports and names of moved modules.

python tools/restructure/check_move.py BEFORE AFTER
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from io import BytesIO
from pathlib import Path


def trees(commit: str, folder: str) -> Counter[str]:
    """Dumps of all top-level statements, with imports and docstrings left out."""
    data = subprocess.run(["git", "archive", commit, folder], capture_output=True, check=True).stdout
    found: Counter[str] = Counter()
    with tarfile.open(fileobj=BytesIO(data)) as archive:
        for member in archive:
            if member.name.endswith(".py") and member.isfile():
                file = archive.extractfile(member)
                assert file is not None, member.name
                for node in ast.parse(file.read()).body:
                    text = dump(node)
                    if text:
                        found[text] += 1
    return found


class _WithoutImports(ast.NodeTransformer):
    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str):
            return ast.copy_location(ast.Constant(renamed(node.value)), node)
        return node


def renamed(text: str) -> str:
    """A string with the old names of modules and paths in place of the new ones: they may differ."""
    for old, new in NAMES:
        text = text.replace(new, old)
    return text


def dump(node: ast.stmt) -> str:
    if isinstance(node, ast.Import | ast.ImportFrom) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ):
        return ""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return ""
    return ast.dump(_WithoutImports().visit(node))


if __name__ == "__main__":
    table = tomllib.loads((Path(__file__).parent / "moves.toml").read_text())
    pairs = {**table["modules"], **{old: rule["default"] for old, rule in table["split"].items()}}
    NAMES = []
    for old, new in sorted(pairs.items(), key=lambda pair: -len(pair[1])):
        old, new = old.removesuffix(".*"), new
        NAMES += [(f"baton.{old}", f"baton.{new}"), (old.replace(".", "/") + ".py", new.replace(".", "/") + ".py")]
    before, after = (trees(commit, "baton") for commit in sys.argv[1:3])
    gone, come = before - after, after - before
    for text in gone:
        print("only before:", text[:300])
    for text in come:
        print("only after: ", text[:300])
    counts = [sum(found.values()) for found in (before, after, gone, come)]
    print("{} statements before, {} after; {} only before, {} only after".format(*counts))
    sys.exit(bool(gone or come))
