"""A tokenizer of one token a word, and a 0.1 M parameter Llama that has imitated a task's conversations."""

import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from marl.quickstart.tasks import TinyTask, WarmExample, words

SPECIAL = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}
ROLES = ("<|user|>", "<|assistant|>")
UNKNOWN = "<unk>"
Half = Sequence[tuple[list[int], list[int]]]
"""Examples of one forward pass: prompt and answer ids of each."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    # special tokens are no words of the model's vocabulary: text that spells one is encoded as unknown
    vocabulary = {word: i for i, word in enumerate([UNKNOWN, *words()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, additional_special_tokens=list(ROLES), **SPECIAL
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, heads: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            intermediate_size=160,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with torch.no_grad():  # the default deviation of .02 is meant for wide models
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.08 if "embed" in name else 0.7 / math.sqrt(parameter.shape[1]))
    return model


def warm_up(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: TinyTask,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
) -> Iterator[float]:
    """Supervised steps on the last answer of warm examples; yields the loss of each.

    The gradients of a step's two halves are computed in two threads: torch releases the GIL, and a sum of two does not depend on
    their order.
    """
    rng = random.Random(f"warm-{seed}")
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr, betas=(0.9, 0.95), weight_decay=0.01)

    def loss_and_gradients(examples: Half) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        loss = imitate(model, examples, tokenizer.pad_token_id)
        return loss.detach(), torch.autograd.grad(loss, parameters)

    with ThreadPoolExecutor(max_workers=2) as threads:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1, (step + 1) / 30) * (1 - 0.9 * step / steps)
            examples = sorted(
                (encode(tokenizer, task.warm_example(rng)) for _ in range(batch)), key=lambda example: len(example[0])
            )
            halves = examples[: batch // 2], examples[batch // 2 :]  # of like length: less padding
            losses, gradients = zip(*threads.map(loss_and_gradients, halves), strict=True)
            for parameter, *of_halves in zip(parameters, *gradients, strict=True):
                parameter.grad = torch.stack(of_halves).mean(0)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            yield torch.stack(losses).mean().item()


def encode(tokenizer: PreTrainedTokenizerFast, example: WarmExample) -> tuple[list[int], list[int]]:
    """Prompt and answer ids of a warm example, as the chat encoder would build them."""
    user, assistant = tokenizer.convert_tokens_to_ids(list(ROLES))
    end = tokenizer.eos_token_id
    ids: list[int] = []
    for i, text in enumerate(example.messages):
        content = tokenizer.convert_tokens_to_ids(text.split())  # a word is a token: far faster than encode()
        ids += [user, *content, assistant] if i % 2 == 0 else [*content, end]
    answer = len(content) + 1
    return ids[:-answer], ids[-answer:]


def imitate(model: LlamaForCausalLM, examples: Half, pad: int) -> torch.Tensor:
    """Mean cross entropy of the answers, all of one length, of left-padded conversations."""
    sequences = [prompt + answer for prompt, answer in examples]
    width, length = max(map(len, sequences)), len(examples[0][1])
    ids = torch.tensor([[pad] * (width - len(sequence)) + sequence for sequence in sequences])
    mask = torch.tensor([[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=length + 1).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -length:].flatten())


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
