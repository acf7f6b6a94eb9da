"""A lean decoding loop on a Hugging Face causal LM: one batch in, tokens and their log-probs out.

What a request is answered with depends on its prompt, seed and sampling parameters, never on the requests that share
its batch, and on a CPU its log-probs are the trainer's own, bit for bit. Both need fixed shapes (``marl.platform.shapes``):
prompts are right-padded, as the trainer pads, to the width of their own bucket (a batch holds one bucket); no product has
fewer than ``MIN_ROWS`` rows; and the attention mask is always explicit: left to itself, transformers drops it, and takes
another kernel, whenever no row of a batch happens to be padded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from marl.platform.shapes import MIN_ROWS, MIN_WIDTH

ATTENTION = "marl_sdpa"


def widened_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """sdpa, but a single query is asked ``MIN_ROWS`` times on a CPU: there a product of one row has other last bits."""
    if query.shape[2] > 1 or query.device.type != "cpu" or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    query, attention_mask = (x.expand(-1, -1, MIN_ROWS, -1).contiguous() for x in (query, attention_mask))
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return output[:, :1], None


AttentionInterface.register(ATTENTION, widened_attention)


@dataclass(frozen=True, slots=True)
class Request:
    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 is off."""
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    """Strings; the answer ends with the token that completes one."""


@dataclass(slots=True)
class Answer:
    token_ids: list[int]
    log_probs: list[float]
    """Log-probs under the sampling distribution: after temperature, top-k and top-p; under the plain one if greedy."""
    stop_reason: str


def bucket(length: int) -> int:
    """The width that a prompt of this length is padded to: multiples of 32, from 512 on of 128."""
    step = MIN_WIDTH if length <= 512 else 128
    return -(-length // step) * step


def end_ids(tokenizer: Any, *configs: Any) -> frozenset[int]:
    """Ids that end an answer: the tokenizer's, and those of a model's configuration and generation configuration."""
    found = {tokenizer.eos_token_id}
    for config in configs:
        eos = getattr(config, "eos_token_id", None)
        found |= set(eos) if isinstance(eos, list) else {eos}
    return frozenset(found - {None})


def padding_token(tokenizer: Any) -> int:
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0


class PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer, written in place, each row at a position of its own: nothing is copied to grow."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def fill(self, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        """Start from the prefilled prompts [U, heads, W, dim]; row b continues prompt ``rows[b]``."""
        width = keys.shape[-2]
        shape = (len(rows), keys.shape[1], width + self.capacity, keys.shape[3])
        self._keys, self._values = keys.new_zeros(shape), values.new_zeros(shape)
        self._keys[:, :, :width], self._values[:, :, :width] = keys[rows], values[rows]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self._view(width)

    def write_at(self, positions_B: Tensor) -> None:
        """Sets the position of each row's next token."""
        self.positions_B = positions_B

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(key_states), device=key_states.device)
        self._keys[rows, :, self.positions_B] = key_states[:, :, 0]
        self._values[rows, :, self.positions_B] = value_states[:, :, 0]
        self._view(self.keys.shape[-2] + 1)
        return self.keys, self.values

    def select(self, rows: Tensor) -> None:
        self._keys, self._values = self._keys[rows], self._values[rows]
        self._view(self.keys.shape[-2])

    def _view(self, length: int) -> None:
        self.keys, self.values = self._keys[:, :, :length], self._values[:, :, :length]


class Reader(Protocol):
    """Model side of decoding: reads the prompts, then every token that was chosen."""

    def start(self, rows: Sequence[int]) -> Tensor:
        """Scores [B, V] of the first token; row b answers request ``rows[b]``."""
        ...

    def step(self, tokens_B: Tensor) -> Tensor:
        """Scores [B, V] of the token after these."""
        ...

    def keep(self, rows_B: Tensor) -> None:
        """Go on with these rows alone."""
        ...


def decode(
    model: PreTrainedModel, requests: Sequence[Request], pad_id: int, to_text: Callable[[list[int]], str]
) -> list[Answer]:
    """Answer requests whose prompts share one bucket. Equal prompts are prefilled once."""
    capacity = max(request.max_tokens for request in requests)
    reader = ModelReader(model, [request.prompt_ids for request in requests], capacity, pad_id)
    return answer(reader, requests, model.device, to_text)


