"""The ledger of a run: records to the last bit, whatever a kill or the disk left of the file, and episodes that go on from them."""

import asyncio
import errno
import math
import os
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from marl.cluster.failures import GroupFailed
from marl.controller import ledger
from marl.controller.collection import EpisodeLost
from marl.controller.ledger import Ledger, forget, forget_after_a_gap, forget_all, read_step
from marl.marl_trainer import MARLTrainer
from marl.preflight.run_folder import origin_of
from marl.rollout.endpoint import Usage
from marl.types import Score, Turn
from tests.builders import Says, collected, controller, task

TURN = Turn(
    "a", 2, [{"role": "user", "content": "2 + 2 \u2026"}], "four\n", "p", [1, 2**31 - 1], [7, 0, 9], [1, 0, 1],
    [-0.1, 0.0, -math.pi], "length", 3, 2**62 + 1, -1, False, answers=False, trained=False, billed_tokens=12,
    thought="two and two", score=Score(0.5, "4", {"why": [1, None]}, 0.25, acc=1.0),
)  # fmt: skip


def written(folder, *turns, of="x"):
    kept = Ledger(folder)
    kept.open(1)
    for turn in turns:
        kept.add_turn(turn, turn.seed, of)
    kept.close()
    return next(folder.glob("ledger/step_1/*.jsonl"))


def reopened(folder, step=1):
    kept = Ledger(folder)
    kept.open(step)
    return kept


def test_a_turn_comes_back_to_the_last_bit(tmp_path):
    written(tmp_path, TURN)
    assert reopened(tmp_path).turn(TURN.seed, "x") == TURN


@pytest.mark.parametrize("seed, of, step", [(TURN.seed, "y", 1), (TURN.seed + 1, "x", 1), (TURN.seed, "x", 2)])
def test_another_turn_is_not_known(tmp_path, seed, of, step):
    written(tmp_path, TURN)
    assert reopened(tmp_path, step).turn(seed, of) is None


DAMAGE = {
    "cut off": lambda line: line[:-9],
    "flipped bit": lambda line: line[:60] + bytes([line[60] ^ 1]) + line[61:],
    "lost block": lambda line: line[:40] + bytes(len(line) - 40),
    "nothing": lambda line: b"",
    "no record": lambda line: b"{}\n",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_line_is_no_record_and_costs_itself_alone(tmp_path, damage):
    other = Turn("b", 1, [], "other", seed=5)
    path = written(tmp_path, other, TURN)
    first, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + DAMAGE[damage](last))
    kept = reopened(tmp_path)
    assert kept.turn(TURN.seed, "x") is None and kept.turn(5, "x") == other
    kept.add_turn(TURN, TURN.seed, "x")  # into the same file, behind what was cut off
    kept.close()
    assert reopened(tmp_path).turn(TURN.seed, "x") == TURN


def test_the_last_of_several_records_counts_whoever_wrote_it(tmp_path):
    path = written(tmp_path, TURN)
    later = Turn("a", 2, [], "later", seed=TURN.seed)
    os.rename(path, path.with_name("z.jsonl"))
    written(tmp_path, later)
    assert reopened(tmp_path).turn(TURN.seed, "x") == later


def test_what_json_cannot_hold_is_left_out(tmp_path):
    path = written(tmp_path, Turn("a", 1, [], "x", score=Score(1.0, None, {"what": object()})))
    assert not path.read_bytes()


def test_ledgers_are_forgotten_up_to_a_step(tmp_path):
    for step in (1, 2, 10):
        reopened(tmp_path, step).close()
    forget(tmp_path, 2)
    assert [path.name for path in tmp_path.glob("ledger/*")] == ["step_10"]
    forget_all(tmp_path)
    assert not list(tmp_path.iterdir())
    forget_all(tmp_path)


def test_without_a_folder_there_is_none():
    none = Ledger(None)
    none.open(1)
    none.add_turn(TURN, TURN.seed, none.digest("x"))
    assert none.turn(TURN.seed, none.digest("x")) is None


