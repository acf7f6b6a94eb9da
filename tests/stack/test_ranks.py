"""A policy and a critic over several ranks: the same gradients and weights as on one."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from marl.cluster.failures import WeightsNotArrived
from marl.cluster.weight_arrival import WeightSync
from marl.main import run
from marl.utils.trees import load_tree

from .conftest import SMALL

STEPS = 5


class Trained(NamedTuple):
    steps: list
    """The metrics of each."""
    weights: list
    """The policies' whole models in the end, in the order of their names."""
    folder: Path


@pytest.fixture(scope="module")
def train(cluster, compose_config, cold_assets, tmp_path_factory):
    """Train five steps, and return the metrics of each and the policies' weights after them. 18 rows a policy do not
    divide among 4 ranks."""
    done = {}

    def train(*overrides):
        if overrides not in done:
            folder, steps = tmp_path_factory.mktemp("ranks"), []
            config = compose_config(
                f"assets={cold_assets}", f"trainer.default_local_dir={folder}", *SMALL, "data.train_batch_size=3",
                "actor_rollout_ref.rollout.n=3", f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}",
                "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "resources.timeout_s=200",
                *([] if any(key.startswith("learner=") for key in overrides) else ["learner=mappo"]), *overrides,
            )  # fmt: skip
            run(config, lambda step, total, metrics: steps.append(metrics))
            saved = sorted((folder / f"global_step_{STEPS}").glob("*/actor/huggingface/model.safetensors"))
            assert saved
            weights = [load_file(file) for file in saved]
            done[overrides] = Trained(steps, weights, folder)
        return done[overrides]

    return train


OF_POLICIES = ("agent/alice/grad_norm", "agent/carol/grad_norm")


def compare(first, second, of_critics=("critic/central/grad_norm", "critic/central/vf_loss"), of_policies=OF_POLICIES):
    for key in (*of_policies, *of_critics):
        for mine, theirs in zip(first.steps, second.steps, strict=True):
            assert theirs[key] == pytest.approx(mine[key], rel=1e-5, abs=1e-5), key
    for mine, theirs in zip(first.weights, second.weights, strict=True):
        assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) <= 1e-4
    assert all(step["agent/alice/log_prob_gap_max"] <= 1e-5 for step in second.steps)


COLOCATED = ("resources.placement=colocated",)
UNEQUAL = "resources.pools={wide: {gpus: 2, policies: [alice], critics: [central]}, narrow: {policies: [carol]}}"
SKIPPED = 3
"""The step before whose sync the servers are asked for proof."""


@pytest.fixture
def proofs(monkeypatch):
    """Errors of the proofs of a step whose weights were not sent yet, and the steps of those that hold."""
    errors, passed, to_step = [], [], WeightSync.to_step

    async def proved_too_early(sync, step):
        if step == SKIPPED:
            for proof in sync.proofs:
                with pytest.raises(WeightsNotArrived) as caught:
                    await proof.prove(step)
                errors.append(str(caught.value))
        metrics = await to_step(sync, step)
        passed.append((step, "timing_s/weight_check" in metrics))
        return metrics

    monkeypatch.setattr(WeightSync, "to_step", proved_too_early)
    return errors, passed


