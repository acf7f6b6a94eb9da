"""The server of the ``hf`` rollout: tokens in, tokens out, on the same waist as verl's vLLM and SGLang servers."""

import asyncio
import itertools
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer
from verl.utils.device import get_torch_device
from verl.workers.rollout.replica import TokenOutput

from marl.modules.pretrained import load_generation_config
from marl.rollout.adapters import AdapterBank
from marl.rollout.attention import ATTENTION, NEAR_ATTENTION
from marl.rollout.decoding import Engine, SingleReader, end_ids, padding_token
from marl.rollout.hf_model import build_model, check_positions, inexact_on_cpu, load_model, longest_of
from marl.rollout.hf_settings import is_exact, prefix_bytes
from marl.rollout.hf_weights import TakesWeights
from marl.rollout.prefixes import Prefixes
from marl.rollout.requests import Draft, Request, check_numbers
from marl.rollout.vllm_sglang import is_frozen
from marl.utils.allocator import keep_freed_memory
from marl.utils.garbage import collect_garbage, freeze_gc
from marl.utils.numbers import LEAST_TEMPERATURE
from marl.utils.spans import Span, Stopwatch

logger = logging.getLogger(__name__)
GATHER_SECONDS = 0.002
"""Time that an idle server waits for more requests to begin with."""
HANDOVER_SECONDS = 0.01
"""Time that an answer waits for others to travel with."""


class Pending(NamedTuple):
    """Stands for an answer that will be there later: :meth:`HFServer.collect` gives it for its ticket."""

    ticket: int


