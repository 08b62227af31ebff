"""The project's files agree with the code: version, licence, continuous integration, platforms."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import baton
from tests.mutants.run import TESTS, gone_equivalents

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOSTED = [
    ".gitlab-ci.yml",
    ".pre-commit-config.yaml",
    *(str(p.relative_to(ROOT)) for p in ROOT.glob(".github/**/*.yml")),
]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]


def test_the_changelog_begins_with_the_packages_version() -> None:
    versions = re.findall(r"^## (\S+) \((\d{4}-\d\d-\d\d|unreleased)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0][0] == baton.__version__
    assert all(date != "unreleased" for _, date in versions[1:])


def test_the_licence_is_the_one_that_the_package_declares() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("path", HOSTED)
def test_a_hosts_file_is_valid_yaml_and_runs_only_targets_that_exist(path: str) -> None:
    text = (ROOT / path).read_text()
    assert isinstance(yaml.safe_load(text), dict)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(r"\bmake ([a-z-]+)", text):
        assert target in targets, f"{path}: the Makefile has no {target}"


def test_both_hosts_test_every_python_and_the_package_declares_those_that_were_tested() -> None:
    declared = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    actions = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    gitlab = yaml.safe_load((ROOT / ".gitlab-ci.yml").read_text())["test"]["parallel"]["matrix"]
    assert actions["python"] == gitlab[0]["PYTHON_VERSION"] == PYTHONS
    rows = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    assert [f"| Linux, Python {each} | tested |" for each in declared] == [r for r in rows if r.endswith("| tested |")]
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_on_windows_the_import_says_what_to_do() -> None:
    code = "import sys; sys.platform = 'win32'; import baton"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, cwd=ROOT
    )
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: Baton runs on Linux (not tested on macOS); on Windows, install it in WSL 2."
    )


def test_the_list_of_equivalent_mutants_names_lines_that_exist() -> None:
    assert not gone_equivalents(list(TESTS))
    rows = (ROOT / "tests" / "mutants" / "results.tsv").read_text().splitlines()[1:]
    assert {row.split("\t")[0] for row in rows} == set(TESTS)
