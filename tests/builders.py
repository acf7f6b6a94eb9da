"""Batches, conversations and stand-ins for workers that several tests are made of."""

import asyncio
import random
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from omegaconf import II, OmegaConf
from tensordict import TensorDict

from marl.batch.build import joint_batch
from marl.batch.evidence import ballots_of, outcomes_of
from marl.batch.utility_inputs import UtilityTurns
from marl.batch.values import place_values
from marl.config.deadlines import Deadline, Phase
from marl.config.schema import AgentConfig, ControllerConfig, JudgeConfig
from marl.controller.controller import Controller
from marl.controller.ledger import Ledger
from marl.learners import CREDITS, LEARNERS
from marl.rewards import Reward
from marl.runners import RUNNERS, Instructions, scripted
from marl.types import Ballot, Episode, Rule, Score, Task, Turn, Vote
from marl.utils import folders
from marl.utils.ragged import jagged

AGENTS = ("a", "b")


@dataclass
class Live:
    """A trainer whose workers and servers are up. ``wait`` runs a coroutine on its loop."""

    trainer: Any
    loop: asyncio.AbstractEventLoop

    def wait(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def tasks(self) -> list:
        return self.trainer.validation[:4]

    def episodes(self, samples: int = 4) -> list:
        collection = self.wait(self.trainer.controller.collect(self.tasks(), samples, self.trainer.step_number))
        return self.wait(self.trainer.controller.score(collection.episodes, self.trainer.step_number))

    def step(self) -> dict:
        self.trainer.step_number += 1
        metrics = self.wait(self.trainer.method.step(self.trainer, next(iter(self.trainer.loader))))
        self.wait(self.trainer.dumps.flush())
        return metrics


class FakeGroup:
    """Stands for one policy's workers."""

    def __init__(self):
        self.rows = []

    async def update_actor(self, rows):
        self.rows.append(rows)
        return {"grad_norm": 1.0}

    async def compute_log_prob(self, rows):
        return TensorDict({"log_probs": rows["old_log_probs"]}, batch_size=[len(rows)])


def episode(task, sample, scores):
    """``scores``: one list an agent, a score a round; None is silence. Everybody answers its score; the last answers are
    voted on, and another answer to any turn would have scored .5."""
    record = Episode(Task(task, [], "1", "marl/x", lambda text: text), sample, list(AGENTS))
    for agent, own_scores in zip(AGENTS, scores, strict=True):
        for round, score in enumerate(own_scores, start=1):
            if score is not None:
                record.turns.append(
                    Turn(
                        agent,
                        round,
                        [],
                        str(score),
                        policy=agent,
                        prompt_ids=[1, 2],
                        response_ids=[3] * round,
                        response_mask=[1] * round,
                        log_probs=[-1.0] * round,
                        score=Score(score, "1"),
                        outcomes=[score, 0.5],
                    )
                )
    record.score = Score(1.0, "1")
    last = [turns[-1] for agent in AGENTS if (turns := record.trajectory(agent))]
    record.ballot = Ballot(Rule.heaviest, tuple(Vote(turn.agent, turn.round, turn.text) for turn in last))
    return record


def batch_of(*episodes, **options):
    batch = joint_batch(episodes, AGENTS, dict.fromkeys(AGENTS, 1.0), **options)
    batch.evidence.ballots = [ballots_of(record) for record in episodes]
    batch.evidence.outcomes_ERAK = outcomes_of(episodes, batch)
    for rows in batch.rows.values():
        rows["old_log_probs"] = rows["rollout_log_probs"]
    return batch


def two_samples():
    return batch_of(episode("t", 0, [[1, 0], [0, 1]]), episode("t", 1, [[0, 0], [0, 0]]))


COMPOSED = {
    II("algorithm.gamma"): 1.0,
    II("algorithm.lam"): 1.0,
    II("algorithm.norm_adv_by_std_in_grpo"): True,
    II("algorithm.adv_estimator"): None,
    II("seed"): 0,
}
"""Values that the configuration puts in where a learner refers to other keys."""


def build_learner(name, credit="own", credit_options=None, **options):
    cls = LEARNERS.get(name)
    defaults = {option.name: COMPOSED[option.default] for option in fields(cls.Config) if option.default in COMPOSED}
    scheme = CREDITS.get(credit)
    return cls(
        cls.Config(name=name, **(defaults | options)), scheme(scheme.Config(name=credit, **(credit_options or {})))
    )


DEBATE = [[1.0, 0.0], [0.0, 1.0]]
"""Scores of two agents by round: each is right once."""


def scheme(name, **options):
    """A credit scheme with these options."""
    return CREDITS.get(name)(CREDITS.get(name).Config(name=name, **options))


def branch(record, agent, round, scores, kept_at=0, trained=True):
    """Give a turn alternatives with these scores, beside the one that is there."""
    (kept,) = [turn for turn in record.turns if (turn.agent, turn.round) == (agent, round)]
    kept.compared, kept.branch = trained, kept_at
    others = [number for number in range(len(scores) + 1) if number != kept_at]
    for number, score in zip(others, scores, strict=True):
        other = episode(record.task.id, record.sample, [[score], []]).turns[0]
        other.agent = other.policy = agent
        other.round, other.branch, other.kept, other.compared, other.trained = round, number, False, trained, trained
        other.text = f"not kept {number}"
        record.turns.append(other)
    return record


def grid_of(batch, policy):
    """A policy's advantages, turn by turn."""
    grid = torch.zeros(batch.mask_ERA.numel())
    rows = batch.rows[policy]
    index = rows["turn_index"].values()
    grid[index[index >= 0]] = rows["advantages"].values()[index >= 0]
    return grid.view(batch.mask_ERA.shape)


class TableCritic:
    """Stands for one critic's workers: a number for every position that is read, and plain gradient descent."""

    def __init__(self, rows, numbers, lr=0.5):
        self.rows, self.lr, self.calls = rows, lr, []
        self.numbers = torch.as_tensor(numbers, dtype=torch.float32)
        self.target = None

    def _ragged(self, numbers):
        return torch.nested.nested_tensor_from_jagged(numbers.clone(), offsets=self.rows["read_at"].offsets())

    async def compute_values(self, rows):
        self.calls.append("values")
        return self._ragged(self.numbers)

    async def compute_targets(self, rows):
        self.calls.append("targets")
        return self._ragged(self.target)

    async def renew_target(self):
        self.calls.append("renew")
        self.target = self.numbers.clone()

    async def descend(self, rows, last):
        self.calls.append("last" if last else "step")
        self.gradients, self.mask = rows["gradients"].values(), rows["value_mask"].values()
        self.numbers = self.numbers - self.lr * self.gradients
        return {"grad_norm": 1.0}


def read(batch, episodes, numbers=None, shared=False, seed=0):
    """The batch as critics leave it, and the critics: their values are ``numbers``, or drawn."""
    batch.critic_data.value_rows = UtilityTurns(shared).rows(episodes, batch)
    batch.critic_data.joint_ids = jagged([[1 + i, 2] for i in range(batch.mask_ERA[..., 0].numel())], torch.long)
    generator, critics = torch.Generator().manual_seed(seed), {}
    for name, rows in batch.critic_data.value_rows.items():
        count = len(rows["read_at"].values())
        drawn = torch.randn(count, generator=generator) if numbers is None else torch.tensor(numbers[name])
        critics[name] = TableCritic(rows, drawn)
        place_values(batch, name, critics[name]._ragged(critics[name].numbers))
    return batch, critics


def fit(learner, batch, critics):
    return asyncio.run(learner.update_critics(batch, critics))


def two_rounds():
    records = [episode("t", 0, [[1, 0], [0, 1]]), episode("t", 1, [[0, 0], [0, 0]])]
    return batch_of(*records), records


BUILT_IN = [name for name in RUNNERS.names() if RUNNERS.get(name).__module__.startswith("marl.")]
"""Without those of recipes, which other tests register."""


QUESTION = [{"role": "user", "content": "2+2?"}]


def play(runner, script, agents=("alice", "carol"), roles=None, seed=0, private=None, **options):
    """Run one episode; ``script(agent, round) -> text``."""
    extra = {"agent_prompts": private or {}}
    task = Task("t", QUESTION, "4", "x", lambda text: text if text.isdigit() else None, extra, lambda text: "?")

    async def generate(agent, observation, round, previous, branch):
        await asyncio.sleep(random.random() / 1000)  # agents end in any order
        said = script(agent, round, branch) if branch else script(agent, round)
        return Turn(agent, round, list(observation), said, branch=branch)

    told = {name: Instructions(role) for name, role in (roles or {}).items()}
    return asyncio.run(scripted.play(runner, task, agents, generate, roles=told, seed=seed, **options))


def build_runner(name, **options):
    cls = RUNNERS.get(name)
    return cls(cls.Config(name=name, **options))


ROLLOUT = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "response_length": 3}