class HFServer(TakesWeights):
    """Token-in, token-out server of one policy: requests join what is being decoded, and leave it, between tokens."""

    handover = HANDOVER_SECONDS

    def __init__(self, config: Any, model_config: Any, device: str) -> None:
        super().__init__()
        if device == "cpu":
            keep_freed_memory()
        self.config, self.device = config, device
        exact = is_exact(config)
        attention = ATTENTION if exact else NEAR_ATTENTION
        make = load_model if is_frozen(config) else build_model
        self.model = make(model_config, getattr(torch, config.dtype), device, attention)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or self.threads()))
        for why in inexact_on_cpu(self.model.config, torch.get_num_threads()) if exact and device == "cpu" else []:
            logger.warning("log-probs may differ in their last bits with the requests beside them: %s", why)
        self.longest = longest_of(config, self.model.config)
        self.vocabulary = len(self.model.get_input_embeddings().weight)
        check_positions(self.model.config, model_config["path"], self.longest)
        self.tokenizer = AutoTokenizer.from_pretrained(
            model_config["tokenizer_path"] or model_config["path"], trust_remote_code=model_config["trust_remote_code"]
        )
        generation = load_generation_config(model_config["path"])
        self.eos_ids = end_ids(self.tokenizer, self.model.config.get_text_config(), generation)
        self.pad_id = padding_token(self.tokenizer)
        prefixes = Prefixes(prefix_bytes(config.custom) * config.enable_prefix_caching)
        self.adapters = AdapterBank(self.model)
        self.reader = SingleReader(self.model, prefixes, self.pad_id, exact, self.adapters)
        self.engine = Engine(self.reader, torch.device(device), self.tokenizer.decode, config.max_num_seqs)
        self.futures: dict[Draft, asyncio.Future] = {}
        self.tickets: dict[int, asyncio.Future] = {}
        self.named: dict[int, asyncio.Future] = {}
        """What is not answered yet, by the name that its client gave it."""
        self.issued = itertools.count()
        self.model_lock, self.interrupted, self.left = asyncio.Lock(), False, False
        self.loop_task: asyncio.Task | None = None
        self.stats = {"requests": 0, "tokens": 0}
        self.busy = Stopwatch()
        freeze_gc()

    def threads(self) -> int:
        """Threads of an operation where ``OMP_NUM_THREADS`` names none: a rank has a core."""
        return 1

    async def ready(self) -> bool:
        return True

    async def sleep(self) -> None:
        async with self._between_tokens():
            self.engine.forget()
            self.model.to("cpu")
            get_torch_device().empty_cache()  # a trainer on the same GPU is another process

    async def wake_up(self) -> None:
        async with self._between_tokens():
            self.model.to(self.device)

    async def clear_kv_cache(self) -> None:
        async with self._between_tokens():
            self.engine.forget()

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Cancel every request, half answered or not."""
        self._give_up(self.futures.values())

    def cancel(self, names: Iterable[int]) -> None:
        """Give up requests that nobody waits for any more; names of others are passed over. No coroutine: it is called within
        one process too, where nobody awaits it."""
        self._give_up(self.named[name] for name in names if name in self.named)

    def _give_up(self, futures: Iterable[asyncio.Future]) -> None:
        """They leave after the next token."""
        for future in futures:
            self.left |= future.cancel()

    async def resume_generation(self) -> None: ...

    async def get_stats(self) -> dict[str, int]:
        return self.stats | {"prefilled_tokens": self.reader.prefilled}

    async def take_spans(self) -> tuple[list[Span], float]:
        """Decoding spans since the last call, and the server's current time."""
        return self.busy.take(), time.monotonic()

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        """verl's contract: one request. ``log_probs`` are of the distribution that was sampled from."""
        future = self._submit(prompt_ids, sampling_params)
        future.add_done_callback(self._heed)
        return to_token_output(await future)

    def _heed(self, future: asyncio.Future) -> None:
        """Let a request leave after the next token if its caller is gone."""
        self.left |= future.cancelled()

    async def generate_many(
        self, requests: Sequence[tuple[list[int], dict[str, Any]] | tuple[list[int], dict[str, Any], int]]
    ) -> list[tuple | BaseException | Pending]:
        """The same for many requests in one call, each with a name for :meth:`cancel` or without: of each (token ids,
        log-probs, stop reason, version), its error, or a ticket. Returns as soon as one has ended."""
        futures = [self._submit(*request) for request in requests]
        if futures:
            await self._any(futures)
        return [outcome(future) if future.done() else self._ticket(future) for future in futures]

    async def collect(self, tickets: list[int]) -> list[tuple[int, tuple | BaseException]]:
        """(ticket, answer or error) of those that have ended, as soon as there is one."""
        futures = {ticket: self.tickets[ticket] for ticket in tickets}
        await self._any(futures.values())
        ended = [ticket for ticket, future in futures.items() if future.done()]
        return [(ticket, outcome(self.tickets.pop(ticket))) for ticket in ended]

    async def _any(self, futures: Iterable[asyncio.Future]) -> None:
        _, pending = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if pending and self.handover:
            await asyncio.wait(pending, timeout=self.handover)

    def _ticket(self, future: asyncio.Future) -> Pending:
        pending = Pending(next(self.issued))
        self.tickets[pending.ticket] = future
        return pending

    def _submit(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], name: int | None = None
    ) -> asyncio.Future:
        future = asyncio.get_running_loop().create_future()
        try:
            draft = self.engine.add(self._request(prompt_ids, sampling_params))
            draft.version, self.futures[draft] = self._version(draft.request.adapter), future
        except (ValueError, TypeError) as error:
            future.set_exception(error)
        if name is not None and not future.done():
            self.named[name] = future
            future.add_done_callback(lambda _: self.named.pop(name))
        if self.loop_task is None or self.loop_task.done():
            self.loop_task = asyncio.get_running_loop().create_task(self._serve())
        return future

    def _request(self, prompt_ids: list[int], params: dict[str, Any]) -> Request:
        params = dict(params)
        params.pop("logprobs", None)
        limits = params.pop("max_tokens", None), params.pop("max_new_tokens", None), self.config.response_length
        limit = next(limit for limit in limits if limit is not None)
        stop = params.pop("stop", None) or ()
        seed = params.pop("seed", None)
        stop_ids = frozenset(params.pop("stop_token_ids", None) or ())
        ignore_eos = params.pop("ignore_eos", False)
        known: dict[str, Any] = {key: params.pop(key) for key in ("temperature", "top_p", "top_k") if key in params}
        adapter = params.pop("adapter", None)
        if adapter is not None and adapter not in self.adapters.names:
            raise ValueError(
                f"the server has no adapter {adapter!r}, only {sorted(self.adapters.names)}; sync its weights first"
            )
        if params.pop("repetition_penalty", 1.0) != 1.0 or params:
            raise ValueError(f"the hf rollout has no sampling parameter {sorted(params) or ['repetition_penalty']}")
        check_numbers(prompt_ids, limit, known, self.vocabulary)
        if known.get("temperature", 1.0) < LEAST_TEMPERATURE:
            known["temperature"] = 0.0
        if len(prompt_ids) + limit > self.longest:
            raise ValueError(
                f"prompt of {len(prompt_ids)} tokens + max_tokens {limit} exceeds the model's {self.longest}; "
                "shorten the conversation, or raise rollout.max_model_len if the model allows it"
            )
        return Request(
            prompt_ids=tuple(prompt_ids),
            max_tokens=limit,
            seed=secrets.randbits(63) if seed is None else int(seed),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=stop_ids if ignore_eos else stop_ids | self.eos_ids,
            adapter=adapter,
            **known,
        )

    async def _serve(self) -> None:
        await asyncio.sleep(GATHER_SECONDS)
        while self.engine.busy:
            async with self.model_lock:
                started = time.monotonic()
                try:
                    self._remove_cancelled()
                    if self.engine.busy:
                        self._answer(await self._decode())
                except Exception as error:
                    for draft in self.engine.fail():
                        future = self.futures.pop(draft)
                        if not future.done():  # cancelled meanwhile
                            future.set_exception(error)
                self.busy.add(started, time.monotonic())
            await asyncio.sleep(0)
        collect_garbage()

    def _remove_cancelled(self) -> None:
        self.left = False
        gone = [draft for draft, future in self.futures.items() if future.done()]
        if gone:
            self.engine.remove(gone)
            for draft in gone:
                del self.futures[draft]

    async def _decode(self) -> list[Draft]:
        """Those that have ended, as soon as there is one, or something has to be done between tokens."""
        return await asyncio.to_thread(self._run)

    def _run(self) -> list[Draft]:
        ended: list[Draft] = []
        while self.engine.busy and not ended and not (self.interrupted or self.left):
            ended = self.engine.step()
        return ended

    @asynccontextmanager
    async def _between_tokens(self) -> AsyncIterator[None]:
        self.interrupted = True
        async with self.model_lock:
            self.interrupted = False
            yield

    def _answer(self, drafts: list[Draft]) -> None:
        for draft in drafts:
            answer = draft.answer
            self.stats["requests"] += 1
            self.stats["tokens"] += len(answer.token_ids)
            future = self.futures.pop(draft)
            if not future.done():
                now = self._version(draft.request.adapter)
                version = None if now is None or draft.version is None else min(draft.version, now)
                future.set_result((answer.token_ids, answer.log_probs, answer.stop_reason, version))


def outcome(future: asyncio.Future) -> tuple | BaseException:
    """Its result or its error."""
    if future.cancelled():
        return asyncio.CancelledError()
    return future.exception() or future.result()


def to_token_output(answer: tuple) -> TokenOutput:
    token_ids, log_probs, stop_reason, version = answer
    fields = {"global_steps": version, "min_global_steps": version, "max_global_steps": version}
    return TokenOutput(token_ids=token_ids, log_probs=log_probs, stop_reason=stop_reason, extra_fields=fields)
