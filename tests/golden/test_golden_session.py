"""Hub and worker say in a session what they said before: messages, their order, fields and values."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.golden.session import FILE, transcript

pytestmark = pytest.mark.timing


def test_a_session_has_the_golden_transcript(tmp_path: Path) -> None:
    assert transcript(tmp_path) == msgspec.json.decode(FILE.read_bytes())
