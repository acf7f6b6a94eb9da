"""One Ray session for all, and one small run that tests can hold in their hands."""

import asyncio
import gc
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.builders import Live

ROOT = Path(__file__).parents[2]


UNBOUND = ("trainer.resume_mode=disable", "trainer.max_actor_ckpt_to_keep=null", "controller.ledger=false")
"""A run of its own, without a ledger: tests play the same step again and again."""
SMALL = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.logger=[]", *UNBOUND)


@pytest.fixture(scope="session")
def cluster(compose_config):
    from marl.cluster.session import ray_session

    with ray_session(compose_config("ray_kwargs.ray_init.num_cpus=8"), ranks=8):
        yield


@pytest.fixture(scope="session")
def live(cluster, compose_config, cold_assets, tmp_path_factory):
    from marl.build import build
    from marl.preflight.prepare import prepare

    folder = tmp_path_factory.mktemp("live")
    overrides = (f"assets={cold_assets}", f"trainer.default_local_dir={folder}", "resources.placement=colocated")
    setup = prepare(compose_config(*overrides, *SMALL))
    loop = asyncio.new_event_loop()
    with ExitStack() as cleanup:
        trainer = loop.run_until_complete(build(setup, cleanup))
        loop.run_until_complete(trainer.sync_weights())
        yield Live(trainer, loop)
    loop.close()


@pytest.fixture
def alone(compose_config, cold_assets, tmp_path):
    """Start runs in this process, without Ray: the same parts, up in two seconds."""
    from marl.build import build
    from marl.cluster.session import session
    from marl.preflight.prepare import prepare

    with ExitStack() as cleanup:

        def start(*overrides: str, **options: Any) -> Live:
            # verl collects garbage several times a run, and would walk all that the tests before this one have imported
            gc.collect()
            gc.freeze()
            small = (f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", *SMALL)
            setup = prepare(compose_config(*small, "resources.one_process=true", *overrides, **options))
            cleanup.enter_context(session(setup))
            loop = asyncio.new_event_loop()
            cleanup.callback(loop.close)
            trainer = loop.run_until_complete(build(setup, cleanup))
            loop.run_until_complete(trainer.sync_weights())
            return Live(trainer, loop)

        yield start


@pytest.fixture(scope="session")
def gsm8k_like(tmp_path_factory):
    """A local copy of a data set of GSM8K's form, through the script that prepares it."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for split, count in (("train", 8), ("test", 4)):
        rows = [
            {
                "question": f"Ann has {i} apples and buys {i + 2} more. How many?",
                "answer": f"{i} + {i + 2}\n#### {2 * i + 2}",
            }
            for i in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    script = ROOT / "examples" / "data_preprocess" / "gsm8k.py"
    arguments = ["--local_dataset_path", folder, "--local_save_dir", folder / "parquet"]
    subprocess.run([sys.executable, script, *arguments], check=True, capture_output=True, timeout=60, cwd=ROOT)
    return folder / "parquet"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, bpe_tokenizer):
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(bpe_tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, intermediate_size=64, max_position_embeddings=1024,
            eos_token_id=bpe_tokenizer.eos_token_id, pad_token_id=bpe_tokenizer.pad_token_id, bos_token_id=None,
            tie_word_embeddings=True,  # as small real models do
        )
    ).save_pretrained(folder)  # fmt: skip
    bpe_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def environment(gsm8k_like, tiny_model):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"DATA": str(gsm8k_like), "MODEL": str(tiny_model), "PATH": path, "PYTHONPATH": str(ROOT)}


def overrides_of(script, environment, folder):
    """Arguments that a script gives to ``python``, as heard by one of ours on the path."""
    stand_in = folder / "python"
    stand_in.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    environment = environment | {"PATH": f"{folder}{os.pathsep}{environment['PATH']}"}
    printed = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=True)
    words = printed.stdout.splitlines()
    assert words[:2] == ["-m", "marl.main"]
    return words[2:]
