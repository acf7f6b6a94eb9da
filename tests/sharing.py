"""Several pytest processes share the tests: each runs the test functions that it was the first to claim in a common folder.

``make test`` starts two of them, one from each end of the list of files: they meet in one file, share its functions, and end at
about the same time. A file that one process must run as a whole comes first in the list, far from where they meet.
"""

from collections import Counter
from pathlib import Path
from urllib.parse import quote

import pytest

CLAIMED = pytest.StashKey[dict]()
PART = pytest.StashKey[str]()
TOGETHER = 16
"""Parameters of a function that one process runs at most, before the other may take over."""


def pytest_addoption(parser):
    parser.addoption("--share", metavar="FOLDER", help="run only what no other process claimed in this folder")
    parser.addoption("--reverse", action="store_true", help="take the files from the end of the list")


def pytest_collection_modifyitems(config, items):
    # both sorts are stable: the tests of a file keep their order
    items.sort(key=lambda item: item.get_closest_marker("whole_file") is None)
    seen = Counter()
    for item in items:
        function = item.nodeid.partition("[")[0]
        item.stash[PART] = shared_part(item, function, seen[function])
        seen[function] += 1
    if config.getoption("reverse"):
        numbers = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
        items.sort(key=lambda item: -numbers[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Pass over tests that another process has claimed; fixtures that they alone would need are torn down."""
    if is_mine(item):
        return None
    item.session._setupstate.teardown_exact(nextitem)
    return True


def is_mine(item):
    folder, claimed, part = item.config.getoption("share"), item.config.stash.setdefault(CLAIMED, {}), item.stash[PART]
    if folder is not None and part not in claimed:
        claimed[part] = claim(Path(folder), part)
    return folder is None or claimed[part]


def shared_part(item, function, number):
    """Name of the part that one process runs with this test, which has ``number`` parameters of its function before it: the whole of
    a file that counts its cases, a slow test alone, sixteen parameters of another function."""
    if item.get_closest_marker("whole_file"):
        return function.partition("::")[0]
    if item.get_closest_marker("slow"):
        return item.nodeid
    return f"{function}#{number // TOGETHER}" if number >= TOGETHER else function


def claim(folder, part):
    """True for the first process that asks for a part. Exclusive creation is atomic."""
    try:
        (folder / quote(part, safe="")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
