"""Lengths of prompts and of a central critic's observation, against lengths counted by hand."""

import asyncio
import copy
import logging
import time

import pyarrow.parquet
import pytest

from marl.config.errors import ConfigError
from marl.controller.chat import ChatEncoder
from marl.preflight import prompt_growth
from marl.preflight.plan_report import growth_text, plan_text
from marl.preflight.prepare import prepare
from marl.preflight.prompt_growth import Seat, length_of, measure, spoken
from marl.preflight.prompts import FirstPrompts
from marl.quickstart.model import build_tokenizer
from marl.runners import RUNNERS, Runner, TooManyTurns
from marl.runners.graph import Edge, Node, When
from marl.runners.messages import Instructions
from marl.types import Task

QUESTION = "Ann has 3 apples ."  # 5 tokens of a word each; <|user|> before and <|assistant|> after make 7
TASK = Task("t", [{"role": "user", "content": QUESTION}], "3", "x", str)


@pytest.fixture(scope="module")
def encoder():
    return ChatEncoder(build_tokenizer())


@pytest.fixture
def grown(encoder):
    """The longest prompt of every round, of agents whose answers have so many tokens."""

    def grown(name, *, tokens=3, ends=False, limit=1000, agents=("alice", "carol"), **settings):
        kind = RUNNERS.get(name)
        runner = kind(kind.Config(name, **settings))
        seats = lambda agent, round: Seat(agent, encoder, tokens, ends)  # noqa: E731
        return measure(runner, [TASK], seats, dict.fromkeys(agents, Instructions()), limit)

    return grown


BRIEF = {"peer_template": "{agent} said {text}", "separator": " ", "instruction": ""}


def test_the_shortest_and_the_longest_answers_of_a_debate(grown):
    # a round more: the own answer, its end where it was cut off, <|user|>, two words and the peer's answer, <|assistant|>
    longest = grown("debate", num_rounds=3, **BRIEF)
    assert longest.by_round == {1: 7, 2: 7 + 3 + 1 + 1 + 2 + 3 + 1, 3: 7 + 2 * 11} and longest.unknown == ""
    shortest = grown("debate", num_rounds=3, tokens=1, ends=True, **BRIEF)
    assert shortest.by_round == {1: 7, 2: 7 + 2 + 1 + 2 + 1 + 1, 3: 7 + 2 * 7}
    assert longest.prompt == 29 and shortest.prompt == 21


def test_a_conversation_that_may_end_early_is_played_to_its_end(grown):
    whole = grown("debate", num_rounds=4, **BRIEF).by_round
    assert grown("debate", num_rounds=4, stop_on_consensus=True, **BRIEF).by_round == whole
    turns = grown("multi_turn", num_turns=4, instruction="Again .", agents=("alice",)).by_round
    for stop in ("answered", "repeated", "right"):
        settings = {"stop": RUNNERS.get("multi_turn").Config.stop.__class__(stop), "instruction": "Again ."}
        assert grown("multi_turn", num_turns=4, agents=("alice",), **settings).by_round == turns


def test_edges_that_only_some_answers_open_are_gone_through(grown):
    nodes = {"answer": Node(), "more": Node(sees=["answer"])}
    for when, word in (
        (When.agreed, ""),
        (When.disagreed, ""),
        (When.right, ""),
        (When.wrong, ""),
        (When.says, "apples"),
    ):
        growth = grown("graph", nodes=nodes, edges=[Edge("answer", ["more"], when, word)])
        assert len(growth.by_round) == 2, when


def test_stages_of_a_game_and_picks_of_a_router_are_reached(grown):
    game = grown("game", game={"name": "matrix", "payoffs": "happo", "rounds": 3}, **BRIEF)
    assert len(game.by_round) == 3, game
    assert len(grown("router", num_picks=2, agents=("alice", "carol", "bob")).by_round) == 4


def test_what_is_made_shorter_is_measured_as_it_is_shown(grown):
    from marl.runners import Overflow

    shortened = grown("debate", num_rounds=5, limit=20, overflow=Overflow.drop_oldest, **BRIEF)
    assert shortened.prompt <= 20 and len(shortened.by_round) == 5
    # the task, one's own answer and what came after it stay: 18 tokens
    assert grown("debate", num_rounds=5, limit=17, overflow=Overflow.drop_oldest, **BRIEF).prompt == 18


