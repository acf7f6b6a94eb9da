"""Weight syncs that go to another policy's server, as verl's names of servers and sockets allow without an error."""

from contextlib import contextmanager

import ray

from marl.rollout import vllm_sglang


def send_to(worker, rank):
    """Give a training worker an adapter made as verl's manager would have it, for the server of this rank."""
    kept, usual = worker.rollout, vllm_sglang.offset_rank
    vllm_sglang.offset_rank = lambda config: rank
    try:
        worker.rollout = vllm_sglang.VLLMServerAdapter(kept.config, kept.model_config, kept.device_mesh)
    finally:
        vllm_sglang.offset_rank = usual
    return kept.replica_rank


@contextmanager
def misdirected(live, ranks):
    """``ranks``: by policy, the rank of the server that its weights go to."""

    def send(policy, rank):
        (worker,) = live.trainer.policies[policy].workers.workers
        return ray.get(worker.__ray_call__.remote(send_to, rank))

    own = {policy: send(policy, rank) for policy, rank in ranks.items()}
    try:
        yield
    finally:
        for policy, rank in own.items():
            send(policy, rank)
