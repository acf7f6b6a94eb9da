"""The work that every system is given: model, tokenizer, prompts, rewards, and how it is counted. Systems import nothing of ours with it."""

import json
import random
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ASSETS = Path("outputs/bench/assets")
TOKENIZER = ASSETS / "tokenizer"
"""Beside no ``config.json``: next to one of Qwen2, transformers would load another tokenizer."""
SIZES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4},
    "small": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8},
}
"""1.05 and 25.5 million parameters, two query heads to a key head."""
REAL = "real"
"""SmolLM2-135M-Instruct, with its own weights and words."""
SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
CHARACTERS = 256
VOCABULARY = 264
END = VOCABULARY
"""The id that ends an answer lies outside the model's vocabulary: it is never sampled, so that lengths are equal."""
PAD = CHARACTERS
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QUESTION = 45
"""Characters of a question, which the template makes a prompt of ``PROMPT`` tokens."""
PROMPT = 64
FOLLOW_UP = 21
"""Tokens of the template between an answer and the next one, beside what the peers said."""
DISTINCT = 4096


@dataclass(frozen=True)
class Load:
    """The work of one step."""

    size: str = "tiny"
    questions: int = 8
    samples: int = 8
    """Episodes of a question."""
    response: int = 64
    """Tokens of an answer."""
    agents: int = 1
    rounds: int = 1
    shared: bool = False
    """The agents share one policy."""
    bf16: bool = False
    micro_batch_tokens: int = 2048
    ragged: bool = False
    """Answers of 1 to ``response`` tokens, each length equally often."""
    judged: bool = False
    """A judge scores one answer at a time, and the episodes are dumped."""
    serial: bool = False
    """Scoring, reading of tasks and dumps wait for what they could be done beside."""

    @property
    def episodes(self) -> int:
        return self.questions * self.samples

    @property
    def micro_batch(self) -> int:
        """Sequences of one turn in a micro-batch."""
        return max(1, min(self.episodes, self.micro_batch_tokens // (PROMPT + self.response)))

    @property
    def contexts(self) -> list[int]:
        """Tokens that an agent reads in each round of a debate, from the question on."""
        return [PROMPT + t * (self.agents * self.response + FOLLOW_UP) for t in range(self.rounds)]

    @property
    def fewest_prefilled(self) -> int:
        """Prompt tokens that have to be read where keys and values are kept, and a question is read once.

        Later rounds read the answer's last token, whose keys and values sampling did not need, and what is new.
        """
        new = 1 + FOLLOW_UP + (self.agents - 1) * self.response
        return self.questions * PROMPT + self.episodes * self.agents * (self.rounds - 1) * new

    @property
    def fewest_forwarded(self) -> int:
        """Tokens of the agents' transcripts: each is trained as one sequence."""
        return self.episodes * self.agents * (self.contexts[-1] + self.response)

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> "Load":
        return cls(**json.loads(text))


@dataclass
class Work:
    """Counts of one step, by the harness rather than by the system."""

    samples: int = 0
    """Answers."""
    prompt_tokens: int = 0
    response_tokens: int = 0
    forwarded_tokens: int = 0
    """Tokens through the model with gradients, without padding."""
    trained_tokens: int = 0
    """Tokens in the loss."""


def questions(count: int = DISTINCT) -> list[str]:
    """Random texts of ``QUESTION`` characters, the same every time."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz "
    return [f"q{''.join(draw.choices(letters, k=QUESTION - 2))}?" for _ in range(count)]


def score(text: str) -> float:
    """Reward of an answer: arbitrary, cheap, and different for nearly all texts."""
    return zlib.crc32(text.encode()) % 700 / 100


def group_advantages(texts: Iterable[str], samples: int) -> Any:
    """GRPO's advantages [B, 1] of answers that stand group by group."""
    import torch

    rewards_NG = torch.tensor([score(text) for text in texts]).view(-1, samples)
    centred_NG = rewards_NG - rewards_NG.mean(1, keepdim=True)
    return (centred_NG / (rewards_NG.std(1, keepdim=True) + 1e-4)).view(-1, 1)


def checksum(models: Iterable[Any]) -> float:
    """A number that changes with the parameters."""
    return sum(float(p.detach().double().abs().sum()) for model in models for p in model.parameters())


def model_folder(size: str) -> Path:
    return ASSETS / size


def tokenizer_folder(size: str) -> Path:
    return ASSETS / "real_tokenizer" if size == REAL else TOKENIZER


def prompt_of(question: str) -> str:
    """The chat template, applied by hand."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def make_assets(sizes: Iterable[str]) -> None:
    """Write the tokenizer and the models of random weights; the real one where it is wanted."""
    make_tokenizer()
    for size in SIZES:
        make_model(size)
    if REAL in sizes:
        make_real()


def make_real() -> None:
    """Write the real model with an end of answers that lies outside its vocabulary, as for the others."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from marl.quickstart import smollm2

    source = smollm2.ensure(ASSETS / smollm2.NAME)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.chat_template = TEMPLATE
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    generation = model.generation_config
    generation.do_sample, generation.top_k, generation.temperature = True, 0, 1.0
    assert tokenizer.eos_token_id == model.config.vocab_size
    model.save_pretrained(model_folder(REAL))
    tokenizer.save_pretrained(tokenizer_folder(REAL))


def make_tokenizer() -> None:
    """Write a tokenizer of single characters."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    characters += [chr(0x100 + i) for i in range(CHARACTERS - len(characters))]
    vocabulary = {character: i for i, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    spare = [f"<|spare_{i}|>" for i in range(VOCABULARY - CHARACTERS - len(SPECIALS))]
    tokenizer.add_special_tokens([*SPECIALS, *spare, "<|end|>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIALS[0],
        eos_token="<|end|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    assert (fast.pad_token_id, fast.eos_token_id) == (PAD, END)
    fast.save_pretrained(TOKENIZER)


def make_model(size: str) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    heads = SIZES[size]["num_attention_heads"]
    config = Qwen2Config(
        vocab_size=VOCABULARY, max_position_embeddings=4096, tie_word_embeddings=False, num_key_value_heads=heads // 2,
        bos_token_id=None, eos_token_id=END, pad_token_id=PAD, **SIZES[size],
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    silence_specials(model)
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id = END, PAD
    generation.do_sample, generation.top_k, generation.temperature = True, 0, 1.0
    model.save_pretrained(model_folder(size))


def silence_specials(model: Any) -> None:
    """Let the model sample characters alone, so that an answer's text has as many tokens as the answer.

    Hidden dimension 0 is made constant through the layers, and the head lowers the special tokens by it.
    """
    import torch

    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.1
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[CHARACTERS:, 0] = -100