def asked(team):
    return [seed for _, seed, _ in team.clients["a"].asked]


def dies_in(seconds_round_of):
    """A server that dies when agent b speaks a second time on one task."""

    def does(agent, round, task, **_):
        if (agent, round, task.id) == ("b", 2, seconds_round_of):
            raise GroupFailed("the server died")
        return "4"

    return does


def test_an_episode_goes_on_from_the_interrupted_turn(tmp_path):
    whole = controller()
    expected = collected(whole, tasks=3, samples=2).episodes
    before = controller(dies_in("val/1"), folder=tmp_path)
    with pytest.raises(GroupFailed):
        collected(before, tasks=3, samples=2)
    before.ledger.close()

    after = controller(folder=tmp_path)
    episodes = collected(after, tasks=3, samples=2).episodes
    recorded = {name for _, name, _ in read_step(tmp_path / "ledger/step_1")}
    assert set(asked(after)) <= recorded, "what is asked for is written at once"
    known = set(asked(before)) - set(asked(after))
    assert known and len(asked(after)) == len(asked(whole)) - len(known), "none is asked for twice"
    assert [episode.turns for episode in episodes] == [episode.turns for episode in expected]
    assert [episode.score for episode in episodes] == [episode.score for episode in expected]


def finished(tmp_path, **options):
    team = controller(folder=tmp_path, **options)
    collected(team)
    team.ledger.close()
    assert asked(team)


def test_other_sampling_is_another_turn(tmp_path):
    finished(tmp_path)
    again, warmer = controller(folder=tmp_path), controller(folder=tmp_path)
    for client in warmer.clients.values():
        client.rollout.temperature = 0.5
    collected(again), collected(warmer)
    assert not asked(again) and len(asked(warmer)) == 4


def test_training_is_not_validation(tmp_path):
    finished(tmp_path)
    team = controller(folder=tmp_path)
    collected(team, validate=True)
    assert len(asked(team)) == 4


def test_other_messages_are_answered_anew(tmp_path):
    finished(tmp_path)
    team = controller(folder=tmp_path)
    other = task()
    other.messages[0]["content"] = "3 + 3"
    asyncio.run(team.collect([other], 1, 1))
    assert len(asked(team)) == 4


def test_a_text_is_scored_once(tmp_path):
    scored = []

    def reward(solution_str, **_):
        scored.append(solution_str)
        return {"score": 1.0, "why": "right"}

    finished(tmp_path, reward=reward)
    count = len(scored)
    episodes = collected(controller(folder=tmp_path, reward=reward)).episodes
    assert count == 4 and len(scored) == count
    assert episodes[0].turns[0].scored == Score(1.0, "4", {"why": "right"})


def test_another_right_answer_is_scored_anew(tmp_path):
    finished(tmp_path)
    other = [task()]
    object.__setattr__(other[0], "ground_truth", "5")
    team = controller(
        folder=tmp_path, reward=lambda solution_str, ground_truth, **_: float(solution_str == ground_truth)
    )
    (episode,) = asyncio.run(team.collect(other, 1, 1)).episodes
    assert not asked(team) and episode.scored.value == 0.0


def test_a_failure_of_the_reward_is_tried_again(tmp_path):
    attempts = []

    def reward(**_):
        attempts.append(1)
        raise ValueError("the machine is tired")

    for _ in range(2):
        team = controller(folder=tmp_path, reward=reward)
        collected(team)
        team.ledger.close()
    assert len(attempts) == 8


