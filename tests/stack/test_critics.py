"""Critics through the real parts: what they read, what they learn, and PPO put together from verl's own functions."""

import copy
from itertools import product

import pytest
import torch
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from marl.batch.build import joint_batch
from marl.controller.collection import Collection, EpisodesFailed
from tests.builders import slow_but
from tests.stack.builders import parameters, valued, with_another_answer


def values_of(live, episodes):
    """Values [E, R, A] of turns, or of the first token of each."""
    batch = valued(live, episodes)
    if batch.critic_data.values_ERA is not None:
        return batch.critic_data.values_ERA.clone()
    grid = torch.zeros(batch.mask_ERA.shape)
    for rows in batch.rows.values():
        for index, values in zip(rows["turn_index"].unbind(), rows["values"].unbind(), strict=True):
            for cell in index[index >= 0].unique():
                grid.view(-1)[cell] = values[index == cell][0]
    return grid


PAIRS = [*product(("ippo", "mappo"), ("turn", "token"))]
"""Learners and levels of their critics."""


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_peers_text_changes_the_central_critics_values_and_not_the_local_ones(alone, pair):
    learner, level = pair
    live = alone(f"learner={learner}", f"critic.level={level}")
    episodes = live.episodes()
    before, after = values_of(live, episodes), values_of(live, with_another_answer(episodes))
    alice, rounds = 0, {1: 0, 2: 1}
    changed = {r: (before[:, i, alice] != after[:, i, alice]).float().mean().item() for r, i in rounds.items()}
    assert changed[1] == 0.0, "nobody reads a turn of the same round"
    assert changed[2] == (1.0 if learner == "mappo" else 0.0)


@pytest.mark.parametrize("learner", ["ippo", "mappo"])
def test_critic_inputs_hold_no_hidden_information(alone, learner):
    """Another ground truth, another order of ending and the turns to come leave every row as it was."""
    live = alone(f"learner={learner}")
    episodes = live.episodes()
    changed = copy.deepcopy(episodes)
    for episode in changed:
        episode.task = type(episode.task)(**{
            name: getattr(episode.task, name) for name in episode.task.__slots__
        } | {"ground_truth": "77"})  # fmt: skip
        episode.turns.reverse()
        for turn in episode.turns:
            if turn.round == 2:
                turn.text, turn.response_ids = "#### 88", [7]
                turn.response_mask, turn.log_probs = [1], [-1.0]
    reader = live.trainer.critics.reader
    first, second = (
        reader.rows(e, joint_batch(e, ["alice", "carol"], live.trainer.temperatures)) for e in (episodes, changed)
    )
    assert list(first) == list(second)
    for name in first:
        ids = [[row.tolist() for row in rows[name]["input_ids"].unbind()] for rows in (first, second)]
        assert ids[0] == ids[1]


def test_the_central_critic_reads_an_episode_once_and_each_speaker_where_the_round_begins(alone):
    live = alone("learner=mappo")
    (episode, *_) = episodes = live.episodes(samples=1)
    batch = live.trainer.batch_of(episodes)
    rows = live.trainer.critics.reader.rows(episodes, batch)["central"]
    assert len(rows) == len(episodes)
    tokenizer = live.trainer.controller.clients["alice"].tokenizer
    words = tokenizer.decode(rows["input_ids"].unbind()[0]).split()
    read = [words[i] for i in rows["read_at"].unbind()[0]]
    assert read == ["alice", "carol", "alice", "carol"]
    said = {turn.agent: turn.text for turn in episode.turns if turn.round == 1}
    text = " ".join(words)
    assert text.startswith(episode.task.messages[0]["content"])
    for agent in ("alice", "carol"):
        own = episode.task.observation(agent)
        assert own == episode.task.messages or f"{agent} has {own[0]['content']}" in text
        assert f"{agent} said {said[agent]}".strip() in text
    assert len(words) == len(rows["input_ids"].unbind()[0]), "no word of the tiny tokenizer is unknown"


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair",
    PAIRS,
    ids="-".join,
)
def test_a_critic_fits_its_targets(alone, pair):
    """Fitted to its own returns again and again on one batch, its error falls by far."""
    learner, level = pair
    live = alone(f"learner={learner}", f"critic.level={level}", "critic.cliprange_value=10", "critic.optim.lr=0.01")
    trainer, episodes = live.trainer, live.episodes()
    losses = []
    for _ in range(30):
        batch = valued(live, episodes)
        generator = torch.Generator().manual_seed(0)
        batch.scores_ERA = torch.rand(batch.mask_ERA.shape, generator=generator)
        trainer.learner.assign_credit(batch)
        fits = live.wait(trainer.learner.update_critics(batch, trainer.critics.groups))
        losses.append(sum(fit["vf_loss"] for fit in fits.values()))
    assert losses[-1] < 0.35 * losses[0], losses


