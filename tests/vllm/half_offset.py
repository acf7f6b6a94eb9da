"""The silent error that the offset prevents: replicas with it, adapters without. Imported by every worker."""

import os

from marl.rollout import vllm_sglang


def rank_without_offset(config):
    return int(os.environ["RANK"])


vllm_sglang.offset_rank = rank_without_offset
