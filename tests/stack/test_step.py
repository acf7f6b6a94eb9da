"""A step through the real parts: Ray, verl's workers on FSDP2, a server for every policy, weight sync."""

import asyncio
import json
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from marl.batch.build import joint_batch, pad_rows
from marl.batch.rows import rows_of
from marl.cluster.failures import GroupFailed, WeightsNotArrived
from marl.cluster.weight_probe import ProbeProof
from marl.controller.collection import EpisodesFailed
from marl.learners import broadcast_to_tokens
from marl.runners.base import Runner
from marl.types import Task

PER_AGENT = (
    "score", "accuracy/round_1", "accuracy/round_2", "ppo_kl", "entropy", "grad_norm", "pg_clipfrac",
    "response_length", "log_prob_gap_max", "degenerate_groups",
)  # fmt: skip
TEAM = (
    "vote",
    "gain",
    "transitions/wrong_right",
    "entropy_of_answers/round_1",
    "disagreement/round_2",
    "failed_episodes",
)


def test_a_step_reports_every_number_and_its_phases(live):
    metrics = live.step()
    for agent in ("alice", "carol"):
        assert not [key for key in PER_AGENT if f"agent/{agent}/{key}" not in metrics]
    assert not [key for key in TEAM if f"team/{key}" not in metrics]
    phases = ("collect", "score", "log_probs", "credit", "update", "sync_weights")
    timed = [metrics[f"timing_s/{phase}"] for phase in phases]
    assert all(seconds > 0 for seconds in timed) and sum(timed) <= metrics["timing_s/step"]
    assert 0 < metrics["perf/overhead_share"] < 1


def test_servers_and_trainer_agree_at_every_step(live):
    for _ in range(3):
        metrics = live.step()
        assert max(metrics["agent/alice/log_prob_gap_max"], metrics["agent/carol/log_prob_gap_max"]) <= 1e-5


@pytest.mark.slow
def test_one_skipped_weight_sync_breaks_that_bound_for_its_policy_alone(live):
    live.step()  # the first one of all has a learning rate of 0
    group = live.trainer.policies["alice"]
    synced, group.sync_weights = group.sync_weights, lambda step: asyncio.sleep(0)
    try:
        with pytest.raises(WeightsNotArrived, match=r"policy 'alice'.*server 0"):
            live.step()
    finally:
        group.sync_weights = synced
    metrics = live.step()
    assert metrics["agent/alice/log_prob_gap_max"] > 1e-4
    assert metrics["agent/carol/log_prob_gap_max"] <= 1e-5
    assert live.step()["agent/alice/log_prob_gap_max"] <= 1e-5, "the next sync mends it"


def test_a_probe_of_real_servers_sees_a_skipped_sync(live):
    trainer = live.trainer
    probe = ProbeProof(trainer.config.seed, trainer.policies, trainer.controller.clients)
    for _ in range(2):
        live.step()
        live.wait(probe.prove(trainer.step_number))
    group, check = trainer.policies["alice"], trainer.weights.proofs
    synced, group.sync_weights, trainer.weights.proofs = group.sync_weights, lambda step: asyncio.sleep(0), []
    try:
        live.step()
    finally:
        group.sync_weights, trainer.weights.proofs = synced, check
    with pytest.raises(
        WeightsNotArrived, match=r"policy .alice.*server 0.*(repeats its answer|differ from the trainer.s)"
    ):
        live.wait(probe.prove(trainer.step_number - 1))  # so that the server's own account is as expected
    live.wait(trainer.sync_weights())
    live.wait(probe.prove(trainer.step_number))


def test_agents_may_sample_at_temperatures_of_their_own(live):
    """The trainer divides each row's logits by its agent's temperature, as the server did."""
    controller, trainer = live.trainer.controller, live.trainer
    controller.agents["alice"].temperature = 0.6
    controller.sampling.cache_clear()
    try:
        assert trainer.temperatures == {"alice": 0.6, "carol": 1.0}
        metrics = live.step()
    finally:
        controller.agents["alice"].temperature = None
        controller.sampling.cache_clear()
    assert max(metrics["agent/alice/log_prob_gap_max"], metrics["agent/carol/log_prob_gap_max"]) <= 1e-5


