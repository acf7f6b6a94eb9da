"""Messages that each runner shows each agent, in order: literal ones from scripted agents."""

import itertools

import pytest

from marl.batch.evidence import ballots_of
from marl.config.policies import policies_by_agent
from marl.config.schema import AgentConfig
from marl.controller.policy_map import PolicyMap
from marl.runners import ENVIRONMENTS, RUNNERS, Decide
from marl.runners.debate import Order, Sees
from marl.runners.graph import Edge, Node, When
from marl.runners.multi_turn import Stop
from marl.runners.tree import Keep, Train
from marl.types import Score
from tests.builders import BUILT_IN, build_runner as build, play

SHORT = {"peer_template": "{agent}:{text}", "separator": " "}
BRIEF = {**SHORT, "instruction": ""}


def transcript(record):
    """Every turn: agent, round, the contents of what it was shown, what it said."""
    turns = sorted(record.turns, key=lambda turn: (turn.round, record.agents.index(turn.agent), turn.branch))
    return [(turn.agent, turn.round, [m["content"] for m in turn.observation], turn.text) for turn in turns]


def says(**texts):
    """A script: agent -> what it says in its first, second … turn; the last of them again and again."""
    answers = {agent: itertools.chain(given, itertools.repeat(given[-1])) for agent, given in texts.items()}
    return lambda agent, round, branch=0: next(answers[agent])


def test_every_runner_has_a_transcript():
    for name in BUILT_IN:
        assert f"test_{name}_transcript" in globals(), name


def test_single_turn_transcript():
    record = play(build("single_turn"), says(alice=["4"], carol=["5"]), roles={"carol": "Guess."})
    assert transcript(record) == [("alice", 1, ["2+2?"], "4"), ("carol", 1, ["2+2?\n\nGuess."], "5")]
    assert record.answer in ("4", "5")


def test_game_transcript():
    runner = build("game", **BRIEF, game={"name": "halves", "rounds": 2})
    record = play(runner, says(alice=["0", "0"], carol=["1", "0"]), roles={"carol": "Differ."})
    assert transcript(record) == [
        ("alice", 1, ["2+2?"], "0"),
        ("carol", 1, ["2+2?\n\nDiffer."], "1"),
        ("alice", 2, ["2+2?", "0", "carol:1"], "0"),
        ("carol", 2, ["2+2?\n\nDiffer.", "1", "alice:0"], "0"),
    ]
    assert [turn.scored.value for turn in record.turns] == [1, 1, 0, 0] and record.answer == "0 0"


def test_debate_transcript():
    record = play(build("debate"), says(alice=["4"], carol=["5", "4"]))
    shown = "carol answered:\n5\n\nConsider the other answers, then give your updated answer."
    assert transcript(record)[2] == ("alice", 2, ["2+2?", "4", shown], "4")
    assert record.answer == "4" and len(record.turns) == 4


def test_debate_in_a_ring_and_with_random_peers():
    def shown(**options):
        record = play(build("debate", **BRIEF, **options), lambda a, r: f"{a}{r}", agents=("a", "b", "c", "d"), seed=5)
        return [messages[-1] for _, round, messages, _ in transcript(record) if round == 2]

    assert shown(sees=Sees.ring) == ["d:d1", "a:a1", "b:b1", "c:c1"]
    assert shown(sees=Sees.ring, num_peers=2) == ["c:c1 d:d1", "a:a1 d:d1", "a:a1 b:b1", "b:b1 c:c1"]
    drawn = shown(sees=Sees.random, num_peers=2)
    assert drawn == shown(sees=Sees.random, num_peers=2), "the episode's seed decides"
    for agent, seen in zip("abcd", drawn, strict=True):
        assert len(seen.split()) == 2 and f"{agent}:" not in seen
    assert len(set(drawn)) > 1 and shown(sees=Sees.random, num_peers=9) == shown()


def test_debate_one_after_another():
    record = play(build("debate", order=Order.sequential, **BRIEF), lambda a, r: f"{a}{r}", agents=("a", "b", "c"))
    assert transcript(record) == [
        ("a", 1, ["2+2?"], "a1"),
        ("b", 2, ["2+2?\n\na:a1"], "b2"),
        ("c", 3, ["2+2?\n\na:a1 b:b2"], "c3"),
        ("a", 4, ["2+2?", "a1", "b:b2 c:c3"], "a4"),
        ("b", 5, ["2+2?\n\na:a1", "b2", "a:a4 c:c3"], "b5"),
        ("c", 6, ["2+2?\n\na:a1 b:b2", "c3", "a:a4 b:b5"], "c6"),
    ]


