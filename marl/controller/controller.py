"""The controller runs episodes: agent -> policy -> server, and back as recorded, scored turns."""

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from marl.cluster.failures import GroupFailed
from marl.config.schema import AgentConfig, ControllerConfig, JudgeConfig
from marl.controller.client import PolicyClient
from marl.controller.collection import (
    Collection,
    EpisodeLost,
    Play,
    check_texts,
    collection_of,
    described,
    failures_of,
    outcomes,
    to_play_again,
)
from marl.controller.endpoint_client import EndpointClient
from marl.controller.ledger import Ledger
from marl.controller.policy_map import PolicyMap
from marl.controller.scores import Accuracy, priced, score_failure, team_score
from marl.report.alarms import NoAnswers, Overflows, RightThreshold
from marl.rewards import Reward, RewardUnavailable, rule_of
from marl.rollout.endpoint import usage_metrics
from marl.runners import Generate, LiveEpisode, RecordedAnswers, Runner, TooManyTurns, instructions_of, play_to_end
from marl.types import AgentId, Episode, Message, Metrics, PolicyName, Score, Task, Turn
from marl.utils.deadlines import OutOfTime, own_time, waiting_for_others
from marl.utils.garbage import collect_garbage
from marl.utils.seeding import derive_seed

T = TypeVar("T")
W = TypeVar("W")


