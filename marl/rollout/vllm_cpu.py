"""vLLM's worker on a CPU, named by ``hardware=cpu_vllm`` and imported in vLLM's own worker process alone."""

from typing import Any

from marl.rollout.vllm_adapters import AdapterExtension


class PlainLinearExtension(AdapterExtension):
    """Keeps every linear layer's weight in place, where verl's weight sync writes to it.

    On a CPU vLLM packs weights for oneDNN after loading and frees the originals. verl 0.9.1 also calls a mapper by the name
    that it had until vLLM 0.25.
    """

    def __new__(cls, **settings: Any) -> Any:
        import vllm._custom_ops as ops
        from vllm.model_executor.models.utils import WeightsMapper

        ops._supports_onednn = False
        if not hasattr(WeightsMapper, "get_unstacked_mapper"):
            WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper
        return super().__new__(cls, **settings)

    def update_weights_from_ipc(self, *args: Any, **settings: Any) -> None:
        """As verl's, whose receiver cannot close shared memory that the failed tensors still use: raises why they failed."""
        try:
            super().update_weights_from_ipc(*args, **settings)
        except BufferError as error:
            raise error.__context__ or error from None
