"""The suite itself: what tests may lean on."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.name)
def test_no_test_imports_another(path):
    """What several tests are made of is in ``builders.py``: a test file may be run, moved or skipped alone."""
    imported = re.findall(r"^(?:from|import) +(\S*\btest_\w+)", path.read_text(), re.MULTILINE)
    assert not imported, f"{path}: imports {imported}; move what they share to tests/builders.py"