def test_validation_is_greedy_unless_it_is_asked_to_sample(live):
    controller = live.trainer.controller
    settings = controller.clients["alice"].rollout.val_kwargs
    sampled, settings.do_sample = settings.do_sample, False
    controller.sampling.cache_clear()
    try:
        assert controller.sampling("alice", "alice", True)["temperature"] == 0.0
        assert controller.sampling("alice", "alice", False)["temperature"] == 1.0
    finally:
        settings.do_sample = sampled
        controller.sampling.cache_clear()


def collected(live, samples=4, validate=False):
    trainer = live.trainer
    collection = live.wait(trainer.controller.collect(live.tasks(), samples, trainer.step_number, validate))
    return live.wait(trainer.controller.score(collection.episodes, trainer.step_number)), collection


def batch_of(live, episodes):
    return joint_batch(episodes, ["alice", "carol"], live.trainer.temperatures)


def test_turns_carry_what_the_server_gave(live):
    episodes, _ = collected(live)
    for episode in episodes:
        for agent in ("alice", "carol"):
            first, second = episode.trajectory(agent)
            assert (
                second.prompt_ids[: len(first.prompt_ids + first.response_ids)] == first.prompt_ids + first.response_ids
            )
            assert first.policy == agent and len(first.log_probs) == len(first.response_ids) <= 3
            assert first.version == live.trainer.step_number and first.score is not None


def test_the_same_step_is_played_again_token_for_token(live):
    def play():
        episodes, _ = collected(live)
        return [[t.response_ids for t in sorted(e.turns, key=lambda t: (t.round, t.agent))] for e in episodes]

    assert play() == play()


def test_validation_draws_the_same_numbers_at_every_step(live):
    def seeds():
        return [turn.seed for episode in collected(live, 1, validate=True)[0] for turn in episode.trajectory("alice")]

    before = seeds()
    live.trainer.step_number += 1
    assert seeds() == before


def test_log_probs_are_those_of_a_plain_forward_pass_of_the_saved_model(live):
    """Our lean output path of the CPU engine, the FSDP2 module and the export of verl, against transformers alone."""
    trainer = live.trainer
    live.wait(trainer.save())
    folder = trainer.folder / f"global_step_{trainer.step_number}" / "alice" / "actor" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = batch_of(live, collected(live)[0]).rows["alice"]
    outputs = live.wait(trainer.policies["alice"].compute_log_prob(rows))
    for ids, prompt, log_probs, entropy in zip(
        rows["input_ids"].unbind(), rows["prompts"].unbind(), outputs["log_probs"].unbind(), outputs["entropy"].unbind(), strict=True
    ):  # fmt: skip
        with torch.no_grad():
            log_softmax = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = log_softmax.gather(1, ids[len(prompt) :, None])[:, 0]
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, -(log_softmax.exp() * log_softmax).sum(-1), atol=1e-4, rtol=0)


def gradient_of(live, advantages_ERA, rows=None):
    """Norm of the gradient of one update with these advantages; the learning rate is zero."""
    batch = batch_of(live, collected(live)[0])
    rows = batch.rows["alice"]
    rows["advantages"] = broadcast_to_tokens(advantages_ERA(batch), rows)
    rows["old_log_probs"] = live.wait(live.trainer.policies["alice"].compute_log_prob(rows))["log_probs"]
    return live.wait(live.trainer.policies["alice"].update_actor(rows))


def test_no_advantage_no_gradient(live):
    metrics = gradient_of(live, lambda batch: torch.zeros_like(batch.scores_ERA))
    assert metrics["grad_norm"] == 0.0 and metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)


