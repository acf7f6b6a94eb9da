"""Pools over hosts: who lives where, and the same training as on one host, to the last bit."""

import os

import pytest

from .product import ON_ONE_HOST, homes, same_bits, timed

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(300)]


def test_a_policy_over_two_hosts_is_the_one_on_a_single_host(product, hosts, unbroken):
    """From relative paths, and weights are proved to have arrived across hosts in every step (``resources.weight_check``)."""
    over = unbroken.homes
    assert over["alice rank"] == over["alice server"] == ["w1", "w2"]
    assert over["narrow rank"] == over["carol server"] and len(over["narrow rank"]) == 1
    with timed("two ranks on one host"):
        assets = os.path.relpath(product.assets, product.folder)
        run = product.start(ON_ONE_HOST, f"assets={assets}", cwd=product.folder)
        assert run.end(200) == 0, run.said[-4000:]
    on_one = homes(hosts)
    (wide,) = set(on_one["alice rank"])
    assert on_one["alice rank"] == on_one["alice server"] == [wide, wide]
    assert on_one["narrow rank"] == on_one["carol server"] == [{"w1": "w2", "w2": "w1"}[wide]]
    assert same_bits(run, unbroken)
