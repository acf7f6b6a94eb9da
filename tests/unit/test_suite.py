"""The suite itself: what tests may lean on."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from marl.config import schema
from marl.learners import CREDITS, LEARNERS
from marl.runners import RUNNERS
from tests.sharing import claim

pytest_plugins = ["pytester"]

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.name)
def test_no_test_imports_another(path):
    """Parts of several tests are in ``builders.py``: a test file may be run, moved or skipped alone."""
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


def claim_all(folder, *names):
    """Claim the two tests of each file."""
    for name in names:
        for i in (1, 2):
            assert claim(folder, f"{name}::test_{Path(name).stem[-1]}{i}")


def test_a_test_is_run_by_the_process_that_claims_it_first(suite, tmp_path):
    everything = ["in one", "a1", "a2", "b1", "b2", "out one", "in two", "c1", "c2", "out two"]
    assert suite() == everything
    claim(tmp_path, "one/test_b.py::test_b1")
    assert suite(f"--share={tmp_path}") == [step for step in everything if step != "b1"]
    assert suite(f"--share={tmp_path}") == [], "everything has been claimed"


def test_from_the_other_end_the_tests_of_a_file_keep_their_order(suite):
    found = suite("--reverse")
    assert found == ["in two", "c1", "c2", "out two", "in one", "b1", "b2", "a1", "a2", "out one"]


def test_the_last_tests_of_a_folder_may_be_anothers(suite, tmp_path):
    claim_all(tmp_path, "one/test_b.py", "two/test_c.py")
    assert suite(f"--share={tmp_path}", "--reverse") == ["in one", "a1", "a2", "out one"]
    for path in tmp_path.glob("*test_[ac]?"):
        path.unlink()
    assert suite(f"--share={tmp_path}") == ["in one", "a1", "a2", "out one", "in two", "c1", "c2", "out two"]


def test_the_parameters_of_a_function_stay_together(suite, pytester, tmp_path):
    case = "import pytest\n@pytest.mark.parametrize('i', [1, 2])\ndef test_d(i):\n    print(f'> d{i}')\n"
    (pytester.path / "two" / "test_c.py").write_text(case)
    claim_all(tmp_path, "one/test_a.py", "one/test_b.py")
    assert suite(f"--share={tmp_path}") == ["d1", "d2"]
    assert [path.name for path in tmp_path.glob("*test_d*")] == [quote("two/test_c.py::test_d", safe="")]


def test_many_parameters_of_a_function_are_shared_by_sixteen(suite, pytester, tmp_path):
    case = "import pytest\n@pytest.mark.parametrize('i', range(40))\ndef test_d(i):\n    print(f'> d{i}')\n"
    (pytester.path / "two" / "test_c.py").write_text(case)
    claim_all(tmp_path, "one/test_a.py", "one/test_b.py")
    claim(tmp_path, "two/test_c.py::test_d#1")
    assert suite(f"--share={tmp_path}") == [f"d{i}" for i in range(40) if not 16 <= i < 32]
    assert suite(f"--share={tmp_path}") == []


def test_one_process_runs_the_whole_of_a_file_that_asks_for_it(suite, pytester, tmp_path):
    pytester.makeini("[pytest]\nmarkers = whole_file")
    path = pytester.path / "two" / "test_c.py"
    path.write_text(f"import pytest\npytestmark = pytest.mark.whole_file\n{path.read_text()}")
    claim_all(tmp_path, "one/test_a.py", "one/test_b.py", "two/test_c.py")
    assert suite(f"--share={tmp_path}") == ["in two", "c1", "c2", "out two"]
    assert suite(f"--share={tmp_path}") == []
    first, last = suite(), suite("--reverse")
    assert [first.index("c1"), last.index("c1")] == [1, 7], "far from where two processes meet"


def test_a_slow_test_is_claimed_by_itself(suite, pytester, tmp_path):
    """Two processes take a file of proofs in turns."""
    pytester.makeini("[pytest]\nmarkers = slow")
    slow = "import pytest\n@pytest.mark.slow\n@pytest.mark.parametrize('i', [1, 2])\ndef test_d(i):\n    print(f'> d{i}')\n"
    (pytester.path / "two" / "test_c.py").write_text(f"{slow}\ndef test_quick():\n    print('> quick')\n")
    claim_all(tmp_path, "one/test_a.py", "one/test_b.py")
    claim(tmp_path, "two/test_c.py::test_d[1]")
    assert suite(f"--share={tmp_path}") == ["d2", "quick"]


def read_outside_of_the_checks():
    """Every name that the package reads: as an attribute, as a key, or by ``getattr``."""
    names = set()
    for path in (TESTS.parent / "marl").rglob("*.py"):
        if path.name == "bounds.py" or path.parent.name == "rules":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def options():
    """(where, key) of every option that is ours, whatever other tests have registered."""
    groups = {
        cls.__name__: cls for cls in vars(schema).values() if is_dataclass(cls) and cls.__module__ == schema.__name__
    }
    for registry in (LEARNERS, CREDITS, RUNNERS):
        ours = (cls for cls in map(registry.get, registry.names()) if cls.__module__.startswith("marl."))
        groups |= {cls.__name__: cls.Config for cls in ours}
    return {(where, field.name) for where, group in groups.items() for field in fields(group)}


def test_every_option_is_read_by_more_than_its_checks():
    """Told apart by their names alone; ``make check`` finds those that nothing reads at all, too."""
    assert len(options()) > 100
    known = read_outside_of_the_checks()
    assert sorted(option for option in options() if option[1] not in known) == []


@pytest.mark.slow
def test_the_smoke_test_fails_where_there_is_no_gpu():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    ran = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 1 and "run make gpu-smoke on a machine with one" in ran.stdout
    assert re.search(r"1 failed, \d errors in", ran.stdout), "nothing passes, and nothing is skipped"
