"""Every runner through the real stack: played, scored, trained, dumped and played again."""

import logging

import pytest
import torch

from marl.report import conversation
from marl.runners import RUNNERS, ReplayDiverged
from marl.types import Score, Turn
from tests.builders import BUILT_IN, slow_but
from tests.stack.builders import num_turns, places, plays_again, replayed, runner_options


def started(alone, name, *overrides):
    long = ("data.max_prompt_length=120", "learner=ippo")  # whose critic tells answers apart that are all wrong
    return alone(*runner_options(name), *long, "trainer.total_training_steps=1", *overrides)


@pytest.mark.parametrize("name", slow_but(BUILT_IN, "debate"))
def test_it_plays_trains_and_plays_again(alone, tmp_path, name):
    live = started(alone, name)
    trainer = live.trainer
    seen = []
    batch_of = trainer.batch_of

    def look(episodes):
        seen.append((episodes, batch_of(episodes)))
        return seen[-1][1]

    trainer.batch_of = look
    metrics = live.step()
    ((episodes, batch),) = seen
    assert len(episodes) == 16 and all(torch.isfinite(torch.tensor(v)) for v in metrics.values())
    rows_are_what_was_said(trainer, episodes, batch)
    for policy in batch.rows:
        assert metrics[f"agent/{policy}/grad_norm"] > 0
    if RUNNERS.get(name).append_only:
        shares = [value for key, value in metrics.items() if key.endswith("extended_prompts")]
        assert shares == [1.0] * len(shares)
    assert metrics["agent/alice/log_prob_gap_max"] <= 1e-5
    plays_again(trainer, episodes, tmp_path)


def rows_are_what_was_said(trainer, episodes, batch):
    """Each trained turn is in one row, with its ids and log-probs where its cell says; nothing else is trained."""
    in_rows = {}
    for rows in batch.rows.values():
        for ids, index, probs in zip(
            *(rows[key].unbind() for key in ("responses", "turn_index", "rollout_log_probs")), strict=True
        ):
            for cell in index[index >= 0].unique().tolist():
                assert cell not in in_rows
                in_rows[cell] = (ids[index == cell].tolist(), probs[index == cell].tolist())
    spoken = {
        cell: (turn.response_ids, turn.log_probs)
        for episode, cells in zip(episodes, batch.cells, strict=True)
        for turn, cell in zip(episode.turns, cells, strict=True)
        if turn.trained
    }
    assert in_rows.keys() == spoken.keys() and spoken
    for cell, (ids, probs) in spoken.items():
        assert in_rows[cell][0] == ids and in_rows[cell][1] == pytest.approx(probs)


@pytest.mark.parametrize(
    "options",
    [
        ("runner.hide_answers=true",),
        ("runner.decide=accuracy",),
        ("runner.num_rounds=5", "runner.overflow=drop_oldest", "data.max_prompt_length=32"),
    ],
    ids=["hidden", "weights", "shortened"],
)
def test_what_was_hidden_weighed_or_shortened_is_played_again_alike(alone, tmp_path, options):
    live = started(alone, "debate", "runner.stop_on_consensus=false", *options)
    live.trainer.controller.accuracy.right.update(alice=3, carol=90)
    live.trainer.controller.accuracy.given.update(alice=98, carol=98)
    episodes = live.episodes()
    live.trainer.controller.accuracy.right.clear()
    assert episodes[0].accuracy == {"alice": 0.04, "carol": 0.91}
    if "runner.decide=accuracy" in options:
        assert all(
            e.answer == e.trajectory("carol")[-1].scored.answer
            for e in episodes
            if e.trajectory("carol")[-1].scored.answer
        )
    plays_again(live.trainer, episodes, tmp_path)


