"""The shipped script on one GPU with two policies of Qwen2.5-0.5B's size: bf16, CUDA graphs, servers that sleep meanwhile."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
VOCABULARY = 151_936
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{m.role}} {{m.content}} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
REWARD = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(zlib.crc32(solution_str.encode()) % 2)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights, and a tokenizer of as many words: an answer has as many tokens in a prompt as it had when sampled."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = ["[UNK]", *(f"w{i}" for i in range(1, VOCABULARY - len(SPECIALS)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="[UNK]",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    assert len(fast) == VOCABULARY
    folder = tmp_path_factory.mktemp("model")
    fast.save_pretrained(folder / "tokenizer")  # apart: beside a Qwen2 model it would be read as Qwen2's
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def problems(folder, count):
    import pyarrow
    import pyarrow.parquet

    draw = random.Random(0)
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": " ".join(f"w{draw.randrange(1, 100_000)}" for _ in range(100))}],
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": index},
        }
        for index in range(count)
    ]
    for name in ("train.parquet", "test.parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)


@pytest.mark.parametrize("script", ["gsm8k_grpo_debate.sh"])
def test_two_policies_of_half_a_billion_parameters(model, tmp_path, script):
    problems(tmp_path, 128)
    (tmp_path / "reward.py").write_text(REWARD)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run(
        [
            "bash", ROOT / "examples" / script, "trainer.n_gpus_per_node=1", "data.train_batch_size=32",
            "++actor_rollout_ref.model.override_config.attn_implementation=sdpa", "data.max_response_length=256",
            f"reward.custom_reward_function.path={tmp_path}/reward.py", "trainer.total_training_steps=3",
            "actor_rollout_ref.actor.ppo_mini_batch_size=32", "trainer.save_freq=-1", "trainer.test_freq=-1",
            "trainer.logger=[console,file]", f"trainer.default_local_dir={tmp_path}/run",
            f"actor_rollout_ref.model.tokenizer_path={model}/tokenizer",
            *os.environ.get("MARL_GPU_ARGS", "").split(),
        ],
        env=environment | {"DATA": str(tmp_path), "MODEL": str(model)}, timeout=600, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-6000:]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("agent_0", "agent_1"):
        gaps = [step[f"agent/{name}/log_prob_gap_mean"] for step in steps]
        assert max(gaps) < 0.05, gaps
