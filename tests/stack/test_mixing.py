"""VDN and QMIX through the real parts: what is read where, the exact gradient, targets, and what a checkpoint keeps."""

import copy

import pytest
import torch

from marl.config.errors import ConfigError
from marl.learners.mixer_fit import read
from tests.builders import slow_but
from tests.stack.builders import valued, with_another_answer

SHARED = ("learner.share_utilities=true",)


@pytest.fixture
def mixed(alone):
    """Start a run whose learner is defined for the team's credit."""
    return lambda learner, *options: alone(f"learner={learner}", "credit=team", *options)


def shards_of(live, name="alice"):
    module = live.trainer.critics.groups[name].workers.worker.engine.module
    return {key: value.to_local().detach().clone() for key, value in module.state_dict().items()}


def fitted(live, episodes):
    batch = valued(live, episodes)
    live.wait(live.trainer.learner.update_critics(batch, live.trainer.critics.groups))
    return batch


def one_token_answers(episodes):
    """The same conversations, in which every answer was cut after its first token."""
    changed = copy.deepcopy(episodes)
    for turn in (turn for episode in changed for turn in episode.turns):
        turn.response_ids, turn.response_mask, turn.log_probs = turn.response_ids[:1], [1], turn.log_probs[:1]
    return changed


@pytest.mark.parametrize("learner", slow_but(("vdn", "qmix"), "qmix"))
def test_a_step_trains_policies_utilities_and_mixer(mixed, learner):
    live = mixed(learner, "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "learner.mixer_epochs=2")
    before = shards_of(live)
    metrics = live.step()
    assert metrics["critic/alice/grad_norm"] > 0 and metrics["agent/alice/grad_norm"] > 0
    assert metrics["critic/carol/q_tot_loss"] > 0
    assert any(not torch.equal(before[key], value) for key, value in shards_of(live).items())
    assert live.trainer.learner.fit(2).steps == 1 and live.trainer.config.credit.name == "team"


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("learner.advantage=group",), SHARED])
def test_options_of_a_step(mixed, options):
    live = mixed("qmix", "learner.mixer_epochs=1", *options)
    metrics = live.step()
    critics = {"utility"} if "learner.share_utilities=true" in options else {"alice", "carol"}
    assert set(live.trainer.critics.groups) == critics
    assert {key.split("/")[1] for key in metrics if key.endswith("q_tot_loss")} == critics