def test_debate_may_hide_answers_and_show_scores():
    options = {**BRIEF, "peer_template": "{agent} ({score:.0f}, {answer}):{text}"}
    record = play(build("debate", **options), says(alice=["4"], carol=["5"]))
    assert transcript(record)[2][2][-1] == "carol (0, 5):5" and transcript(record)[3][2][-1] == "alice (1, 4):4"
    record = play(build("debate", hide_answers=True, **BRIEF), says(alice=["4"], carol=["5"]))
    assert transcript(record)[2][2][-1] == "carol:?"


@pytest.mark.parametrize("order,turns", [(Order.simultaneous, 4), (Order.sequential, 3)])
def test_debate_stops_on_consensus(order, turns):
    runner = build("debate", num_rounds=5, stop_on_consensus=True, order=order)
    record = play(runner, says(alice=["4"], carol=["5", "4"]) if turns == 4 else says(alice=["5", "4"], carol=["4"]))
    assert len(record.turns) == turns and record.answer == "4"
    abstains = play(runner, says(alice=["none"], carol=["none"]))
    assert len(abstains.turns) == 10 and abstains.answer is None, "nobody's answer is no consensus"


def test_debate_pass_and_leave():
    """An agent that passes keeps its answer and is not quoted anew; one that leaves speaks no more, and its answer counts."""
    runner = build("debate", num_rounds=3, pass_word="pass", leave_word="bye", **BRIEF)
    record = play(
        runner, says(a=["4", "pass", "5"], b=["7", "8 bye"], c=["pass", "pass", "pass"]), agents=("a", "b", "c")
    )
    assert transcript(record) == [
        ("a", 1, ["2+2?"], "4"), ("b", 1, ["2+2?"], "7"), ("c", 1, ["2+2?"], "pass"),
        ("a", 2, ["2+2?", "4", "b:7"], "pass"), ("b", 2, ["2+2?", "7", "a:4"], "8 bye"), ("c", 2, ["2+2?", "pass", "a:4 b:7"], "pass"),
        ("a", 3, ["2+2?", "4", "b:7", "pass", "b:8 bye"], "5"), ("c", 3, ["2+2?", "pass", "a:4 b:7", "pass", "a:4 b:8 bye"], "pass"),
    ]  # fmt: skip
    assert [turn.answers for turn in record.trajectory("a")] == [True, False, True]
    unsure = build("debate", pass_word="pass", decide=Decide.unanimous)
    assert play(unsure, says(a=["4"], b=["pass"]), agents=("a", "b")).answer is None, "who only passes abstains"
    bold = play(build("debate", pass_word="4"), says(a=["4"], b=["4"]), agents=("a", "b"))
    assert all(turn.answers for turn in bold.turns) and bold.answer == "4", "an answer is no pass"
    assert record.answer == "5", "b's last text gives none, and c never answered"


def test_voting_transcript():
    record = play(build("voting"), says(a=["4"], b=["5"], c=["4"]), agents=("a", "b", "c"))
    assert [entry[:3] for entry in transcript(record)] == [(agent, 1, ["2+2?"]) for agent in "abc"]
    assert record.answer == "4"
    runner = build("voting", ballot=True, **{**BRIEF, "instruction": "Which?"})
    record = play(runner, says(a=["4", "4"], b=["5", "9"], c=["6", "6"]), agents=("a", "b", "c"))
    assert transcript(record)[4] == ("b", 2, ["2+2?", "5", "a:4 b:5 c:6 Which?"], "9")
    for seed in range(9):
        record = play(runner, says(a=["4", "4"], b=["5", "9"], c=["6", "6"]), agents=("a", "b", "c"), seed=seed)
        assert record.answer in ("4", "6"), "9 was never proposed"
    invalid = build("voting", ballot=True, decide=Decide.unanimous, **BRIEF)
    assert play(invalid, says(alice=["4", "4"], carol=["5", "9"])).answer is None, "an invalid vote is an abstention"


