"""A run's own Ray cluster answers nobody without its token."""

import os

import grpc
import psutil
import pytest
import ray


def ask_for_nodes(token=None):
    """Ask the cluster's control store for its nodes, as any program on the network could."""
    metadata = [("authorization", f"Bearer {token}")] if token else None
    with grpc.insecure_channel(ray.get_runtime_context().gcs_address) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        return ask(b"", metadata=metadata, timeout=20)


def test_the_cluster_of_a_run_asks_for_a_token(cluster):
    token = os.environ["RAY_AUTH_TOKEN"]
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(token) >= 32
    for wrong in (None, "0" * len(token)):
        with pytest.raises(grpc.RpcError) as caught:
            ask_for_nodes(wrong)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert ask_for_nodes(token), "the answer is read with the token alone"


def test_workers_run_with_the_token(cluster):
    @ray.remote
    def nodes():
        return len(ray.nodes())

    assert ray.get(nodes.remote(), timeout=60) == 1


def listening(process):
    """Addresses at which a process takes connections."""
    found = [connection for connection in process.net_connections("inet") if connection.status == psutil.CONN_LISTEN]
    return [f"{connection.laddr.ip}:{connection.laddr.port} of {process.name()}" for connection in found]


def test_a_run_on_one_machine_listens_on_its_loopback_alone(live):
    """Metrics have no token, and neither have the stores in which ranks meet."""
    driver = psutil.Process()
    found = [address for process in (driver, *driver.children(recursive=True)) for address in listening(process)]
    assert len(found) > 5 and not [
        one for one in found if not one.startswith(("127.0.0.1:", "::ffff:127.0.0.1:", "::1:"))
    ]
