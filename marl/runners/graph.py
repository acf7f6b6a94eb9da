"""Graph: who speaks when as nodes and edges, from YAML and without code.

A node is one or more agents that speak at the same time; an edge leads from a node to others once it has spoken, if its
condition holds and its limit is not reached. The first such edge is followed; without one the episode ends.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from marl.runners.base import ConversationRunner, register_runner
from marl.runners.episode import Agent, LiveEpisode, together
from marl.runners.messages import says
from marl.runners.team_answer import Decide, agreed, decide
from marl.types import AgentId, Message, Turn
from marl.utils.numbers import Number, bounded
from marl.utils.registry import did_you_mean


class When(Enum):
    """An edge's condition on the last turns of the node that it leaves."""

    always = "always"
    agreed = "agreed"
    """All give the same answer."""
    disagreed = "disagreed"
    says = "says"
    """One of them says ``word``."""
    right = "right"
    """All are right, by their scores."""
    wrong = "wrong"


@dataclass
class Node:
    agents: list[AgentId] = field(default_factory=list)
    """Agents that speak; empty for all."""
    sees: list[str] = field(default_factory=list)
    """Nodes whose agents' last turns are shown, an agent's own excepted."""
    instruction: str = ""
    """Ends what is shown."""
    answers: bool = True
    """False: what is said here is no answer to the task."""


@dataclass
class Edge:
    source: str
    to: list[str]
    """Several nodes speak at the same time."""
    when: When = When.always
    word: str = ""
    limit: int = bounded(1, Number(1, 10_000, whole=True))
    """Maximum number of times that it is taken."""


