"""A run's own Ray cluster answers nobody without its token."""

import os

import grpc
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
