"""docs/conformance.md names every row, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "conformance.md"
NUM_ROWS = 117
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \|$", re.M)


def missing(named: list[str]) -> list[str]:
    """Those that are no test file, or no test in one."""
    found = []
    for name in named:
        file, _, test = name.partition("::")
        path = TESTS / file
        if not path.is_file() or (test and f"def {test}(" not in path.read_text()):
            found.append(name)
    return found


def test_every_row_is_there_once_and_in_order() -> None:
    numbers = [int(number) for number, _, _ in ROW.findall(PAGE.read_text())]
    assert numbers == list(range(1, NUM_ROWS + 1))


def test_every_row_is_held_by_tests_that_exist_or_says_why_it_does_not_apply() -> None:
    for number, what, held in ROW.findall(PAGE.read_text()):
        named = re.findall(r"`(test_\w+\.py(?:::\w+)?)`", held)
        assert bool(named) is not what.startswith("does not apply: "), number
        assert missing(named) == [], number


def test_the_check_sees() -> None:
    here = "test_conformance_docs.py"
    named = [here, f"{here}::test_the_check_sees", f"{here}::test_nothing", "test_no_such_file.py"]
    assert missing(named) == named[2:]
