"""Tasks that two agents solve only together, and games. Pure Python: sentences and answers, no tokens.

*Smudged note*: both read one word problem; one copy, chosen at random, has an unreadable number (``~``), and neither
knows whose. Alone they can reach .50 between them.
*Smudged sums*: the same in plain English, for a pre-trained model.
*Split information*: each holds one number; the answer is their sum mod 10.

*Game*: an action in one token, 0 or 1, for games of ``runner=game``, whose payoffs are the scores.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

AGENTS = ("alice", "carol")
NAMES = ("tom", "ann", "bob", "mia", "sam", "eve")
OBJECTS = ("apples", "coins", "cards", "pens", "eggs", "books")
TEMPLATES = {
    "add": (
        "{name} has {a} {objects} and buys {b} more . how many ?",
        "{name} has {a} {objects} . then {name} gets {b} . how many ?",
    ),
    "subtract": (
        "{name} has {a} {objects} and loses {b} . how many ?",
        "{name} had {a} {objects} . then {name} gave away {b} . how many ?",
    ),
    "multiply": (
        "{name} has {b} boxes of {a} {objects} . how many ?",
        "there are {b} bags with {a} {objects} . how many ?",
    ),
}
QUESTION = "how many ?"
SMUDGE = "~"
PEER_TEMPLATE = "{agent} said {text}"
"""Template of a peer's answer; the runner's ``peer_template`` must be the same."""
Split = Literal["train", "test"]


def answer_text(number: int) -> str:
    return f"#### {number}"


@dataclass(frozen=True)
class Problem:
    """A question as each agent reads it, and the answer."""

    question: str
    observations: tuple[str, ...]
    answer: int
    wrong: int
    """Result of the wrong operation."""
    system: str = ""

    def row(self, data_source: str, index: int, split: Split) -> dict[str, Any]:
        """A dataset row with verl's columns."""
        prompts = {agent: self.messages(text) for agent, text in zip(AGENTS, self.observations, strict=True)}
        return {
            "data_source": data_source,
            "prompt": self.messages(self.question),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(self.answer)},
            "extra_info": {"index": index, "split": split, "agent_prompts": prompts},
        }

    def messages(self, text: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": text}]


@dataclass(frozen=True)
class WarmExample:
    """A conversation to imitate: messages of alternating roles, the last one the assistant's."""

    messages: tuple[str, ...]
    system: str = ""


class SmudgedNote:
    """``right``: how often the warm start lets an agent that sees the whole problem solve it."""

    data_source = "marl/smudged_note"

    def __init__(self, right: float = 0.7, second_turns: float = 0.6) -> None:
        self.right, self.second_turns = right, second_turns

    def problem(self, rng: random.Random, split: Split) -> Problem:
        while True:
            question, answer, wrong, numbers = word_problem(rng)
            if held_out(question) == (split == "test"):
                break
        observations = [question] * len(AGENTS)
        observations[rng.randrange(len(AGENTS))] = smudge(question, rng.choice(numbers), rng)
        return Problem(question, tuple(observations), answer, wrong)

    def first_answer(self, rng: random.Random, problem: Problem, agent: int) -> int:
        """Before training: who sees all is right, or applies the wrong operation; who does not names the number it sees."""
        seen = problem.observations[agent]
        if SMUDGE in seen:
            return next(int(word) for word in seen.split() if word.isdigit())
        if rng.random() < self.right:
            return problem.answer
        return problem.wrong if rng.random() < 0.8 else rng.randint(1, 18)

    def warm_example(self, rng: random.Random) -> WarmExample:
        problem, agent = self.problem(rng, "train"), rng.randrange(len(AGENTS))
        answers = [self.first_answer(rng, problem, i) for i in range(len(AGENTS))]
        own = (problem.observations[agent], answer_text(answers[agent]))
        if rng.random() >= self.second_turns:
            return WarmExample(own)
        return WarmExample((*own, peers_text(agent, answers), answer_text(rng.choice(answers))))


class SplitInformation:
    data_source = "marl/split_information"

    def __init__(self, truth: float = 0.4, good: float = 0.8, second_turns: float = 0.8) -> None:
        self.truth, self.good, self.second_turns = truth, good, second_turns

    def problem(self, rng: random.Random, split: Split) -> Problem:
        numbers = [rng.randrange(10) for _ in AGENTS]
        answer = sum(numbers) % 10
        return Problem(QUESTION, tuple(f"you have {number}" for number in numbers), answer, (answer + 1) % 10)

    def warm_example(self, rng: random.Random) -> WarmExample:
        problem, agent = self.problem(rng, "train"), rng.randrange(len(AGENTS))
        own = int(problem.observations[agent].split()[-1])
        peer = int(problem.observations[1 - agent].split()[-1])
        message = own if rng.random() < self.truth else 0 if rng.random() < 0.7 else rng.randrange(10)
        first = (problem.observations[agent], answer_text(message))
        if rng.random() >= self.second_turns:
            return WarmExample(first)
        final = problem.answer if rng.random() < self.good else rng.randrange(10)
        answers = [0, 0]
        answers[1 - agent] = peer
        return WarmExample((*first, peers_text(agent, answers), answer_text(final)))


class Game:
    """``first``: how often the warm start chooses the action 0, whatever it was shown."""

    data_source = "marl/game"

    def __init__(self, first: float = 0.5) -> None:
        self.first = first

    def problem(self, rng: random.Random, split: Split) -> Problem:
        """All rows are equal; the payoffs define what is right."""
        return Problem(QUESTION, (QUESTION,) * len(AGENTS), answer=0, wrong=1)

    def action(self, rng: random.Random) -> str:
        return "0" if rng.random() < self.first else "1"

    def warm_example(self, rng: random.Random) -> WarmExample:
        """One to three stages; who did not act at the first one is shown it with the question."""
        peers = rng.sample((*AGENTS, *NAMES), rng.randint(0, 2))

        def shown() -> str:
            said = [PEER_TEMPLATE.format(agent=peer, text=rng.choice("01")) for peer in peers]
            return " ".join([*said, QUESTION])

        messages = [QUESTION if rng.random() < 0.8 else f"{QUESTION} {shown()}", self.action(rng)]
        for _ in range(rng.randint(0, 2)):
            messages += [shown(), self.action(rng)]
        return WarmExample(tuple(messages))


class SmudgedSums:
    """The smudged note in plain English; an agent that guesses says so ("Maybe 12."). The names and objects of a test problem are
    not met with its numbers in training."""

    data_source = "smudged_sums"
    templates = (
        "{name} has {a} {objects} and buys {b} more. How many is that?",
        "{name} found {a} {objects} on Monday and {b} on Tuesday. How many is that?",
        "There are {a} {objects} in the box and {b} on the table. How many is that?",
    )
    system, smudge = "Answer in a few words.", "[smudged]"
    says, guesses = "The answer is {}.", "Maybe {}."
    peer_template, instruction = "{agent} said: {text}", "So how many is that?"
    """The runner's must be the same."""
    numbers = (2, 12)

    def problem(self, rng: random.Random, split: Split) -> Problem:
        while True:
            numbers = {key: rng.randint(*self.numbers) for key in ("a", "b")}
            words = {"name": rng.choice(NAMES).title(), "objects": rng.choice(OBJECTS)}
            template = rng.choice(self.templates)
            question = template.format(**numbers, **words)
            if held_out(question) == (split == "test"):
                break
        hidden = rng.choice(list(numbers))
        observations = [question] * len(AGENTS)
        observations[rng.randrange(len(AGENTS))] = template.format(**(numbers | {hidden: self.smudge}), **words)
        a, b = numbers.values()
        return Problem(question, tuple(observations), a + b, abs(a - b), self.system)

    def warm_example(self, rng: random.Random) -> WarmExample:
        """First answers: right for a whole sum, and a guess that says so for a smudged one. Half of the time a second answer follows,
        with either agent's number by chance: whom to trust is not shown."""
        problem, agent = self.problem(rng, "train"), rng.randrange(len(AGENTS))
        numbers = [self.first_answer(rng, text) for text in problem.observations]
        answers = [
            (self.guesses if self.smudge in text else self.says).format(number)
            for text, number in zip(problem.observations, numbers, strict=True)
        ]
        own = (problem.observations[agent], answers[agent])
        if rng.random() < 0.5:
            return WarmExample(own, self.system)
        peer = f"{self.peer_template.format(agent=AGENTS[1 - agent], text=answers[1 - agent])} {self.instruction}"
        return WarmExample((*own, peer, self.says.format(rng.choice(numbers))), self.system)

    def first_answer(self, rng: random.Random, text: str) -> int:
        seen = [int(word) for word in text.split() if word.isdigit()]
        return sum(seen) if len(seen) == 2 else seen[0] + rng.randint(*self.numbers)


Task = SmudgedNote | SmudgedSums | SplitInformation | Game
TASKS: dict[str, Callable[[], Task]] = {
    "smudged_note": SmudgedNote,
    "smudged_sums": SmudgedSums,
    "split_information": SplitInformation,
    "game": Game,
    "game_70": partial(Game, first=0.70),
    "game_02": partial(Game, first=0.02),
}


def word_problem(rng: random.Random) -> tuple[str, int, int, tuple[int, int]]:
    """A question, its answer, what the wrong operation gives, and its two numbers."""
    operation = rng.choice(list(TEMPLATES))
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    if operation == "add":
        answer, wrong = a + b, abs(a - b)
    elif operation == "subtract":
        b = rng.randint(1, a)
        answer, wrong = a - b, a + b
    else:
        b = rng.randint(2, 9)
        answer, wrong = a * b, a + b
    template = rng.choice(TEMPLATES[operation])
    return template.format(name=rng.choice(NAMES), objects=rng.choice(OBJECTS), a=a, b=b), answer, wrong, (a, b)


def held_out(question: str) -> bool:
    """One statement in five is for testing only; number facts are shared."""
    return hashlib.md5(question.encode()).digest()[0] % 5 == 0


def smudge(question: str, number: int, rng: random.Random) -> str:
    words = question.split()
    place = rng.choice([i for i, word in enumerate(words) if word == str(number)])
    words[place] = SMUDGE
    return " ".join(words)


def peers_text(agent: int, answers: list[int]) -> str:
    """Text of the other agents' answers, as the debate runner shows it to this agent."""
    return " ".join(
        PEER_TEMPLATE.format(agent=name, text=answer_text(answers[i])) for i, name in enumerate(AGENTS) if i != agent
    )


def rows(task: Task, count: int, seed: int, split: Split) -> Iterator[dict[str, Any]]:
    rng = random.Random(f"{split}-{seed}")
    for index in range(count):
        yield task.problem(rng, split).row(task.data_source, index, split)


def words() -> list[str]:
    """Every word that a task, a template or an answer uses."""
    fields = dict.fromkeys(("name", "objects", "a", "b", "agent", "text"), "")
    sentences = [template.format(**fields) for templates in TEMPLATES.values() for template in templates]
    sentences += [PEER_TEMPLATE.format(**fields), f"you have {QUESTION}", "####", SMUDGE]
    found = {word for sentence in sentences for word in sentence.split()} | {*NAMES, *OBJECTS, *AGENTS}
    return [*map(str, range(100)), *sorted(found)]