@pytest.mark.slow
def test_two_ranks_train_a_policy_as_one_does(train):
    """The least that is a policy over several ranks: three processes, of which one serves both ranks."""
    shared = ("agents.carol.policy=alice", "learner=reinforce_plus_plus")  # whose baseline is the batch
    ranks = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    one, two = train("resources.one_process=true", *shared), train(*ranks, *shared)
    compare(one, two, of_critics=(), of_policies=["agent/alice/grad_norm"])
    assert len(two.weights) == 1 and all(step["agent/alice/grad_norm"] > 0 for step in two.steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pools_of_two_ranks_and_of_one_are_one(train, proofs):
    one = train("resources.one_process=true")
    errors, passed = proofs
    errors.clear()
    passed.clear()
    # the servers sleep while the trainer works, and wake with its new weights
    asleep = "actor_rollout_ref.rollout.free_cache_engine=true"
    compare(one, train(UNEQUAL, asleep, "resources.weight_check=digest"))
    # and they have trained
    assert one.steps[-1]["agent/alice/grad_norm"] > 0
    # a digest that two ranks' shards add up to is the servers', unless a sync is skipped
    assert passed == [(step, True) for step in range(STEPS + 1)] and len(errors) == 1
    assert "policy 'alice', step 3: server 0" in errors[0] and "are still those of step 2" in errors[0]


ADAPTERS = (
    "sharing=lora", "+policies.alice.model.lora_rank=3", "+policies.carol.model.lora_rank=1",
    "actor_rollout_ref.actor.optim.lr=0.01",
)  # fmt: skip
"""Ranks that do not divide between two: alice's shards are of 2 and 1 rows, and the second of carol's is empty."""
ON_TWO_RANKS = ("trainer.n_gpus_per_node=2", "trainer.save_freq=3", *ADAPTERS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_train_adapters_as_one_does(train):
    one, two = train("resources.one_process=true", *ADAPTERS), train(*ON_TWO_RANKS)
    compare(one, two)
    assert all(step["agent/carol/log_prob_gap_max"] <= 1e-5 for step in two.steps)
    alice, carol = one.weights
    assert any(not torch.equal(alice[name], carol[name]) for name in alice), "each has an adapter of its own"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_resume_adapters_to_the_last_bit(train):
    """Saved after three steps of five: moments in shards of their parameters' sizes, empty ones among them."""
    whole = train(*ON_TWO_RANKS)
    saved = whole.folder / "global_step_3"
    files = [saved / "carol" / "actor" / f"adapter_world_size_2_rank_{rank}.safetensors" for rank in (0, 1)]
    first, second = ({len(m["exp_avg"]) for m in load_tree(f)["optimizer"]["state"].values()} for f in files)
    assert 0 not in first and 0 in second
    resumed = train(*ON_TWO_RANKS, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
    assert len(resumed.steps) == STEPS - 3
    for mine, theirs in zip(resumed.steps, whole.steps[3:], strict=True):
        assert [mine[key] for key in OF_POLICIES] == [theirs[key] for key in OF_POLICIES]
    for mine, theirs in zip(resumed.weights, whole.weights, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_fit_utilities_as_one_does(train):
    """The mixer's derivatives, the linear loss and the target's shards. Unwhitened: that would blow rounding up."""
    options = (
        "learner=qmix",
        "credit=team",
        "learner.mixer_epochs=2",
        "learner.target_update_every=2",
        "learner.whiten=false",
    )
    one, two = train("resources.one_process=true", *options), train(*COLOCATED, "trainer.n_gpus_per_node=2", *options)
    compare(
        one,
        two,
        [f"critic/{name}/{key}" for name in ("alice", "carol") for key in ("grad_norm", "q_tot_loss", "v_loss")],
    )


def rows(path):
    """Answers to imitate, and pairs whose sides are of unequal length: a pair may lie on two ranks."""
    said = (
        {"prompt": f"what is {i} plus {j} ?", "answer": f"#### {i + j}", "chosen": f"#### {i + j}", "rejected": f"#### {i} {j}"}
        for i in range(6) for j in range(4)
    )  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in said))
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["sft", "dpo", "madpo"])
def test_two_ranks_imitate_and_prefer_as_one_does(train, tmp_path, method):
    """Batches of 3 rows, or of 3 pairs: they do not divide between two ranks."""
    data = (
        "learner=grpo",
        f"method={method}",
        f"data.train_files={rows(tmp_path / 'rows.jsonl')}",
        "data.val_files=null",
    )
    one, two = (train(where, *data) for where in ("resources.one_process=true", "trainer.n_gpus_per_node=2"))
    keys = ["agent/alice/loss", *(["agent/carol/preference_margin"] if method != "sft" else [])]
    for mine, theirs in zip(one.steps, two.steps, strict=True):
        for key in (*OF_POLICIES, *keys):
            assert theirs[key] == pytest.approx(mine[key], rel=1e-5, abs=1e-5), key
    for mine, theirs in zip(one.weights, two.weights, strict=True):
        assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) <= 1e-4
    assert one.steps[-1]["agent/alice/loss"] < one.steps[0]["agent/alice/loss"], "and they have learned"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.n_gpus_per_node=4",),
        # hybrid: shards in pairs, replicas across them; one server over the four ranks
        ("trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.fsdp_config.fsdp_size=2", "critic.fsdp.fsdp_size=2"),
        ("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"),
        ("trainer.n_gpus_per_node=2", "actor_rollout_ref.model.use_remove_padding=true", "controller.pack_turns=true"),
        ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64"),
    ],
)
def test_more_ranks_and_other_layouts_are_one(train, overrides):
    compare(train("resources.one_process=true"), train(*COLOCATED, *overrides))
    assert torch.distributed.is_initialized() is False