@pytest.mark.slow
def test_predictions_are_played_again_and_neither_trained_nor_credited(alone, tmp_path):
    options = (
        "runner.foresee=true",
        "runner.foresee_request='{agent} ?'",
        "runner.foreseen_template='{agent} said {text}'",
    )
    live = started(alone, "debate", *options)
    seen, batch_of = [], live.trainer.batch_of
    live.trainer.batch_of = lambda episodes: seen.append((episodes, batch_of(episodes))) or seen[-1][1]
    metrics = live.step()
    ((episodes, batch),) = seen
    notes = [turn for episode in episodes for turn in episode.turns if turn.foresees]
    assert len(notes) == sum(len(episode.path) for episode in episodes) and all(note.response_ids for note in notes)
    rows_are_what_was_said(live.trainer, episodes, batch)
    assert metrics["agent/alice/grad_norm"] > 0 and 0 <= metrics["team/foresight"] <= 1
    plays_again(live.trainer, episodes, tmp_path)


@pytest.mark.slow
def test_shares_of_right_answers_are_counted_and_saved(alone):
    live = started(alone, "debate")
    live.step()
    accuracy = live.trainer.controller.accuracy
    assert sum(accuracy.given.values()) > 0 and 0 < accuracy.shares()["alice"] < 1
    live.wait(live.trainer.save())
    saved = accuracy.state_dict()
    accuracy.given.clear()
    live.trainer.config.trainer.resume_mode = "auto"
    live.wait(live.trainer.resume())
    assert live.trainer.controller.accuracy.state_dict() == saved


def test_alternatives_are_drawn_apart(alone):
    live = started(alone, "tree", "runner.num_branches=4")
    episodes = live.episodes()
    seeds = [turn.seed for e in episodes for turn in e.turns]
    assert len(set(seeds)) == len(seeds)
    sets = [{t.text for t in e.turns if (t.agent, t.round) == ("alice", 1)} for e in episodes]
    assert max(map(len, sets)) > 1


def test_a_peers_answer_lends_its_text_and_never_its_prompt(alone):
    """Agents of one policy, of whom one must not see what the other was shown."""
    live = started(alone, "debate", "runner.stop_on_consensus=false", "agents.carol.policy=alice")
    controller = live.trainer.controller
    episode = next(e for e in live.episodes() if e.turns[0].observation != e.turns[1].observation)
    mine, others = episode.turns[:2]
    given = live.wait(controller.resume(episode, mine, 0, 0, answer=others))
    lent, after = given.trajectory("alice")[:2]
    assert lent.text == others.text and not lent.trained and not lent.prompt_ids
    assert after.prompt_ids[: len(mine.prompt_ids)] == mine.prompt_ids
    (scored,) = live.wait(controller.score([given], 0))
    live.trainer.batch_of([scored])


@pytest.mark.slow
def test_a_conversation_goes_on_with_another_answer(alone):
    """Turns before a changed one, and those beside it, stay; those after it are asked of the servers."""
    live = started(alone, "debate", "runner.stop_on_consensus=false")
    controller = live.trainer.controller
    episode = next(e for e in live.episodes() if len({t.text for t in e.turns if t.round == 1}) == 2)
    first = {turn.agent: turn for turn in episode.turns if turn.round == 1}
    alternatives = [live.wait(controller.resume(episode, first["alice"], 0, number)) for number in range(6)]
    for other in alternatives:
        assert other.trajectory("carol")[0].text == first["carol"].text and len(other.turns) == 6
        said = other.trajectory("alice")[0]
        assert said.observation == first["alice"].observation
        assert other.trajectory("carol")[1].observation[-1]["content"] == f"alice said {said.text}"
        assert other.turns[0].log_probs and not other.score
    assert len({episode.trajectory("alice")[0].text for episode in alternatives}) > 1
    given = live.wait(controller.resume(episode, first["alice"], 0, 0, answer=first["carol"]))
    assert given.trajectory("alice")[0].text == first["carol"].text
    again = live.wait(controller.resume(episode, first["alice"], 0, 3))
    assert places(again) == places(alternatives[3]), "the number of the alternative seeds it"
    scored = live.wait(controller.score(alternatives, 0))
    assert len(scored) == 6 and all(e.score is not None for e in scored)


