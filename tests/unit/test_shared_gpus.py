"""Servers that share a GPU: parts of its memory by hand, and what is too much."""

import re
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from marl.config.errors import ConfigError
from marl.config.policies import own_settings
from marl.preflight.memory_plan import ModelSize
from marl.preflight.plan_report import plan_text
from marl.preflight.prepare import prepare
from marl.preflight.shared_gpus import divide, text_of

SERVER = {"name": "vllm", "dtype": "bfloat16", "gpu_memory_utilization": 0.8}
SERVER |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}


def run_of(parameters, pools=None, **policies):
    """A run whose policies have so many parameters, and the servers that share a pool unless ``pools`` names others."""
    rollout = OmegaConf.create({"actor_rollout_ref": {"rollout": SERVER}, "policies": policies, "sharing": None})
    sizes = {name: ModelSize(count, 0, 0, 0, 0, 0, 0, 0) for name, count in parameters.items()}
    own = pools or dict.fromkeys(parameters, "shared")
    return SimpleNamespace(config=rollout, sizes=sizes, pool_by_policy=own, pools=dict.fromkeys(own.values()))


def shares(run):
    divide(run)
    return {name: own_settings(run.config, name).rollout.gpu_memory_utilization for name in run.sizes}


def test_servers_of_a_pool_divide_its_share_by_their_weights():
    assert shares(run_of({"a": 300, "b": 100})) == pytest.approx({"a": 0.6, "b": 0.2})
    halved = run_of({"a": 600, "b": 100}, a={"rollout": {"tensor_model_parallel_size": 2}})
    assert shares(halved) == pytest.approx({"a": 0.6, "b": 0.2})
    assert shares(run_of({"a": 300, "b": 100}, {"a": "p", "b": "q"})) == {"a": 0.8, "b": 0.8}, "each GPU has one"


def test_a_share_of_its_own_is_kept_and_the_others_divide_what_it_leaves():
    run = run_of({"a": 300, "b": 100, "c": 100}, a={"rollout": {"gpu_memory_utilization": 0.5}})
    assert shares(run) == pytest.approx({"a": 0.5, "b": 0.15, "c": 0.15})
    assert text_of(run) == ["pool shared: GPU memory share of each server, started in turn: a 0.50, b 0.15, c 0.15"]


def test_our_own_server_takes_no_share():
    run = run_of({"a": 300, "b": 100}, b={"rollout": {"name": "hf"}})
    assert shares(run)["a"] == 0.8 and text_of(run) == []


TOO_MUCH = {
    "their own": ({"a": 0.5, "b": 0.45}, 0.8, "policies.a.rollout.gpu_memory_utilization=0.5; policies.b.rollout"),
    "nothing left": ({"a": 0.8}, 0.8, "actor_rollout_ref.rollout.gpu_memory_utilization=0.8, which is for all servers of a GPU (b too)"),
    "all": ({}, 0.95, "actor_rollout_ref.rollout.gpu_memory_utilization=0.95, which is for all"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOO_MUCH)
def test_more_than_a_gpu_has_is_refused(case):
    fixed, together, said = TOO_MUCH[case]
    run = run_of({"a": 300, "b": 100}, **{n: {"rollout": {"gpu_memory_utilization": s}} for n, s in fixed.items()})
    run.config.actor_rollout_ref.rollout.gpu_memory_utilization = together
    with pytest.raises(ConfigError, match=rf"^pool 'shared': .*{re.escape(said)}.*at most 0.9 of a GPU.*its own pool$"):
        divide(run)


def test_a_run_of_two_engines_on_one_gpu_is_planned_with_their_parts(compose_config, cold_assets, monkeypatch):
    """On a machine without a GPU, which is only asked what the cluster's machines would have."""
    monkeypatch.setattr("marl.cluster.session.fitting_platform", lambda device: None)
    words = ["hardware=gpu", "resources.placement=colocated", "actor_rollout_ref.rollout.gpu_memory_utilization=.6"]
    words += [f"assets={cold_assets}", "actor_rollout_ref.rollout.dtype=bfloat16"]
    setup = prepare(compose_config(*words))
    assert "alice 0.30, carol 0.30" in plan_text(setup)
    assert own_settings(setup.config, "carol").rollout.gpu_memory_utilization == pytest.approx(0.3)
    adapted = prepare(compose_config(*words, "sharing=lora"))
    assert own_settings(adapted.config, "carol").rollout.gpu_memory_utilization == 0.6, "adapters have one engine"
    assert text_of(adapted) == []
