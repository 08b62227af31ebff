"""What is sent and written has the same bytes as in the golden files: README.md says how they are made anew."""

from __future__ import annotations

import msgspec
import pytest

from tests.golden.wire import CANONICAL, CASES, FILE, bytes_of, encoded

GOLDEN = msgspec.json.decode(FILE.read_bytes(), type=dict[str, dict[str, list[str]]])
RECORDS = [(name, key) for name, case in CASES.items() for key in case.kinds]


def test_there_is_a_golden_instance_of_every_message_and_record() -> None:
    assert {name: set(found) for name, found in GOLDEN.items()} == {n: set(c.kinds) for n, c in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_message_and_record_is_encoded_to_the_golden_bytes(name: str) -> None:
    assert encoded(CASES[name]) == GOLDEN[name]


@pytest.mark.parametrize(("name", "key"), RECORDS)
def test_golden_bytes_are_decoded_and_encoded_again(name: str, key: str) -> None:
    case = CASES[name]
    golden = [bytes_of(text) for text in GOLDEN[name][key]]
    decoded = [case.decode(data, case.kinds[key]) for data in golden]
    assert decoded == CANONICAL.instances(case.kinds[key])
    assert [case.encode(each) for each in decoded] == golden
