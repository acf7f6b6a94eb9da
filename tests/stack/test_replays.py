"""Credit by replay through the real stack: what stays, what is drawn anew, and what comes of it."""

import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch

from marl.controller.alternative_rollouts import AlternativeRollouts
from marl.learners.replay_credit import ReplayCredit, ReturnOf
from marl.report import dump
from marl.rewards import extractor, hider
from tests.builders import slow_but
from tests.stack.builders import num_turns, plays_again

THREE = (
    "runner=debate", "runner.num_rounds=3", "runner.peer_template='{agent} said {text}'", "runner.separator=' '",
    "runner.instruction=''", "data.max_prompt_length=120", "credit=replay",
)  # fmt: skip


REWARD = """
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(solution_str.encode()) % 2)
"""


@pytest.fixture
def judged(alone, tmp_path):
    """Start a run in which every other text is right: a model that was hardly warmed up hardly ever is."""
    path = tmp_path / "reward.py"
    path.write_text(REWARD)
    return lambda *overrides: alone(*overrides, f"reward.custom_reward_function.path={path}")


@pytest.fixture
def played(judged):
    """A run, its scored episodes, and every episode that is taken up at a turn: (recorded, at, alternative, answer, end)."""

    def play(*overrides):
        live = judged(*THREE, *overrides)
        controller, resumed = live.trainer.controller, []
        resume = controller.resume

        async def watched(episode, at, step, alternative, answer=None):
            end = await resume(episode, at, step, alternative, answer)
            resumed.append((episode, at, alternative, answer, end))
            return end

        controller.resume = watched
        return live, live.episodes(), resumed

    return play


def replay(live, episodes, step=0, **options):
    credit = ReplayCredit(ReplayCredit.Config(name="replay", **options))
    rollouts = AlternativeRollouts(live.trainer.controller, step, lambda turn: True)
    return live.wait(credit.gather(episodes, rollouts)).metrics


def said(turn):
    return turn.agent, turn.text, turn.prompt_ids, turn.response_ids, turn.log_probs, turn.seed, turn.observation


@pytest.mark.slow
def test_what_came_before_is_the_record_and_what_is_tried_is_new(played):
    live, episodes, resumed = played()
    recorded = {id(episode): list(episode.turns) for episode in episodes}
    metrics = replay(live, episodes, alternatives=4)
    assert len(resumed) == 16 * 6 * 3
    drawn = Counter()
    for episode, at, _, _, end in resumed:
        turns = recorded[id(episode)]
        before = [turn for turn in turns if turn.round <= at.round and turn is not at]
        frozen = [
            turn for turn in end.turns if turn.round <= at.round and (turn.agent, turn.round) != (at.agent, at.round)
        ]
        assert [said(turn) for turn in frozen] == [said(turn) for turn in before], "to the last bit"
        fresh = [
            turn.seed for turn in end.turns if turn.round > at.round or (turn.agent, turn.round) == (at.agent, at.round)
        ]
        assert not set(fresh) & {turn.seed for turn in turns} and len(fresh) == 1 + 2 * (3 - at.round)
        drawn.update(fresh)
    assert max(drawn.values()) == 1, "everything that is new is drawn with a seed of its own"
    assert metrics["replay/turns"] == len(drawn) == 16 * 3 * 2 * (5 + 3 + 1), "the last round costs one turn only"
    tried = {}
    for episode, at, _, _, end in resumed:
        (answer,) = [turn for turn in end.turns if (turn.agent, turn.round) == (at.agent, at.round)]
        tried.setdefault((id(episode), id(at)), set()).add(answer.text)
    assert sum(len(texts) > 1 for texts in tried.values()) > 48, "alternatives differ by seed"


