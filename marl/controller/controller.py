"""The controller lets episodes talk: agent -> policy -> server, and back as recorded turns with verdicts."""

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from omegaconf import OmegaConf

from marl.controller.client import PolicyClient
from marl.controller.failures import GroupFailed
from marl.controller.policy_map import PolicyMap
from marl.rewards import Reward
from marl.runners import ContextOverflow, Generate, LiveEpisode, Replay, Runner, TooManyTurns, played
from marl.types import AgentId, Episode, Message, PolicyName, Task, Turn, Verdict
from marl.utils.seeding import derive_seed

logger = logging.getLogger(__name__)

T = TypeVar("T")
Play = tuple[Task, int]
"""A task, and which of its samples."""


class EpisodesFailed(RuntimeError):
    """Too many episodes of one collection ended in an error."""


@dataclass(slots=True)
class Collection:
    """Episodes that ended, and why the others did not."""

    episodes: list[Episode]
    failures: list[Exception] = field(default_factory=list)

    @property
    def refused(self) -> int:
        """Episodes that ended because a conversation grew too long."""
        return sum(isinstance(error, ContextOverflow) for error in self.failures)


async def outcomes(works: Sequence[Coroutine[Any, Any, T]]) -> list[T | Exception]:
    """Do all at once, and give each one's result or error. A policy that failed, or a runner that breaks its own word, ends
    the rest at once, and is raised."""
    running = [asyncio.create_task(work) for work in works]
    try:
        for ended in asyncio.as_completed(running):
            try:
                await ended
            except (GroupFailed, TooManyTurns):
                raise
            except Exception:
                continue  # given below
    finally:
        for task in running:
            task.cancel()
    return [outcome(task) for task in running]


def outcome(task: asyncio.Task[T]) -> T | Exception:
    error = task.exception()
    if error is None:
        return task.result()
    if not isinstance(error, Exception):
        raise error
    return error


def team_verdict(episode: Episode, no_answer_score: float = 0.0) -> Verdict:
    """What the runner settled; else the verdict on the last turn that gave the team's answer, since only texts can be judged."""
    if episode.settled is not None:
        return episode.settled
    for turn in reversed(episode.path):
        if turn.answers and episode.answer is not None and episode.task.extract(turn.text) == episode.answer:
            return turn.judged
    return Verdict(no_answer_score if episode.answer is None else 0.0, episode.answer)


def overlong(length: int, limit: int, buffer: int) -> float:
    """How far an answer reaches into the last ``buffer`` tokens before its limit, from 0 to 1 (DAPO, arXiv:2503.14476)."""
    return min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


class Accuracy:
    """Each agent's share of right answers in training so far; one half before it has given any."""

    def __init__(self) -> None:
        self.right: Counter[AgentId] = Counter()
        self.given: Counter[AgentId] = Counter()

    def update(self, episodes: Sequence[Episode]) -> None:
        for turn in (turn for episode in episodes for turn in episode.turns if turn.answers):
            self.right[turn.agent] += turn.correct
            self.given[turn.agent] += 1

    def shares(self) -> dict[AgentId, float]:
        return {agent: (self.right[agent] + 1) / (given + 2) for agent, given in self.given.items()}

    def state_dict(self) -> dict[str, dict[AgentId, int]]:
        return {"right": dict(self.right), "given": dict(self.given)}

    def load_state_dict(self, state: Mapping[str, Mapping[AgentId, int]]) -> None:
        self.right, self.given = Counter(state["right"]), Counter(state["given"])


