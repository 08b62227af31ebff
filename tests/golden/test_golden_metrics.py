"""Names of metrics are the golden ones: dashboards and scripts know them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.golden.metrics import FILE, PROMETHEUS, QUICK, SLOW, names_of, status_text, steady

pytestmark = pytest.mark.timing

GOLDEN = tomllib.loads(FILE.read_text())
MODES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.mark.parametrize("name", MODES)
def test_a_run_writes_metrics_of_the_golden_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert steady(name, names_of(name, tmp_path)) == GOLDEN[name]


def test_there_is_a_golden_list_for_every_mode() -> None:
    assert set(GOLDEN) == {*QUICK, *SLOW}


def test_a_hub_has_the_golden_text_for_prometheus() -> None:
    assert status_text() == PROMETHEUS.read_text()
