"""A policy that nobody trains: a server that loads its weights itself. It answers as it would beside a trainer, which it lacks."""

import asyncio
import logging
from contextlib import ExitStack

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from marl.build import build
from marl.cluster.workers.policy_worker import SeatWorker
from marl.config.errors import ConfigError
from marl.config.kinds import frozen_policies
from marl.config.policies import own_settings
from marl.preflight import plan
from marl.preflight.prepare import prepare
from tests.builders import Live
from tests.stack.conftest import SMALL

FROZEN = ("agents.carol.trainable=false", "credit=own")


def server_of(live, policy):
    return live.trainer.policies[policy].servers.server_handles[0]._target


def answers(live, agent):
    turns = [turn for episode in live.episodes() for turn in episode.turns if turn.agent == agent]
    return [(turn.round, turn.response_ids, turn.log_probs) for turn in turns]


@pytest.mark.slow
def test_it_answers_as_it_would_beside_a_trainer(alone):
    """Bit for bit, in full precision and in half."""
    for precision in ("null", "bf16"):
        options = ("credit=own", f"precision={precision}")
        trained, frozen = alone(*options), alone(*options, "agents.carol.trainable=false")
        assert answers(frozen, "carol") == answers(trained, "carol")
        assert answers(frozen, "alice") == answers(trained, "alice")


def test_it_has_no_trainer_and_its_weights_stay(alone, tmp_path):
    reward = tmp_path / "odd.py"
    reward.write_text("def compute_score(solution_str, **_):\n    return float(sum(map(ord, solution_str)) % 2)\n")
    live = alone(
        *FROZEN, "actor_rollout_ref.actor.optim.lr_warmup_steps=0", f"reward.custom_reward_function.path={reward}"
    )
    group, path = live.trainer.policies["carol"], own_settings(live.trainer.config, "carol").model.path
    worker = group.workers.worker
    assert type(worker) is SeatWorker and not any(isinstance(value, torch.nn.Module) for value in vars(worker).values())
    first = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    before = {name: tensor.clone() for name, tensor in server_of(live, "alice").model.state_dict().items()}
    live.step()
    served = server_of(live, "carol").model.state_dict()
    assert served.keys() == first.keys() and all(torch.equal(served[name], first[name]) for name in first)
    after = server_of(live, "alice").model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before), "alice's server has new weights"
    assert group.version == 1 and server_of(live, "carol").received == set()


@pytest.mark.slow
def test_a_checkpoint_holds_no_weights_of_it(alone, tmp_path, caplog):
    live = alone(*FROZEN)
    live.step()
    live.wait(live.trainer.save())
    (saved,) = tmp_path.glob("global_step_*")
    assert (saved / "alice" / "actor").is_dir() and not (saved / "carol").exists()
    again = alone(*FROZEN, "trainer.resume_mode=auto")
    again.wait(again.trainer.resume())
    assert again.trainer.step_number == 1 and "is not trained" not in caplog.text
    (saved / "carol" / "actor").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        again.wait(again.trainer.policies["carol"].load(saved / "carol" / "actor"))
    assert "set policies.carol.model.path" in caplog.text and "huggingface" in caplog.text


@pytest.fixture
def composed(compose_config, cold_assets):
    return lambda *overrides: compose_config(f"assets={cold_assets}", *overrides)


def test_what_is_frozen(composed):
    assert frozen_policies(composed()) == []
    assert frozen_policies(composed("agents.carol.trainable=false")) == ["carol"]
    assert frozen_policies(composed("agents.carol.trainable=false", "agents.carol.policy=alice")) == []
    endpoint = "+policies.carol.endpoint={base_url: 'http://h/v1', model: m}"
    assert frozen_policies(composed("agents.carol.trainable=false", endpoint)) == []


def test_its_plan_is_a_server_alone(composed, monkeypatch):
    shown = {}
    monkeypatch.setattr(plan, "memory_text", lambda pools, asleep: shown.update(pools) or "")
    plan.plan_text(prepare(composed("agents.carol.trainable=false")))
    ((_, alice),), ((_, carol),) = shown["alice"], shown["carol"]
    assert alice.kept > 0 and carol.kept == carol.working == 0 and carol.server == alice.server > 0


def test_an_adapter_that_nobody_trains_is_refused(composed):
    config = composed("agents.carol.trainable=false", "+policies.carol.model.lora_adapter_path=/a")
    with pytest.raises(ConfigError, match=r"policies.carol.model.lora_adapter_path=/a: .*merge the adapter"):
        prepare(config)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_over_ray_it_is_a_server_alone(cluster, compose_config, cold_assets, tmp_path, placement):
    """Its place in the pool is a process of its own, or the others'; asleep while they train, if that is asked for."""
    small = (f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", *SMALL)
    asleep = f"actor_rollout_ref.rollout.free_cache_engine={'true' if placement == 'colocated' else 'false'}"
    setup = prepare(compose_config(*small, *FROZEN, f"resources.placement={placement}", asleep))
    loop = asyncio.new_event_loop()
    with ExitStack() as cleanup:
        live = Live(loop.run_until_complete(build(setup, cleanup)), loop)
        live.wait(live.trainer.sync_weights())
        group = live.trainer.policies["carol"]
        assert not group.takes_weights
        assert not hasattr(group.workers, "update_actor") and not hasattr(group.workers, "init_model")
        (state,) = ray.get([server.get_stats.remote() for server in group.servers.server_handles])
        assert state["requests"] == 0
        metrics = live.step()
        assert any(key.endswith("alice/grad_norm") for key in metrics) and "agent/carol/grad_norm" not in metrics
        (state,) = ray.get([server.get_stats.remote() for server in group.servers.server_handles])
        assert state["requests"] > 0
    loop.close()
