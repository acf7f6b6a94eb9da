"""Several pytest processes share the tests: each runs the files that it was the first to claim in a common folder.

``make test`` starts two of them, one from each end of the list, so that both end at about the same time.
"""

from pathlib import Path

import pytest

CLAIMED = pytest.StashKey[dict]()


def pytest_addoption(parser):
    parser.addoption(
        "--share", metavar="FOLDER", help="run only the files that no other process claimed in this folder"
    )
    parser.addoption("--reverse", action="store_true", help="take the files from the end of the list")


def pytest_collection_modifyitems(config, items):
    if config.getoption("reverse"):
        numbers = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
        items.sort(key=lambda item: -numbers[item.path])  # stable: the tests of a file keep their order


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Pass over the tests of a file that another process has claimed; what they alone would need is torn down."""
    if is_mine(item):
        return None
    item.session._setupstate.teardown_exact(nextitem)
    return True


def is_mine(item):
    folder, claimed = item.config.getoption("share"), item.config.stash.setdefault(CLAIMED, {})
    if folder is not None and item.path not in claimed:
        claimed[item.path] = claim(Path(folder), item.path.relative_to(item.config.rootpath))
    return folder is None or claimed[item.path]


def claim(folder, path):
    """True for the first process that asks for a file. Exclusive creation is atomic."""
    try:
        (folder / "__".join(path.parts)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
