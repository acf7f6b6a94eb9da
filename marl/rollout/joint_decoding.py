"""One common answer of several agents: each model reads its own prompt and the answer so far, and every token is chosen by
all of them together.

*distribution*: the mean of the agents' next-token distributions, p = sum_k w_k p_k / sum_k w_k. Temperature, top-k and
top-p are applied to the mean, as to the distribution of a single model. *hidden*: the mean of the agents' last hidden states
(each at the last token that the agent has read), through the head. Agents with heads of their own vote on it: the mean of
what their heads say of the mean state, which is what the mean of linear heads says; it does not depend on the agents' order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from marl.config.errors import ConfigError
from marl.platform.shapes import missing_rows
from marl.rollout.decoding import answer
from marl.rollout.prefixes import Prefixes
from marl.rollout.reader import ModelReader
from marl.rollout.requests import Answer, Draft, Request


def weighted_mean(values_KBX: Tensor, weights_K: Tensor) -> Tensor:
    """sum_k w_k x_k / sum_k w_k, in double precision: the mean of copies of one number is that number."""
    weights = weights_K.double()[:, None, None]
    return (weights * values_KBX.double()).sum(0) / weights.sum()


def mean_distribution(logits_KBV: Tensor, weights_K: Tensor) -> Tensor:
    """log p [B, V] with p = sum_k w_k softmax(logits_k) / sum_k w_k."""
    return weighted_mean(logits_KBV.double().softmax(-1), weights_K).log()


class JointReader(ABC):
    """Reads one answer with every agent's model, each after its own prompt. Agents of one model are one batch of it."""

    def __init__(
        self,
        models_K: Sequence[PreTrainedModel],
        prompts_KN: Sequence[Sequence[tuple[int, ...]]],
        weights_K: Sequence[float],
        pad_id: int,
    ) -> None:
        """``models_K`` and ``prompts_KN``: of each agent, for each request."""
        self.prompts_KN, self.weights = prompts_KN, list(weights_K)
        self.agents_of: dict[PreTrainedModel, list[int]] = {}
        for k, model in enumerate(models_K):
            self.agents_of.setdefault(model, []).append(k)
        self.readers = {model: ModelReader(model, Prefixes(limit=0), pad_id) for model in self.agents_of}
        self.width = min(head_of(model).weight.shape[0] for model in self.readers)
        """Vocabularies of one tokenizer may be padded to different sizes."""

    def join(self, drafts: Sequence[Draft]) -> Tensor:
        """A model's rows are its agents, request after request."""

        def contexts(model: PreTrainedModel) -> list[tuple[int, ...]]:
            prompts = ((self.prompts_KN[k][s.index], s) for s in drafts for k in self.agents_of[model])
            return [(*prompt, *s.answer.token_ids) for prompt, s in prompts]

        room = max(len(prompts[s.index]) + s.request.max_tokens for prompts in self.prompts_KN for s in drafts)
        return self._read(lambda model: self.readers[model].append(contexts(model), room))

    def step(self, tokens: Sequence[int]) -> Tensor:
        return self._read(
            lambda model: self.readers[model].step([token for token in tokens for _ in self.agents_of[model]])
        )

    def keep(self, rows: Sequence[int]) -> None:
        for model, reader in self.readers.items():
            agents = len(self.agents_of[model])
            reader.keep([row * agents + i for row in rows for i in range(agents)])

    def clear(self, adapter: str | None = None) -> None:
        for reader in self.readers.values():
            reader.clear(adapter)

    def _read(self, read: Callable[[PreTrainedModel], Tensor]) -> Tensor:
        outputs = {
            model: read(model).unflatten(0, (-1, len(agents))).transpose(0, 1)
            for model, agents in self.agents_of.items()
        }
        return self.combine(outputs)

    def weights_of(self, agents: Sequence[int], like: Tensor) -> Tensor:
        return torch.tensor([self.weights[k] for k in agents], dtype=torch.float64, device=like.device)

    def joined(self, outputs: Mapping[PreTrainedModel, Tensor]) -> tuple[Tensor, Tensor]:
        """All agents' outputs, and their weights in the same order."""
        together = torch.cat(list(outputs.values()))
        return together, self.weights_of([k for agents in self.agents_of.values() for k in agents], together)

    @abstractmethod
    def combine(self, outputs: Mapping[PreTrainedModel, Tensor]) -> Tensor:
        """Scores [B, V] of the common token, from each model's output for its agents [A, B, …]."""


