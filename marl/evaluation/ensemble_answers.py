"""The agents answer the tasks: each alone, and together."""

import logging
import random
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from marl.config.errors import ConfigError
from marl.config.policies import own_settings
from marl.controller.collection import outcomes
from marl.controller.policy_map import PolicyMap
from marl.controller.scores import team_score
from marl.controller.tasks import validation_tasks
from marl.evaluation.load import load_policy, saved_step
from marl.report.ensemble_table import Way
from marl.rollout.decoding import Answer, Request, bucket, decode, end_ids, padding_token
from marl.rollout.joint_decoding import READERS, check_together, decode_jointly
from marl.run_setup import Setup
from marl.runners import instructions_of, majority
from marl.types import Episode, Score, Task, Turn
from marl.utils.seeding import derive_seed

logger = logging.getLogger(__name__)

MODES = ("vote", *READERS)


@dataclass(frozen=True)
class Play:
    """One sample of one task, as every agent is shown it."""

    task: Task
    sample: int
    key: tuple[Any, ...]
    """Key of its sampling seeds, the same as in validation."""
    prompts: tuple[tuple[int, ...], ...]
    """Ids, of each agent."""


class Ensemble:
    """The agents of a configuration with their weights, and the tasks that they are to answer."""

    def __init__(self, setup: Setup) -> None:
        config = setup.config
        self.config, self.agents = config, list(config.agents)
        policy_map = PolicyMap(config.agents, setup.learner.exchange_every).at(saved_step(config.ensemble.checkpoint))
        self.names = [policy_map.policy(agent, 1) for agent in self.agents]
        """Each agent's policy of the first round, as at the checkpoint's validation."""
        self.policies = {name: load_policy(config, name) for name in dict.fromkeys(self.names)}
        self.policy_of = [self.policies[name] for name in self.names]
        everybody = range(len(self.agents))
        self.sampling, self.sampling_together = [self._sampling([k]) for k in everybody], self._sampling(everybody)
        asked = config.ensemble.modes
        self.modes = MODES if asked is None else [mode for mode in MODES if mode in {one.name for one in asked}]
        self.impossible = self._impossible(asked is not None)
        self.tasks = validation_tasks(config, self.policy_of[0].tokenizer)[: config.ensemble.tasks]
        self.samples = config.ensemble.samples or config.actor_rollout_ref.rollout.val_kwargs.n
        self._must_vary()
        self.plays = [self._play(task, sample) for task in self.tasks for sample in range(self.samples)]

    def _must_vary(self) -> None:
        """Raise ConfigError where all samples of a task would be the same."""
        if self.samples > 1 and not any(one["temperature"] for one in (*self.sampling, self.sampling_together)):
            raise ConfigError(
                f"ensemble.samples={self.samples}: the run's validation decodes greedily, and all samples of a task would be the "
                "same; add actor_rollout_ref.rollout.val_kwargs.do_sample=true "
                "actor_rollout_ref.rollout.val_kwargs.temperature=1, or use ensemble.samples=1"
            )

    def _impossible(self, asked: bool) -> dict[str, str]:
        """Ways that these models do not allow, and why. Raises ConfigError instead where they were asked for by name."""
        reasons = {}
        models = {name: policy.model for name, policy in self.policies.items()}
        tokenizers = {name: policy.tokenizer for name, policy in self.policies.items()}
        for mode in READERS.keys() & set(self.modes):
            try:
                check_together(mode, models, tokenizers)
            except ConfigError as error:
                if asked:
                    raise
                reasons[mode] = str(error)
        return reasons

    def _play(self, task: Task, sample: int) -> Play:
        prompts = tuple(self._prompt(task, k) for k in range(len(self.agents)))
        return Play(task, sample, (self.config.seed, "validate", task.id, sample), prompts)

    def _prompt(self, task: Task, k: int) -> tuple[int, ...]:
        """Ids of agent k's prompt in a single turn. Raises ConfigError if it is too long."""
        limit, policy = self.config.data.max_prompt_length, self.policy_of[k]
        ids = tuple(policy.encoder.encode(self._observation(task, k)))
        if len(ids) > limit:
            raise ConfigError(
                f"data.max_prompt_length={limit}: agent {self.agents[k]!r} is shown {len(ids)} tokens of task {task.id}; "
                "raise it to at least that, or set data.filter_overlong_prompts=true"
            )
        longest = len(ids) + self.sampling_together["max_tokens"]
        if longest > policy.longest:
            raise ConfigError(
                f"data.max_response_length={self.config.data.max_response_length}: with the {len(ids)} tokens of task {task.id} for agent {self.agents[k]!r} an answer "
                f"ends at {longest} tokens, and the model takes {policy.longest}; lower it, or raise rollout.max_model_len"
            )
        return ids

    def _observation(self, task: Task, k: int) -> list[dict[str, Any]]:
        agent = self.agents[k]
        return instructions_of(self.config.agents)[agent].beside(task.observation(agent))

    def _sampling(self, seats: Sequence[int]) -> dict[str, Any]:
        """Sampling parameters of these agents, as in validation. A joint answer follows ``actor_rollout_ref``,
        may be as long as any agent's, and ends where any agent's would."""
        agents = [self.config.agents[self.agents[k]] for k in seats]
        rollout = self.config.actor_rollout_ref.rollout
        if len(seats) == 1:
            rollout = own_settings(self.config, self.names[seats[0]]).rollout
        return {
            "temperature": rollout.val_kwargs.temperature if rollout.val_kwargs.do_sample else 0.0,
            "top_p": rollout.val_kwargs.top_p,
            "top_k": rollout.val_kwargs.top_k,
            "max_tokens": max(agent.max_tokens or rollout.response_length for agent in agents),
            # a stop string ends no thought: where there may be one, it is looked for in what was answered
            "stop": () if any(self.policy_of[k].encoder.thinking for k in seats) else self._stops(seats),
            "stop_token_ids": frozenset().union(
                *(
                    end_ids(policy.tokenizer, policy.model.config.get_text_config(), policy.model.generation_config)
                    for policy in (self.policy_of[k] for k in seats)
                )
            ),
        }

    def _stops(self, seats: Sequence[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(stop for k in seats for stop in self.config.agents[self.agents[k]].stop))

    async def measure(self, reward: Any) -> list[Way]:
        """Every agent alone, then every way to answer together that was asked for."""
        ways, turns_KN = [], []
        for k, name in enumerate(self.agents):
            answers, seconds = self._alone(k)
            turns_KN.append(await self._turns(name, answers, [k], reward))
            ways.append(self._way(name, [turn.scored for turn in turns_KN[-1]], answers, [k], seconds))
        together = {"vote": self._vote(ways, turns_KN)}
        together |= {mode: Way(mode, reason=reason) for mode, reason in self.impossible.items()}
        for mode in self.modes:
            if mode not in together:
                answers, seconds = self._together(mode)
                scores = [turn.scored for turn in await self._turns(mode, answers, range(len(self.agents)), reward)]
                together[mode] = self._way(mode, scores, answers, range(len(self.agents)), seconds)
        return ways + [together[mode] for mode in self.modes]

    def _alone(self, k: int) -> tuple[list[Answer], float]:
        policy, sampling = self.policy_of[k], self.sampling[k]
        requests = [
            Request(play.prompts[k], seed=derive_seed(*play.key, self.agents[k], 1), **sampling) for play in self.plays
        ]
        return self._in_batches(
            [bucket(len(request.prompt_ids)) for request in requests],
            lambda chosen: decode(
                policy.model, [requests[i] for i in chosen], padding_token(policy.tokenizer), policy.tokenizer.decode
            ),
        )

    def _together(self, mode: str) -> tuple[list[Answer], float]:
        tokenizer = self.policy_of[0].tokenizer
        requests = [
            Request((), seed=derive_seed(*play.key, "together"), **self.sampling_together) for play in self.plays
        ]
        return self._in_batches(
            [tuple(bucket(len(prompt)) for prompt in play.prompts) for play in self.plays],
            lambda chosen: decode_jointly(
                mode,
                [policy.model for policy in self.policy_of],
                [[self.plays[i].prompts[k] for i in chosen] for k in range(len(self.agents))],
                [requests[i] for i in chosen],
                padding_token(tokenizer),
                tokenizer.decode,
                weights_of(self.config),
            ),
        )

    def _in_batches(
        self, keys: Sequence[Hashable], answer: Callable[[list[int]], list[Answer]]
    ) -> tuple[list[Answer], float]:
        """Answer plays of one key together, at most ``rollout.max_num_seqs`` rows at a time; and the seconds that it took."""
        size = max(1, self.config.actor_rollout_ref.rollout.max_num_seqs // len(self.agents))
        alike: dict[Hashable, list[int]] = {}
        for i, key in enumerate(keys):
            alike.setdefault(key, []).append(i)
        answers: dict[int, Answer] = {}
        started = time.perf_counter()
        for members in alike.values():
            for start in range(0, len(members), size):
                chosen = members[start : start + size]
                answers |= zip(chosen, answer(chosen), strict=True)
        seconds = time.perf_counter() - started
        return [answers[i] for i in range(len(keys))], seconds

    async def _turns(self, name: str, answers: Sequence[Answer], seats: Sequence[int], reward: Any) -> list[Turn]:
        """The answers of these agents as turns with their scores, in the tokenizer of the first."""
        pairs = zip(self.plays, answers, strict=True)
        turns = [Turn(name, 1, [], self._text(play, answer.token_ids, seats)) for play, answer in pairs]
        score = self.config.judge.failure_score
        judging = [
            reward.judge_or_fail(play.task, turn.text, score) for play, turn in zip(self.plays, turns, strict=True)
        ]
        results = await outcomes(judging)
        lost = [result for result in results if isinstance(result, Exception)]
        if lost and len(lost) == len(results):
            raise lost[0]
        for turn, play, result in zip(turns, self.plays, results, strict=True):
            failed = Score(score, play.task.extract(turn.text), failure=str(result))
            judged = failed if isinstance(result, Exception) else result
            turn.score = replace(judged, right_at=self.config.judge.right_at)
        reasons = [turn.scored.failure for turn in turns if turn.scored.failure is not None]
        if reasons:
            logger.warning(
                "%s: %d of %d texts could not be scored, the first: %s", name, len(reasons), len(turns), reasons[0]
            )
        return turns

    def _text(self, play: Play, ids: list[int], seats: Sequence[int]) -> str:
        encoder, prompt = self.policy_of[seats[0]].encoder, play.prompts[seats[0]]
        return encoder.read(prompt, ids[: encoder.until_stop(prompt, ids, self._stops(seats))])[1]

    def _way(
        self, name: str, scores: Sequence[Score], answers: Sequence[Answer], seats: Sequence[int], seconds: float
    ) -> Way:
        read = [
            sum(len(play.prompts[k]) + len(answer.token_ids) - 1 for k in seats)
            for play, answer in zip(self.plays, answers, strict=True)
        ]
        return Way(name, self._by_task(scores), sum(len(answer.token_ids) for answer in answers), sum(read), seconds)

    def _vote(self, ways: Sequence[Way], turns_KN: Sequence[Sequence[Turn]]) -> Way:
        """The majority of the agents' own answers, as a single turn's runner takes it; it costs what they cost."""
        scores = []
        for play, *turns in zip(self.plays, *turns_KN, strict=True):
            episode = Episode(play.task, play.sample, self.agents, turns)
            answers = [play.task.extract(turn.text) for turn in turns]
            episode.answer = majority(answers, random.Random(derive_seed(*play.key)))
            scores.append(team_score(episode))
        cost = [sum(getattr(way, key) for way in ways) for key in ("tokens", "forward_tokens", "seconds")]
        return Way("vote", self._by_task(scores), *cost)

    def _by_task(self, scores: Sequence[Score]) -> list[list[float]]:
        correct = [float(score.right) for score in scores]
        return [correct[start : start + self.samples] for start in range(0, len(correct), self.samples)]


def weights_of(config: DictConfig) -> list[float]:
    given = config.ensemble.weights
    return [1.0] * len(config.agents) if given is None else list(given)