class Says:
    """A policy whose answer depends on agent and round; ``does`` may raise."""

    def __init__(self, does=lambda agent, round, task, **_: "4"):
        self.does, self.rollout = does, OmegaConf.create(ROLLOUT | {"val_kwargs": ROLLOUT | {"do_sample": False}})
        self.asked = []

    async def act(self, agent, observation, round, previous, *, seed, sampling, task, **_):
        self.asked.append((task.id, seed, sampling["temperature"]))
        text = self.does(agent, round, task=task, seed=seed)
        await asyncio.sleep(0)
        return Turn(
            agent, round, observation, text, prompt_ids=[1], response_ids=[1], response_mask=[1], log_probs=[0.0], seed=seed
        )  # fmt: skip


def task(number=0):
    return Task(f"val/{number}", [{"role": "user", "content": "2 + 2"}], "4", "x", str)


def controller(does=None, runner="debate", reward=None, folder=None, **settings):
    cls = RUNNERS.get(runner) if isinstance(runner, str) else runner
    judging = JudgeConfig(**{key: settings.pop(key) for key in vars(JudgeConfig()) if key in settings})
    judge = reward or (lambda solution_str, **_: float(solution_str == "4"))
    client = Says(does) if does else Says()
    agents = OmegaConf.create({"a": AgentConfig(), "b": AgentConfig()})
    return Controller(
        cls(cls.Config(name="x")), agents, {"a": client, "b": client}, Reward(judge), seed=0, max_prompt_length=9,
        settings=ControllerConfig(**settings), judging=judging, ledger=Ledger(folder),
    )  # fmt: skip


