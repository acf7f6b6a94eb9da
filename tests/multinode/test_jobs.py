"""Runs as jobs of the cluster: with its token, and not without."""

import pytest

from .hosts import SUBMIT
from .product import ROOT, timed

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(300)]
OTHER_TOKEN = {"RAY_AUTH_TOKEN": "0" * 64}
SHORT_WAIT = {"RAY_gcs_server_request_timeout_seconds": "10"}
"""Time for which a driver looks for a node on its machine: 60 s by default."""


def submit(hosts, *words, on="head", **env):
    """``ray job submit``, as README.md and docs/clusters.md have it: from the repository, to the head's loopback address."""
    return hosts[on].run(*SUBMIT.split(), *words, cwd=ROOT, timeout=200, env={"RAY_ADDRESS": hosts.dashboard, **env})


def test_a_job_trains_and_its_exit_code_is_the_runs(product, hosts):
    folder = product.folder / "job"
    words = product.words(folder, "learner=grpo", "trainer.total_training_steps=2")
    with timed("a job"):
        done = submit(hosts, "python", *words)
    assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout[-4000:]
    assert (folder / "global_step_2" / "manifest.json").exists()
    refused = submit(hosts, "python", *words, "learner=gppo")
    assert refused.returncode != 0 and "Did you mean" in refused.stdout, refused.stdout[-4000:]


def test_nobody_gets_in_with_another_token_or_from_another_host(product, hosts):
    without_node, other_token = product.start(on="client", **SHORT_WAIT), product.start(**OTHER_TOKEN)
    denied = submit(hosts, "true", **OTHER_TOKEN)
    assert denied.returncode != 0 and "Invalid authentication token" in denied.stdout, denied.stdout[-2000:]
    outside = submit(hosts, "true", on="client", RAY_ADDRESS="http://10.213.0.1:8265")
    assert outside.returncode != 0 and "Failed to connect" in outside.stdout, outside.stdout[-2000:]
    for run in (other_token, without_node):
        assert run.end(90) == 2 and f"RAY_ADDRESS={hosts.address}: " in run.said, run.said[-4000:]
        assert "a Ray node of it on this machine, and its token" in run.said