@pytest.mark.slow
def test_a_replay_with_another_runner_says_where_it_left_the_record(alone):
    live = started(alone, "debate", "runner.stop_on_consensus=false")
    episode = live.episodes()[0]
    live.trainer.controller.runner.config.peer_template = "{agent}: {text}"
    with pytest.raises(ReplayDiverged, match=r"(alice|carol)' is shown another message 2 in round 2.*said"):
        replayed(live.trainer, episode)


def test_policies_of_rounds_are_trained_on_their_rounds_alone(alone):
    """MAPoRL's collaboration separation: one policy answers, another one discusses."""
    rounds = [f"agents.{name}.policy_by_round=[{name}_first,talker]" for name in ("alice", "carol")]
    live = started(alone, "debate", "runner.stop_on_consensus=false", "learner=ippo", "critic.level=turn", *rounds)
    assert list(live.trainer.policies) == ["alice_first", "talker", "carol_first"]
    episodes = live.episodes()
    assert {(t.round, t.policy) for e in episodes for t in e.trajectory("alice")} == {
        (1, "alice_first"), (2, "talker"), (3, "talker"),
    }  # fmt: skip
    rows = live.trainer.batch_of(episodes).rows
    assert {name: num_turns(part) for name, part in rows.items()} == {
        "alice_first": 16,
        "talker": 64,
        "carol_first": 16,
    }
    metrics = live.step()
    assert metrics["value/talker/explained_variance"] <= 1
    for label in ("alice/alice_first", "alice/talker", "carol/talker"):
        assert metrics[f"agent/{label}/grad_norm"] > 0 and metrics[f"agent/{label}/log_prob_gap_max"] <= 1e-5
    assert sorted(live.trainer.critics.groups) == ["alice_first", "carol_first", "talker"]


@pytest.mark.parametrize(
    "overflow,count",
    [("drop_oldest", "dropped_rounds"), pytest.param("summarise", "summaries", marks=pytest.mark.slow)],
)
def test_long_conversations_are_made_to_fit(alone, monkeypatch, overflow, count):
    monkeypatch.setattr("marl.runners.messages.SUMMARISE", "{conversation} ?")
    monkeypatch.setattr("marl.runners.messages.SUMMARY", "{summary}")
    live = started(
        alone, "debate", "runner.num_rounds=5", "runner.stop_on_consensus=false", f"runner.overflow={overflow}",
        f"data.max_prompt_length={32 if overflow == 'drop_oldest' else 40}",
    )  # fmt: skip
    longest = live.trainer.config.data.max_prompt_length
    metrics = live.step()
    assert metrics[f"team/{count}"] > 0 and metrics["team/failed_episodes"] == 0
    episodes = live.episodes()
    assert max(len(turn.prompt_ids) for e in episodes for turn in e.turns) <= longest
    assert all(e.num_rounds == 5 for e in episodes)
    notes = [turn for e in episodes for turn in e.turns if not turn.kept]
    assert bool(notes) is (overflow == "summarise") and not any(turn.trained or turn.answers for turn in notes)
    batch = live.trainer.batch_of(episodes)
    assert int(batch.trained_ERA.sum()) == 16 * 2 * 5
    after = [e.trajectory(turn.agent)[turn.round - 1] for e in episodes for turn in e.turns if not turn.kept]
    for note, turn in zip(notes, after, strict=True):
        assert turn.observation[0]["content"].endswith(note.text), "the note stands after the task"
        assert len(turn.observation) == 3, "the last exchange stays"