def test_an_answer_has_as_many_tokens_as_it_is_to_have(encoder, bpe_tokenizer):
    for own in (encoder, ChatEncoder(bpe_tokenizer)):
        for tokens in (1, 2, 7, 100):
            assert length_of(own, spoken(own, tokens, "", QUESTION)) == tokens
        assert spoken(own, 9, "apples", QUESTION).startswith("apples ")


class Broken(Runner):
    async def run(self, episode):
        await episode.agents[0].act(episode.agents[0].prompt)
        raise LookupError("no such server")


class Endless(Runner):
    async def run(self, episode):
        while True:
            await episode.agents[0].act(episode.agents[0].prompt)


def test_a_runner_that_cannot_be_played_yet_is_not_refused_and_one_that_breaks_its_word_is(encoder):
    def played(kind):
        return measure(
            kind(Runner.Config("own")), [TASK], lambda a, r: Seat(a, encoder, 3), {"alice": Instructions()}, 99
        )

    assert played(Broken).unknown == "LookupError: no such server"
    with pytest.raises(TooManyTurns, match="runner=own"):
        played(Endless)


class Waiting(Runner):
    async def run(self, episode):
        await asyncio.sleep(60)


class Blocking(Runner):
    async def run(self, episode):
        time.sleep(20)


class Impatient(Runner):
    async def run(self, episode):
        raise TimeoutError("no answer")


def test_the_deadline_is_the_runners_own_and_named_as_such(encoder, monkeypatch):
    monkeypatch.setattr(prompt_growth, "DEADLINE_S", 0.2)

    def unknown(kind):
        return measure(
            kind(Runner.Config("own")), [TASK], lambda a, r: Seat(a, encoder, 3), {"alice": Instructions()}, 99
        ).unknown

    assert unknown(Waiting) == "a conversation did not end within 0.2 s"
    assert unknown(Impatient) == "TimeoutError: no answer"
    began = time.monotonic()
    assert unknown(Blocking) == "a conversation was blocked for 0.6 s by a call that waits without await"
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_encoding_long_answers_takes_none_of_the_runners_time(grown, monkeypatch):
    def slowly(*arguments):
        time.sleep(0.15)
        return spoken(*arguments)

    monkeypatch.setattr(prompt_growth, "DEADLINE_S", 0.2)
    monkeypatch.setattr(prompt_growth, "spoken", slowly)
    growth = grown("debate", num_rounds=2, **BRIEF)
    assert growth.unknown == "" and len(growth.by_round) == 2


def test_an_answer_is_made_once_for_all_turns_of_its_length(grown, monkeypatch):
    made = []
    monkeypatch.setattr(prompt_growth, "length_of", lambda *of: made.append(of) or length_of(*of))
    prompt_growth.spoken.cache_clear()
    assert len(grown("debate", num_rounds=5, tokens=11, **BRIEF).by_round) == 5
    assert len(made) <= prompt_growth.TRIED


def test_a_central_critics_unknown_observation_is_warned_of(quickstart, caplog, monkeypatch):
    monkeypatch.setattr("marl.runners.debate.Debate.run", Impatient.run)
    with caplog.at_level(logging.WARNING):
        setup = prepare(quickstart("learner=mappo"))
    (warned,) = [record.getMessage() for record in caplog.records if "central critic" in record.getMessage()]
    assert "learner=mappo" in warned and "TimeoutError: no answer" in warned
    assert "critic.ppo_max_token_len_per_gpu" in warned
    assert "runner=debate: TimeoutError: no answer" in growth_text(setup)


@pytest.fixture
def quickstart(compose_config, cold_assets):
    return lambda *overrides: compose_config(f"assets={cold_assets}", *overrides)


def test_prompts_that_cannot_fit_are_refused_before_the_start(quickstart):
    with pytest.raises(ConfigError) as caught:
        prepare(quickstart("runner.num_rounds=9"))
    text = str(caught.value)
    assert text.startswith("data.max_prompt_length=40: prompts grow to ") and "runner=debate, by round: 1" in text
    assert (
        "single token" in text
        and "runner.overflow=drop_oldest" in text
        and "set data.max_prompt_length to at least" in text
    )
    prepare(quickstart("runner.num_rounds=9", "runner.overflow=drop_oldest"))


