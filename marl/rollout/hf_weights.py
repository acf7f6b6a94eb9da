"""Weights of an ``hf`` server: those that a trainer sends, the model's and its adapters', and an account of those it holds."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import torch

from marl.rollout.adapters import AdapterBank
from marl.rollout.decoding import Engine
from marl.utils.weight_digest import Held, digest_of


class TakesWeights:
    """The part of a server that weight syncs call."""

    config: Any
    model: Any
    engine: Engine
    adapters: AdapterBank

    def __init__(self) -> None:
        self.global_steps: int | None = None
        self.received: set[str] = set()
        self.arriving: dict[str, torch.Tensor] = {}
        """An adapter's weights, until it is named."""
        self.versions: dict[str, int] = {}
        """The step of every adapter's weights."""

    def _between_tokens(self) -> AbstractAsyncContextManager[None]:
        """Nothing is decoded inside."""
        raise NotImplementedError

    async def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Overwrite the named parameters. Raises KeyError for a name that this model does not have."""
        own = self.model.state_dict()
        unknown = sorted(set(weights) - set(own))
        if unknown:
            raise KeyError(f"weight sync: the server's model has no {unknown[:3]}; is its path the trainer's?")
        async with self._between_tokens():
            self.engine.forget()
            with torch.inference_mode():
                for name, tensor in weights.items():
                    own[name].copy_(tensor)
        self.received |= set(weights)

    async def finish_weights(self, global_steps: int | None) -> None:
        """End a weight sync. Raises KeyError if a parameter was left out."""
        tied = self.model.config.tie_word_embeddings
        shared = set(getattr(self.model, "_tied_weights_keys", None) or ()) if tied else set()
        received, self.received = self.received, set()  # those of a sync that failed do not count for the next
        missing = sorted(set(dict(self.model.named_parameters())) - received - shared)
        if missing:
            raise KeyError(f"weight sync: the trainer sent no {missing[:3]}")
        async with self._between_tokens():
            self.engine.forget()
            self.global_steps = global_steps

    async def held_weights(self, seed: int, adapter: str | None = None, with_base: bool = True) -> Held:
        """The step and the digest of the weights that it decodes with: the model's, an adapter's, or both."""
        async with self._between_tokens():
            tensors = dict(self.model.state_dict()) if with_base else {}
            tensors |= dict(self.adapters.weights(adapter)) if adapter else {}
            return Held(self._version(adapter), digest_of(tensors.items(), getattr(torch, self.config.dtype), seed))

    async def load_adapter(self, weights: dict[str, torch.Tensor]) -> None:
        """Keep weights of the adapter that :meth:`finish_adapter` will name."""
        self.arriving |= weights

    async def finish_adapter(self, name: str, scaling: float, global_steps: int) -> None:
        """End an adapter's sync: what has arrived replaces it as a whole, and where nothing has, it stays. Raises KeyError for
        weights that do not fit, or none at all."""
        weights, self.arriving = self.arriving, {}
        if not weights and name not in self.adapters.names:
            raise KeyError(f"weight sync: the trainer sent no weights of the adapter {name!r}")
        async with self._between_tokens():
            if weights:
                self.adapters.put(name, weights, scaling)
                self.engine.forget(name)
            self.versions[name] = global_steps

    def _version(self, adapter: str | None) -> int | None:
        return self.global_steps if adapter is None else self.versions.get(adapter)
