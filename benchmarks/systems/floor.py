"""The floor: GRPO as a bare loop over :class:`benchmarks.systems.lean.Lean`, with nothing that a framework adds."""

import sys
from itertools import cycle, islice

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.gate import Gate, Stopped
from benchmarks.systems.lean import Lean, decode, log_probs_of, prefill_once
from benchmarks.work import (
    PROMPT,
    TOKENIZER,
    Load,
    Work,
    checksum,
    group_advantages,
    model_folder,
    prompt_of,
    questions,
)

CLIP = 0.2


class Policy:
    """One model that is sampled from and trained."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.model = Lean(model_folder(load.size))
        self.sampler = Lean(model_folder(load.size), torch.bfloat16) if load.bf16 else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)

    def rollout(self, prompts_NP: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            if self.sampler is not self.model:
                for own, trained in zip(self.sampler.parameters(), self.model.parameters(), strict=True):
                    own.copy_(trained)
            length = PROMPT + self.load.response
            logits_BV, cache = prefill_once(self.sampler, prompts_NP, self.load.samples, length)
            answers_BT, log_probs_BT = decode(self.sampler, logits_BV, cache, PROMPT, self.load.response)
        return answers_BT.clone(), log_probs_BT.clone()  # inference tensors cannot be trained on

    def update(self, ids_BT: Tensor, old_log_probs_BT: Tensor, advantages_B1: Tensor, work: Work) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        size = self.load.micro_batch
        batches = (x.split(size) for x in (ids_BT, old_log_probs_BT, advantages_B1))
        for ids, old, advantages in zip(*batches, strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.load.bf16):
                logits = self.model(ids, keep_from=PROMPT - 1)[:, :-1]
            ratio = (log_probs_of(logits, ids[:, PROMPT:]) - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            (-gain.mean() * len(ids) / len(ids_BT)).backward()
            work.forwarded_tokens += ids.numel()
            work.trained_tokens += gain.numel()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()


class Floor:
    """Agents with models of their own, which answer the same questions one after another."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
        self.policies = [Policy(load) for _ in range(load.agents)]
        self.questions = cycle(questions())

    def step(self, work: Work) -> None:
        prompts_NP = self.prompts()
        for policy in self.policies:
            answers_BT, old_log_probs_BT = policy.rollout(prompts_NP)
            texts = self.tokenizer.decode_batch(answers_BT.tolist())
            advantages_B1 = group_advantages(texts, self.load.samples)
            prompts_BP = prompts_NP.repeat_interleave(self.load.samples, 0)
            policy.update(torch.cat([prompts_BP, answers_BT], 1), old_log_probs_BT, advantages_B1, work)
            work.samples += len(answers_BT)
            work.prompt_tokens += prompts_BP.numel()
            work.response_tokens += answers_BT.numel()

    def prompts(self) -> Tensor:
        texts = [prompt_of(question) for question in islice(self.questions, self.load.questions)]
        return torch.tensor([encoded.ids for encoded in self.tokenizer.encode_batch(texts)])

    def checksum(self) -> float:
        return checksum([policy.model for policy in self.policies])


def main(load: Load) -> None:
    gate = Gate()
    torch.set_num_threads(1)
    floor = Floor(load)
    gate.ready(floor.checksum())
    while True:
        gate.begin()
        work = Work()
        floor.step(work)
        gate.stop_clocks()
        gate.report(work, floor.checksum())


if __name__ == "__main__":
    try:
        main(Load.loads(sys.argv[1]))
    except Stopped:
        sys.exit(0)