def collected(team, tasks=1, samples=1, **options):
    return asyncio.run(team.collect([task(i) for i in range(tasks)], samples, 1, **options))


def turn_of_ids(agent, round, prompt, response, policy=None, mask=None):
    return Turn(
        agent,
        round,
        [],
        "x",
        policy=policy or agent,
        prompt_ids=prompt,
        response_ids=response,
        response_mask=mask or [1] * len(response),
        log_probs=[-0.5] * len(response),
        score=Score(round / 10, "x"),
    )


def episode_of_turns(*turns, agents=("a", "b")):
    record = Episode(Task("t", [], "1", "x", str), 0, list(agents), list(turns))
    record.score = Score(1.0, "x")
    return record


def like(rows, values):
    return torch.nested.nested_tensor_from_jagged(values, offsets=rows["responses"].offsets())


def slow_but(values, *fast):
    """Parameters of a heavy test: ``make test`` runs it with the ``fast`` ones, ``make test-all`` with every value."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def same_for_all(seconds):
    """One deadline for every phase."""
    return dict.fromkeys(Phase, Deadline(seconds, "resources.timeout_s"))


@contextmanager
def writing(root, step, facts=None):
    """A folder to fill; it becomes ``global_step_N`` when the block ends without an error."""
    yield folders.begin(root, step)
    folders.publish(root, step, facts or {})


class Letters:
    """A tokenizer of letters, after a prompt that begins with 1; 0 ends an answer."""

    def encode(self, observation, previous=None):
        return [1, *map(ord, "".join(message["content"] for message in observation))]

    def reply(self, text, prompt_ids=(), thought=None):
        return [*map(ord, text if thought is None else f"{thought}: {text}"), 0]