@torch.inference_mode()
def answer(
    reader: Reader, requests: Sequence[Request], device: torch.device, to_text: Callable[[list[int]], str]
) -> list[Answer]:
    """Sample from the reader's scores until every request has its answer."""
    batch = _Batch(requests, device)
    answers = [Answer([], [], "length") for _ in requests]
    logits = reader.start([row or 0 for row in batch.rows])
    for position in range(max(request.max_tokens for request in requests)):
        tokens, log_probs = batch.sample(logits, position)
        finished = np.zeros(len(batch.rows), dtype=bool)
        for b, (row, token, log_prob) in enumerate(zip(batch.rows, tokens.tolist(), log_probs.tolist(), strict=True)):
            if row is None or batch.done[row]:
                finished[b] = True
            else:
                finished[b] = batch.done[row] = _append(answers[row], requests[row], token, log_prob, to_text)
        if finished.all():
            break
        if 2 * finished.sum() >= len(finished) > MIN_ROWS:
            kept = batch.keep(np.flatnonzero(~finished))
            reader.keep(kept)
            tokens = tokens[kept]
        logits = reader.step(tokens)
    return answers


def _append(answer: Answer, request: Request, token: int, log_prob: float, to_text: Callable[[list[int]], str]) -> bool:
    """Record a token; True if it was the last one."""
    answer.token_ids.append(token)
    answer.log_probs.append(log_prob)
    stopped = token in request.stop_token_ids
    if not stopped and request.stop:
        text = to_text(answer.token_ids)
        stopped = any(stop in text for stop in request.stop)
    if stopped:
        answer.stop_reason = "completed"
    return stopped or len(answer.token_ids) >= request.max_tokens


