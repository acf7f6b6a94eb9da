"""Freed memory is kept for the next allocation."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from marl.utils.allocator import keep_freed_memory
{call}
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(1 << 20) for _ in range(64)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 64 * 2**20 // os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
@pytest.mark.parametrize(
    ("call", "variables", "kept"),
    [("", {}, False), ("keep_freed_memory()", {}, True), ("keep_freed_memory()", {"MALLOC_ARENA_MAX": "2"}, False)],
    ids=["by default", "kept", "the user's setting"],
)
def test_pages_are_not_asked_for_again(call, variables, kept):
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM.format(call=call)]
    done = subprocess.run(command, env=plain | variables, capture_output=True, text=True, check=True, timeout=60)
    faults = int(done.stdout)
    assert faults < PAGES / 20 if kept else faults > PAGES / 2
