"""Episodes for workers, as far as that needs no Ray: who plays what, and what can be sent."""

import asyncio
import pickle

import pytest
from omegaconf import OmegaConf

from marl.config.schema import AgentConfig, ControllerConfig
from marl.controller.controller import Controller
from marl.controller.episode_workers import CHUNK, CHUNKS_A_WORKER, EpisodeFailed, chunks, sendable
from marl.rewards import Reward, RewardError, extractor, hider
from marl.runners import RUNNERS
from marl.types import ContextOverflow, Task, Turn


@pytest.mark.parametrize("plays", [0, 1, 2, 7, 64, 65, 1000, 16384, 98001])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_every_play_is_given_to_one_worker_and_shares_are_equal(plays, workers):
    parts = chunks(plays, workers)
    assert [play for _, part in parts for play in range(plays)[part]] == list(range(plays)), "in order, each once"
    shares = [sum(part.stop - part.start for worker, part in parts if worker == w) for w in range(workers)]
    assert max(shares) - min(shares) <= 1
    assert all(part.stop > part.start for _, part in parts)
    assert max((sum(worker == w for worker, _ in parts) for w in range(workers)), default=0) <= CHUNKS_A_WORKER
    if plays <= CHUNK * CHUNKS_A_WORKER * workers:
        assert all(part.stop - part.start <= CHUNK for _, part in parts)


@pytest.mark.parametrize("rule", ["strict", "flexible"])
@pytest.mark.parametrize("source", ["openai/gsm8k", "marl/smudged_note", "aime_2024", "codecontests", "anything"])
def test_tasks_can_be_sent(source, rule):
    task = Task("train/0", [], "4", source, extractor(source, rule), {"index": 0}, hider(source, rule))
    sent = pickle.loads(pickle.dumps(task))
    assert sent == task and sent.extract == task.extract and sent.hide == task.hide


def test_a_task_travels_once_with_all_its_samples():
    task = Task("train/0", [{"role": "user", "content": "x" * 10_000}], "4", "marl/x", str)
    assert len(pickle.dumps([(task, sample) for sample in range(50)])) < 12_000


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def raised(error):
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    "error", [RewardError("no", "timeouts"), ContextOverflow("long"), ValueError(1, 2), KeyError("a")]
)
def test_errors_arrive_as_they_are_with_where_they_were_raised(error):
    sent = pickle.loads(pickle.dumps(sendable(raised(error))))
    assert type(sent) is type(error) and sent.args == error.args
    assert getattr(sent, "kind", None) == getattr(error, "kind", None)
    assert "in raised" in sent.__notes__[0] and "test_workers.py" in sent.__notes__[0]


def test_an_error_that_cannot_be_read_elsewhere_arrives_as_what_it_says():
    sent = pickle.loads(pickle.dumps(sendable(raised(Odd("one", "two")))))
    assert type(sent) is EpisodeFailed and str(sent) == "Odd: one" and "in raised" in sent.__notes__[0]


class Slow:
    """A policy that takes its time."""

    def __init__(self, seconds):
        self.seconds, self.rollout = seconds, OmegaConf.create(ROLLOUT)

    async def act(self, agent, observation, round, previous, **_):
        await asyncio.sleep(self.seconds)
        return Turn(agent, round, observation, "#### 4", response_ids=[1], response_mask=[1], log_probs=[0.0])


ROLLOUT = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "response_length": 3}


def test_completion_order_does_not_matter():
    debate = RUNNERS.get("debate")
    agents = OmegaConf.create({"a": AgentConfig(), "b": AgentConfig()})
    clients = {"a": Slow(0.02), "b": Slow(0.0)}
    controller = Controller(
        debate(debate.Config(name="debate")), agents, clients, Reward(lambda **_: 1.0), seed=0, max_prompt_length=9,
        settings=ControllerConfig(),
    )  # fmt: skip
    task = Task("train/0", [{"role": "user", "content": "2 + 2"}], "4", "marl/x", extractor("marl/x"))
    (episode,) = asyncio.run(controller.collect([task], 1, 1)).episodes
    assert [(turn.agent, turn.round) for turn in episode.turns] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
