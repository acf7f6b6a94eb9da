"""Hosts that share no file system, that lose one another, or that are gone: a named error within its deadline."""

import re

import pytest

from .product import OVER_HOSTS, timed

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(300)]
LONG = (OVER_HOSTS, "trainer.total_training_steps=500")


def test_a_folder_that_hosts_do_not_share_is_refused_before_the_first_step(product, hosts):
    with timed("a folder of each host's own"):
        run = product.start(OVER_HOSTS, folder="/mnt/run")
        code = run.end(90)
    assert code == 2 and "missing on w1, w2" in run.said, run.said[-4000:]
    assert "trainer.default_local_dir=/mnt/run" in run.said and "shared by all hosts" in run.said


def test_two_hosts_that_no_longer_reach_each_other(product, hosts):
    run = product.start(*LONG, "resources.process_group_timeout_s=8")
    run.until_step(2)
    hosts.part("w1", "w2")
    ends(run, "two hosts apart", 40)


def test_a_cable_that_is_cut_for_good(product, hosts):
    run = product.start(*LONG, "resources.process_group_timeout_s=60")
    run.until_step(2)
    hosts.link("w2", "down")
    ends(run, "a cut cable", 60)


def test_a_node_that_dies(product, hosts):
    run = product.start(*LONG)
    run.until_step(2)
    hosts["w2"].power_off()
    ends(run, "a dead node", 40)


def test_a_head_that_is_lost(product, hosts):
    run = product.start(*LONG, on="w1")
    run.until_step(2)
    hosts["head"].power_off()
    ends(run, "a lost head", 60)


def ends(run, what, seconds):
    """It ends with an error that names whose call failed."""
    with timed(what):
        code = run.end(seconds)
    print(code, run.said[-2500:])
    assert code == 1 and re.search(r"run failed: GroupFailed: (policy|critic) '\w+'", run.said), run.said[-4000:]
