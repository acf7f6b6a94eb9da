"""Hosts that share no file system, that lose one another, or that are gone: recovery, or a named error within its deadline."""

import re

import pytest

from marl.config.schema import ResourcesConfig

from .product import OVER_HOSTS, same_bits, timed

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(300)]
RECOVERS = hasattr(ResourcesConfig(), "max_restarts")
ONCE = ("resources.max_restarts=0",) if RECOVERS else ()
LONG = (OVER_HOSTS, "trainer.total_training_steps=500", *ONCE)
"""Pools that need both workers, so that nothing can be built anew on what is left."""


def ending(run, seconds):
    """``recovered``, ``named error``, or neither."""
    code, said = run.end(seconds), run.said
    if code == 0:
        return "recovered" if re.search(r"Restart 1 of \d+ \(resources\.max_restarts\)", said) else "never disturbed"
    named = re.search(
        r"^run failed: Group\w+: (policy|critic) '\w+'|the head of .* has not answered for", said, re.MULTILINE
    )
    return "named error" if code == 1 and named else f"exit code {code}: {said[-4000:]}"


def fault(run, what, break_it, seconds):
    """Break something after two steps of a run, and return how it ends."""
    run.until_step(2)
    break_it()
    with timed(f"{what}, until the run has ended"):
        return ending(run, seconds)


def test_a_folder_that_hosts_do_not_share_is_refused_before_the_first_step(product, hosts):
    with timed("a folder of each host's own"):
        run = product.start(OVER_HOSTS, folder="/mnt/run")
        code = run.end(90)
    assert code == 2 and "missing on w1, w2" in run.said, run.said[-4000:]
    assert "trainer.default_local_dir=/mnt/run" in run.said and "shared by all hosts" in run.said


def test_two_hosts_that_no_longer_reach_each_other(product, hosts):
    """Ray sees nothing: both reach the head."""
    run = product.start(*LONG, "resources.process_group_timeout_s=8")
    assert fault(run, "two hosts apart", lambda: hosts.part("w1", "w2"), 30) == "named error"


def test_a_cable_that_is_cut_for_good(product, hosts):
    """Ray's health check is faster than the collective, and than the deadline of the call."""
    run = product.start(*LONG, "resources.process_group_timeout_s=60")
    assert fault(run, "a cut cable", lambda: hosts.link("w2", "down"), 40) == "named error"


def test_a_node_that_dies(product, hosts):
    run = product.start(*LONG)
    assert fault(run, "a dead node", hosts["w2"].power_off, 30) == "named error"


def test_a_node_that_dies_while_the_rest_has_room(product, hosts):
    """carol's host; both pools then fit on alice's."""
    words = ("learner=grpo", "trainer.total_training_steps=8")
    run = product.start(*words)
    how = fault(run, "a dead node, room on the other", hosts["w2"].power_off, 120)
    assert how == ("recovered" if RECOVERS else "named error")
    if RECOVERS:
        hosts.mend()
        unbroken = product.start(*words)
        assert unbroken.end(120) == 0 and same_bits(run, unbroken, 8)


def test_a_head_that_is_lost(product, hosts):
    """Ray would end the driver without a word."""
    run = product.start(*LONG, on="w1")
    assert fault(run, "a lost head", hosts["head"].power_off, 30) == "named error"
    said = f"head of the Ray cluster at {hosts.address} has not answered for 5 s; of one that is gone, Ray ends the run after 10 s"
    assert said in run.said