def test_summary_transcript():
    runner = build("summary", **{**BRIEF, "instruction": "Merge."})
    record = play(runner, says(a=["4"], b=["5"], c=["4"]), agents=("a", "b", "c"), roles={"c": "You merge."})
    assert transcript(record) == [
        ("a", 1, ["2+2?"], "4"),
        ("b", 1, ["2+2?"], "5"),
        ("c", 2, ["2+2?\n\nYou merge.\n\na:4 b:5 Merge."], "4"),
    ]
    assert record.answer == "4"
    first = play(build("summary", summariser="a", **BRIEF), says(a=["9"], b=["5"]), agents=("a", "b"))
    assert transcript(first)[1] == ("a", 2, ["2+2?\n\nb:5"], "9") and first.answer == "9"


def test_chain_transcript():
    runner = build("chain", laps=2, **{**BRIEF, "instruction": "Go on."})
    record = play(runner, lambda agent, round: f"{agent}{round}", agents=("a", "b", "c"))
    assert transcript(record) == [
        ("a", 1, ["2+2?"], "a1"),
        ("b", 2, ["2+2?\n\na:a1 Go on."], "b2"),
        ("c", 3, ["2+2?\n\nb:b2 Go on."], "c3"),
        ("a", 4, ["2+2?", "a1", "c:c3 Go on."], "a4"),
        ("b", 5, ["2+2?\n\na:a1 Go on.", "b2", "a:a4 Go on."], "b5"),
        ("c", 6, ["2+2?\n\nb:b2 Go on.", "c3", "b:b5 Go on."], "c6"),
    ]
    assert [turn.answers for turn in record.turns] == [False] * 5 + [True]
    assert all(turn.answers for turn in play(build("chain", all_answer=True), lambda agent, round: "4").turns)
    runner = build("chain", laps=2, hands_over_all=True, **BRIEF)
    record = play(runner, lambda agent, round: f"{agent}{round}", agents=("a", "b", "c"))
    assert [entry[2][-1] for entry in transcript(record)[2:]] == [
        "2+2?\n\na:a1 b:b2",
        "b:b2 c:c3",
        "c:c3 a:a4",
        "a:a4 b:b5",
    ]


def test_pioneer_observer_transcript():
    runner = build("pioneer_observer", pioneer="carol", **BRIEF)
    record = play(runner, says(alice=["4"], carol=["5"]))
    assert transcript(record) == [("carol", 1, ["2+2?"], "5"), ("alice", 2, ["2+2?\n\ncarol:5"], "4")]
    assert record.answer == "4"


def test_critique_transcript():
    words = {
        "critic_instruction": "Wrong?",
        "reviser_instruction": "Again.",
        "peer_template": "{agent}:{text}",
        "separator": " ",
    }
    record = play(build("critique", **words), says(a=["5", "4"], b=["no 5"]), agents=("a", "b"))
    assert transcript(record) == [
        ("a", 1, ["2+2?"], "5"),
        ("b", 2, ["2+2?\n\na:5 Wrong?"], "no 5"),
        ("a", 3, ["2+2?", "5", "b:no 5 Again."], "4"),
    ]
    assert record.answer == "4" and [turn.answers for turn in record.turns] == [True, False, True]
    record = play(
        build("critique", num_revisions=2, **words), says(a=["5"], b=["no"], c=["6", "4"]), agents=("a", "b", "c")
    )
    assert transcript(record)[2:] == [
        ("c", 3, ["2+2?\n\na:5 b:no Again."], "6"),
        ("b", 4, ["2+2?\n\na:5 Wrong?", "no", "c:6 Wrong?"], "no"),
        ("c", 5, ["2+2?\n\na:5 b:no Again.", "6", "b:no Again."], "4"),
    ]


