"""The interface at which ranks meet: the node's, or the user's. tests/multinode has hosts that need it."""

import os
import socket

import psutil
import pytest
import ray
import torch
from verl.workers.engine_workers import ActorRolloutRefWorker

from marl.cluster.workers import interface, policy_worker
from marl.config.errors import ConfigError


@pytest.fixture
def node(monkeypatch):
    """A node of Ray whose address is that of the loopback."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv(interface.VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(interface.VARIABLE)


def meet(ranks, error=None):
    with interface.at_the_nodes_interface(ranks):
        if error:
            raise error
        return os.environ.get(interface.VARIABLE)


def test_an_interface_is_found_by_its_address():
    assert interface.interface_of("127.0.0.1") == "lo"
    assert interface.interface_of("203.0.113.9") is None


def test_ranks_meet_at_the_nodes_interface_unless_the_user_names_one(node, monkeypatch):
    assert meet(2) == "lo"
    monkeypatch.setenv(interface.VARIABLE, "eth7")
    assert meet(2) == "eth7"


def test_ranks_that_do_not_meet_at_another_interface_are_told_which_to_use(node, monkeypatch):
    gloo = RuntimeError("[/gloo/pair.cc] Connection refused\nmore")
    with pytest.raises(RuntimeError) as raised:
        meet(2, gloo)
    assert raised.value is gloo, "at the node's own, a dead host is as likely"
    monkeypatch.setenv(interface.VARIABLE, "eth7")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME=eth7 on .*such as lo.*Unset it.*refused\)$"):
        meet(2, gloo)


def test_ranks_on_gpus_meet_there_too_and_before_the_first_model(node, monkeypatch):
    """verl makes their group with the first model, after the generators were seeded by rank; its part on gloo meets as on CPUs."""
    met = []
    monkeypatch.setattr(policy_worker, "get_device_name", lambda: "cuda")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: bool(met))
    monkeypatch.setattr(policy_worker, "loopback_store", lambda rank, ranks: None)
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, **_: met.append([backend, os.environ[interface.VARIABLE]]),
    )
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ActorRolloutRefWorker, "__init__", lambda *_, **__: None)
    policy_worker.PolicyWorker(None, "actor")
    policy_worker.ensure_process_group()
    assert met == [["cpu:gloo,cuda:nccl", "lo"]]


def test_ranks_of_one_machine_meet_in_a_store_on_its_loopback(monkeypatch):
    """torch's own store takes connections on every interface, and asks nobody who they are."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    assert interface.loopback_store(0, 1) is None, "a cluster's"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store = interface.loopback_store(0, 1)
    store.set("key", "value")
    listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