def test_what_a_collection_lost_stays_lost(tmp_path):
    """A step that was trained is the same step when it is played again, whatever was the reason."""

    def does(agent, round, task, **_):
        if task.id == "val/1":
            raise RuntimeError("the episode worker was out of memory")
        return "4"

    settings = {"max_attempts": 2, "max_error_rate": 0.5, "min_sample_share": 1.0}
    first = controller(does, folder=tmp_path, **settings)
    one = collected(first, tasks=3)
    first.ledger.close()
    second = controller(folder=tmp_path, **settings)
    two = collected(second, tasks=3)
    assert not asked(second) and two.retried == one.retried == 1
    assert [episode.task.id for episode in two.episodes] == ["val/0", "val/2"]
    assert [(play[0].id, play[1]) for play in two.lost] == [("val/1", 0)]
    (error,) = two.failures
    assert isinstance(error, EpisodeLost) and str(error) == "RuntimeError: the episode worker was out of memory"


def test_an_episode_that_is_tried_again_is_played_not_read(tmp_path):
    calls = []

    def does(agent, round, task, seed):
        if task.id == "val/0":
            calls.append((round, seed))
        if len(calls) == 3:
            raise RuntimeError("once")
        return "4"

    team = controller(does, folder=tmp_path, max_error_rate=1.0, min_sample_share=1.0)
    assert len(collected(team, tasks=2).episodes) == 2
    first = [seed for round, seed in calls if round == 1]
    assert len(first) == 4 and len(set(first)) == 2, "the first round is asked for again, with the same seeds"


class Endpoint(Says):
    """Says what it is billed for."""

    def __init__(self, does=None):
        super().__init__(*([does] if does else []))
        self.server = SimpleNamespace(usage=Usage())

    async def act(self, *arguments, **options):
        turn = await super().act(*arguments, **options)
        turn.billed_tokens = 10
        self.server.usage.answered(10)
        return turn


def billed(folder, does=None, **settings):
    team, client = controller(folder=folder, **settings), Endpoint(does)
    team.clients, team.endpoints = {"a": client, "b": client}, {"a": client.server.usage}
    return team


def test_what_an_endpoint_billed_is_counted_once(tmp_path):
    first = billed(tmp_path)
    collected(first)
    first.ledger.close()
    again = billed(tmp_path)
    collected(again)
    assert first.spent() == {"a": 40} and again.spent() == {"a": 20}, (
        "both agents' turns, of which a's policy is an endpoint"
    )


class Validating(SimpleNamespace):
    """As much of a trainer as a validation needs that breaks off at its end."""

    async def validate(self):
        await self.controller.collect([task()], 1, step=1, validate=True)
        raise RuntimeError("the judge is gone")

    async def save(self, wait):
        numbers = MARLTrainer.state_dict(MagicMock(controller=self.controller, unsettled=self.unsettled))
        self.saved = numbers["spent_at_endpoints"]


@pytest.mark.parametrize("keeps", [True, False], ids=["ledger", "no ledger"])
def test_what_a_broken_validation_was_billed_is_counted_once(tmp_path, keeps):
    """It is repeated: its turns are read from the ledger, and count then; without one they are billed again."""
    first = billed(tmp_path if keeps else None)
    first.go_on_from({"a": 100})
    settings = SimpleNamespace(test_freq=1, save_freq=1, save_final=True, save_in_background=True)
    trainer = Validating(
        controller=first,
        step_number=1,
        config=SimpleNamespace(trainer=settings),
        tracking=MagicMock(),
        collapse_alarm=MagicMock(),
    )
    with pytest.raises(RuntimeError, match="the judge"):
        asyncio.run(MARLTrainer.keep(trainer, {}, last=False))
    first.ledger.close()
    again = billed(tmp_path if keeps else None)
    again.go_on_from(trainer.saved)
    asyncio.run(again.collect([task()], 1, step=1, validate=True))
    assert first.spent() == {"a": 140} and again.spent() == {"a": 120 if keeps else 180}, "20 of the 40 are policy a's"


