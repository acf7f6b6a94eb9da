"""TRL's GRPOTrainer, as it comes, with what is not equal work turned off: no reference model, no logging, no saving."""

import sys
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.gate import Gate, Stopped
from benchmarks.work import Load, Work, checksum, model_folder, questions, score, tokenizer_folder

MANY = 10**6


class Counted(trl.GRPOTrainer):
    """The trainer, which takes its turn before it draws a batch, and counts its work."""

    gate: Gate
    work = Work()
    began = False

    def get_batch_samples(self, *arguments: Any, **settings: Any) -> Any:
        if not self.began:
            self.began = True
            self.gate.begin()
        return super().get_batch_samples(*arguments, **settings)

    def _generate_and_score_completions(self, *arguments: Any, **settings: Any) -> Any:
        output = super()._generate_and_score_completions(*arguments, **settings)
        self.work.samples += len(output["completion_ids"])
        self.work.prompt_tokens += int(output["prompt_mask"].sum())
        self.work.response_tokens += int(output["completion_mask"].sum())
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self.work.trained_tokens += int(inputs["completion_mask"].sum())
        return super()._compute_loss(model, inputs)

    def count_forward(self, module: Any, arguments: Any, settings: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.work.forwarded_tokens += int(settings["attention_mask"].sum())


class Turns(TrainerCallback):
    """Reports at the end of a step, and waits for the next turn."""

    def __init__(self, trainer: Counted) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.gate.ready(checksum([self.trainer.model]))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        gate = self.trainer.gate
        gate.stop_clocks()
        gate.report(self.trainer.work, checksum([self.trainer.model]))
        self.trainer.work = Work()
        gate.begin()


def rewards(completions: list, **_: Any) -> list[float]:
    return [score(messages[0]["content"]) for messages in completions]


def settings(load: Load) -> trl.GRPOConfig:
    return trl.GRPOConfig(
        output_dir="outputs/bench/trl",
        per_device_train_batch_size=load.micro_batch,
        gradient_accumulation_steps=load.episodes // load.micro_batch,
        num_generations=load.samples,
        max_completion_length=load.response,
        learning_rate=1e-6,
        max_steps=MANY,
        logging_steps=MANY,
        save_strategy="no",
        report_to=[],
        bf16=load.bf16,
        gradient_checkpointing=False,
        temperature=1.0,
        beta=0.0,
        disable_tqdm=True,
        use_cpu=True,
        optim="adamw_torch",
        shuffle_dataset=False,
    )


def main(load: Load) -> None:
    gate = Gate()
    torch.set_num_threads(1)
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in questions()]
    trainer = Counted(
        model=AutoModelForCausalLM.from_pretrained(model_folder(load.size)),
        processing_class=AutoTokenizer.from_pretrained(tokenizer_folder(load.size)),
        reward_funcs=rewards,
        args=settings(load),
        train_dataset=Dataset.from_list(rows),
    )
    trainer.gate = gate
    trainer.model.register_forward_pre_hook(trainer.count_forward, with_kwargs=True)
    trainer.add_callback(Turns(trainer))
    trainer.train()


if __name__ == "__main__":
    try:
        main(Load.loads(sys.argv[1]))
    except Stopped:
        sys.exit(0)