def test_long_conversations_are_refused_counted_and_trained(alone):
    """All of them would end the run, were they errors; validation takes them for wrong."""
    live = started(
        alone, "debate", "runner.num_rounds=5", "runner.stop_on_consensus=false", "data.max_prompt_length=46",
        "controller.max_error_rate=0",
    )  # fmt: skip
    metrics = live.step()
    refused = metrics["team/refused_contexts"]
    assert (
        0 < refused == metrics["team/failed"] <= metrics["team/episodes"] == 16 and metrics["team/failed_episodes"] == 0
    )
    assert metrics["agent/alice/grad_norm"] > 0
    found = live.wait(live.trainer.validate())
    assert 0 < found["val/team/failed"] <= 8 and found["val/team/vote"] <= 1 - found["val/team/failed"] / 8


@pytest.mark.slow
def test_a_run_that_cannot_learn_says_so(alone, caplog):
    """Every answer is right, so no group teaches anything; the score of one text alone changes that."""
    live = alone(*runner_options("single_turn"), "controller.degenerate_steps=2")
    live.trainer.controller.reward.compute_score = lambda **_: 1.0
    with caplog.at_level(logging.WARNING):
        assert live.step()["team/degenerate_groups"] == 1.0 and "all groups" not in caplog.text
        live.step()
    assert "all groups of the last 2 steps, to step 2, were all alike" in caplog.text


def test_scores_of_missing_and_truncated_answers(alone):
    live = started(
        alone, "debate", "runner.stop_on_consensus=false", "judge.no_answer_score=-2", "judge.truncated_score=-1",
        "controller.train_truncated=false", "agents.alice.max_tokens=1",
    )  # fmt: skip
    episodes = live.episodes()
    turns = [turn for e in episodes for turn in e.turns]
    assert all(t.scored.value == -1 and not t.trained for t in turns if t.truncated)
    assert all(t.scored.value == -2 for t in turns if not t.truncated and t.scored.answer is None)
    assert {e.scored.value for e in episodes if e.answer is None} == {-2}, "a team that abstains pays as well"
    right = Score(1.0, None)
    assert live.trainer.controller.priced(Turn("alice", 1, [], ""), right) == right, "what is called right is right"
    batch = live.trainer.batch_of(episodes)
    for agent, rows in batch.rows.items():
        assert num_turns(rows) == sum(not t.truncated for t in turns if t.agent == agent) < 16 * 3
    metrics = conversation.agent_metrics(episodes, "alice")
    assert metrics["truncated"] > 0.5 and metrics["score"] == pytest.approx(-2 + metrics["truncated"])
    plain = started(alone, "debate", "agents.alice.max_tokens=1")
    assert {t.scored.value for e in plain.episodes() for t in e.trajectory("alice")} == {0.0}


@pytest.mark.slow
def test_passing_agents_and_those_that_left_reach_every_learner(alone, monkeypatch):
    """Agents that speak a different number of times: each learner trains exactly the turns that were spoken."""
    for learner, level in (
        ("grpo", "turn"),
        ("ippo", "turn"),
        ("ippo", "token"),
        ("mappo", "turn"),
        ("mappo", "token"),
    ):
        live = started(
            alone, "debate", "runner.num_rounds=3", "runner.leave_word=1", "runner.pass_word='#### 2'", f"learner={learner}",
            f"critic.level={level}",
        )  # fmt: skip
        seen = []
        original = live.trainer.learner.assign_credit
        live.trainer.learner.assign_credit = lambda batch, seen=seen, original=original: (
            original(batch),
            seen.append(batch),
        )[0]
        live.step()
        (batch,) = seen
        lengths = batch.mask_ERA.sum(1)
        assert lengths.unique().numel() > 1, "a variable number of turns"
        for rows in batch.rows.values():
            outside = rows["turn_index"].values() < 0
            assert (rows["advantages"].values()[outside] == 0).all()
            assert torch.isfinite(rows["advantages"].values()).all()
        if batch.critic_data.values_ERA is not None:
            silent = ~batch.mask_ERA.bool()
            assert (batch.critic_data.values_ERA[silent] == 0).all() and (batch.returns_ERA[silent] == 0).all()