@pytest.mark.parametrize("finishes,of", [(2, ReturnOf.final), pytest.param(1, ReturnOf.answer, marks=pytest.mark.slow)])
def test_the_credit_is_each_outcome_less_the_mean_of_the_others(played, of, finishes):
    live, episodes, resumed = played()
    turns = {id(episode): list(episode.turns) for episode in episodes}

    def outcome(end):
        last = [turn.scored.value for turn in end.turns if turn.round == 3]
        return sum(last) / 2 if of is ReturnOf.final else end.scored.value

    before = {id(episode): outcome(episode) for episode in episodes}
    replay(live, episodes, alternatives=3, finishes=finishes, of=of, train_alternatives=False)
    ends = {}
    for episode, at, alternative, _, end in resumed:
        ends.setdefault((id(episode), id(at)), {}).setdefault(alternative // finishes, []).append(outcome(end))
    batch = live.trainer.batch_of(episodes)
    live.trainer.learner.assign_credit(batch)
    got, unequal = advantages_of(batch), 0
    for episode, cells in zip(episodes, batch.cells, strict=True):
        assert episode.turns == turns[id(episode)], "nothing was added"
        for turn, cell in zip(episode.turns, cells, strict=True):
            own = ends[id(episode), id(turn)]
            first = [before[id(episode)], *(own[0] if finishes > 1 else [])]
            assert [len(first), len(own[1]), len(own[2])] == [finishes] * 3
            means = [sum(values) / finishes for values in (first, own[1], own[2])]
            assert got[cell] == pytest.approx(means[0] - (means[1] + means[2]) / 2, abs=1e-6)
            unequal += means != [means[0]] * 3
    assert unequal > 30


def advantages_of(batch):
    """The advantage of every turn's tokens, by cell."""
    found = {}
    for rows in batch.rows.values():
        for index, advantages in zip(rows["turn_index"].unbind(), rows["advantages"].unbind(), strict=True):
            for cell in index[index >= 0].unique().tolist():
                (found[cell],) = set(advantages[index == cell].tolist())
    return found


@pytest.mark.slow
def test_further_finishes_go_on_from_the_same_answer(played):
    live, episodes, resumed = played()
    replay(live, episodes[:2], alternatives=2, finishes=3)
    answers, later = {}, {}
    for episode, at, alternative, given, end in resumed:
        (turn,) = [turn for turn in end.turns if (turn.agent, turn.round) == (at.agent, at.round)]
        number = (id(episode), id(at), alternative // 3)
        answers.setdefault(number, set()).add((turn.text, turn.seed))
        later.setdefault(number, []).extend(t.seed for t in end.turns if t.round > at.round)
        assert (given is at) is (alternative < 3) and (given is None) is (alternative == 3)
    assert all(len(texts) == 1 for texts in answers.values())
    assert all(len(set(seeds)) == len(seeds) for seeds in later.values()), "each is played on by itself"


@pytest.mark.slow
def test_other_answers_are_trained_beside_what_was_said(played):
    live, episodes, _ = played()
    texts = [[turn.text for turn in episode.path] for episode in episodes]
    replay(live, episodes, alternatives=3)
    assert [[turn.text for turn in episode.path] for episode in episodes] == texts, "the conversation is the same"
    batch = live.trainer.batch_of(episodes)
    assert {name: num_turns(rows) for name, rows in batch.rows.items()} == {"alice": 16 * 9, "carol": 16 * 9}
    live.trainer.learner.assign_credit(batch)
    advantages = advantages_of(batch)
    for episode, cells in zip(episodes, batch.cells, strict=True):
        groups = {}
        for turn, cell in zip(episode.turns, cells, strict=True):
            groups.setdefault((turn.agent, turn.round), []).append((turn, advantages[cell]))
        for group in groups.values():
            assert len(group) == 3 and [turn.kept for turn, _ in group] == [True, False, False]
            assert [turn.branch for turn, _ in group] == [0, 1, 2]
            assert sum(advantage for _, advantage in group) == pytest.approx(0, abs=1e-6), "leave one out"
            assert len({tuple(sorted(turn.outcomes)) for turn, _ in group}) == 1
            assert all(turn.observation == group[0][0].observation for turn, _ in group)
    assert any(advantages.values())


@pytest.mark.slow
def test_it_is_the_same_in_every_run_and_another_one_in_every_step(judged):
    results = []
    for step in (1, 1, 2):
        live = judged(*THREE)
        episodes = live.episodes()
        replay(live, episodes, step=step, share=0.5)
        results.append(
            [(turn.place, turn.text, turn.seed, turn.outcomes, turn.trained) for e in episodes for turn in e.turns]
        )
    assert results[0] == results[1] != results[2]
    drawn = [{seed for (_, _, branch), _, seed, *_ in result if branch} for result in results]
    assert drawn[0] and not drawn[0] & drawn[2], "a turn that both steps try is answered anew"


@pytest.mark.slow
def test_a_share_of_the_turns_is_tried_and_trained(played):
    live, episodes, resumed = played()
    replay(live, episodes, alternatives=2, share=1 / 3, train_alternatives=False)
    assert len(resumed) == 16 * 2
    for episode in episodes:
        tried = [turn for turn in episode.turns if turn.outcomes]
        assert len(tried) == 2 and [turn for turn in episode.turns if turn.trained] == tried
    assert len({tuple(turn.place for turn in e.turns if turn.trained) for e in episodes}) > 3, (
        "others in other episodes"
    )
    assert sum(num_turns(rows) for rows in live.trainer.batch_of(episodes).rows.values()) == 32


@pytest.mark.parametrize("train", slow_but(["true", "false"], "true"))
def test_a_step_tries_trains_counts_and_dumps(judged, tmp_path, train):
    live = judged(
        *THREE, "credit.alternatives=3", f"credit.train_alternatives={train}", f"trainer.rollout_data_dir={tmp_path}",
        "agents.carol.trainable=false", "learner.train_rounds=[1,3]", "controller.old_log_probs=trainer",
        "controller.pack_turns=false",
    )  # fmt: skip
    order, trainer = [], live.trainer
    for name in ("gather", "log_probs"):
        note(trainer, name, order)
    for group in trainer.policies.values():
        note(group, "free_servers", order)
    rows = trainer.policies["alice"].compute_log_prob
    counts = []
    trainer.policies["alice"].compute_log_prob = lambda part: (counts.append(len(part)), rows(part))[1]
    metrics = live.step()
    assert order == ["gather", "free_servers", "free_servers", "log_probs"], "servers sleep once they are not needed"
    assert counts == [16 * 2 * (3 if train == "true" else 1)]
    assert metrics["replay/turns"] == 16 * 2 * (5 + 1) and metrics["replay/failed"] == 0
    assert metrics["timing_s/replay"] > 0 and metrics["agent/alice/credit_share"] == 1.0
    assert "agent/carol/credit_share" not in metrics and "agent/carol/grad_norm" not in metrics
    assert metrics["agent/alice/grad_norm"] > 0 and metrics["agent/alice/turns"] == 3
    assert 0 < metrics["replay/unequal"] <= 1
    assert metrics["replay/tokens"] < trainer.sampled_tokens <= metrics["replay/tokens"] + 16 * 6 * 3
    episodes = dumped(trainer, tmp_path)
    assert len(episodes) == 16 and {len(e.turns) for e in episodes} == {10 if train == "true" else 6}
    lines = [json.loads(line) for line in (tmp_path / "1.jsonl").read_text().splitlines()]
    credited = [line for line in lines if line["advantage"] is not None]
    assert len(credited) == counts[0] and {line["agent"] for line in credited} == {"alice"}
    assert all(line["advantage"] == pytest.approx(line["reward"], abs=1e-6) for line in credited)


def note(owner, name, order):
    method = getattr(owner, name)

    async def noted(*arguments):
        order.append(name)
        return await method(*arguments)

    setattr(owner, name, noted)


def dumped(trainer, folder):
    return list(dump.read(Path(folder) / "1.jsonl", extractor, hider))


def test_an_episode_with_tried_answers_is_played_again_as_it_was(played, tmp_path):
    live, episodes, _ = played()
    answers = [episode.answer for episode in episodes]
    replay(live, episodes, alternatives=2)
    for episode in episodes:
        episode.turns = [turn for turn in episode.turns if turn.kept]
    plays_again(live.trainer, episodes, tmp_path)
    assert [episode.answer for episode in episodes] == answers


def test_what_fails_is_left_out_and_counted(played, caplog):
    live, episodes, _ = played()
    controller = live.trainer.controller
    resume = controller.resume

    async def failing(episode, at, step, alternative, answer=None):
        if at.agent == "alice" and at.round == 2 and alternative != 1:
            raise ZeroDivisionError("alice broke")
        return await resume(episode, at, step, alternative, answer)

    controller.resume = failing
    with caplog.at_level(logging.WARNING):
        metrics = replay(live, episodes, alternatives=3)
    assert metrics["replay/failed"] == 16 and "playing on with other answers failed in step 0" in caplog.text
    lengths = {(turn.agent, turn.round): len(turn.outcomes) for e in episodes for turn in e.turns}
    assert lengths == {(a, r): 2 if (a, r) == ("alice", 2) else 3 for a in ("alice", "carol") for r in (1, 2, 3)}
    batch = live.trainer.batch_of(episodes)
    live.trainer.learner.assign_credit(batch)
    assert all(torch.isfinite(rows["advantages"].values()).all() for rows in batch.rows.values())


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["shapley", "counterfactual", "mixed", "joint"])
def test_a_step_with_every_other_credit(judged, credit):
    live = judged("runner=debate", *THREE[1:6], f"credit={credit}")
    metrics = live.step()
    assert metrics["agent/alice/credit_share"] + metrics["agent/carol/credit_share"] == pytest.approx(1.0)
    assert metrics["agent/alice/grad_norm"] > 0
