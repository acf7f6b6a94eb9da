"""A worker extension whose engine fails in the middle of a weight sync, once it is told to. Loaded by vLLM's own worker process."""

from marl.rollout.vllm_cpu import PlainLinearExtension


class RefusesWhenTold(PlainLinearExtension):
    def refuse_next(self):
        self.refuses = True

    def _update_weights(self, weights, peft_config, base_sync_done):
        if getattr(self, "refuses", False):
            self.refuses = False
            raise KeyError("no parameter of this name")
        super()._update_weights(weights, peft_config, base_sync_done)