@pytest.mark.slow
def test_values_far_from_the_old_ones_are_clipped(alone):
    live = alone("learner=ippo", "critic.cliprange_value=0.001", "critic.optim.lr=0.002", "critic.ppo_epochs=4")
    episodes = live.episodes()
    batch = valued(live, episodes)
    live.trainer.learner.assign_credit(batch)
    fits = live.wait(live.trainer.learner.update_critics(batch, live.trainer.critics.groups))
    assert fits["alice"]["vf_clipfrac"] > 0.2


@pytest.mark.slow
def test_figures_of_a_fit_do_not_depend_on_its_micro_batches(alone):
    found = []
    for tokens in (4096, 256):
        live = alone("learner=ippo", "critic.cliprange_value=1e-4", f"critic.ppo_max_token_len_per_gpu={tokens}")
        episodes = live.episodes()
        batch = valued(live, episodes)
        live.trainer.learner.assign_credit(batch)
        with torch.no_grad():
            for parameter in live.trainer.critics.groups["alice"].workers.worker.engine.module.parameters():
                parameter.add_(0.01)
        found.append(live.wait(live.trainer.learner.update_critics(batch, live.trainer.critics.groups))["alice"])
    for name in ("vf_loss", "vf_clipfrac", "vpred_mean"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4), name
    assert 0 < found[0]["vf_clipfrac"] < 1


@pytest.mark.slow
def test_the_critic_warms_up_alone(alone):
    live = alone("learner=mappo", "trainer.critic_warmup=3", "actor_rollout_ref.actor.optim.lr_warmup_steps=0")
    actor = live.trainer.policies["alice"].workers.worker.actor.engine.module
    before = [p.to_local().clone() for p in actor.parameters()]
    for _ in range(2):
        metrics = live.step()
        assert "agent/alice/grad_norm" not in metrics and metrics["critic/central/grad_norm"] > 0
    assert all(torch.equal(a, b.to_local()) for a, b in zip(before, actor.parameters(), strict=True))
    assert "agent/alice/grad_norm" in live.step()


@pytest.mark.slow
def test_a_critic_with_a_tokenizer_of_its_own_values_turns_and_not_tokens(alone, tmp_path, bpe_tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    from marl.config.errors import ConfigError

    folder = tmp_path / "critic"
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(bpe_tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=2, intermediate_size=64, max_position_embeddings=1024)
    ).save_pretrained(folder)  # fmt: skip
    bpe_tokenizer.save_pretrained(folder)
    for learner in ("ippo", "mappo"):
        live = alone(f"learner={learner}", f"critic.model.path={folder}", "critic.model.tokenizer_path=null")
        metrics = live.step()
        assert any(key.endswith("vf_loss") for key in metrics)
    with pytest.raises(ConfigError, match="critic.level=token.*Set critic.level=turn"):
        alone("learner=ippo", "critic.level=token", f"critic.model.path={folder}", "critic.model.tokenizer_path=null")


@pytest.mark.parametrize("pair", slow_but(PAIRS, ("mappo", "token")), ids="-".join)
def test_an_episode_that_is_too_long_for_the_critic_costs_itself_alone(alone, monkeypatch, pair):
    learner, level = pair
    live = alone(f"learner={learner}", f"critic.level={level}")
    trainer = live.trainer
    episodes = live.episodes()
    long = {1, 6}
    for index in long:  # as if the task of these had been longer
        for turn in episodes[index].turns:
            turn.text, turn.prompt_ids = " ".join(["apples"] * 40), [*turn.prompt_ids, *[7] * 40]
    batch = trainer.batch_of(episodes)
    trainer.critics.read(episodes, batch)
    name = next(iter(batch.critic_data.value_rows))
    normal = max(
        length
        for rows in batch.critic_data.value_rows.values()
        for length in rows["input_ids"].offsets().diff().tolist()
        if length < 60
    )
    for group in trainer.critics.groups.values():
        group.config.critic.ppo_max_token_len_per_gpu = 60
    assert normal < 60 and trainer.critics.groups[name].longest == 60
    assert set(trainer.critics.too_long(batch)) == long
    kept, batch = trainer.readable(episodes)
    assert kept == [episode for index, episode in enumerate(episodes) if index not in long]
    assert len(batch.mask_ERA) == len(kept) and not trainer.critics.too_long(batch)
    live.wait(trainer.critics.value(kept, batch))

    async def collected(tasks):
        return Collection(list(episodes))

    async def scored(episodes, step):
        return list(episodes)

    monkeypatch.setattr(trainer, "collect", collected)
    monkeypatch.setattr(trainer.controller, "score", scored)
    metrics = live.step()
    assert metrics["critic/refused_contexts"] == 2 and metrics["team/failed_episodes"] == 2
    assert metrics["team/episodes"] == len(episodes) - 2
    assert any(key.endswith("vf_loss") for key in metrics)
    trainer.controller.max_error_rate = 0.1
    with pytest.raises(EpisodesFailed, match=r"reading for the critics failed for 2 of 16.*would read .* allow 60"):
        trainer.readable(episodes)


