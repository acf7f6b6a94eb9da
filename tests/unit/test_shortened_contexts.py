"""Conversations that outgrow the context limit: as they are played, played again, and resumed with another answer."""

import asyncio

import pytest

from marl.runners import RUNNERS, Overflow, RecordedAnswers, ReplayDiverged, scripted
from marl.runners.messages import SUMMARISE
from marl.types import ContextOverflow, Task

TASK = Task("t", [{"role": "user", "content": "2+2?"}], "4", "x", lambda text: text or None)
LIMIT = 120
LONG = {1: "a" * 10, 2: "b" * 100, 3: "c" * 10, 4: "d" * 10}
SHORT = LONG | {2: "B" * 10}
REQUEST = SUMMARISE.partition("{")[0]


@pytest.fixture(autouse=True)
def short_note(monkeypatch):
    monkeypatch.setattr("marl.runners.messages.SUMMARY", "{summary}")


def multi_turn(overflow):
    cls = RUNNERS.get("multi_turn")
    return cls(cls.Config("multi_turn", num_turns=4, instruction="Again.", overflow=overflow))


def within_limit(texts, note=""):
    """Answers by round, and a note, by a model that reads ``LIMIT`` characters; a note's request is read at any length, unless
    the note is None."""

    async def generate(agent, observation, round, previous, branch):
        asks_note = observation[0]["content"].startswith(REQUEST)
        if sum(len(message["content"]) for message in observation) > LIMIT and (not asks_note or note is None):
            raise ContextOverflow("long")
        said = scripted.scripted(lambda *_: note if asks_note else texts[round])
        return await said(agent, observation, round, previous, branch)

    return generate


def play(overflow, generate):
    return asyncio.run(scripted.play(multi_turn(overflow), TASK, ["a"], generate))


def shown(record):
    return [len(turn.observation) for turn in record.turns if turn.kept], dict(record.counts)


def resumed(overflow, record, texts, note=""):
    """From round 2 on, with other answers."""
    other = next(turn for turn in play(overflow, within_limit(texts, note)).turns if turn.place == ("a", 2, 0))
    return play(overflow, RecordedAnswers(record, within_limit(texts, note), {("a", 2, 0): other}))


@pytest.mark.parametrize(("overflow", "count"), [("drop_oldest", "dropped_rounds"), ("summarise", "summaries")])
def test_an_alternative_that_is_shorter_is_shown_all_that_fits(overflow, count):
    overflow = Overflow[overflow]
    record = play(overflow, within_limit(LONG, "note"))
    assert shown(record) == ([1, 3, 3, 3], {count: 2})
    fresh = play(overflow, within_limit(SHORT, "note"))
    assert shown(fresh) == ([1, 3, 5, 7], {})
    again = resumed(overflow, record, SHORT, "note")
    assert shown(again) == shown(fresh) and [t.observation for t in again.turns] == [t.observation for t in fresh.turns]


@pytest.mark.parametrize("overflow", ["drop_oldest", "summarise"])
def test_an_alternative_that_is_as_long_is_shown_less_as_before(overflow):
    record = play(Overflow[overflow], within_limit(LONG, "note"))
    again = resumed(Overflow[overflow], record, LONG | {2: "B" * 100}, "note")
    assert shown(again) == shown(record)


@pytest.mark.parametrize("overflow", ["drop_oldest", "summarise"])
def test_a_record_that_was_shortened_is_played_again_as_it_is(overflow):
    """Nobody is asked what fits."""
    record = play(Overflow[overflow], within_limit(LONG, "note"))
    again = play(Overflow[overflow], RecordedAnswers(record))
    assert again.turns == record.turns and again.counts == record.counts


@pytest.mark.parametrize("note", ["", " \n", None])
def test_a_conversation_without_a_note_loses_its_oldest_part(note):
    """A note whose thought is never closed is empty; None: the part to sum up is itself too long to be read."""
    record = play(Overflow.summarise, within_limit(LONG, note))
    dropped = play(Overflow.drop_oldest, within_limit(LONG))
    assert shown(record) == ([1, 3, 3, 3], {"dropped_rounds": 2}) == shown(dropped)
    assert [turn.observation for turn in record.turns if turn.kept] == [turn.observation for turn in dropped.turns]
    notes = [turn for turn in record.turns if not turn.kept]
    assert [turn.place for turn in notes] == [("a", 3, -1), ("a", 4, -1)][: 2 * (note is not None)]
    assert not any(turn.trained or turn.answers for turn in notes)


@pytest.mark.parametrize("note", ["", None])
def test_a_record_without_a_note_is_played_again_and_resumed(note):
    record = play(Overflow.summarise, within_limit(LONG, note))
    again = play(Overflow.summarise, RecordedAnswers(record))
    assert again.turns == record.turns and again.counts == record.counts
    fresh = play(Overflow.summarise, within_limit(SHORT, note))
    assert shown(resumed(Overflow.summarise, record, SHORT, note)) == shown(fresh) == ([1, 3, 5, 7], {})


def test_a_record_of_another_runner_is_refused_as_ever():
    record = play(Overflow.summarise, within_limit(LONG, None))
    record.turns = record.turns[:3]
    with pytest.raises(ReplayDiverged, match="holds no turn of 'a' in round 4, branch 0"):
        play(Overflow.summarise, RecordedAnswers(record))
