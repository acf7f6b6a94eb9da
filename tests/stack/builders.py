"""Looks into a live run that several tests take."""

import asyncio
import copy
from pathlib import Path

import torch

from marl.batch.build import joint_batch
from marl.learners import broadcast_to_tokens
from marl.platform.adapters import merged
from marl.report import dump
from marl.rewards import extractor, hider
from marl.runners import RUNNERS, RecordedAnswers, scripted

ADAPTERS = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.lora_alpha=8",
    "actor_rollout_ref.model.lora.merge=true",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
)
ADAPTED = (
    "sharing=lora", "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "actor_rollout_ref.actor.optim.lr=0.01",
)  # fmt: skip
"""A base that every policy adapts, and on which they move."""
VARIED = (
    f"reward.custom_reward_function.path={Path(__file__).parents[2] / 'benchmarks' / 'reward.py'}",
    "judge.processes=0",  # no process to start
)
"""A score for every text: a model that has learned nothing seldom earns the task's own, and equal scores have no gradient."""
SAME = ("grad_norm", "loss", "ppo_kl", "entropy", "score", "explained_variance", "vf_loss", "accuracy")


BRIEF = {"peer_template": "'{agent} said {text}'", "separator": "' '", "instruction": "''"}
"""The tiny model's words, and few of them."""
MORE = {
    "multi_turn": ["runner.user=carol", "runner.num_turns=3"],
    "router": ["+agents.bob={}", "runner.num_picks=2", "runner.menu='{workers} ?'"],
    "critique": ["runner.critic_instruction='?'", "runner.reviser_instruction='?'", "+agents.bob={}"],
    "graph": ["runner=debate_graph", "runner.nodes.discuss.instruction=''"],
    "debate": ["runner.num_rounds=3", "runner.stop_on_consensus=true"],
    "chain": ["runner.laps=2"],
    "self_play": ["runner.num_rounds=2", "credit=auto"],
    "summary": ["+agents.bob={}"],
    "voting": ["runner.ballot=true"],
    "tree": ["runner.num_branches=3", "credit=auto"],
    "game": ["+runner.game={rounds: 2, invalid: -1}", "runner.instruction='?'"],
}


def short_run(assets, folder, steps, seed=0):
    """Overrides of a run in this process that learns fast, validates at its start and its end, and saves nothing."""
    return (
        f"assets={assets}", f"trainer.default_local_dir={folder / 'run'}", "resources.one_process=true", f"seed={seed}",
        "trainer.logger=[]", "trainer.save_final=false", "trainer.save_freq=-1", f"trainer.test_freq={steps}",
        f"trainer.total_training_steps={steps}", "actor_rollout_ref.actor.optim.lr=0.003", "data.max_response_length=6",
    )  # fmt: skip


def runner_options(name):
    """Overrides with which a runner plays with the tiny model."""
    fields = RUNNERS.get(name).Config.__dataclass_fields__
    return [f"runner={name}", *(f"runner.{k}={v}" for k, v in BRIEF.items() if k in fields), *MORE.get(name, [])]


def numbers(steps):
    """The metrics that two equal runs share; phase times are none of them."""
    return [
        {key: v for key, v in metrics.items() if key.split("/")[-1] in SAME and not key.startswith("timing")}
        for metrics in steps
    ]


def num_turns(rows):
    """Trained turns in a policy's rows, however many share one."""
    return len(rows["turn_index"].values().unique()) - bool((rows["turn_index"].values() < 0).any())


def gradient(live, rows, policy="alice"):
    """The gradient that the engine is about to apply, and the metrics of the update."""
    group = live.trainer.policies[policy]
    engine, kept = group.workers.worker.actor.engine, []
    step = engine.optimizer_step

    def look():
        kept.append(torch.cat([p.grad.to_local().flatten().clone() for p in engine.module.parameters()]))
        return 0.0

    engine.optimizer_step = look
    try:
        metrics = live.wait(group.update_actor(rows))
    finally:
        engine.optimizer_step = step
    return kept[0], metrics


def parameters(live, part):
    if part == "policies":
        engine = live.trainer.policies["alice"].workers.worker.actor.engine
    else:
        engine = live.trainer.critics.groups["alice"].workers.worker.engine
    return [p.to_local().detach().clone() for p in engine.module.parameters()]


def plays_again(trainer, episodes, folder):
    """A dump brings the episodes back, and the runner plays them from their answers to the same end."""
    path = dump.write(episodes, 1, folder)
    for episode, was in zip(dump.read(path, extractor, hider), episodes, strict=True):
        again = replayed(trainer, episode)
        assert places(again) == places(episode) == places(was)
        assert again.answer == was.answer and again.counts == was.counts


def places(episode):
    return sorted(
        (*turn.place, turn.text, turn.kept, turn.trained, turn.compared, turn.answers, str(turn.observation))
        for turn in episode.turns
    )


def replayed(trainer, episode, **options):
    record = trainer.controller
    return asyncio.run(
        scripted.play(
            record.runner, episode.task, episode.agents, RecordedAnswers(episode, **options), roles=record.roles, seed=episode.seed,
            accuracy=episode.accuracy,
        )
    )  # fmt: skip


def valued(live, episodes):
    """A batch whose values are there."""
    batch = live.trainer.batch_of(episodes)
    live.wait(live.trainer.critics.value(episodes, batch))
    return batch


def with_another_answer(episodes, agent="carol", round=1):
    """The same episodes, in which one agent said something else and nobody heard it."""
    changed = copy.deepcopy(episodes)
    for episode in changed:
        turn = next(turn for turn in episode.turns if (turn.agent, turn.round) == (agent, round))
        turn.text = "#### 99 #### 99"
        turn.response_ids = list(reversed(turn.response_ids))
    return changed


def prepared(live, pack=False, policy="alice", episodes=None):
    """Rows of one policy, ready to train, with a different advantage for every turn."""
    trainer = live.trainer
    batch = joint_batch(episodes or live.episodes(), ["alice", "carol"], trainer.temperatures, pack_turns=pack)
    rows = batch.rows[policy]
    rows["advantages"] = broadcast_to_tokens(
        torch.linspace(-1, 1, batch.mask_ERA.numel()).view(batch.mask_ERA.shape), rows
    )
    rows["old_log_probs"] = live.wait(trainer.policies[policy].compute_log_prob(rows))["log_probs"]
    return rows


def adapter_engine(live, policy="alice"):
    """The engine of one base and several adapters."""
    return live.trainer.policies[policy].workers.worker.engine


def merged_weights(live, policy):
    """Whole weights of the base with one adapter added."""
    engine = adapter_engine(live)
    added = dict(engine.adapter_weights(policy))
    return dict(merged(engine.base_weights(), added, engine.adapters[policy].scaling))


def adapter_weights(live, policy):
    return dict(adapter_engine(live, policy).adapter_weights(policy))


def same_weights(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def trainable(live, seed):
    """Rows of both policies, with advantages that differ by seed."""
    batch = live.trainer.batch_of(live.episodes())
    generator = torch.Generator().manual_seed(seed)
    for rows in batch.rows.values():
        rows["old_log_probs"] = rows["rollout_log_probs"]
        drawn = torch.randn(rows["responses"].values().shape, generator=generator)
        rows["advantages"] = torch.nested.nested_tensor_from_jagged(drawn, offsets=rows["responses"].offsets())
    return batch.rows


def updated(live, policy, rows, times=1):
    for _ in range(times):
        metrics = live.wait(live.trainer.policies[policy].update_actor(rows))
    return metrics
