"""A tokenizer of one token a word, and a 0.1 M parameter Llama that has imitated a task's conversations."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from marl.quickstart.tasks import Task, WarmExample, words

SPECIAL = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}
ROLES = ("<|user|>", "<|assistant|>")
UNKNOWN, IGNORED = "<unk>", -100
Ids = tuple[list[int], list[int]]
"""Those of a prompt, and of the answer to it."""
Encode = Callable[[PreTrainedTokenizerFast, WarmExample], Ids]
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
    task: Task,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
    encode: Encode,
    lr_warmup_steps: int = 30,
    parts: int = 2,
) -> Iterator[float]:
    """Supervised steps on the last answer of warm examples; yields the loss of each.

    The gradients of a step's ``parts`` are computed in two threads (torch releases the GIL) and added in order.
    """
    rng = random.Random(f"warm-{seed}")
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr, betas=(0.9, 0.95), weight_decay=0.01)

    def loss_and_gradients(examples: Sequence[Ids]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        loss = imitate(model, examples, tokenizer.pad_token_id)
        return loss.detach(), torch.autograd.grad(loss, parameters)

    with ThreadPoolExecutor(max_workers=2) as threads:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1, (step + 1) / lr_warmup_steps) * (1 - 0.9 * step / steps)
            examples = sorted(
                (encode(tokenizer, task.warm_example(rng)) for _ in range(batch)), key=lambda example: len(example[0])
            )
            losses = []
            optimizer.zero_grad()
            alike = [examples[i : i + batch // parts] for i in range(0, batch, batch // parts)]  # less padding
            for loss, gradients in threads.map(loss_and_gradients, alike):
                losses.append(loss)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.div_(parts).add_(0 if parameter.grad is None else parameter.grad)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            yield torch.stack(losses).mean().item()


def encode_chat(tokenizer: PreTrainedTokenizerFast, example: WarmExample) -> Ids:
    """Prompt and answer ids of a warm example, by the tokenizer's own chat template."""
    messages = [{"role": "system", "content": example.system}] * bool(example.system)
    messages += [
        {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(example.messages[:-1])
    ]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    answer = tokenizer.encode(example.messages[-1], add_special_tokens=False)
    return prompt, [*answer, tokenizer.eos_token_id]


def encode_words(tokenizer: PreTrainedTokenizerFast, example: WarmExample) -> Ids:
    """The same for the tiny model's tokenizer, as the chat encoder would build them."""
    user, assistant = tokenizer.convert_tokens_to_ids(list(ROLES))
    end = tokenizer.eos_token_id
    ids: list[int] = []
    for i, text in enumerate(example.messages):
        content = tokenizer.convert_tokens_to_ids(text.split())  # a word is a token: far faster than encode()
        ids += [user, *content, assistant] if i % 2 == 0 else [*content, end]
    answer = len(content) + 1
    return ids[:-answer], ids[-answer:]


def imitate(model: LlamaForCausalLM, examples: Sequence[Ids], pad: int) -> torch.Tensor:
    """Mean cross entropy of the answers' tokens, of left-padded conversations."""
    sequences = [prompt + answer for prompt, answer in examples]
    width, length = max(map(len, sequences)), max(len(answer) for _, answer in examples)
    ids = torch.tensor([[pad] * (width - len(sequence)) + sequence for sequence in sequences])
    mask = torch.tensor([[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences])
    labels = torch.tensor([[IGNORED] * (length - len(answer)) + answer for _, answer in examples])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=length + 1).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
