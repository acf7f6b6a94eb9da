"""Choice of whose turns an agent imitates: those of a team, of one agent, or the answer that the team gave. From dumps, as they are read."""

import pytest

from marl.config.errors import ConfigError
from marl.config.sources import Source
from marl.controller.method_data import read_items
from marl.methods.examples import encoded, policy_rows
from marl.methods.teachers import Target
from marl.report import dump
from marl.types import Episode, Score, Task, Turn
from tests.builders import Letters
from tests.method_rows import method

ASKED = [{"role": "user", "content": "2 + 2"}]
PRIVATE = [{"role": "user", "content": "two and two"}]


def said(agent, round, text, answer, score=0.0):
    seen = [{"role": "user", "content": f"{agent} in {round}"}]
    return Turn(agent, round, seen, text, policy=agent, stop_reason="completed", score=Score(score, answer))


def debate(sample=0):
    """Two rounds: a says 5, then 4; b says 4, then 4, and the team answers 4."""
    record = Episode(Task("t", ASKED, "4", "x", str), sample, ["a", "b"])
    record.turns = [
        said("a", 1, "five", "5"),
        said("b", 1, "four", "4", 1.0),
        said("a", 2, "so four", "4", 1.0),
        said("b", 2, "still four", "4", 1.0),
    ]
    record.answer, record.score = "4", Score(1.0, "4")
    return record


@pytest.fixture
def learned(tmp_path):
    """Give what ``sft`` makes of a dump of these episodes: each side's policy, agent, first message and text."""

    def learned(speakers, *records, **options):
        path = dump.write(records, 1, tmp_path)
        sft = method("sft", source=Source.episodes, **options)
        items = read_items(sft, Source.episodes, [str(path)], speakers, "data.train_files")
        sides = [side for item in items for example in item for side in example.sides]
        return [[(t.policy, t.agent, t.observation[0]["content"], t.text) for t in side] for side in sides]

    return learned


def test_a_team_is_distilled_into_the_policy_that_all_share(learned):
    assert learned({"a": ["team"], "b": ["team"]}, debate()) == [
        [
            ("team", "a", "a in 1", "five"),
            ("team", "b", "b in 1", "four"),
            ("team", "a", "a in 2", "so four"),
            ("team", "b", "b in 2", "still four"),
        ]
    ]


def test_a_thought_is_taught_from_a_dump(tmp_path):
    record = debate()
    record.turns[1].thought = "hm"
    path = dump.write([record], 1, tmp_path)
    items = read_items(
        method("sft", source=Source.episodes), Source.episodes, [str(path)], {"b": ["b"]}, "data.train_files"
    )
    (side,) = [side for item in items for example in item for side in encoded(example, {"b": Letters()}).sides]
    assert [turn.response_ids for turn in side] == [[*map(ord, text), 0] for text in ("hm: four", "still four")]


def test_the_teams_answer_is_what_one_agent_says_at_once(learned):
    """The last turn that gave it, after the task as it was set; the student need not have played."""
    assert learned({"solo": ["solo"]}, debate(), target=Target.team_answer) == [
        [("solo", "solo", "2 + 2", "still four")]
    ]
    cut, silent = debate(), debate()
    cut.turns[3].stop_reason = "length"
    assert learned({"solo": ["solo"]}, cut, target=Target.team_answer)[0][0][-1] == "so four"
    thoughtful = debate()
    thoughtful.turns[3].thought, thoughtful.turns[3].response_ids = "hm", [6]
    (example,) = method("sft", target=Target.team_answer).of_episodes([thoughtful], {"solo": ["solo"]}).examples
    (own,) = example.sides[0]
    assert (own.thought, own.text, own.response_ids) == ("hm", "still four", []), "encoded anew, as from a dump"
    silent.answer = None
    assert len(learned({"solo": ["solo"]}, debate(), silent, target=Target.team_answer)) == 1