def test_router_transcript():
    runner = build("router", num_picks=3, stop_word="done", menu="Who of {workers}?", **BRIEF)
    record = play(runner, says(r=["take bo, not al", "al", "done"], al=["4"], bo=["5"]), agents=("r", "al", "bo"))
    assert transcript(record) == [
        ("r", 1, ["2+2?\n\nWho of al, bo?"], "take bo, not al"),
        ("bo", 2, ["2+2?"], "5"),
        ("r", 3, ["2+2?\n\nWho of al, bo?", "take bo, not al", "bo:5 Who of al, bo?"], "al"),
        ("al", 4, ["2+2?\n\nbo:5"], "4"),
        (
            "r",
            5,
            ["2+2?\n\nWho of al, bo?", "take bo, not al", "bo:5 Who of al, bo?", "al", "al:4 Who of al, bo?"],
            "done",
        ),
    ]
    assert record.answer == "4" and not record.counts
    again = play(
        build("router", num_picks=3, menu="?", **BRIEF),
        says(r=["al", "bo", "Al!"], al=["4"], bo=["5"]),
        agents=("r", "al", "bo"),
    )
    assert transcript(again)[5] == ("al", 6, ["2+2?", "4", "bo:5"], "4"), (
        "what was said since its last turn; names in any case"
    )
    twice = play(build("router", num_picks=2), says(r=["al"], al=["4"], bo=["5"]), agents=("r", "al", "bo"))
    assert transcript(twice)[3][2][-1] == "Go on from here."
    nobody = play(build("router"), says(r=["alfred"], al=["4"], bo=["4"]), agents=("r", "al", "bo"))
    assert nobody.counts == {"picked_at_random": 1} and nobody.answer == "4", "alfred is not al"


def test_tree_transcript():
    def script(agent, round, branch=0):
        return "4" if (agent, round, branch) in (("a", 1, 2), ("b", 2, 0)) else f"{round}{branch}"

    runner = build("tree", num_branches=3, **BRIEF)
    record = play(runner, script, agents=("a", "b"))
    entries = transcript(record)
    assert [entry[:3] for entry in entries] == [
        *[(agent, 1, ["2+2?"]) for agent in "aaabbb"],
        *[("a", 2, ["2+2?", "4", ""])] * 3,
        *[("b", 2, ["2+2?\n\na:4"])] * 3,
    ]
    assert [turn.place for turn in record.path] == [("a", 1, 2), ("b", 2, 0)] and record.answer == "4"
    assert all(turn.trained and turn.compared for turn in record.turns)
    alone = play(build("tree", num_branches=3, train=Train.path, **BRIEF), script, agents=("a", "b"))
    assert [turn.place for turn in alone.turns if turn.trained] == [("a", 1, 2), ("b", 2, 0)]
    assert not any(turn.compared for turn in alone.turns)
    votes = play(
        build("tree", num_levels=1, num_branches=3, keep=Keep.majority), says(a=["1", "2", "2"]), agents=("a",)
    )
    assert votes.answer == "2"


def test_self_play_transcript():
    runner = build("self_play", num_rounds=2, swap=False, **BRIEF)
    record = play(runner, lambda agent, round: f"{agent}{round}", agents=("a", "b"))
    assert transcript(record) == [
        ("a", 1, ["2+2?"], "a1"),
        ("b", 2, ["2+2?\n\na:a1"], "b2"),
        ("a", 3, ["2+2?", "a1", "b:b2"], "a3"),
        ("b", 4, ["2+2?\n\na:a1", "b2", "a:a3"], "b4"),
    ]
    first = {play(build("self_play"), lambda a, r: "4", agents=("a", "b"), seed=s).turns[0].agent for s in range(20)}
    assert first == {"a", "b"}, "who begins is drawn"


def test_multi_turn_transcript():
    record = play(build("multi_turn", num_turns=3, instruction="Sure?"), says(a=["5", "6", "4"]), agents=("a",))
    assert transcript(record)[2] == ("a", 3, ["2+2?", "5", "Sure?", "6", "Sure?"], "4") and record.answer == "4"


def test_multi_turn_with_a_simulated_user():
    runner = build("multi_turn", num_turns=4, user="u", stop_words=["thanks"])
    roles = {"u": "You are the user."}
    record = play(runner, says(a=["5", "4"], u=["no", "thanks"]), agents=("a", "u"), roles=roles)
    assert transcript(record) == [
        ("a", 1, ["2+2?"], "5"),
        ("u", 2, ["2+2?\n\nYou are the user.\n\n5"], "no"),
        ("a", 3, ["2+2?", "5", "no"], "4"),
        ("u", 4, ["2+2?\n\nYou are the user.\n\n5", "no", "4"], "thanks"),
    ]
    assert record.answer == "4" and [turn.answers for turn in record.trajectory("u")] == [False, False]


def test_multi_turn_in_an_environment():
    record = play(build("multi_turn", num_turns=5, environment="verifier"), says(a=["5", "4"]), agents=("a",))
    assert transcript(record) == [
        ("a", 1, ["2+2?"], "5"),
        ("a", 2, ["2+2?", "5", "That is not right. Try again."], "4"),
    ]
    assert ENVIRONMENTS.names() == ["verifier"]


