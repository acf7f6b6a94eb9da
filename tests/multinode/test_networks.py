"""Cables that are slow or cut, and interfaces that the other hosts do not reach."""

import time

import pytest

from .product import OVER_HOSTS, same_bits, timed

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(300)]


def test_a_slow_cable_that_loses_frames_slows_a_run_and_changes_nothing(product, slow_cable, unbroken):
    slow_cable.impair(delay_ms=10, loss_percent=0.5)
    with timed("a run over a slow cable"):
        run = product.start(OVER_HOSTS)
        assert run.end(250) == 0, run.said[-4000:]
    assert same_bits(run, unbroken)


def test_a_cable_that_is_cut_briefly_changes_nothing(product, hosts, unbroken):
    run = product.start(OVER_HOSTS)
    run.until_step(2)
    hosts.link("w2", "down")
    time.sleep(4)
    before = len(run.steps())
    hosts.link("w2", "up")
    with timed("from the repair to the run's end"):
        assert run.end(120) == 0, run.said[-4000:]
    assert before < len(run.steps()), "the cut came before the end"
    assert same_bits(run, unbroken)


def test_ranks_at_an_interface_that_no_other_host_reaches_are_told_so(product, hosts):
    wrong = "+ray_kwargs.ray_init.runtime_env.env_vars.GLOO_SOCKET_IFNAME=lo"
    with timed("an interface that no other host reaches"):
        run = product.start(OVER_HOSTS, wrong)
        code = run.end(90)
    print(run.said[-3000:])
    assert code == 1 and not run.steps()
    assert "policy 'alice'" in run.said and "GLOO_SOCKET_IFNAME=lo" in run.said and "ray start" in run.said, run.said[
        -4000:
    ]