def test_what_lost_episodes_were_billed_is_not_forgotten(tmp_path):
    def does(agent, round, task, **_):
        if task.id == "val/1" and round == 2:
            raise RuntimeError("lost")
        return "4"

    settings = {"max_attempts": 2, "max_error_rate": 0.5, "min_sample_share": 1.0}
    first = billed(tmp_path, does, **settings)
    collected(first, tasks=3)
    first.ledger.close()
    again = billed(tmp_path, **settings)
    collected(again, tasks=3)
    assert again.spent() == first.spent() == {"a": 3 * 40}, "two episodes of four turns, and two rounds of two"


def test_a_full_disk_ends_the_ledger_and_not_the_run(tmp_path, caplog):
    team = controller(folder=tmp_path)
    team.ledger.open(1)

    class Full:
        def write(self, line):
            raise OSError(errno.ENOSPC, "No space left on device")

    team.ledger.file = Full()
    assert len(collected(team).episodes) == 1
    assert caplog.text.count("no more turns are recorded") == 1 and "No space left" in caplog.text


def test_a_disk_without_room_for_a_file_ends_the_ledger_and_not_the_run(tmp_path, caplog):
    team = controller(folder=tmp_path)
    (tmp_path / "ledger").write_text("no folder can be made here")
    assert len(collected(team).episodes) == 1 and "no more turns are recorded" in caplog.text


def test_a_disk_that_tells_at_the_end_that_it_is_full_ends_the_ledger(tmp_path, caplog, monkeypatch):
    """NFS does, when a file is synchronised."""
    team = controller(folder=tmp_path)
    team.ledger.open(1)

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    team.ledger.open(2)
    assert caplog.text.count("no more turns are recorded") == 1 and team.ledger.file is None
    last = reopened(tmp_path / "other")
    last.close()
    assert caplog.text.count("no more turns are recorded") == 2


def test_a_line_that_was_written_in_part_ends_the_ledger(tmp_path, caplog):
    team = controller(folder=tmp_path)
    team.ledger.open(1)

    class AlmostFull:
        def write(self, line):
            return len(line) - 1

    team.ledger.file = AlmostFull()
    collected(team)
    assert caplog.text.count("no more turns are recorded") == 1


def test_records_are_in_order_whatever_the_clock_does(tmp_path, monkeypatch):
    clock = iter([5e9, 4e9])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    later = Turn("a", 2, [], "later", seed=TURN.seed)
    written(tmp_path, TURN, later)
    assert reopened(tmp_path).turn(TURN.seed, "x") == later


def test_ledgers_after_a_gap_are_of_other_weights(tmp_path):
    """An older checkpoint than the newest was taken: what followed the newest followed others."""
    for step in (5, 6, 7):
        reopened(tmp_path, step).close()
    forget_after_a_gap(tmp_path, 5)
    assert len(list(tmp_path.glob("ledger/*"))) == 3
    forget_after_a_gap(tmp_path, 3)
    forget_after_a_gap(tmp_path, 7)
    assert not list(tmp_path.glob("ledger/*"))


def test_other_source_files_are_another_run(tmp_path, monkeypatch):
    finished(tmp_path)
    monkeypatch.setattr(ledger, "code_fingerprint", lambda: "other")
    team = controller(folder=tmp_path)
    collected(team)
    assert len(asked(team)) == 4


def test_what_a_reward_reads_beside_the_text_decides_its_score(tmp_path):
    finished(tmp_path)
    other = task()
    object.__setattr__(other, "extra", {"tolerance": 1})
    team = controller(folder=tmp_path, reward=lambda **_: 0.0)
    (episode,) = asyncio.run(team.collect([other], 1, 1)).episodes
    assert not asked(team) and episode.scored.value == 0.0


def test_a_run_that_left_only_a_ledger_is_gone_on_with(tmp_path):
    class Settings:
        resume_mode = "auto"

    assert origin_of(Settings, tmp_path) is None
    written(tmp_path, TURN)
    assert origin_of(Settings, tmp_path) == tmp_path, "so that its settings are compared"
    Settings.resume_mode = "disable"
    assert origin_of(Settings, tmp_path) is None
