"""Prompt growth, measured before anything starts: the runner is played with answers of a given length and no model, and
what agents and a central critic would read is measured.

The course of a conversation depends on its answers, so it is played in several ways, and the longest counts.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

from marl.controller.chat import ChatEncoder
from marl.runners import Instructions, Overflow, Runner, TooManyTurns, scripted
from marl.types import AgentId, ContextOverflow, Episode, Message, Score, Task, Turn
from marl.utils.deadlines import OutOfTime, own_time, waiting_for_others
from marl.utils.threads import in_thread

DEADLINE_S = 10.0
"""Deadline per conversation for waits in the runner itself; the time to encode its prompts does not count."""
BLOCKED = 3
"""So many of these without an agent asked, and the runner blocks its loop."""


NO_TOKEN = -1
"""Stands for tokens of which the number alone matters."""


@dataclass(frozen=True)
class Seat:
    """Lengths of one agent in one round."""

    policy: str
    encoder: ChatEncoder
    tokens: int
    """Tokens of its answer's text."""
    ends: bool = False
    """True if an end token follows: the longest answers are truncated at their limit."""
    limited: bool = True
    """False for a server elsewhere, which has a limit of its own; its answers are measured as others read them."""


@dataclass
class Growth:
    """The longest that was read in any of the ways that were played."""

    by_round: dict[int, int] = field(default_factory=dict)
    """Tokens of an agent's prompt."""
    joint: int = 0
    """Tokens of the central critic's observation."""
    unknown: str = ""
    """Reason why a way could not be played to its end: the runner asks for something that is not there yet."""
    moved: float = field(default_factory=time.monotonic)
    """Time at which an agent was last asked."""
    over: bool = False
    """True once nobody waits for the rest."""

    @property
    def prompt(self) -> int:
        return max(self.by_round.values(), default=0)

    def read(self, round: int, tokens: int) -> None:
        self.by_round[round] = max(self.by_round.get(round, 0), tokens)


@dataclass(frozen=True)
class Way:
    """Content of the scripted answers: ``word`` is in each of them."""

    extract: Callable[[str], str | None]
    score: float
    word: str = ""


def ways_of(runner: Runner, agents: Sequence[AgentId]) -> list[Way]:
    """Nobody answers, all differ, all agree and are wrong or right; and each word that leads a conversation on."""
    numbers = count()
    differ = Way(lambda text: str(next(numbers)), 0.0)
    agree = [Way(lambda text: "1", score) for score in (0.0, 1.0)]
    words = [Way(lambda text: str(next(numbers)), 0.0, word) for word in runner.keywords(agents)]
    return [Way(lambda text: None, 0.0), differ, *agree, *words]


def measure(
    runner: Runner,
    tasks: Sequence[Task],
    seats: Callable[[AgentId, int], Seat],
    roles: Mapping[AgentId, Instructions],
    limit: int,
    joint: Callable[[Episode], int] = lambda episode: 0,
) -> Growth:
    """Play every task in every way. ``limit``: of a prompt's tokens, where the runner makes longer ones shorter; ``joint``: the
    length of a critic's observation. Raises TooManyTurns."""
    growth, agents = Growth(), list(roles)

    async def play_all() -> None:
        for task in tasks:
            for way in () if growth.over else ways_of(runner, agents):
                await play(runner, task, way, seats, roles, limit, joint, growth)

    played = in_thread("prompt_growth", asyncio.run, play_all())  # the caller may have a loop of its own
    while not wait([played], timeout=DEADLINE_S / 10).done:
        if time.monotonic() - growth.moved > BLOCKED * DEADLINE_S:
            unknown = f"a conversation was blocked for {BLOCKED * DEADLINE_S:g} s by a call that waits without await"
            growth.over = True
            return Growth(dict(growth.by_round), growth.joint, unknown)
    try:
        played.result()
    except TooManyTurns:
        raise
    except OutOfTime:
        growth.unknown = f"a conversation did not end within {DEADLINE_S:g} s"
    except Exception as error:  # a runner's own: it is its episodes' to fail
        growth.unknown = f"{type(error).__name__}: {error}"
    return growth


async def play(
    runner: Runner,
    task: Task,
    way: Way,
    seats: Callable[[AgentId, int], Seat],
    roles: Mapping[AgentId, Instructions],
    limit: int,
    joint: Callable[[Episode], int],
    growth: Growth,
) -> None:
    shortens = runner.config.overflow is not Overflow.refuse

    def answer(agent: AgentId, observation: list[Message], round: int, previous: Turn | None, branch: int) -> Turn:
        seat = seats(agent, round)
        own = previous if previous is not None and previous.policy == seat.policy else None
        prompt = seat.encoder.encode(observation, own)
        if seat.limited and shortens and len(prompt) > limit:
            raise ContextOverflow(f"{len(prompt)}")
        if seat.limited:
            growth.read(round, len(prompt))
        text = spoken(seat.encoder, seat.tokens, way.word, content_of(task))
        ids = [NO_TOKEN] * seat.tokens + [seat.encoder.tokenizer.eos_token_id] * seat.ends
        return Turn(agent, round, list(observation), text, seat.policy, prompt, ids, [1] * len(ids), branch=branch)

    async def generate(
        agent: AgentId, observation: list[Message], round: int, previous: Turn | None, branch: int
    ) -> Turn:
        growth.moved = time.monotonic()
        if growth.over:
            raise OutOfTime
        with waiting_for_others():
            return answer(agent, observation, round, previous, branch)

    async def judge(task: Task, turn: Turn) -> Score:
        return Score(way.score, task.extract(turn.text), acc=way.score)

    own_task = Task(task.id, task.messages, task.ground_truth, task.data_source, way.extract, task.extra)
    async with own_time(DEADLINE_S):
        episode = await scripted.play(runner, own_task, list(roles), generate, judge=judge, roles=roles)
    if episode.failure is not None:  # it cannot be made any shorter
        growth.read(0, int(episode.failure_message))
    else:
        growth.joint = max(growth.joint, joint(episode))


def content_of(task: Task) -> str:
    return " ".join(message["content"] for message in task.messages)


@lru_cache(maxsize=64)
def spoken(encoder: ChatEncoder, tokens: int, word: str, sample: str) -> str:
    """A text of so many tokens: a word, then one of the sample's tokens again and again."""
    start = f"{word} " if word else ""
    left = tokens - length_of(encoder, word) if word else tokens
    if left <= 0:
        return word
    ids = list(dict.fromkeys(encoder.answer(sample)[-2::-1]))
    repeated = [encoder.tokenizer.decode([token] * left, skip_special_tokens=True) for token in ids[:TRIED]]
    exact = [text for text in repeated if length_of(encoder, text) == left]
    return start + (exact or repeated)[0]


TRIED = 16
"""Tokens, of which one keeps its length when it is repeated: most do."""


def length_of(encoder: ChatEncoder, text: str) -> int:
    return len(encoder.answer(text)) - 1