class Controller:
    def __init__(
        self,
        runner: Runner,
        agents: Mapping[AgentId, AgentConfig],
        clients: Mapping[PolicyName, PolicyClient | EndpointClient],
        reward: Reward,
        *,
        seed: int,
        max_prompt_length: int,
        settings: ControllerConfig,
        judging: JudgeConfig | None = None,
        exchange_every: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        """``exchange_every``: see :meth:`PolicyMap.at`. ``ledger``: None keeps none."""
        self.ledger = ledger or Ledger(None)
        self.runner, self.agents, self.clients, self.reward = runner, agents, clients, reward
        self.endpoints = {
            name: client.server.usage for name, client in clients.items() if isinstance(client, EndpointClient)
        }
        """Usage of the servers elsewhere, by policy."""
        self.policy_map = PolicyMap(agents, exchange_every)
        self.roles = instructions_of(agents)
        self.sampling = functools.cache(self._sampling)  # reading a configuration costs more than the rest of a turn
        self.seed, self.max_prompt_length = seed, max_prompt_length
        self.settings, self.judging = settings, judging or JudgeConfig()
        self.episode_timeout, self.max_error_rate = settings.episode_timeout_s, settings.max_error_rate
        self.accuracy, self.right_threshold = Accuracy(), RightThreshold()
        self.no_answers, self.overflows = NoAnswers(lambda task: rule_of(task.extract)), Overflows()
        self.judged: dict[int, tuple[Episode, Exception | None]] = {}
        """Scored episodes and their scoring errors, by ``id(episode)``, until :meth:`score` collects them."""

    def metrics(self) -> Metrics:
        """Failures of the reward and usage of endpoints since the last call."""
        metrics = self.reward.metrics()
        for policy, usage in self.endpoints.items():
            metrics |= usage_metrics(policy, usage.take())
        return metrics

    def spent(self) -> dict[PolicyName, int]:
        """Tokens that the run has used of each endpoint."""
        return {policy: usage.spent for policy, usage in self.endpoints.items()}

    def go_on_from(self, spent: Mapping[PolicyName, int]) -> None:
        """Count the endpoints' tokens from what the run had used; an endpoint that is new to it has used none."""
        for policy, usage in self.endpoints.items():
            if policy in spent:
                usage.go_on_from(spent[policy])

    async def collect(self, tasks: Sequence[Task], samples: int, step: int, validate: bool = False) -> Collection:
        """Play every task ``samples`` times, all episodes at once. Each is scored while the others still run.

        An error ends its own episode and is counted; where too few samples of a task are left
        (``controller.min_sample_share``; in validation, where one is missing), its lost ones are played again with the same
        seeds. Raises EpisodesFailed, with the first error as its cause, where more than ``max_error_rate`` of the episodes
        failed at the first attempt; a policy that failed is raised at once. What the ledger knows of this step is not played
        again.
        """
        self.judged.clear()
        self.ledger.open(step)
        plays = [(task, sample) for task in tasks for sample in range(samples)]
        known_by = Ledger.digest_of([content_of(task) for task in tasks]), validate, samples

        async def play(plays: Sequence[Play]) -> tuple[list[Episode | Exception], int]:
            return await self._with_retries(plays, step, validate)

        results, retried = await self.unless_lost("lost", step, known_by, plays, play)
        return collection_of(plays, results, retried, step)

    async def unless_lost(
        self,
        kind: str,
        step: int,
        known_by: Sequence[Any],
        works: Sequence[W],
        run: Callable[[Sequence[W]], Awaitable[tuple[list[T | Exception], int]]],
    ) -> tuple[list[T | Exception], int]:
        """The result of each work, and how many were retried. What the step lost before the run was killed is lost again: another
        outcome would be another update. ``known_by`` names these works within the step, in JSON."""
        of = self.ledger.digest(*known_by)
        before = self.ledger.find(kind, step, of)
        lost = {int(at): EpisodeLost(error) for at, error in before["errors"].items()} if before else {}
        ended, retried = await run([work for at, work in enumerate(works) if at not in lost])
        left = iter(ended)
        results = [lost.get(at) or next(left) for at in range(len(works))]
        if before:
            self.go_on_from(before["spent"])  # lost works, and first attempts, were billed too
            return results, before["retried"]
        errors = {at: described(result) for at, result in enumerate(results) if isinstance(result, Exception)}
        if errors or retried:
            content = {"known_by": known_by, "errors": errors, "retried": retried, "spent": self.spent()}
            self.ledger.add(kind, step, of, content)
        return results, retried

    async def _with_retries(
        self, plays: Sequence[Play], step: int, validate: bool
    ) -> tuple[list[Episode | Exception], int]:
        """Each play's outcome, and how many plays were retried."""
        results = await self.outcomes_of(plays, step, validate)
        self.failures_of(results, "playing episodes", step)
        share, retried = 1.0 if validate else self.settings.min_sample_share, 0
        for _ in range(1, self.settings.max_attempts):
            again = to_play_again(plays, results, share)
            if not again:
                break
            retried += len(again)
            for at, result in zip(
                again, await self.outcomes_of([plays[at] for at in again], step, validate), strict=True
            ):
                results[at] = result
        return results, retried

    async def measure(self, tasks: Sequence[Task], samples: int, step: int, validate: bool = True) -> list[Episode]:
        """``samples`` judged episodes of every task, in their order. One that was lost is a failed one: whatever happens,
        shares are of the same set. ``validate=False`` samples as in training."""
        collection = await self.collect(tasks, samples, step, validate)
        scored = await self.score(collection.episodes, step)
        found = {(episode.task.id, episode.sample): episode for episode in scored}
        for task, sample in ((task, sample) for task in tasks for sample in range(samples)):
            if (task.id, sample) not in found:
                lost = found[task.id, sample] = Episode(task, sample, list(self.agents), failure="error")
                lost.score = Score(self.failure_score(lost), None, failure="error")
        return [found[task.id, sample] for task in tasks for sample in range(samples)]

    async def outcomes_of(self, plays: Sequence[Play], step: int, validate: bool) -> list[Episode | Exception]:
        """Each play's episode, or what ended it."""
        return await outcomes([self.play_and_score(task, sample, step, validate) for task, sample in plays])

    async def play_and_score(self, task: Task, sample: int, step: int, validate: bool) -> Episode:
        """An episode whose outcome is kept for :meth:`score`: a reward's error is not counted as a failed episode."""
        # validation draws the same numbers every time: its curve moves with the weights alone
        key = (self.seed, "validate" if validate else step, task.id, sample)
        record = Episode(task, sample, list(self.agents), seed=derive_seed(*key), accuracy=self.accuracy.shares())
        return await self._score(await self.play(record, self.generate(task, key, step, validate)))

    async def play(self, record: Episode, generate: Generate) -> Episode:
        """Raises TimeoutError after ``controller.episode_timeout_s``, waits for others not counted."""
        live = LiveEpisode(record, generate, self.judge, self.roles, self.runner.config.overflow)
        try:
            async with own_time(self.episode_timeout):
                played = await play_to_end(self.runner, live)
        except OutOfTime:
            raise TimeoutError(
                f"task {record.task.id}, sample {record.sample} took longer than controller.episode_timeout_s="
                f"{self.episode_timeout:g}"
            ) from None
        collect_garbage()
        return played

    async def _score(self, episode: Episode) -> Episode:
        before = self.ledger.find(UNSCORED, episode.seed, self.ledger.digest(*names_of(episode)))
        error: Exception | None = before and EpisodeLost(before["error"])
        try:
            if error is None:
                await self.scored(episode)
        except (GroupFailed, TooManyTurns):
            raise
        except Exception as failed:
            error = failed
        self.judged[id(episode)] = episode, error
        return episode

    async def score(self, episodes: Sequence[Episode], step: int) -> list[Episode]:
        """Score every turn and every team's answer, unless already scored when the episode ended. A text that cannot be scored
        gets ``failure_score``; an episode is dropped and logged where nothing was there to judge it. Raises EpisodesFailed for
        too many of either."""
        await outcomes([self._score(episode) for episode in episodes if id(episode) not in self.judged])
        results = [error or episode for episode, error in (self.judged[id(episode)] for episode in episodes)]
        for episode in episodes:
            self.judged.pop(id(episode), None)
        self.failures_of(results, "the reward function", step)
        scored = [result for result in results if isinstance(result, Episode)]
        check_texts(scored, step, self.max_error_rate)
        for episode, result in zip(episodes, results, strict=True):
            if isinstance(result, Exception):  # a resumed run drops it too
                names = names_of(episode)
                content = {"known_by": names, "error": described(result)}
                self.ledger.add(UNSCORED, episode.seed, self.ledger.digest(*names), content)
        self.overflows.look(scored, step)
        if not self.runner.scores_turns:  # whose turns are moves
            self.right_threshold.look(scored, step)
            self.no_answers.look(scored, step)
        return scored

    def failures_of(self, results: Sequence[Any], what: str, step: int) -> list[Exception]:
        """The errors among the results. Raises EpisodesFailed for too many."""
        return failures_of(results, what, step, self.max_error_rate)

    async def scored(self, episode: Episode) -> Episode:
        for turn in episode.turns:
            if turn.answers and turn.score is None:
                if self.runner.scores_turns:  # it ended before it scored them; the last ones are scored below
                    turn.score = Score(0.0, None, acc=0.0)
                else:
                    turn.score = await self.judge(episode.task, turn)
        failure_score = self.failure_score(episode)
        right_at = self.judging.right_at
        for turn in episode.turns:  # a runner's or an agent loop's own scores too
            turn.score = turn.score and replace(turn.score, right_at=right_at)
        team = team_score(episode, self.judging.no_answer_score or 0.0, failure_score)
        episode.score = team = replace(team, right_at=right_at)
        for turn in episode.turns:
            if not turn.answers:
                turn.score = Score(team.value, None, acc=float(team.right))
            if turn.truncated and not self.settings.train_truncated:
                turn.trained = False
        if episode.failure is not None:
            own = {agent: self.runner.last_turn_score(episode, agent) for agent in episode.agents}
            score_failure(episode, {agent: failure_score if score is None else score for agent, score in own.items()})
        return episode

    def failure_score(self, episode: Episode) -> float:
        """Team score of a conversation that ended early: the runner's own where it has one."""
        own = self.runner.failure_score(episode)
        return self.judging.failure_score if own is None else own

    def _sampling(self, agent: AgentId, policy: PolicyName, validate: bool) -> Mapping[str, Any]:
        return sampling_of(self.clients[policy].rollout, self.agents[agent], validate)

    async def judge(self, task: Task, turn: Turn) -> Score:
        """The score with its penalty. Raises RewardUnavailable where no scorer was there, ``max_attempts`` times."""
        of = self.ledger.digest(task.data_source, task.ground_truth, dict(task.extra), turn.text)
        score = self.ledger.score(turn, of)
        if score is None:
            score = await self._judge(task, turn)
            self.ledger.add_score(turn, score, of)
        return score if score.failure is not None else self.priced(turn, score)

    async def _judge(self, task: Task, turn: Turn) -> Score:
        for attempt in range(self.settings.max_attempts):
            try:
                with waiting_for_others():
                    return await self.reward.judge_or_fail(task, turn.text, self.judging.failure_score)
            except RewardUnavailable:
                if attempt + 1 == self.settings.max_attempts:
                    raise
        raise AssertionError("max_attempts is at least 1")

    def priced(self, turn: Turn, score: Score) -> Score:
        """A score with what length, truncation and abstention cost."""
        limit = self.sampling(turn.agent, turn.policy, False)["max_tokens"] if self.judging.overlong_buffer else 0
        return priced(score, turn, self.judging, limit)

    def generate(
        self,
        task: Task,
        key: tuple,
        step: int,
        validate: bool = False,
        asked: Mapping[str, Any] | None = None,
        session: str | None = None,
    ) -> Generate:
        """Generate function of one episode: observations to turns. ``key`` names the episode and seeds the sampling; ``asked``:
        sampling parameters that replace the configuration's, and add to an agent's stop strings; ``session``: a name of the
        episode for servers, where ``key`` may come twice."""
        policy_map = self.policy_map.at(step)
        self.ledger.open(step)
        name = session or "/".join(map(str, key[1:]))

        async def generate(
            agent: AgentId, observation: list[Message], round: int, previous: Turn | None, branch: int
        ) -> Turn:
            policy = policy_map.policy(agent, round)
            seed = derive_seed(*key, agent, round, *([branch] if branch else []))
            sampling = self.sampling(agent, policy, validate)
            if asked:
                sampling = with_asked(sampling, asked)
            of = self.ledger.digest(policy, observation, sampling, self.max_prompt_length)
            turn = self._recorded(policy, seed, of)
            if turn is None:
                turn = await self.clients[policy].act(
                    agent,
                    observation,
                    round,
                    previous,
                    task=task,
                    session=f"{name}/{agent}",
                    seed=seed,
                    sampling=sampling,
                    max_prompt_length=self.max_prompt_length,
                )
                turn.branch = branch
                self.ledger.add_turn(turn, seed, of)
            if turn.score is not None:  # an agent loop's own
                turn.score = self.priced(turn, turn.score)
            return turn

        return generate

    def _recorded(self, policy: PolicyName, seed: int, of: str) -> Turn | None:
        """The turn that a killed run has made; what it cost at an endpoint counts."""
        turn = self.ledger.turn(seed, of)
        if turn is not None and policy in self.endpoints:
            self.endpoints[policy].answered(turn.billed_tokens)
        return turn

    async def resume(
        self, episode: Episode, at: Turn, step: int, alternative: int, answer: Turn | None = None
    ) -> Episode:
        """Play a recorded episode again up to a turn, put another answer in its place and play on with the servers.

        Without ``answer`` the servers give one; ``alternative``, of this turn, seeds it and what follows. Turns of earlier rounds stay as
        they were, and of its own round those whose agents are shown the same. The result is not scored yet. Raises
        TimeoutError after ``controller.episode_timeout_s``.
        """
        key = (self.seed, "resume", *at.place, alternative, step, episode.task.id, episode.sample)
        generate = RecordedAnswers(episode, self.generate(episode.task, key, step), {at.place: answer})
        record = Episode(
            episode.task, episode.sample, list(episode.agents), seed=episode.seed, accuracy=episode.accuracy
        )
        return await self.play(record, generate)


UNSCORED = "unscored"
"""Kind of the record of an episode that could not be scored."""


def content_of(task: Task) -> list[Any]:
    """Content of a task. Its id alone is ambiguous: rows of two files may share one."""
    return [task.id, task.messages, task.ground_truth, dict(task.extra)]


def names_of(episode: Episode) -> tuple[str, list[Any]]:
    """Identifies an episode by its task's content and by the seeds and texts of its turns."""
    return Ledger.digest_of(content_of(episode.task)), [[turn.seed, turn.text] for turn in episode.turns]


def with_asked(sampling: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """An agent's sampling parameters as a request changes them; an agent's own limit on its answers stays the most."""
    merged = {**sampling, **asked}
    merged["max_tokens"] = min(sampling["max_tokens"], merged["max_tokens"])
    if asked.get("stop"):
        merged["stop"] = list(dict.fromkeys([*(sampling.get("stop") or ()), *asked["stop"]]))
    return merged


def sampling_of(rollout: Any, own: AgentConfig, validate: bool) -> dict[str, Any]:
    """The policy's sampling parameters, with what the agent sets for itself when it trains."""
    source = rollout.val_kwargs if validate else rollout
    sampling = {key: source[key] for key in ("temperature", "top_p", "top_k")} | {"max_tokens": rollout.response_length}
    if validate and not source.do_sample:
        sampling["temperature"] = 0.0
    keys = ("max_tokens",) if validate else ("temperature", "top_p", "top_k", "max_tokens")
    sampling |= {key: value for key in keys if (value := getattr(own, key)) is not None}
    if own.stop:
        sampling["stop"] = list(own.stop)
    return sampling