class DistributionReader(JointReader):
    def combine(self, outputs: Mapping[PreTrainedModel, Tensor]) -> Tensor:
        return mean_distribution(*self.joined({model: logits[..., : self.width] for model, logits in outputs.items()}))


class HiddenReader(JointReader):
    """Its models give hidden states: they run without their heads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heads = {model: head_of(model) for model in self.readers}

    def combine(self, outputs: Mapping[PreTrainedModel, Tensor]) -> Tensor:
        states_KBH, weights_K = self.joined(outputs)
        state_BH = weighted_mean(states_KBH, weights_K).to(states_KBH.dtype)
        rows = len(state_BH)
        state_B1H = torch.cat([state_BH, *[state_BH[:1]] * missing_rows(rows)])[:, None]
        said = torch.stack([head(state_B1H)[:rows, 0, : self.width] for head in self.heads.values()])
        shares = torch.stack([self.weights_of(agents, said).sum() for agents in self.agents_of.values()])
        return weighted_mean(said, shares)

    def _read(self, read: Callable[[PreTrainedModel], Tensor]) -> Tensor:
        with ExitStack() as headless:
            for model in self.readers:
                headless.enter_context(without_head(model))
            return super()._read(read)


@contextmanager
def without_head(model: PreTrainedModel) -> Iterator[None]:
    """A model whose output is what its head would have read."""
    head = head_of(model)
    model.set_output_embeddings(torch.nn.Identity())
    try:
        yield
    finally:
        model.set_output_embeddings(head)


def head_of(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings()


READERS: dict[str, type[JointReader]] = {"distribution": DistributionReader, "hidden": HiddenReader}


def decode_jointly(
    mode: str,
    models_K: Sequence[PreTrainedModel],
    prompts_KN: Sequence[Sequence[tuple[int, ...]]],
    requests_N: Sequence[Request],
    pad_id: int,
    to_text: Callable[[list[int]], str],
    weights_K: Sequence[float] | None = None,
) -> list[Answer]:
    """The common answers. ``requests_N`` say how answers are sampled, their own ``prompt_ids`` are not read."""
    reader = READERS[mode](models_K, prompts_KN, weights_K or [1.0] * len(models_K), pad_id)
    return answer(reader, requests_N, models_K[0].device, to_text)


def check_together(mode: str, models: Mapping[str, PreTrainedModel], tokenizers: Mapping[str, Any]) -> None:
    """Raise ConfigError where the models, by the names of their policies, cannot choose one token together."""
    check_tokenizers(mode, tokenizers)
    if mode == "hidden":
        check_states(mode, models)


def check_tokenizers(mode: str, tokenizers: Mapping[str, Any]) -> None:
    vocabularies = {name: tokenizer.get_vocab() for name, tokenizer in tokenizers.items()}
    first, *others = vocabularies
    for name in others:
        if vocabularies[name] != vocabularies[first]:
            shared = len(vocabularies[first].items() & vocabularies[name].items())
            raise ConfigError(
                f"ensemble.modes=[{mode}]: policies {first!r} and {name!r} have different tokenizers, of "
                f"{len(vocabularies[first])} and {len(vocabularies[name])} tokens, {shared} of them equal; expected one "
                "vocabulary. Use ensemble.modes=[vote], or models with one tokenizer"
            )


def check_states(mode: str, models: Mapping[str, PreTrainedModel]) -> None:
    remedy = "use ensemble.modes=[vote,distribution]"
    sizes = {name: head_of(model).weight.shape[1] for name, model in models.items()}
    first, *others = sizes
    for name in others:
        if sizes[name] != sizes[first]:
            raise ConfigError(
                f"ensemble.modes=[{mode}]: the hidden states of policies {first!r} and {name!r} have {sizes[first]} and "
                f"{sizes[name]} numbers; expected one size, or there is no mean; {remedy}"
            )
    for name, model in models.items():
        if not head_says_all(model):
            raise ConfigError(
                f"ensemble.modes=[{mode}]: the model of policy {name!r} changes what its head says, by a soft cap or "
                f"the like; expected a head whose numbers are the logits; {remedy}"
            )


@torch.inference_mode()
def head_says_all(model: PreTrainedModel) -> bool:
    """True if a model's logits equal its head applied to the state that the model gives without it."""
    word = {key: torch.ones(1, 1, dtype=torch.long, device=model.device) for key in ("input_ids", "attention_mask")}
    logits = model(**word).logits
    with without_head(model):
        state = model(**word).logits
    said = head_of(model)(state)
    return said.shape == logits.shape and torch.allclose(said.float(), logits.float(), rtol=1e-4, atol=1e-6)
