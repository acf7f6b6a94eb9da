"""The suite itself: what tests may lean on."""

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.name)
def test_no_test_imports_another(path):
    """What several tests are made of is in ``builders.py``: a test file may be run, moved or skipped alone."""
    imported = re.findall(r"^(?:from|import) +(\S*\btest_\w+)", path.read_text(), re.MULTILINE)
    assert not imported, f"{path}: imports {imported}; move what they share to tests/builders.py"


@pytest.fixture
def suite(pytester):
    """Three files in two folders, and a fixture of each folder; returns a function that runs them and the names that ran."""
    pytester.makeconftest("from tests.sharing import *")
    for folder, name in (("one", "a"), ("one", "b"), ("two", "c")):
        (pytester.path / folder).mkdir(exist_ok=True)
        (pytester.path / folder / "__init__.py").touch()
        (pytester.path / folder / "conftest.py").write_text(
            "import pytest\n@pytest.fixture(scope='package')\n"
            f"def room():\n    print('> in {folder}')\n    yield\n    print('> out {folder}')\n"
        )
        tests = (f"def test_{name}{i}(room):\n    print('> {name}{i}')\n" for i in (1, 2))
        (pytester.path / folder / f"test_{name}.py").write_text("\n".join(tests))

    def run(*options):
        result = pytester.runpytest_inprocess("-s", "-p", "no:cacheprovider", *options)
        assert result.ret == 0
        return [line.split("> ")[1] for line in result.outlines if "> " in line]

    return run


def test_a_file_is_run_by_the_process_that_claims_it_first(suite, tmp_path):
    everything = ["in one", "a1", "a2", "b1", "b2", "out one", "in two", "c1", "c2", "out two"]
    assert suite() == everything
    (tmp_path / "one__test_b.py").touch()
    assert suite(f"--share={tmp_path}") == [step for step in everything if step not in ("b1", "b2")]
    assert suite(f"--share={tmp_path}") == [], "everything has been claimed"


def test_the_last_file_of_a_folder_may_be_anothers(suite, tmp_path):
    (tmp_path / "one__test_b.py").touch()
    (tmp_path / "two__test_c.py").touch()
    assert suite(f"--share={tmp_path}", "--reverse") == ["in one", "a2", "a1", "out one"]
    (tmp_path / "one__test_a.py").unlink()
    (tmp_path / "two__test_c.py").unlink()
    assert suite(f"--share={tmp_path}") == ["in one", "a1", "a2", "out one", "in two", "c1", "c2", "out two"]
