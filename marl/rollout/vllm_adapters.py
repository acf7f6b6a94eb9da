"""Several adapters on one vLLM server (``sharing=lora``).

verl's server holds one adapter, under one number, and answers with the base where that is missing. Here every policy of
a pool has a number of its own (``rollout.custom.adapters``), a request names its adapter, and one that was never sent is
an error. Importing this module imports vLLM; in vLLM's worker processes it provides their extension.
"""

from contextvars import ContextVar
from typing import Any

from verl.utils.vllm import TensorLoRARequest
from verl.workers.rollout.vllm_rollout.utils import get_vllm_max_lora_rank, vLLMColocateWorkerExtension
from vllm.lora.request import LoRARequest

from marl.rollout.adapter_ids import adapter_ids, adapter_ranks

ASKED: ContextVar[LoRARequest | None] = ContextVar("asked", default=None)
"""Adapter named by the request that this task serves; None for the base."""


def request_of(name: str, number: int, kind: type[LoRARequest] = LoRARequest, **tensors: Any) -> LoRARequest:
    """The request by which vLLM knows an adapter. Its path does not exist, so a lost adapter is never reloaded from disk."""
    return kind(lora_name=name, lora_int_id=number, lora_path=f"/sent-by-the-trainer/{name}", **tensors)


class AdapterExtension(vLLMColocateWorkerExtension):
    """verl's extension of vLLM's worker, which keeps an adapter under its own number."""

    def update_weights_from_ipc(self, *args: Any, adapter: tuple[str, int] | None = None, **settings: Any) -> None:
        """``adapter``: the name and number of the one that is sent; None for anything else."""
        self.adapter_sent = adapter
        super().update_weights_from_ipc(*args, **settings)

    def _update_weights(self, weights: Any, peft_config: Any, base_sync_done: bool) -> None:
        if self.adapter_sent is None:
            super()._update_weights(weights, peft_config, base_sync_done)
            return
        tensors = {name: tensor.clone() for name, tensor in weights}
        name, number = self.adapter_sent
        self.remove_lora(number)
        self.add_lora(request_of(name, number, TensorLoRARequest, peft_config=peft_config, lora_tensors=tensors))


class AdapterEngine:
    """vLLM's engine, whose requests are computed with the adapter that was asked for."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def list_loras(self) -> tuple[int, ...]:
        """None: verl looks for its own adapter before every request."""
        return ()

    def generate(self, **settings: Any) -> Any:
        return self.engine.generate(**settings | {"lora_request": ASKED.get()})


class AdapterServing:
    """Mixin for verl's vLLM server."""

    config: Any
    engine: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.versions: dict[str, int] = {}
        """The step that each adapter's weights are of."""

    def _get_worker_extension_cls(self) -> str:
        return f"{AdapterExtension.__module__}.{AdapterExtension.__qualname__}"

    async def run_server(self, args: Any) -> None:
        await super().run_server(with_room(args, self.config))  # type: ignore[misc]
        self.engine = AdapterEngine(self.engine)

    async def run_headless(self, args: Any) -> None:
        await super().run_headless(with_room(args, self.config))  # type: ignore[misc]

    async def finish_adapter(self, name: str, step: int) -> None:
        """Note the step of an adapter's weights. Raises KeyError where the engine does not hold it."""
        if adapter_ids(self.config)[name] not in await self.engine.engine.list_loras():
            raise KeyError(f"adapter {name!r}: the engine does not hold it, though its sync of step {step} ended")
        self.versions[name] = step

    async def generate(self, prompt_ids: Any, sampling_params: dict[str, Any], *rest: Any, **settings: Any) -> Any:
        """As verl's; ``sampling_params["adapter"]`` names the adapter. Raises KeyError for one that was never sent."""
        sampling = dict(sampling_params)
        name = sampling.pop("adapter", None)
        asked = ASKED.set(None if name is None else self._held(name))
        try:
            output = await super().generate(prompt_ids, sampling, *rest, **settings)  # type: ignore[misc]
        finally:
            ASKED.reset(asked)
        if name is not None:
            output.extra_fields["global_steps"] = self.versions[name]
        return output

    def _held(self, name: str) -> LoRARequest:
        if name not in self.versions:
            raise KeyError(
                f"adapter {name!r}: expected one that was sent, {', '.join(self.versions) or 'and none was'}"
            )
        return request_of(name, adapter_ids(self.config)[name])


def with_room(args: Any, config: Any) -> Any:
    """vLLM's arguments with room for every adapter: verl's allow for one, of the first policy's rank.

    One slot stays free: with all of them taken, vLLM computes rows of the base with an adapter on some platforms.
    """
    ranks = adapter_ranks(config)
    args.max_loras = args.max_cpu_loras = len(ranks) + 1
    args.max_lora_rank = get_vllm_max_lora_rank(max(ranks.values()))
    return args