@pytest.mark.slow
def test_what_is_read_is_what_the_model_says_at_the_two_positions(mixed):
    """v at the last token of what the policy was shown, q at the last of its answer: also where an answer has one token,
    whose only position in verl's response slice is the one before it."""
    live = mixed("vdn")
    for episodes in (live.episodes(), one_token_answers(live.episodes())):
        batch = valued(live, episodes)
        for episode, cells in zip(episodes, batch.cells, strict=True):
            for turn, cell in zip(episode.turns, cells, strict=True):
                module = live.trainer.critics.groups[turn.policy].workers.worker.engine.module
                ids = torch.tensor([turn.prompt_ids + turn.response_ids])
                with torch.no_grad():
                    values = module(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :, 0]
                v, q = batch.critic_data.values_ERA.flatten()[cell], batch.critic_data.utilities_ERA.flatten()[cell]
                torch.testing.assert_close(v, values[len(turn.prompt_ids) - 1], atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(q, values[-1], atol=1e-5, rtol=1e-5)
                assert v != q


@pytest.mark.slow
def test_a_peers_text_of_the_same_round_changes_no_utility(mixed):
    live = mixed("qmix")
    episodes = live.episodes()
    first, second = (valued(live, e) for e in (episodes, with_another_answer(episodes)))
    assert torch.equal(first.critic_data.utilities_ERA[..., 0], second.critic_data.utilities_ERA[..., 0])
    assert torch.equal(first.critic_data.values_ERA, second.critic_data.values_ERA)
    assert (first.critic_data.utilities_ERA[:, 0, 1] != second.critic_data.utilities_ERA[:, 0, 1]).any(), (
        "the speaker's own utility does"
    )


def test_the_state_is_the_joint_observation(mixed):
    live = mixed("qmix")
    (episode, *_) = episodes = live.episodes(samples=1)
    batch = valued(live, episodes)
    tokenizer = live.trainer.controller.clients["alice"].tokenizer
    first, second = (tokenizer.decode(batch.critic_data.joint_ids.unbind()[r]) for r in (0, 1))
    said = {turn.agent: turn.text for turn in episode.turns if turn.round == 1}
    assert all(f"{agent} said {text}".strip() in second for agent, text in said.items()) and "said" not in first
    for agent in ("alice", "carol"):
        own = episode.task.observation(agent)[0]["content"]
        assert own in first and first.startswith(episode.task.messages[0]["content"])
    changed = copy.deepcopy(episodes)
    for other in changed:
        other.task = type(other.task)(
            **{name: getattr(other.task, name) for name in other.task.__slots__} | {"ground_truth": "77"}
        )
        other.turns.reverse()
        for turn in other.turns:
            turn.text = turn.text if turn.round == 1 else "#### 88"
    again = valued(live, changed).critic_data.joint_ids
    assert torch.equal(batch.critic_data.joint_ids.values(), again.values())


def gradients_of(live, monkeypatch):
    """Gradient that the next optimizer step of every critic would follow, before it is clipped; no step is taken."""
    found = {}
    for name, group in live.trainer.critics.groups.items():
        engine = group.workers.worker.engine

        def keep(name=name, engine=engine):
            found[name] = [p.grad.to_local().detach().clone() for p in engine.module.parameters()]
            return 0.0

        monkeypatch.setattr(engine, "optimizer_step", keep)
    return found


@pytest.mark.parametrize("options", slow_but([(), ("critic.ppo_max_token_len_per_gpu=64",), SHARED], ()))
def test_the_gradient_is_that_of_one_graph_from_the_mixer_to_the_value_heads(mixed, monkeypatch, options):
    """Through the workers' linear loss, in one micro-batch or in many; and by autograd through the critics' own modules."""
    live = mixed("qmix", "learner.mixer_epochs=1", *options)
    trainer, episodes = live.trainer, live.episodes()
    learner, found = trainer.learner, gradients_of(live, monkeypatch)
    batch = valued(live, episodes)
    fit, joint = learner.fit(2), learner.joint(batch)
    targets_B = live.wait(fit.begin(batch, trainer.critics.groups, joint, 1.0, target_update_every=1))
    mixing = copy.deepcopy(fit.mixing)
    live.wait(learner.update_critics(batch, trainer.critics.groups))

    grids = torch.zeros(2, batch.mask_ERA.numel())
    modules = {name: group.workers.worker.engine.module for name, group in trainer.critics.groups.items()}
    cells, numbers = ([], []), ([], [])
    for name, module in modules.items():
        module.train()
        module.zero_grad()
        rows = batch.critic_data.value_rows[name]
        ids = torch.nested.to_padded_tensor(rows["input_ids"], 0)
        mask = (torch.arange(ids.shape[1]) < rows["input_ids"].offsets().diff()[:, None]).long()
        values = module(input_ids=ids, attention_mask=mask).logits[..., 0]
        for i, parts in enumerate(zip(*(rows[k].unbind() for k in ("read_at", "turn_index", "answered")), strict=True)):
            for at, cell, answered in zip(*parts, strict=True):
                cells[answered].append(int(cell))
                numbers[answered].append(values[i, at])
    v_ERA, q_ERA = (
        grids[k].index_put((torch.tensor(cells[k]),), torch.stack(numbers[k])).view(batch.mask_ERA.shape)
        for k in (0, 1)
    )
    loss = (mixing(joint.from_grid(q_ERA), mixing.states(joint)) - targets_B).square().mean()
    turns = joint.mask_BA.sum()
    (loss + (joint.from_grid(v_ERA) - joint.from_grid(q_ERA).detach()).square().sum() / turns).backward()
    for name, module in modules.items():
        for ours, parameter in zip(found[name], module.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad.to_local(), atol=1e-6, rtol=1e-5)
        assert max(float(gradient.abs().max()) for gradient in found[name]) > 1e-2


def test_the_target_is_the_critic_of_its_last_renewal_and_leaves_the_present_one_alone(mixed):
    live = mixed("vdn", "learner.mixer_epochs=1", "learner.target_update_every=2")
    episodes, critics = live.episodes(), live.trainer.critics.groups
    present = valued(live, episodes)
    batch = fitted(live, episodes)
    weights = shards_of(live)
    v_ERA, q_ERA = live.wait(read(batch, critics, target=True))
    assert torch.equal(q_ERA, present.critic_data.utilities_ERA) and torch.equal(v_ERA, present.critic_data.values_ERA)
    assert not torch.equal(q_ERA, batch.critic_data.utilities_ERA)
    assert all(torch.equal(weights[key], value) for key, value in shards_of(live).items())
    _, again = live.wait(read(batch, critics))
    assert torch.equal(again, batch.critic_data.utilities_ERA)
    for renewed in (False, True):
        before = valued(live, episodes).critic_data.utilities_ERA
        fitted(live, episodes)
        _, q_ERA = live.wait(read(batch, critics, target=True))
        assert torch.equal(q_ERA, before if renewed else present.critic_data.utilities_ERA)


def test_a_critic_without_a_target_raises(mixed):
    live = mixed("vdn")
    batch = valued(live, live.episodes())
    with pytest.raises(ValueError, match="no target yet"):
        live.wait(live.trainer.critics.groups["alice"].compute_targets(batch.critic_data.value_rows["alice"]))


@pytest.mark.slow
def test_a_resumed_run_has_the_same_utilities_targets_and_mixer(mixed, tmp_path):
    options = ("qmix", "learner.mixer_epochs=2", "trainer.save_freq=1")
    first = mixed(*options, f"trainer.default_local_dir={tmp_path / 'run'}")
    first.step()
    first.wait(first.trainer.save())
    second = mixed(*options, f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.resume_mode=auto", "seed=3")
    second.wait(second.trainer.resume())
    episodes = first.episodes()
    grids = []
    for live in (first, second):
        batch = valued(live, episodes)
        target = live.wait(read(batch, live.trainer.critics.groups, target=True))
        fit = live.trainer.learner.fit(2)
        live.wait(live.trainer.learner.update_critics(batch, live.trainer.critics.groups))
        live.trainer.learner.assign_credit(batch)
        grids.append([*target, batch.critic_data.utilities_ERA, batch.rows["alice"]["advantages"].values()])
        assert fit.steps == 2
    assert all(torch.equal(a, b) for a, b in zip(*grids, strict=True))
    assert not torch.equal(grids[0][1], grids[0][2]), "the target is a step behind"


@pytest.mark.slow
def test_the_learning_rate_moves_once_a_step(mixed):
    live = mixed("vdn", "learner.mixer_epochs=3")
    scheduler = live.trainer.critics.groups["alice"].workers.worker.engine.lr_scheduler
    before = scheduler.last_epoch
    live.step()
    assert scheduler.last_epoch == before + 1


@pytest.mark.slow
def test_a_critic_with_a_tokenizer_of_its_own(mixed, tmp_path, bpe_tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "critic"
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(bpe_tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=2, intermediate_size=64, max_position_embeddings=1024)
    ).save_pretrained(folder)  # fmt: skip
    bpe_tokenizer.save_pretrained(folder)
    live = mixed("qmix", "learner.mixer_epochs=1", f"critic.model.path={folder}", "critic.model.tokenizer_path=null")
    (episode, *_) = episodes = live.episodes(samples=1)
    rows = valued(live, episodes).critic_data.value_rows["alice"]
    text = bpe_tokenizer.decode(rows["input_ids"].unbind()[0])
    turn = next(turn for turn in episode.turns if turn.agent == "alice")
    assert turn.observation[0]["content"] in text and f"assistant\n{turn.text}<|im_end|>" in text
    assert live.step()["critic/alice/grad_norm"] > 0
    bpe_tokenizer = copy.deepcopy(bpe_tokenizer)  # the others' has one
    bpe_tokenizer.eos_token = None
    bpe_tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match="no end-of-text token"):
        mixed("vdn", f"critic.model.path={folder}", "critic.model.tokenizer_path=null")


@pytest.mark.parametrize(
    "options,said",
    [
        (("critic.level=token",), "set critic.level=turn"),
        (("critic.ppo_epochs=2",), "set critic.ppo_epochs=1"),
        (("critic.ppo_mini_batch_size=2",), "critic.ppo_mini_batch_size=4"),
        (("learner.advantage=group", "actor_rollout_ref.rollout.n=1"), "set it to at least 2"),
        (("runner=tree", "runner.num_branches=2"), "no joint action"),
        (("learner.mixer_epochs=0",), "learner.mixer_epochs=0"),
    ],
)
def test_unsupported_settings_are_refused(mixed, options, said):
    with pytest.raises(ConfigError, match=said):
        mixed("qmix", *options)


def test_they_are_defined_for_the_teams_credit(alone):
    with pytest.raises(ConfigError, match="credit=team alone"):
        alone("learner=vdn", "credit=own")
