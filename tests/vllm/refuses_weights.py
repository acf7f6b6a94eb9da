"""A worker extension whose engine fails in the middle of a weight sync. Loaded by vLLM's own worker process."""

from marl.rollout.vllm_cpu import PlainLinearExtension


class RefusesSecondSync(PlainLinearExtension):
    taken = 0

    def _update_weights(self, weights, peft_config, base_sync_done):
        RefusesSecondSync.taken += 1
        if RefusesSecondSync.taken > 1:
            raise KeyError("no parameter of this name")
        super()._update_weights(weights, peft_config, base_sync_done)
