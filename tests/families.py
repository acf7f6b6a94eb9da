"""A team of three families, each with its own tokenizer, chat template and context length: everybody holds one number, and the
answer is their sum. The models are made from configurations and have imitated such conversations."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from marl.quickstart.model import UNKNOWN, imitate

NUMBERS = 3
"""0, 1 and 2."""
TEXT = [*map(str, range(3 * NUMBERS)), "####", "you", "have", "said", "how", "many", "?"]
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
}
WINDOW = 12
"""Below the 25 tokens of a conversation; over two layers it reaches an agent's own first answer."""


@dataclass(frozen=True)
class Family:
    config: type[PretrainedConfig]
    template: str
    end: str
    context: int
    options: dict[str, Any]


FAMILIES = {
    "alice": Family(
        Qwen2Config,
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}",
        "<|im_end|>",
        128,
        {"tie_word_embeddings": True},
    ),
    "carol": Family(
        MistralConfig,
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}",
        "<eos>",
        256,
        {"sliding_window": WINDOW, "tie_word_embeddings": True},
    ),
    "bob": Family(
        LlamaConfig,
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|assistant|>"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
        "</s>",
        64,
        {"tie_word_embeddings": True},
    ),
}  # fmt: skip
AGENTS = tuple(FAMILIES)
"""In the order of the run, in which the debate shows their answers."""
MARKS = ("<|im_start|>", "<|user|>", "<|assistant|>", "[INST]", "[/INST]")


def tokenizer_of(agent: str) -> PreTrainedTokenizerFast:
    """Its own order of words, and special tokens that only its template has."""
    family, words = FAMILIES[agent], [*TEXT, "user", "assistant", *AGENTS]
    random.Random(agent).shuffle(words)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([UNKNOWN, *words])}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token="<pad>",
        eos_token=family.end,
        additional_special_tokens=[mark for mark in MARKS if mark in family.template],
    )
    fast.chat_template = family.template
    return fast


def model_of(agent: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    family = FAMILIES[agent]
    config = family.config(
        vocab_size=len(tokenizer), max_position_embeddings=family.context, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **SIZES, **family.options,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.08 if "embed" in name else 0.7 / math.sqrt(parameter.shape[1]))
    return model


def peers_text(agent: str, said: dict[str, int]) -> str:
    return " ".join(f"{name} said #### {number}" for name, number in said.items() if name != agent)


def warm_example(agent: str, rng: random.Random) -> list[dict[str, str]]:
    """A first answer tells the own number every second time; a second one adds what was heard, four times in five."""
    numbers = {name: rng.randrange(NUMBERS) for name in AGENTS}
    first = numbers[agent] if rng.random() < 0.5 else rng.randrange(NUMBERS)
    last = sum(numbers.values()) if rng.random() < 0.8 else rng.randrange(3 * NUMBERS - 2)
    texts = [f"you have {numbers[agent]}", f"#### {first}", peers_text(agent, numbers), f"#### {last}"]
    said = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    return said if rng.random() < 0.8 else said[:2]


def encoded(tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[int]]:
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    ids, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, messages[-1]["content"]))
    return ids, [*answer, tokenizer.eos_token_id]


def warm_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, agent: str, steps: int, seed: int) -> None:
    rng, lr = random.Random(f"{agent}-{seed}"), 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 30) * (1 - 0.9 * step / steps)
        examples = [encoded(tokenizer, warm_example(agent, rng)) for _ in range(64)]
        imitate(model, examples, tokenizer.pad_token_id).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def rows(count: int, seed: str) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    for index in range(count):
        numbers = {name: rng.randrange(NUMBERS) for name in AGENTS}
        prompts = {name: [{"role": "user", "content": f"you have {number}"}] for name, number in numbers.items()}
        yield {
            "data_source": "marl/sum_of_three",
            "prompt": [{"role": "user", "content": "how many ?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(sum(numbers.values()))},
            "extra_info": {"index": index, "agent_prompts": prompts},
        }


def make(folder: Path, steps: int, seed: int = 0, train: int = 2048, test: int = 250) -> tuple[str, ...]:
    """Models and problems in a folder; returns the overrides of a run with them."""
    torch.set_num_threads(1)
    for agent in AGENTS:
        tokenizer = tokenizer_of(agent)
        model = model_of(agent, tokenizer, seed)
        warm_up(model, tokenizer, agent, steps, seed)
        model.save_pretrained(folder / agent)
        tokenizer.save_pretrained(
            folder / f"{agent}_words"
        )  # beside a Qwen2 model, transformers would read it as Qwen2's
    for name, count in (("train", train), ("test", test)):
        table = pyarrow.Table.from_pylist(list(rows(count, f"{name}-{seed}")))
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
    return (
        f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/test.parquet",
        f"actor_rollout_ref.model.path={folder}/alice", "+agents.bob={}", f"seed={seed}",
        *(f"+policies.{agent}.model.path={folder}/{agent}" for agent in AGENTS),
        *(f"+policies.{agent}.model.tokenizer_path={folder}/{agent}_words" for agent in AGENTS),
    )  # fmt: skip