@pytest.mark.parametrize(
    "stop,answers,turns",
    [(Stop.answered, ["?", "7", "8"], 2), (Stop.repeated, ["?", "?", "7", "7", "8"], 4), (Stop.right, ["5", "4", "4"], 2), (Stop.never, ["4", "4"], 6)],
)  # fmt: skip
def test_multi_turn_stops(stop, answers, turns):
    record = play(build("multi_turn", num_turns=6, stop=stop), says(a=answers), agents=("a",))
    assert len(record.turns) == turns


DEBATE = {
    "start": "first",
    "nodes": {"first": Node(), "discuss": Node(sees=["first", "discuss"], instruction="Again.")},
    "edges": [Edge("first", ["discuss"]), Edge("discuss", ["discuss"], limit=1)],
}
SUMMARY = {
    "start": "work",
    "nodes": {"work": Node(agents=["a", "b"]), "merge": Node(agents=["c"], sees=["work"], instruction="Again.")},
    "edges": [Edge("work", ["merge"])],
}


@pytest.mark.parametrize(
    "graph,name,options", [(DEBATE, "debate", {"num_rounds": 3}), (SUMMARY, "summary", {})], ids=["debate", "summary"]
)
def test_graph_transcript(graph, name, options):
    """It reproduces debate and summary message by message, and decides alike."""
    for seed in range(5):
        script = lambda agent, round: str((ord(agent) + round * 3) % 4)  # noqa: E731
        expected = play(
            build(name, instruction="Again.", **SHORT, **options), script, agents=("a", "b", "c"), seed=seed
        )
        got = play(build("graph", **graph, **SHORT), script, agents=("a", "b", "c"), seed=seed)
        assert transcript(got) == transcript(expected) and got.answer == expected.answer
        assert len(got.turns) == (9 if name == "debate" else 3)


def test_graph_conditions_and_limits():
    """Two solve; while they differ a judge is asked, three times at most, and sends them back; who says so ends it."""
    runner = build(
        "graph", start="solve", **SHORT,
        nodes={"solve": Node(["a", "b"], sees=["judge"]), "judge": Node(["j"], sees=["solve"], answers=False)},
        edges=[
            Edge("solve", ["judge"], When.disagreed, limit=3),
            Edge("judge", ["solve"], When.says, word="again", limit=9),
        ],
        decided_by=["solve"],
    )  # fmt: skip
    agents = ("a", "b", "j")
    record = play(runner, says(a=["4", "4"], b=["5", "4"], j=["again"]), agents=agents)
    assert [(t[0], t[1], t[3]) for t in transcript(record)] == [
        ("a", 1, "4"), ("b", 1, "5"), ("j", 2, "again"), ("a", 3, "4"), ("b", 3, "4"),
    ]  # fmt: skip
    assert transcript(record)[2][2] == ["2+2?\n\na:4 b:5"] and transcript(record)[3][2] == ["2+2?", "4", "j:again"]
    assert record.answer == "4"
    for_ever = play(runner, says(a=["4"], b=["5"], j=["again"]), agents=agents)
    assert len(for_ever.turns) == 2 * 4 + 3, "the limit holds"
    enough = play(runner, says(a=["4"], b=["5"], j=["stop"]), agents=agents)
    assert len(enough.turns) == 3