def test_every_agent_learns_the_teams_answer_after_its_own_prompt_and_a_shared_policy_once(learned):
    record = debate()
    object.__setattr__(record.task, "extra", {"agent_prompts": {"b": PRIVATE}})
    own = learned({"a": ["first", "later"], "b": ["b"]}, record, target=Target.team_answer)
    assert own == [[("first", "a", "2 + 2", "still four"), ("b", "b", "two and two", "still four")]]
    shared = learned({"a": ["team"], "c": ["team"]}, debate(), target=Target.team_answer)
    assert shared == [[("team", "a", "2 + 2", "still four")]]


def test_all_agents_learn_from_one(learned):
    found = learned({"b": ["b"], "c": ["first", "later"]}, debate(), from_agent="a")
    assert found == [
        [
            ("b", "b", "a in 1", "five"),
            ("first", "c", "a in 1", "five"),
            ("b", "b", "a in 2", "so four"),
            ("later", "c", "a in 2", "so four"),
        ]
    ]


def test_some_agents_learn_from_another_and_the_rest_from_themselves(learned):
    found = learned({"a": ["a"], "b": ["b"]}, debate(), from_agent={"b": "a"})
    assert found[0][:2] == [("a", "a", "a in 1", "five"), ("b", "b", "a in 1", "five")] and len(found[0]) == 4
    shared = learned({"a": ["team"], "b": ["team"]}, debate(), from_agent={"b": "a"})
    assert [turn[2:] for turn in shared[0]] == [("a in 1", "five"), ("a in 2", "so four")], (
        "a policy learns a turn once"
    )


def test_a_turn_that_was_played_is_encoded_anew_for_another_policy():
    record = debate()
    for turn in record.turns:
        turn.prompt_ids, turn.response_ids, turn.response_mask, turn.log_probs = [5], [6], [1], [-1.0]
    sft = method("sft", from_agent="a", min_score=None)
    (example,) = sft.of_episodes([record], {"a": ["a"], "b": ["b"]}).examples
    rows = policy_rows([encoded(example, {"a": Letters(), "b": Letters()})], pack=False)
    assert [row.tolist() for row in rows["a"]["responses"].unbind()] == [[6], [6]]
    assert [row.tolist() for row in rows["b"]["responses"].unbind()] == [
        [*map(ord, text), 0] for text in ("five", "so four")
    ]
    assert [turn.agent for turn in record.turns] == ["a", "b", "a", "b"], "the episode itself stays as it was"
    record.turns[0].thought = "hm"
    record.turns[2].thought, record.turns[2].response_mask = "the tool says 4", [1, 0, 1]
    (example,) = sft.of_episodes([record], {"b": ["b"]}).examples
    side = encoded(example, {"b": Letters()}).sides[0]
    assert [turn.response_ids for turn in side] == [[*map(ord, text), 0] for text in ("hm: five", "so four")]


def test_a_shared_policy_learns_the_ids_that_its_teacher_sampled():
    record = debate()
    for turn in record.turns:
        turn.policy, turn.prompt_ids, turn.response_ids = "team", [5], [6]
    (example,) = method("sft", from_agent="b").of_episodes([record], {"a": ["team"], "b": ["team"]}).examples
    assert [(turn.agent, turn.response_ids) for turn in example.sides[0]] == [("b", [6])] * 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"from_agent": "aa"}, ["method.from_agent names 'aa'", "one of a, b"]),
        ({"from_agent": {"b": "c"}}, ["method.from_agent names 'c'", "data.train_files", "one of a, b"]),
        ({"target": Target.team_answer}, ["nothing to learn", "no turn to learn from"]),
    ],
)
def test_a_teacher_or_a_turn_that_is_not_there_is_named(learned, options, expected):
    record = debate()
    record.answer = "7"
    with pytest.raises(ConfigError) as caught:
        learned({"a": ["a"], "b": ["b"]}, record, **options)
    assert all(part in str(caught.value) for part in expected), str(caught.value)
