"""One question, played by the team's runner or answered by one of its agents."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any
from uuid import uuid4

from marl.config.policies import hosted_policies, own_settings, policies_by_agent
from marl.data.rows import file_list, rows_of
from marl.evaluation.team import Team
from marl.rewards import answer_rules
from marl.runners import RUNNERS, LiveEpisode, Runner, play_to_end
from marl.runners.episode import FORESIGHT, Generate, Judge
from marl.serving.refusals import TOO_LONG, Refused
from marl.types import AgentId, Episode, Message, Score, Task, Turn
from marl.utils.garbage import collect_garbage
from marl.utils.seeding import derive_seed

TEAM = "team"
Heard = Callable[[Turn, Episode], None]
"""Called with every turn as it ends."""


class Player:
    """Plays questions on the team's loop."""

    def __init__(self, team: Team, data_source: str | None = None) -> None:
        """``data_source``: the rule by which an answer is read; None for that of the run's validation rows."""
        self.controller, self.config, self.step = team.controller, team.setup.config, team.step
        self.agents = list(self.config.agents)
        self.models: dict[str, list[AgentId]] = {TEAM: self.agents} | {f"{TEAM}/{name}": [name] for name in self.agents}
        self.max_prompt_length = self.config.data.max_prompt_length if hosted_policies(self.config) else None
        """None where servers elsewhere read all prompts, within limits of their own."""
        self.source: str
        self.truth: Any
        self.source, self.truth = (data_source, None) if data_source else first_row(self.config)
        self.rules = answer_rules(self.config)
        self.alone = RUNNERS.get("single_turn")(RUNNERS.get("single_turn").Config(name="single_turn"))

    @cached_property
    def longest(self) -> dict[str, int]:
        """The most tokens of an answer, by model. Kept: to read a policy's settings takes 50 ms."""
        return {model: min(map(self._longest, agents)) for model, agents in self.models.items()}

    def _longest(self, agent: AgentId) -> int:
        policies = policies_by_agent(self.config.agents)[agent]
        limits = [own_settings(self.config, policy).rollout.response_length for policy in policies]
        return int(min([*limits, self.config.agents[agent].max_tokens or max(limits)]))

    async def play(
        self,
        model: str,
        messages: Sequence[Message],
        sampling: Mapping[str, Any],
        seed: int,
        sample: int = 0,
        heard: Heard = lambda turn, episode: None,
    ) -> Episode:
        """One episode of a model. Raises Refused for a conversation that the agents cannot read, and GroupFailed where a server is
        gone."""
        agents, key = self.models[model], (self.controller.seed, "serve", seed, sample)
        task = self.task(messages)
        accuracy = self.controller.accuracy.shares()
        record = Episode(task, sample, list(agents), seed=derive_seed(*key), accuracy=accuracy)
        spoken = self.controller.generate(task, key, self.step, True, sampling, session=uuid4().hex)
        generate = listened(spoken, record, heard)
        live = LiveEpisode(record, generate, self.judge(), self.controller.roles, self.runner(model).config.overflow)
        played = await play_to_end(self.runner(model), live)
        collect_garbage()
        if played.failure == "overflow" or not played.path:
            said = played.failure_message or "no agent has spoken"
            raise Refused(400, f"the conversation is too long for the team: {said}", TOO_LONG, "messages")
        return played

    def runner(self, model: str) -> Runner:
        return self.controller.runner if model == TEAM else self.alone

    def task(self, messages: Sequence[Message]) -> Task:
        rules, of = self.rules, (self.source, self.truth)
        return Task("question", list(messages), None, self.source, rules.extractor(*of), {}, rules.hider(*of))

    def judge(self) -> Judge:
        """A reward function of the user's may score without the truth; the built-in ones compare with it."""
        if self.config.reward.custom_reward_function.path:
            return self.controller.judge
        return unscored


async def unscored(task: Task, turn: Turn) -> Score:
    raise Refused(
        400,
        "this team's runner asks for the scores of answers, and a question without a known answer has none; serve it with "
        "runner.decide=majority (or runner.keep=majority of a tree), or with reward.custom_reward_function.path, a verifier",
        "needs_scores",
    )


def listened(generate: Generate, record: Episode, heard: Heard) -> Generate:
    """The same turns, each of which is heard as it ends; predictions of peers' turns are not."""

    async def listening(
        agent: AgentId, observation: list[Message], round: int, previous: Turn | None, branch: int
    ) -> Turn:
        turn = await generate(agent, observation, round, previous, branch)
        if branch > FORESIGHT:
            heard(turn, record)
        return turn

    return listening


def first_row(config: Any) -> tuple[str, Any]:
    """The data source and the truth of the validation's first row: they say how answers are read."""
    first = next(rows_of(file_list(config.data.val_files)[0], config.data.prompt_key))
    return str(first["data_source"]), first["reward_model"]["ground_truth"]
