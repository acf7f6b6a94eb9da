"""One cluster of hosts for the session, whole again before every test."""

import os
import time

import pytest

from .cable import without_tun
from .hosts import Hosts, why_not
from .product import OVER_HOSTS, Product, Run, homes, timed


def skip_for(reason: str | None) -> None:
    """Skip, or fail where ``MULTINODE=required``: a skip cannot hide a gap there."""
    if reason and os.environ.get("MULTINODE") == "required":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A head without CPUs, two workers with two each, and a client without Ray."""
    skip_for(why_not())
    began = time.monotonic()
    hosts = Hosts(tmp_path_factory.mktemp("hosts"), workers={"w1": 2, "w2": 2}, slow=["w2"])
    print(f"\n[cluster up in {time.monotonic() - began:.1f} s]")
    yield hosts
    hosts.close()


@pytest.fixture
def hosts(lab):
    lab.mend()
    return lab


@pytest.fixture
def slow_cable(hosts):
    """The cable of w2, whose delay and loss can be set."""
    skip_for(without_tun())
    return hosts.cables["w2"]


@pytest.fixture
def product(hosts, cold_assets, tmp_path):
    """Start runs of the product on the hosts; what still runs after the test is ended."""
    started = Product(hosts, cold_assets, tmp_path)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def unbroken(lab, cold_assets, tmp_path_factory) -> Run:
    """A run that nothing disturbs, with a policy over two hosts."""
    lab.mend()
    product = Product(lab, cold_assets, tmp_path_factory.mktemp("unbroken"))
    with timed("two ranks on two hosts"):
        run = product.start(OVER_HOSTS)
        assert run.end(200) == 0, run.said[-4000:]
    run.homes = homes(lab)
    return run