def test_a_critic_reads_no_further_than_its_models_context(alone):
    live = alone("learner=mappo")
    group = live.trainer.critics.groups["central"]
    group.__dict__["_context"] = 20
    assert group.longest == 20
    with pytest.raises(EpisodesFailed, match="model's context allow 20"):
        live.step()


def padded(rows, *keys):
    """Rows as verl's left-right padded DataProto."""
    prompts, responses = rows["prompts"].unbind(), rows["responses"].unbind()
    width, length = max(map(len, prompts)), max(map(len, responses))
    size = len(prompts)
    tensors = {
        "prompts": torch.zeros(size, width, dtype=torch.long),
        "responses": torch.zeros(size, length, dtype=torch.long),
    }
    mask = torch.zeros(size, width + length, dtype=torch.long)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tensors["prompts"][i, width - len(prompt) :], mask[i, width - len(prompt) : width] = prompt, 1
        tensors["responses"][i, : len(response)], mask[i, width : width + len(response)] = response, 1
    tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], 1)
    tensors |= {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    tensors["response_mask"] = mask[:, width:]
    batch = DataProto.from_dict(tensors=tensors)
    batch.meta_info["temperature"] = 1.0
    return batch


def to_workers(batch, **settings):
    rows = left_right_2_no_padding(batch.to_tensordict())
    for key, mask in {"prompts": batch.batch["attention_mask"], "responses": batch.batch["response_mask"]}.items():
        tokens = batch.batch[key]
        parts = [row[kept.bool()] for row, kept in zip(tokens, mask[:, : tokens.shape[1]], strict=True)]
        rows[key] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    tu.assign_non_tensor(rows, **settings)
    return rows


def test_ippo_with_one_agent_is_ppo_put_together_from_verls_functions(alone):
    """Three steps of our trainer, and of a loop of verl's own functions on verl's own workers: the same weights, bit for bit."""
    options = (
        "learner=ippo", "critic.level=token", "credit=own", "runner=single_turn", "agents=schema", "+agents.solo={}",
        "learner.token_gamma=0.99", "algorithm.lam=0.95", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    )  # fmt: skip
    options = tuple(option for option in options if not option.startswith(("agents=", "+agents")))
    options += ("agents.carol.trainable=false", "controller.old_log_probs=trainer")
    ours, theirs = alone(*options), alone(*options)
    group, critic = (theirs.trainer.policies["alice"], theirs.trainer.critics.groups["alice"])
    actor, values = group.workers.worker, critic.workers.worker
    values.set_loss_fn(lambda model_output, data, dp_group=None: value_loss(values.settings, model_output, data))
    size = 16
    train = {"global_batch_size": size // 2, "mini_batch_size": size // 2, "epochs": 2, "seed": 42, "compute_loss": True,
             "dataloader_kwargs": {"shuffle": False}}  # fmt: skip
    for _ in range(3):
        ours.step()
        theirs.trainer.step_number += 1
        tasks = next(iter(theirs.trainer.loader))
        played = theirs.wait(theirs.trainer.controller.collect(tasks, 4, theirs.trainer.step_number))
        episodes = theirs.wait(theirs.trainer.controller.score(played.episodes, 0))
        batch = padded(joint_batch(episodes, ["alice", "carol"], {"alice": 1.0}).rows["alice"])
        rows = to_workers(batch, calculate_entropy=False, compute_loss=False)
        whole = super(type(actor), actor).compute_log_prob(rows)
        batch.batch["old_log_probs"] = no_padding_2_padding(whole["log_probs"], rows).float()
        rows = to_workers(batch, compute_loss=False)
        batch.batch["values"] = no_padding_2_padding(values.infer_batch(rows)["values"], rows).float()
        mask = batch.batch["response_mask"]
        rewards = torch.zeros(mask.shape)
        scores = [episode.trajectory("alice")[0].scored.value for episode in episodes]
        rewards[torch.arange(size), mask.sum(1) - 1] = torch.tensor(scores)
        batch.batch["advantages"], batch.batch["returns"] = core_algos.compute_gae_advantage_return(
            rewards, batch.batch["values"], mask.float(), 0.99, 0.95
        )
        super(type(actor), actor).update_actor(to_workers(batch, calculate_entropy=False, **train))
        values.train_mini_batch(to_workers(batch, **train))
        theirs.wait(theirs.trainer.sync_weights())
    for part in ("policies", "critics"):
        for mine, other in zip(*(parameters(live, part) for live in (ours, theirs)), strict=True):
            assert torch.equal(mine, other), part
    assert not torch.equal(parameters(ours, "policies")[2], parameters(alone(*options), "policies")[2]), (
        "it has trained"
    )