@pytest.mark.parametrize("place", [2, 150], ids=["among the first", "later"])
def test_a_row_that_is_too_long_is_named_at_the_start(quickstart, tmp_path, caplog, place):
    plain = quickstart()
    rows = pyarrow.parquet.read_table(plain.data.train_files).slice(0, 1).to_pylist() * 200
    long = copy.deepcopy(rows[0])
    long["prompt"][-1]["content"] = " ".join([long["prompt"][-1]["content"]] * 9)
    rows[place] = {**long, "extra_info": None}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    prepare(quickstart(f"data.train_files={tmp_path / 'rows.parquet'}"))
    assert (
        "rows.parquet: at least 1 rows are longer than data.max_prompt_length=40 before anybody speaks" in caplog.text
    )
    assert f"teach nothing: row {place} (" in caplog.text and "data.filter_overlong_prompts=true" in caplog.text
    caplog.clear()
    prepare(quickstart(f"data.train_files={tmp_path / 'rows.parquet'}", "data.filter_overlong_prompts=true"))
    assert "longer than" not in caplog.text


def test_the_plan_shows_how_prompts_grow_and_warns_of_answers_that_are_too_long(quickstart):
    plan = plan_text(prepare(quickstart()))
    assert "\nprompts grow to" in plan and "with the longest answers; data.max_prompt_length=40" in plan
    assert "warning" not in plan
    longer = growth_text(prepare(quickstart("data.max_response_length=16")))
    assert "warning: an episode is refused where a prompt exceeds data.max_prompt_length=40" in longer
    assert "lower data.max_response_length=16" in longer
    assert "warning" not in growth_text(prepare(quickstart("data.max_response_length=16", "agents.alice.max_tokens=3",
                                                           "agents.carol.max_tokens=3")))  # fmt: skip


def test_it_is_measured_where_a_loop_runs_already(quickstart):
    async def within_a_loop():
        return growth_text(prepare(quickstart()))

    assert "prompts grow to" in asyncio.run(within_a_loop())


@pytest.mark.parametrize("level", ["turn", pytest.param("token", marks=pytest.mark.slow)])
def test_a_central_critic_that_could_not_read_the_longest_conversation_is_refused(quickstart, level):
    few = ("learner=mappo", f"critic.level={level}")
    with pytest.raises(ConfigError) as caught:
        prepare(quickstart(*few, "critic.ppo_max_token_len_per_gpu=20"))
    text = str(caught.value)
    assert "critic.ppo_max_token_len_per_gpu=20" in text and "the central critic of learner=mappo" in text
    needed = int(text.split("set it to at least ")[1].split(",")[0])
    prepare(quickstart(*few, f"critic.ppo_max_token_len_per_gpu={needed}"))
    with pytest.raises(ConfigError, match=f"at least {needed}"):
        prepare(quickstart(*few, f"critic.ppo_max_token_len_per_gpu={needed - 1}"))
    prepare(quickstart("learner=grpo", "critic.ppo_max_token_len_per_gpu=20"))


def test_a_conversation_that_agents_are_shown_in_part_is_no_shorter_for_a_critic(quickstart):
    """With old rounds left out by the agents, no prompt bounds what the critic reads of the whole."""
    dropping = ("learner=mappo", "runner.num_rounds=12", "runner.overflow=drop_oldest")
    with pytest.raises(ConfigError, match="the central critic of learner=mappo reads the whole conversation") as caught:
        prepare(quickstart(*dropping, "critic.ppo_max_token_len_per_gpu=20"))
    needed = int(str(caught.value).split("set it to at least ")[1].split(",")[0])
    assert needed > 12 * 2 * 6, "all rounds, and not the longest prompts and answers of two agents alone, 2 * (40 + 3)"


def test_the_first_prompts_of_many_rows_are_measured_at_once(compose_config, cold_assets, encoder):
    """A configuration's values take milliseconds a row to read, and a data set has a million rows."""
    roles = ("agents.alice.role='Add it up .'", "agents.carol.role='Be brief .'")
    first = FirstPrompts.of(compose_config(f"assets={cold_assets}", *roles), {"alice": encoder})
    row = {"prompt": TASK.messages, "extra_info": {"agent_prompts": {"carol": TASK.messages * 9}}}
    assert first.tokens(row) == 7 + 4 and first.characters(row) == len(f"{QUESTION}\n\nAdd it up .")
    began = time.process_time()
    for _ in range(20_000):
        first.characters(row)
    assert time.process_time() - began < 1.5