def test_rows_that_do_not_divide_are_padded_without_a_trace(live):
    """The padding row has no token to learn: the gradient of 7 rows is that of 7 rows and one of padding."""
    group, batch = live.trainer.policies["alice"], batch_of(live, collected(live)[0])
    odd = rows_of(batch.rows["alice"], range(7))
    outputs = live.wait(group.compute_log_prob(odd))
    assert len(outputs) == 7
    odd["old_log_probs"] = outputs["log_probs"]
    odd["advantages"] = broadcast_to_tokens(
        torch.linspace(-1, 1, batch.scores_ERA.numel()).view_as(batch.scores_ERA), odd
    )
    live.wait(live.trainer.save())
    norms = []
    for rows in (odd, pad_rows(odd, 8)):
        norms.append(live.wait(group.update_actor(rows))["grad_norm"])
        live.wait(group.load(live.trainer.folder / f"global_step_{live.trainer.step_number}" / "alice" / "actor"))
    live.wait(live.trainer.sync_weights())
    assert norms[0] > 0 and norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_mini_batches_of_a_ragged_number_of_rows(live):
    """7 rows in two mini-batches: one row of padding, one learning rate step."""
    group, batch = live.trainer.policies["alice"], batch_of(live, collected(live)[0])
    odd = rows_of(batch.rows["alice"], range(7))
    odd["old_log_probs"] = live.wait(group.compute_log_prob(odd))["log_probs"]
    odd["advantages"] = broadcast_to_tokens(torch.zeros_like(batch.scores_ERA), odd)
    group.actor.ppo_mini_batch_size = 2
    try:
        assert live.wait(group.update_actor(odd))["grad_norm"] == 0.0
    finally:
        group.actor.ppo_mini_batch_size = 4


def test_a_request_that_is_wrong_fails_alone(live):
    server = live.trainer.controller.clients["alice"].server

    async def ask():
        good = {"max_tokens": 3, "seed": 5, "temperature": 1.0}
        return await asyncio.gather(
            server.generate(request_id="a", prompt_ids=[1, 2, 3], sampling_params=good),
            server.generate(request_id="b", prompt_ids=[1, 2, 3], sampling_params=good | {"temprature": 2.0}),
            server.generate(request_id="c", prompt_ids=[1] * 300, sampling_params=good),
            return_exceptions=True,
        )

    good, unknown, long = live.wait(ask())
    assert 1 <= len(good.token_ids) <= 3 and good.extra_fields["global_steps"] is not None
    assert isinstance(unknown, ValueError) and "temprature" in str(unknown)
    assert isinstance(long, ValueError) and "300 tokens" in str(long)


def test_a_request_alone_and_in_a_crowd_is_answered_alike(live):
    server = live.trainer.controller.clients["carol"].server

    async def ask(count):
        params = [{"max_tokens": 3, "seed": i, "temperature": 1.0} for i in range(count)]
        return await asyncio.gather(
            *(
                server.generate(request_id=str(i), prompt_ids=list(range(5, 15)), sampling_params=p)
                for i, p in enumerate(params)
            )
        )

    alone, crowd = live.wait(ask(1)), live.wait(ask(60))
    assert (alone[0].token_ids, alone[0].log_probs) == (crowd[0].token_ids, crowd[0].log_probs)


class Moody(Runner):
    """Fails on odd samples, or sleeps for ever."""

    def __init__(self, sleeps=False):
        super().__init__(self.Config(name="moody"))
        self.sleeps = sleeps

    async def run(self, episode):
        turn = await episode.agents[0].act(episode.agents[0].prompt)
        if episode.record.sample % 2:
            if self.sleeps:
                await asyncio.sleep(1000)
            raise RuntimeError("odd samples make me sad")
        return episode.answer(turn)


@pytest.mark.parametrize("sleeps,error", [(False, "odd samples make me sad"), (True, "episode_timeout_s=1")])
def test_an_error_or_a_deadline_ends_its_own_episode_and_is_counted(live, sleeps, error):
    controller = live.trainer.controller
    before = controller.runner, controller.episode_timeout
    controller.runner, controller.episode_timeout = Moody(sleeps), 1.0
    try:
        episodes, collection = collected(live)
    finally:
        controller.runner, controller.episode_timeout = before
    assert len(episodes) == 8 and len(collection.failures) == 8
    assert all(error in str(failure) for failure in collection.failures)


def test_too_many_failures_end_the_run_with_the_first_of_them(live):
    controller, before = live.trainer.controller, live.trainer.controller.runner
    controller.runner, controller.max_error_rate = Moody(), 0.1
    try:
        with pytest.raises(EpisodesFailed, match="8 of 16 episodes .*RuntimeError: odd samples make me sad"):
            collected(live)
    finally:
        controller.runner, controller.max_error_rate = before, 0.5