def test_graph_speaks_at_several_nodes_at_once():
    runner = build(
        "graph", start="plan", **SHORT,
        nodes={"plan": Node(["a"], answers=False), "left": Node(["b"], sees=["plan"]), "right": Node(["c"], sees=["plan"]),
               "join": Node(["a"], sees=["left", "right"])},
        edges=[Edge("plan", ["left", "right"]), Edge("right", ["join"])],
    )  # fmt: skip
    record = play(runner, says(a=["p", "4"], b=["x"], c=["y"]), agents=("a", "b", "c"))
    assert transcript(record) == [
        ("a", 1, ["2+2?"], "p"), ("b", 2, ["2+2?\n\na:p"], "x"), ("c", 2, ["2+2?\n\na:p"], "y"),
        ("a", 3, ["2+2?", "p", "b:x c:y"], "4"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name,options,agents,says_",
    [
        ("summary", {}, ("a",), "runner=summary is played by at least 2 agents, and agents names 1"),
        ("self_play", {}, ("a", "b", "c"), "runner=self_play is played by 2 agents"),
        ("critique", {}, ("a",), "2 to 3 agents"),
        ("summary", {"summariser": "aa"}, ("a", "b"), "runner.summariser=aa: no such agent; expected one of a, b"),
        ("multi_turn", {}, ("a", "b"), "runner.user=None.*played by one agent"),
        ("multi_turn", {"user": "b", "environment": "verifier"}, ("a", "b"), "would both reply"),
        ("multi_turn", {"stop_words": ["bye", ""]}, ("a",), "runner.stop_words=.*an empty word"),
        ("debate", {"hide_answers": True, "peer_template": "{answer}"}, ("a",), "runner.hide_answers=true"),
        ("graph", {"nodes": {"answer": Node(agents=["a", "a"])}}, ("a",), "'a' would speak 2 times at once"),
        ("graph", {"nodes": {"answer": Node(), "x": Node(), "y": Node()}, "edges": [Edge("answer", ["x", "y"])]}, ("a",), r"edges\[0\].to=.*2 times at once"),
        ("graph", {"nodes": {"answer": Node(answers=False)}}, ("a",), "the team would never answer"),
        ("graph", {"nodes": {"answer": Node(), "x": Node()}, "edges": [Edge("x", ["x"])]}, ("a",), "runner.nodes.x: no way leads there"),
        ("multi_turn", {"environment": "verifer"}, ("a",), "Did you mean 'verifier'"),
        ("graph", {"start": "x", "nodes": {"answer": Node()}}, ("a",), "runner.start: there is no node 'x'; expected one of answer"),
        ("graph", {"nodes": {"answer": Node(agents=["bo"])}}, ("a",), r"runner.nodes.answer.agents=bo: no such agent"),
        ("graph", {"nodes": {"answer": Node(), "x": Node()}}, ("a",), "runner.nodes.x: no way leads there"),
        ("graph", {"nodes": {"answer": Node(agents=["a"])}}, ("a", "b"), "agents.b: no node of runner.nodes lets it speak"),
        ("graph", {"edges": [Edge("answer", ["y"])]}, ("a",), r"runner.edges\[0\]: there is no node 'y'"),
        ("graph", {"edges": [Edge("answer", ["answer"], When.says)]}, ("a",), "a word if and only if when=says"),
    ],
)  # fmt: skip
def test_invalid_teams_are_refused(name, options, agents, says_):
    with pytest.raises(ValueError, match=says_):
        build(name, **options).check(agents)


OF_RUNNER = {"graph": DEBATE, "game": {"game": {"name": "halves", "rounds": 3}}}


@pytest.mark.parametrize("name", [name for name in BUILT_IN if RUNNERS.get(name).append_only])
def test_a_runner_that_promises_it_lets_contexts_grow_append_only(name):
    options = {"num_rounds": 3, "laps": 2, "num_turns": 3, "num_picks": 3, "num_revisions": 2, "ballot": True}
    fields = RUNNERS.get(name).Config.__dataclass_fields__
    given = {key: value for key, value in options.items() if key in fields} | OF_RUNNER.get(name, {})
    agents = {"multi_turn": ("a",), "game": ("a", "b")}.get(
        name, ("a", "b", "c")[: RUNNERS.get(name).num_agents[1] or 3]
    )
    record = play(build(name, **given), lambda agent, round: f"{agent}{round} 1", agents=agents)
    pairs = [pair for agent in agents for pair in itertools.pairwise(record.trajectory(agent))]
    assert pairs or name in ("single_turn", "summary", "pioneer_observer")
    for before, after in pairs:
        extended = [*before.observation, {"role": "assistant", "content": before.text}]
        assert after.observation[: len(extended)] == extended


def test_most_turns_is_what_a_long_episode_takes():
    for name in BUILT_IN:
        agents = {"multi_turn": ("a",)}.get(name, ("a", "b", "c")[: RUNNERS.get(name).num_agents[1] or 3])
        options = DEBATE if name == "graph" else {"num_turns": 3} if name == "multi_turn" else {}
        runner = build(name, **options)
        record = play(runner, lambda agent, round, branch=0: f"{agent} {round}", agents=agents)
        most = runner.most_turns(agents)
        for agent in agents:
            spoken = len([turn for turn in record.turns if turn.agent == agent])
            assert spoken <= most[agent] and (spoken == most[agent] or name == "router"), name


@pytest.mark.parametrize(
    "rule,answers,expected",
    [
        (Decide.majority, ["4", "5", "5"], "5"),
        (Decide.unanimous, ["4", "5", "5"], None),
        (Decide.unanimous, ["5", "5", "5"], "5"),
        (Decide.unanimous, ["5", "5", "none"], None),
        (Decide.last, ["4", "5", "6"], "6"),
        (Decide.last, ["4", "5", "none"], None),
        (Decide.verifier, ["4", "5", "5"], "4"),
        (Decide.accuracy, ["4", "5", "5"], "4"),
    ],
)
def test_a_team_decides(rule, answers, expected):
    """The score of 4 is 1; in training so far a was right .9 of the time, b and c .4 together."""
    accuracy = {"a": 0.9, "b": 0.2, "c": 0.2}
    script = says(a=answers[:1], b=answers[1:2], c=answers[2:])
    record = play(build("single_turn", decide=rule), script, agents=("a", "b", "c"), accuracy=accuracy)
    assert record.answer == expected


def test_the_last_turn_decides_and_not_the_last_seat():
    """b leaves in its second turn; a still speaks in the third."""
    runner = build("debate", order=Order.sequential, num_rounds=3, leave_word="LEAVE", decide=Decide.last)
    record = play(runner, says(a=["3", "3", "4"], b=["5", "5 LEAVE"]), agents=("a", "b"))
    assert max(turn.round for turn in record.turns if turn.agent == "b") < record.turns[-1].round
    assert record.answer == "4" and [vote.agent for vote in record.ballot.votes] == ["b", "a"]


def test_who_only_passes_does_not_decide_last():
    runner = build("debate", num_rounds=2, pass_word="PASS", decide=Decide.last)
    assert play(runner, says(a=["PASS"], b=["5", "PASS"]), agents=("a", "b")).answer == "5"
    assert play(runner, says(a=["3", "4"], b=["PASS"]), agents=("a", "b")).answer == "4"


def test_earlier_ballots_of_the_last_turn_are_those_of_shorter_debates():
    """After one round b decided; in the second a spoke last, for b passed."""
    whole, short = (
        play(
            build("debate", num_rounds=rounds, pass_word="PASS", decide=Decide.last),
            says(a=["3", "4"], b=["5", "PASS"]),
            agents=("a", "b"),
        )
        for rounds in (2, 1)
    )
    for record in (whole, short):
        for turn in record.turns:
            turn.score = Score(float(turn.text == "5"), turn.text)
    first, decided = ballots_of(whole)
    assert (
        [(vote.agent, vote.round) for vote in first.votes]
        == [(vote.agent, vote.round) for vote in short.ballot.votes]
        == [("a", 1), ("b", 1)]
    )
    assert [vote.agent for vote in decided.votes] == ["b", "a"] and whole.answer == "4"


def test_policies_of_rounds():
    agents = {
        "a": AgentConfig(policy_by_round=["first", "later"]),
        "b": AgentConfig(policy="later"),
        "c": AgentConfig(),
    }
    known = PolicyMap(agents)
    assert [known.policy("a", r) for r in (1, 2, 3)] == ["first", "later", "later"]
    assert [known.policy("b", 1), known.policy("c", 5)] == ["later", "c"]
    assert known.agents("later") == ["a", "b"] and policies_by_agent(agents)["c"] == ["c"]


def test_agents_exchange_their_policies_every_few_steps():
    """Two exchanges are none: of two agents. The validation before the first step sees what the first step does."""
    two = PolicyMap({"a": AgentConfig(policy="p"), "b": AgentConfig(policy="q")}, exchange_every=3)
    held = ["".join(two.at(step).policy(agent, 1) for agent in "ab") for step in range(11)]
    assert held == ["pq"] * 4 + ["qp"] * 3 + ["pq"] * 3 + ["qp"]
    assert two.at(4).agents("q") == ["a"] and two.at(4).label("a", "q") == "a"
    three = PolicyMap(dict.fromkeys("abc", AgentConfig()), exchange_every=1)
    assert [three.at(step).policy("a", 1) for step in (1, 2, 3, 4)] == ["a", "b", "c", "a"]
    assert PolicyMap({"a": AgentConfig(), "b": AgentConfig()}).at(100).policy("a", 1) == "a"
