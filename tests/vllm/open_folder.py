"""A folder opened by vLLM alone, in a process without Ray: prints the log-probs of the tokens of a prompt, all but the first.

``python open_folder.py MODEL [ADAPTER] IDS``, where IDS are token ids as JSON.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def log_probs(model, adapter, ids):
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapted = {"enable_lora": True, "max_lora_rank": 16} if adapter else {}
    engine = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        kv_cache_memory_bytes=16 << 20,
        block_size=32,
        **adapted,
    )
    (output,) = engine.generate(
        {"prompt_token_ids": ids},
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        lora_request=LoRARequest("opened", 1, adapter) if adapter else None,
    )
    return [read[token].logprob for token, read in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]


if __name__ == "__main__":
    model, *adapter, ids = sys.argv[1:]
    print(json.dumps(log_probs(model, adapter[0] if adapter else None, json.loads(ids))))  # noqa: T201 - the answer