def test_a_reward_function_that_fails_is_not_a_wrong_answer(live):
    reward = live.trainer.controller.reward
    judged, reward.compute_score = reward.compute_score, lambda **_: "fine"
    try:
        with pytest.raises(EpisodesFailed, match="the reward function failed for 64 of 64 texts.*returned 'fine'"):
            collected(live)
    finally:
        reward.compute_score = judged


def test_a_reward_function_that_never_ends_has_a_deadline(live):
    async def forever(**_):
        await asyncio.sleep(1000)

    reward = live.trainer.controller.reward
    before = reward.compute_score, reward.timeout_s
    reward.compute_score, reward.timeout_s = forever, 0.5
    try:
        with pytest.raises(EpisodesFailed, match="64 of 64 texts.*judge.timeout_s=0.5 s"):
            collected(live)
    finally:
        reward.compute_score, reward.timeout_s = before


def test_a_policy_that_failed_ends_the_others_at_once(live):
    """No waiting for episodes that other servers still answer."""

    class Dies(Runner):
        async def run(self, episode):
            if episode.record.sample == 0:
                raise GroupFailed("policy 'alice' died")
            await asyncio.sleep(1000)

    controller, before = live.trainer.controller, live.trainer.controller.runner
    controller.runner, started = Dies(Dies.Config(name="dies")), time.monotonic()
    try:
        with pytest.raises(GroupFailed):
            collected(live)
    finally:
        controller.runner = before
    assert time.monotonic() - started < 5


def test_a_cancelled_request_whose_answer_is_an_error_leaves_its_neighbours_alone(live):
    server = live.trainer.controller.clients["alice"].server

    async def ask():
        good = {"max_tokens": 3, "seed": 5, "temperature": 1.0}
        bad = asyncio.create_task(server.generate(request_id="a", prompt_ids=[1] * 300, sampling_params=good))
        neighbour = asyncio.create_task(server.generate(request_id="a", prompt_ids=[1, 2], sampling_params=good))
        await asyncio.sleep(0)
        bad.cancel()
        return await asyncio.wait_for(neighbour, 20)

    assert live.wait(ask()).token_ids


def test_an_observation_that_is_too_long_says_by_how_much(live):
    client = live.trainer.controller.clients["alice"]
    task = Task("t", [{"role": "user", "content": "tom " * 50}], "1", "x", str)
    act = client.act("alice", task.messages, 1, None, task=task, session="s", seed=0, sampling={}, max_prompt_length=40)
    with pytest.raises(ValueError, match="shown 52 tokens in round 1, data.max_prompt_length allows 40"):
        live.wait(act)


def test_validation_is_dumped_so_that_anyone_can_recount(live):
    metrics = live.wait(live.trainer.validate())
    folder = live.trainer.folder / "validation"
    lines = [json.loads(line) for line in (folder / f"{live.trainer.step_number}.jsonl").read_text().splitlines()]
    second = [line["score"] for line in lines if line["round"] == 2]
    assert metrics["val/team/accuracy/round_2"] == pytest.approx(sum(second) / len(second))


def test_a_checkpoint_brings_back_weights_and_optimizer(live):
    """Loaded, the same update leads to the same weights, bit for bit: the moments are back as well."""
    trainer, group = live.trainer, live.trainer.policies["alice"]
    live.step()
    live.wait(trainer.save())
    folder = trainer.folder / f"global_step_{trainer.step_number}"
    batch = batch_of(live, collected(live)[0])
    rows = batch.rows["alice"]

    def log_probs():
        return live.wait(group.compute_log_prob(rows))["log_probs"]

    def update():
        live.wait(group.update_actor(rows))
        return log_probs().values()

    rows["old_log_probs"] = log_probs()
    rows["advantages"] = broadcast_to_tokens(
        torch.linspace(-1, 1, batch.scores_ERA.numel()).view_as(batch.scores_ERA), rows
    )
    saved, updated = rows["old_log_probs"].values(), update()
    assert (updated - saved).abs().max() > 1e-4
    live.wait(group.load(folder / "alice" / "actor"))
    assert torch.equal(log_probs().values(), saved)
    assert torch.equal(update(), updated)
    live.wait(trainer.sync_weights())