@contextmanager
def picked(head: torch.nn.Module, pick: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Reduce a module's input to what ``pick`` selects: logits of one position per row instead of all."""
    hook = head.register_forward_pre_hook(lambda _, inputs: (pick(inputs[0]), *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()


class ModelReader:
    """One model, and the keys and values of the rows that it reads."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], capacity: int, pad_id: int) -> None:
        """``prompts``: of each request; ``capacity``: how many tokens may follow them."""
        self.model, self.device, self.capacity = model, model.device, capacity
        distinct = list(dict.fromkeys(prompts))
        index = {prompt: u for u, prompt in enumerate(distinct)}
        self.prompt_of = [index[prompt] for prompt in prompts]
        width = bucket(max(map(len, distinct)))
        ids_UW = np.full((max(len(distinct), MIN_ROWS), width), pad_id, dtype=np.int64)
        mask_UW = np.zeros_like(ids_UW, dtype=bool)
        for u in range(len(ids_UW)):
            prompt = distinct[min(u, len(distinct) - 1)]
            ids_UW[u, : len(prompt)] = prompt
            mask_UW[u, : len(prompt)] = True
        self.ids_UW, self.mask_UW = (torch.from_numpy(x).to(self.device) for x in (ids_UW, mask_UW))

    def start(self, rows: Sequence[int]) -> Tensor:
        prompts, width = self.ids_UW.shape
        causal = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        mask_UWW = causal & self.mask_UW[:, None, :]
        last_U = self.mask_UW.sum(1) - 1
        rows_U = torch.arange(prompts, device=self.device)
        with picked(self.model.get_output_embeddings(), lambda hidden: hidden[rows_U, last_U][:, None]):
            output = self.model(
                input_ids=self.ids_UW,
                attention_mask=mask_UWW[:, None],
                position_ids=torch.arange(width, device=self.device).expand(prompts, -1),
                use_cache=True,
            )
        prompt_of_B = torch.tensor([self.prompt_of[row] for row in rows], device=self.device)
        layers = [PreallocatedLayer(self.capacity) for _ in output.past_key_values.layers]
        for layer, prefilled in zip(layers, output.past_key_values.layers, strict=True):
            layer.fill(prefilled.keys, prefilled.values, prompt_of_B)
        self.cache = Cache(layers=layers)
        self.position_B = last_U[prompt_of_B]
        return output.logits[prompt_of_B, 0]

    def step(self, tokens_B: Tensor) -> Tensor:
        self.position_B = self.position_B + 1
        for layer in self.cache.layers:
            layer.write_at(self.position_B)
        width = self.cache.get_seq_length() + 1
        seen_BW = torch.arange(width, device=self.device) <= self.position_B[:, None]
        output = self.model(
            input_ids=tokens_B[:, None],
            attention_mask=seen_BW[:, None, None],
            position_ids=self.position_B[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, 0]

    def keep(self, rows_B: Tensor) -> None:
        for layer in self.cache.layers:
            layer.select(rows_B)
        self.position_B = self.position_B[rows_B]


class _Batch:
    """Sampling state of one batch; rows that have ended leave it in halves."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        self.rows: list[int | None] = [*range(len(requests)), *[None] * (MIN_ROWS - len(requests))]
        """Request that a row decodes; None is padding, which decodes the first one once more."""
        self.done = [False] * len(requests)
        decoded = [requests[row or 0] for row in self.rows]
        capacity = max(request.max_tokens for request in requests)
        self.uniforms_BT = torch.from_numpy(
            np.stack([np.random.Generator(np.random.Philox(request.seed)).random(capacity) for request in decoded])
        ).to(device)
        self.sampling = _Sampling(decoded, device)

    def sample(self, logits_BV: Tensor, position: int) -> tuple[Tensor, Tensor]:
        return self.sampling(logits_BV, self.uniforms_BT[:, position])

    def keep(self, kept: np.ndarray) -> Tensor:
        """Keep these rows; returns those that the batch has now, padding included."""
        padding = max(0, MIN_ROWS - len(kept))
        self.rows = [*(self.rows[b] for b in kept), *[None] * padding]
        rows = torch.from_numpy(np.concatenate([kept, np.repeat(kept[:1], padding)])).to(self.uniforms_BT.device)
        self.uniforms_BT = self.uniforms_BT[rows]
        self.sampling.select(rows)
        return rows


class _Sampling:
    """Each row's own temperature, top-k and top-p; one uniform number a token, turned into a token by the inverse CDF."""

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        self.greedy = column([request.temperature == 0 for request in requests])
        self.temperature = column([request.temperature or 1.0 for request in requests])
        self.top_p = column([request.top_p for request in requests])
        self.top_k = column([request.top_k if request.top_k > 0 else 2**31 - 1 for request in requests])
        self.truncates = any(request.top_p < 1 or request.top_k > 0 for request in requests)

    def select(self, rows: Tensor) -> None:
        self.greedy, self.temperature = self.greedy[rows], self.temperature[rows]
        self.top_p, self.top_k = self.top_p[rows], self.top_k[rows]

    def __call__(self, logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
        log_probs_BV = (logits_BV.float() / self.temperature).log_softmax(-1)
        if self.truncates:
            log_probs_BV = self._truncate(log_probs_BV)
        cdf_BV = log_probs_BV.double().exp().cumsum(-1)
        drawn_B1 = torch.searchsorted(cdf_BV, uniforms_B[:, None] * cdf_BV[:, -1:], right=True)
        drawn_B1 = drawn_B1.clamp(max=logits_BV.shape[-1] - 1)
        tokens_B1 = torch.where(self.greedy, logits_BV.argmax(-1, keepdim=True), drawn_B1)
        return tokens_B1[:, 0], log_probs_BV.gather(1, tokens_B1)[:, 0]

    def _truncate(self, log_probs_BV: Tensor) -> Tensor:
        """Keep the k likeliest tokens, and of those the fewest whose mass reaches p; the likeliest always stays."""
        sorted_BV, order_BV = log_probs_BV.sort(dim=-1, descending=True, stable=True)
        rank_V = torch.arange(sorted_BV.shape[-1], device=sorted_BV.device)
        in_k_BV = rank_V < self.top_k
        probs_BV = sorted_BV.masked_fill(~in_k_BV, -torch.inf).softmax(-1)
        before_BV = probs_BV.cumsum(-1) - probs_BV
        kept_BV = in_k_BV & ((before_BV < self.top_p) | (rank_V == 0))
        truncated_BV = torch.full_like(log_probs_BV, -torch.inf)
        truncated_BV.scatter_(1, order_BV, sorted_BV.masked_fill(~kept_BV, -torch.inf))
        truncated_BV = truncated_BV.log_softmax(-1)
        rows_B1 = ((self.top_p < 1) | (self.top_k < 2**31 - 1)) & ~self.greedy
        return torch.where(rows_B1, truncated_BV, log_probs_BV)
