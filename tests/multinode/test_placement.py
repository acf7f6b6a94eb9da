"""Pools over hosts: who lives where, and the same training as on one host, to the last bit."""

import os
import re

import pytest

from .product import ON_ONE_HOST, same_bits, timed

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(300)]


def homes(hosts):
    """The hosts of the ranks of each pool, and of the servers of each policy, of the newest job."""
    found: dict[str, list[str]] = {}
    for actor, host in hosts.hosts_of_actors():
        owner = re.search(r"alice|carol|narrow", actor)[0]
        found.setdefault(f"{owner} {'server' if 'HFServer' in actor else 'rank'}", []).append(host)
    return {key: sorted(value) for key, value in found.items()}


def test_a_policy_over_two_hosts_is_the_one_on_a_single_host(product, hosts, unbroken):
    """From relative paths, and weights are proved to have arrived across hosts in every step (``resources.weight_check``)."""
    over = homes(hosts)
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