@register_runner("graph")
class Graph(ConversationRunner):
    votes = True

    @dataclass
    class Config(ConversationRunner.Config):
        start: str = "answer"
        """The node that speaks first."""
        nodes: dict[str, Node] = field(default_factory=dict)
        """Empty for ``start`` alone, where all agents speak."""
        edges: list[Edge] = field(default_factory=list)
        """Order of speakers: ``source``, ``to``, ``when``, ``word`` and ``limit`` of each."""
        decided_by: list[str] = field(default_factory=list)
        """Nodes whose agents' last answers make the team's; empty for the last that spoke."""
        decide: Decide = Decide.majority

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.nodes = config.nodes or {config.start: Node()}

    @property
    def may_end_early(self) -> bool:
        return any(edge.when in (When.agreed, When.disagreed, When.says) for edge in self.config.edges)

    async def run(self, episode: LiveEpisode) -> str | None:
        last: dict[str, dict[AgentId, Turn]] = {}
        gone: Counter[int] = Counter()
        nodes: list[str] = [self.config.start]
        while nodes:
            spoken = nodes
            await self.speak(nodes, last, episode)
            nodes = await self.following(nodes, last, gone, episode)
        return await decide(self.config.decide, latest(self.config.decided_by or spoken, last, episode), episode)

    async def speak(self, nodes: Sequence[str], last: dict[str, dict[AgentId, Turn]], episode: LiveEpisode) -> None:
        seats = [
            (name, episode.agent(agent)) for name in nodes for agent in self.nodes[name].agents or everybody(episode)
        ]
        observations = [await self.observation(self.nodes[name], agent, last, episode) for name, agent in seats]
        turns = await together(
            agent.act(seen, answers=self.nodes[name].answers)
            for (name, agent), seen in zip(seats, observations, strict=True)
        )
        for (name, _), turn in zip(seats, turns, strict=True):
            last.setdefault(name, {})[turn.agent] = turn

    async def observation(
        self, node: Node, agent: Agent, last: dict[str, dict[AgentId, Turn]], episode: LiveEpisode
    ) -> list[Message]:
        seen = [turn for turn in latest(node.sees, last, episode) if turn.agent != agent.name]
        text = await self.shown(episode, seen, node.instruction)
        return agent.continue_with(text) if text or agent.turns else agent.prompt

    async def following(
        self, nodes: Sequence[str], last: dict[str, dict[AgentId, Turn]], gone: Counter[int], episode: LiveEpisode
    ) -> list[str]:
        for i, edge in enumerate(self.config.edges):
            if edge.source in nodes and gone[i] < edge.limit and await self.holds(edge, last[edge.source], episode):
                gone[i] += 1
                return list(edge.to)
        return []

    async def holds(self, edge: Edge, turns: dict[AgentId, Turn], episode: LiveEpisode) -> bool:
        match edge.when:
            case When.agreed | When.disagreed:
                alike = agreed([episode.answer(turn) for turn in turns.values()]) is not None
                return alike is (edge.when is When.agreed)
            case When.says:
                return any(says(turn.text, edge.word) for turn in turns.values())
            case When.right | When.wrong:
                right = [(await episode.score(turn)).right for turn in turns.values()]
                return all(right) is (edge.when is When.right)
        return True

    def most_turns(self, agents: Sequence[AgentId]) -> dict[AgentId, int]:
        turns = dict.fromkeys(agents, 0)
        for name, node in self.nodes.items():
            visits = (name == self.config.start) + sum(edge.limit for edge in self.config.edges if name in edge.to)
            for agent in node.agents or agents:
                turns[agent] += visits
        return turns

    def check(self, agents: Sequence[AgentId]) -> None:
        super().check(agents)
        named = {"runner.start": [self.config.start], "runner.decided_by": self.config.decided_by}
        for name, node in self.nodes.items():
            self.must_be_agents(f"runner.nodes.{name}.agents", node.agents, agents)
            self.check_seats(f"runner.nodes.{name}.agents={node.agents}", [name], agents)
            named[f"runner.nodes.{name}.sees"] = node.sees
        for i, edge in enumerate(self.config.edges):
            named[f"runner.edges[{i}]"] = [edge.source, *edge.to]
            self.check_seats(f"runner.edges[{i}].to={edge.to}", edge.to, agents)
            if not edge.to or (edge.when is When.says) is not bool(edge.word):
                raise ValueError(
                    f"runner.edges[{i}]={edge}: expected at least one node in to, and a word if and only if when=says"
                )
        self.check_nodes(named)
        for agent in [agent for agent, turns in self.most_turns(agents).items() if not turns]:
            raise ValueError(
                f"agents.{agent}: no node of runner.nodes lets it speak; expected its name in the agents of a node, or no such "
                f"agent (~agents.{agent})"
            )

    def check_nodes(self, named: Mapping[str, Sequence[str]]) -> None:
        """Every node that a key names is there, and every node is reached."""
        for key, names in named.items():
            for name in names:
                if name not in self.nodes:
                    known = ", ".join(self.nodes)
                    raise ValueError(
                        f"{key}: there is no node {name!r}; expected one of {known}.{did_you_mean(name, self.nodes)}"
                    )
        reached, edges = {self.config.start}, list(self.config.edges)
        while found := [edge for edge in edges if edge.source in reached]:
            reached |= {name for edge in found for name in edge.to}
            edges = [edge for edge in edges if edge not in found]
        for name in self.nodes:
            if name not in reached:
                raise ValueError(
                    f"runner.nodes.{name}: no way leads there from runner.start={self.config.start}; add an edge, or remove "
                    "the node"
                )
        if not any(node.answers for node in self.nodes.values()):
            raise ValueError("runner.nodes: no node has answers=true, and the team would never answer; set one")

    def check_seats(self, key: str, nodes: Sequence[str], agents: Sequence[AgentId]) -> None:
        """Nobody speaks twice at the same time."""
        spoken = Counter(agent for name in nodes if name in self.nodes for agent in self.nodes[name].agents or agents)
        for agent, count in spoken.items():
            if count > 1:
                raise ValueError(f"{key}: {agent!r} would speak {count} times at once; give it one node of them")


def latest(nodes: Sequence[str], last: dict[str, dict[AgentId, Turn]], episode: LiveEpisode) -> list[Turn]:
    """Every agent's last turn at any of these nodes, in the order of the team."""
    found: dict[AgentId, Turn] = {}
    for name in nodes:
        for agent, turn in last.get(name, {}).items():
            if agent not in found or found[agent].round < turn.round:
                found[agent] = turn
    return [found[agent] for agent in everybody(episode) if agent in found]


def everybody(episode: LiveEpisode) -> list[AgentId]:
    return [agent.name for agent in episode.agents]
