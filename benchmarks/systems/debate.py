"""Rollouts of a debate with shared parameters: schedules of Hugging Face's ``generate``, and the lean optimum.

    python -m benchmarks.systems.debate LOAD SCHEDULE

Contexts are ids of the lengths that our chat template gives, in its order: own answer, then the peers', then glue.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.gate import Gate, Stopped
from benchmarks.systems.lean import Lean, decode, prefill_once
from benchmarks.work import CHARACTERS, FOLLOW_UP, PROMPT, Load, Work, model_folder

Rollout = Callable[[Work], None]


class Debate:
    def __init__(self, load: Load) -> None:
        self.load = load
        self.glue = torch.zeros(load.episodes, FOLLOW_UP, dtype=torch.long)

    def questions(self) -> Tensor:
        """Prompts [questions, PROMPT] that no step has had before."""
        return torch.randint(CHARACTERS, (self.load.questions, PROMPT))

    def follow_up(self, answers: list[Tensor], agent: int) -> Tensor:
        """New text for an agent after its own answer."""
        peers = [answer for other, answer in enumerate(answers) if other != agent]
        return torch.cat([*peers, self.glue], 1)

    def count(self, work: Work, contexts: list[Tensor], answers: list[Tensor]) -> None:
        work.samples += sum(map(len, answers))
        work.prompt_tokens += sum(context.numel() for context in contexts)
        work.response_tokens += sum(answer.numel() for answer in answers)


class HuggingFace(Debate):
    """Every context is read from its start by ``generate``."""

    def __init__(self, load: Load, batch: int, together: bool = False) -> None:
        """``batch``: episodes that are generated at once; ``together``: all agents in one batch, else in turn."""
        super().__init__(load)
        self.batch, self.together = batch, together
        self.model = AutoModelForCausalLM.from_pretrained(model_folder(load.size)).eval()

    @torch.inference_mode()
    def __call__(self, work: Work) -> None:
        contexts = [self.questions().repeat_interleave(self.load.samples, 0)] * self.load.agents
        answers = self.answers(contexts)
        self.count(work, contexts, answers)
        for _ in range(self.load.rounds - 1):
            contexts = [
                torch.cat([context, answers[agent], self.follow_up(answers, agent)], 1)
                for agent, context in enumerate(contexts)
            ]
            answers = self.answers(contexts)
            self.count(work, contexts, answers)

    def answers(self, contexts: list[Tensor]) -> list[Tensor]:
        if self.together:
            return list(self.generate(torch.cat(contexts)).chunk(len(contexts)))
        return [torch.cat([self.generate(part) for part in context.split(self.batch)]) for context in contexts]

    def generate(self, ids_BT: Tensor) -> Tensor:
        output = self.model.generate(
            input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), max_new_tokens=self.load.response,
            do_sample=True, top_k=0, temperature=1.0,
        )  # fmt: skip
        return output[:, ids_BT.shape[1] :]


class Optimum(Debate):
    """All agents in one batch, keys and values kept between rounds, a question read once."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self.model = Lean(model_folder(load.size))

    @torch.inference_mode()
    def __call__(self, work: Work) -> None:
        load, copies = self.load, self.load.samples * self.load.agents
        question = self.questions()
        logits, cache = prefill_once(self.model, question, copies, load.contexts[-1] + load.response)
        rows = question.repeat_interleave(copies, 0)
        tokens = self.answers(logits, cache, rows, work)
        for _ in range(load.rounds - 1):
            new = self.new_text(tokens)
            start = rows.shape[1] + load.response - 1  # the last token was sampled, and never read
            logits = self.model.extend(torch.cat([tokens[:, -1:], new], 1), cache, start)
            rows = torch.cat([rows, tokens, new], 1)
            tokens = self.answers(logits, cache, rows, work)

    def answers(self, logits: Tensor, cache: Tensor, rows: Tensor, work: Work) -> Tensor:
        tokens, _ = decode(self.model, logits, cache, rows.shape[1], self.load.response)
        self.count(work, [rows], [tokens])
        return tokens

    def new_text(self, tokens: Tensor) -> Tensor:
        """Rows of an episode stand beside one another: its agents, in their order."""
        answers = list(tokens.view(self.load.episodes, self.load.agents, -1).unbind(1))
        return torch.stack([self.follow_up(answers, agent) for agent in range(self.load.agents)], 1).flatten(0, 1)


def schedule(name: str, load: Load) -> Rollout:
    if name == "in_turn":
        return HuggingFace(load, batch=load.episodes)
    if name == "together":
        return HuggingFace(load, batch=load.episodes, together=True)
    if name == "per_question":
        return HuggingFace(load, batch=load.samples)
    return Optimum(load)


def main(load: Load, name: str) -> None:
    gate = Gate()
    torch.set_num_threads(1)
    rollout = schedule(name, load)
    gate.ready()
    while True:
        gate.begin()
        work = Work()
        with gate.part("rollout"):
            rollout(work)
        gate.stop_clocks()
        gate.report(work)


if __name__ == "__main__":
    try:
        main(Load.loads(sys.argv[1]), sys.argv[2])
    except Stopped:
        sys.exit(0)
