"""Several pytest processes share the tests: each runs the test functions that it was the first to claim in a common folder.

``make test`` starts two of them, one from each end of the list of files: they meet in one file, share its functions, and end at
about the same time.
"""

from pathlib import Path
from urllib.parse import quote

import pytest

CLAIMED = pytest.StashKey[dict]()


def pytest_addoption(parser):
    parser.addoption("--share", metavar="FOLDER", help="run only what no other process claimed in this folder")
    parser.addoption("--reverse", action="store_true", help="take the files from the end of the list")


def pytest_collection_modifyitems(config, items):
    if config.getoption("reverse"):
        numbers = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
        items.sort(key=lambda item: -numbers[item.path])  # stable: the tests of a file keep their order


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Pass over tests that another process has claimed; fixtures that they alone would need are torn down."""
    if is_mine(item):
        return None
    item.session._setupstate.teardown_exact(nextitem)
    return True


def is_mine(item):
    folder, claimed, part = item.config.getoption("share"), item.config.stash.setdefault(CLAIMED, {}), shared_part(item)
    if folder is not None and part not in claimed:
        claimed[part] = claim(Path(folder), part)
    return folder is None or claimed[part]


def shared_part(item):
    """The function of a test, with all its parameters; of a slow one, the test itself; of a file that counts what it ran, the file."""
    if item.get_closest_marker("slow"):
        return item.nodeid
    return item.nodeid.partition("::" if item.get_closest_marker("whole_file") else "[")[0]


def claim(folder, part):
    """True for the first process that asks for a part. Exclusive creation is atomic."""
    try:
        (folder / quote(part, safe="")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
