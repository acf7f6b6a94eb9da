"""CoMLRL's MAGRPOTrainer, as it comes: agents with own parameters, one turn each."""

import sys
from typing import Any

import torch
from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gate import Gate, Stopped
from benchmarks.work import TOKENIZER, Load, Work, checksum, model_folder, prompt_of, questions, score


class Counted(MAGRPOTrainer):
    """The trainer, which takes its turn before the first question of a step, and counts its work."""

    gate: Gate
    load: Load
    work = Work()
    played = 0

    def _train_step_returns(self, *arguments: Any, **settings: Any) -> Any:
        if self.played % self.load.questions == 0:
            self.take_turn()
        self.played += 1
        return super()._train_step_returns(*arguments, **settings)

    def take_turn(self) -> None:
        if self.played:
            self.gate.stop_clocks()
            self.gate.report(self.work, checksum(self.agents))
            self.work = Work()
        else:
            self.gate.ready(checksum(self.agents))
        self.gate.begin()

    def _generate_completions(self, *arguments: Any, **settings: Any) -> Any:
        output = super()._generate_completions(*arguments, **settings)
        lengths = output["response_lens"]
        self.work.samples += len(lengths)
        self.work.prompt_tokens += output["prompt_input_ids"].shape[1] * len(lengths)
        self.work.response_tokens += sum(lengths)
        return output

    def _compute_loss_with_gradients(self, agent: Any, completions: dict[str, Any], returns: Any) -> Any:
        width, sequences = completions["prompt_input_ids"].shape[1], len(completions["completion_input_ids"][0])
        before = self.work.forwarded_tokens
        loss = super()._compute_loss_with_gradients(agent, completions, returns)
        # it reads the logits behind the prompt
        self.work.trained_tokens += self.work.forwarded_tokens - before - width * sequences
        return loss

    def count_forward(self, module: Any, arguments: Any, settings: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.work.forwarded_tokens += settings["input_ids"].numel()


def rewards(*answers: list[str], batch_items: Any = None) -> list[float]:
    """The team's reward: that of the first agent's answer."""
    return [score(text) for text in answers[0]]


def settings(load: Load) -> MAGRPOConfig:
    return MAGRPOConfig(
        num_train_epochs=1,
        agent_learning_rate=1e-6,
        num_agents=load.agents,
        agent_devices="cpu",
        num_generations=load.samples,
        max_new_tokens=load.response,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        num_turns=1,
        eval_interval=0,
        rollout_buffer_size=load.questions,
        train_batch_size=load.questions,
        early_termination_threshold=None,
    )


def main(load: Load) -> None:
    gate = Gate()
    torch.set_num_threads(1)
    trainer = Counted(
        agents=[AutoModelForCausalLM.from_pretrained(model_folder(load.size)) for _ in range(load.agents)],
        num_agents=load.agents,
        tokenizer=AutoTokenizer.from_pretrained(TOKENIZER),
        train_dataset=Dataset.from_list([{"prompt": question} for question in questions()]),
        reward_func=rewards,
        formatters=lambda row: prompt_of(row["prompt"]),
        args=settings(load),
    )
    trainer.gate, trainer.load, trainer.verbose = gate, load, False
    for agent in trainer.agents:
        agent.register_forward_pre_hook(trainer.count_forward, with_kwargs=True)
    trainer.train()


if __name__ == "__main__":
    try:
        main(Load.loads(sys.argv[1]))
    except Stopped:
        sys.exit(0)