class Controller:
    def __init__(
        self,
        runner: Runner,
        agents: Mapping[AgentId, Any],
        clients: Mapping[PolicyName, PolicyClient],
        reward: Reward,
        *,
        seed: int,
        max_prompt_length: int,
        settings: Any,
        exchange_every: int = 0,
    ) -> None:
        """``settings``: the group ``controller`` of the configuration. ``exchange_every``: see :meth:`PolicyMap.at`."""
        self.runner, self.agents, self.clients, self.reward = runner, agents, clients, reward
        self.policy_map = PolicyMap(agents, exchange_every)
        self.roles = {name: agent.role for name, agent in agents.items()}
        self.sampling = functools.cache(self._sampling)  # reading a configuration costs more than the rest of a turn
        self.seed, self.max_prompt_length = seed, max_prompt_length
        # reading a configuration node costs more than judging a short text
        self.settings: Any = OmegaConf.to_object(settings) if OmegaConf.is_config(settings) else settings
        self.episode_timeout, self.max_error_rate = settings.episode_timeout_s, settings.max_error_rate
        self.accuracy = Accuracy()

    async def collect(self, tasks: Sequence[Task], samples: int, step: int, validate: bool = False) -> Collection:
        """Play every task ``samples`` times, all episodes at once.

        An error ends its own episode and is counted. Raises EpisodesFailed, with the first error as its cause, where
        more than ``max_error_rate`` of the episodes failed; a policy that failed is raised at once.
        """
        plays = [(task, sample) for task in tasks for sample in range(samples)]
        return self._counted(await self.outcomes_of(plays, step, validate), "playing episodes", step)

    async def outcomes_of(self, plays: Sequence[Play], step: int, validate: bool) -> list[Episode | Exception]:
        """Each play's episode, or what ended it."""
        return await outcomes([self.bounded(task, sample, step, validate) for task, sample in plays])

    async def score(self, episodes: Sequence[Episode], step: int) -> list[Episode]:
        """Put a verdict on every turn and every team's answer. An episode whose verdict fails is dropped and logged."""
        results = await outcomes([self.scored(episode) for episode in episodes])
        return self._counted(results, "the reward function", step).episodes

    def _counted(self, results: Sequence[Episode | Exception], what: str, step: int) -> Collection:
        failures = self.failures_of(results, what, step)
        return Collection([result for result in results if isinstance(result, Episode)], failures)

    def failures_of(self, results: Sequence[Any], what: str, step: int) -> list[Exception]:
        """Log the first errors, and raise EpisodesFailed for too many."""
        failures = [result for result in results if isinstance(result, Exception)]
        for error in failures[:3]:
            logger.warning("%s failed in step %d: %s: %s", what, step, type(error).__name__, error)
        if failures and len(failures) > self.max_error_rate * len(results):
            raise EpisodesFailed(
                f"{what} failed for {len(failures)} of {len(results)} episodes of step {step} (controller.max_error_rate="
                f"{self.max_error_rate:g}); the first: {type(failures[0]).__name__}: {failures[0]}"
            ) from failures[0]
        if failures and len(failures) == len(results):
            raise EpisodesFailed(f"{what} failed for every episode of step {step}") from failures[0]
        return failures

    async def scored(self, episode: Episode) -> Episode:
        try:
            async with asyncio.timeout(self.episode_timeout):
                for turn in episode.turns:
                    if turn.answers and turn.verdict is None:
                        turn.verdict = await self.judge(episode.task, turn)
        except TimeoutError:
            raise TimeoutError(
                f"the reward function took longer than controller.episode_timeout_s={self.episode_timeout:g} for task "
                f"{episode.task.id}, sample {episode.sample}; raise it, or give the function a deadline"
            ) from None
        episode.verdict = team_verdict(episode, self.settings.no_answer_score or 0.0)
        for turn in episode.turns:
            if not turn.answers:
                turn.verdict = Verdict(episode.verdict.score, None)
            if turn.truncated and not self.settings.train_truncated:
                turn.trained = False
        return episode

    def _sampling(self, agent: AgentId, policy: PolicyName, validate: bool) -> Mapping[str, Any]:
        """The policy's sampling parameters, with what the agent sets for itself when it trains."""
        rollout = self.clients[policy].rollout
        source = rollout.val_kwargs if validate else rollout
        sampling = {key: source[key] for key in ("temperature", "top_p", "top_k")} | {
            "max_tokens": rollout.response_length
        }
        if validate and not source.do_sample:
            sampling["temperature"] = 0.0
        own = self.agents[agent]
        keys = ("max_tokens",) if validate else ("temperature", "top_p", "top_k", "max_tokens")
        sampling |= {key: own[key] for key in keys if own[key] is not None}
        if own.stop:
            sampling["stop"] = list(own.stop)
        return sampling

    async def judge(self, task: Task, turn: Turn) -> Verdict:
        return self.priced(turn, await self.reward.judge(task, turn.text))

    def priced(self, turn: Turn, verdict: Verdict) -> Verdict:
        """A verdict with what length, truncation and abstention cost. What the reward function calls right is an answer."""
        if self.settings.overlong_buffer:
            limit = self.sampling(turn.agent, turn.policy, False)["max_tokens"]
            share = overlong(len(turn.response_ids), limit, self.settings.overlong_buffer)
            verdict = replace(verdict, penalty=self.settings.overlong_penalty * share)
        if turn.truncated and self.settings.truncated_score is not None:
            return replace(verdict, score=self.settings.truncated_score)
        if verdict.answer is None and verdict.score < 1.0 and self.settings.no_answer_score is not None:
            return replace(verdict, score=self.settings.no_answer_score)
        return verdict

    async def bounded(self, task: Task, sample: int, step: int, validate: bool) -> Episode:
        try:
            async with asyncio.timeout(self.episode_timeout):
                return await self._play(task, sample, step, validate)
        except TimeoutError:
            raise self._late(task, sample) from None

    def _late(self, task: Task, sample: int) -> TimeoutError:
        return TimeoutError(
            f"task {task.id}, sample {sample} took longer than controller.episode_timeout_s={self.episode_timeout:g}"
        )

    async def _play(self, task: Task, sample: int, step: int, validate: bool) -> Episode:
        # validation draws the same numbers every time: its curve moves with the weights alone
        key = (self.seed, "validate" if validate else step, task.id, sample)
        record = Episode(task, sample, list(self.agents), seed=derive_seed(*key), accuracy=self.accuracy.shares())
        return await self._run(record, self.generate(task, key, step, validate))

    async def _run(self, record: Episode, generate: Generate) -> Episode:
        return await played(
            self.runner, LiveEpisode(record, generate, self.judge, self.roles, self.runner.config.overflow)
        )

    def generate(self, task: Task, key: tuple, step: int, validate: bool = False) -> Generate:
        """What turns observations into turns of one episode; ``key`` names the episode, and seeds what is sampled."""
        policy_map = self.policy_map.at(step)

        async def generate(
            agent: AgentId, observation: list[Message], round: int, previous: Turn | None, branch: int
        ) -> Turn:
            policy = policy_map.policy(agent, round)
            turn = await self.clients[policy].act(
                agent,
                observation,
                round,
                previous,
                task=task,
                session=f"{'/'.join(map(str, key[1:]))}/{agent}",
                seed=derive_seed(*key, agent, round, *([branch] if branch else [])),
                sampling=self.sampling(agent, policy, validate),
                max_prompt_length=self.max_prompt_length,
            )
            turn.branch = branch
            if turn.verdict is not None:  # an agent loop's own
                turn.verdict = self.priced(turn, turn.verdict)
            return turn

        return generate

    async def resume(
        self, episode: Episode, at: Turn, step: int, alternative: int, answer: Turn | None = None
    ) -> Episode:
        """Play a recorded episode again up to a turn, put another answer in its place and play on with the servers.

        Without ``answer`` the servers give one; ``alternative``, of this turn, seeds it and what follows. Turns of earlier rounds stay as
        they were, and of its own round those whose agents are shown the same. The result is not scored yet. Raises
        TimeoutError after ``controller.episode_timeout_s``.
        """
        key = (self.seed, "resume", *at.place, alternative, step, episode.task.id, episode.sample)
        generate = Replay(episode, self.generate(episode.task, key, step), {at.place: answer})
        record = Episode(
            episode.task, episode.sample, list(episode.agents), seed=episode.seed, accuracy=episode.accuracy
        )
        try:
            async with asyncio.timeout(self.episode_timeout):
                return await self._run(record, generate)
        except TimeoutError:
            raise self._late(episode.task, episode.sample) from None
