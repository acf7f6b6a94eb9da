"""A real pre-trained model and plain sentences, end to end: ``make test-real``."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from marl import main as marl_main
from marl.commands import evaluate
from marl.controller.chat import ChatEncoder
from marl.types import Turn
from tests.composing import compose
from tests.stack.builders import gradient, prepared

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]
SAID = (
    "The answer is 14.",
    "Tom has 20 - 11 = 9 apples.\n\nSo the answer is **9**.",
    "I am not sure",
    "",
    "Réponse : 14 — naïve café 😀",
    "<|im_end|> is how an answer ends",
)
"""What such a model says: plain, in several lines, cut off, empty, in other scripts, and with a mark of the template in it."""


def options(model, sums, folder, *overrides):
    return (
        f"actor_rollout_ref.model.path={model}", f"data.train_files={sums}/train.parquet",
        f"data.val_files={sums}/test.parquet", f"trainer.default_local_dir={folder}", "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n=4", "trainer.logger=[file]", "trainer.val_before_train=false", "trainer.test_freq=-1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}", *overrides,
    )  # fmt: skip


def trained(model, sums, folder, *overrides):
    """Every step's metrics of a run."""
    steps: list[dict] = []
    config = compose(*options(model, sums, folder, *overrides), name="smollm2")
    marl_main.run(config, lambda step, total, metrics: steps.append(metrics))
    return steps


@pytest.fixture(scope="module")
def run(model, sums, tmp_path_factory):
    """Three steps of the second quick start on the model as it came, with a checkpoint after the second and the third."""
    folder = tmp_path_factory.mktemp("real") / "run"
    more = ("trainer.total_training_steps=3", "trainer.save_freq=1", f"trainer.rollout_data_dir={folder}/rollouts")
    return folder, trained(model, sums, folder, *more)


def test_the_converted_model_answers(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert sum(p.numel() for p in network.parameters()) == 134_515_008
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == network.config.eos_token_id == 2
    question = [{"role": "user", "content": "What is 7 + 5? Answer with a number."}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    said = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)[
        0, ids.shape[1] :
    ]
    assert said[-1] == tokenizer.eos_token_id, "it ends its answer"
    assert "12" in tokenizer.decode(said)


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("system", ["", "Answer in a few words."])
def test_a_conversation_has_the_ids_of_the_tokenizers_own_template(model, said, system):
    """Turn by turn, each prompt the last one's ids and what followed. A mark of the template in a text is text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = ChatEncoder(tokenizer)
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": "What is 9 + 5?"}]
    turn = None
    for _ in range(3):
        ids = encoder.encode(messages, turn)
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        if "<|im_end|>" not in said:
            assert ids == expected
        assert ids.count(tokenizer.eos_token_id) == len(messages) + (not system), (
            "nobody but the template ends a message"
        )
        answer = [*tokenizer.encode(said, add_special_tokens=False, split_special_tokens=True), tokenizer.eos_token_id]
        turn = Turn("alice", 1, messages, said, prompt_ids=ids, response_ids=answer)
        messages = [
            *messages,
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"carol said: {said} So?"},
        ]


def test_servers_and_trainer_agree_and_the_policies_move(run):
    _, steps = run
    assert len(steps) == 3
    for metrics in steps:
        for agent in ("alice", "carol"):
            # equal but for single tokens, which differ with two threads: at most 1.3e-5 in runs of 16 steps
            assert metrics[f"agent/{agent}/log_prob_gap_max"] <= 2e-5
    assert any(metrics[f"agent/{agent}/grad_norm"] > 0 for metrics in steps for agent in ("alice", "carol"))


def test_an_update_is_that_of_an_independent_autograd(alone, model, sums, tmp_path):
    """The gradient of all weights on the rows of a played step: transformers' model, torch's autograd, REINFORCE."""
    whole = ("sharing=shared", "actor_rollout_ref.model.lora_rank=0")
    live = alone(*options(model, sums, tmp_path, *whole), name="smollm2")
    rows = prepared(live, pack=True, policy="team")
    found, _ = gradient(live, rows, policy="team")
    temperature = live.trainer.temperatures["alice"]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.get_input_embeddings().padding_idx = (
        None  # padding is the end token here, which is an input of later rounds
    )
    losses, tokens = [], 0
    for row in range(len(rows)):
        one = rows[row]
        ids, prompt = one["input_ids"], len(one["prompts"])
        mask, advantages = one["response_mask"].float(), one["advantages"]
        logits = network(input_ids=ids[None]).logits[0, prompt - 1 : -1] / temperature
        log_probs = logits.log_softmax(-1).gather(-1, ids[prompt:, None])[:, 0]
        losses.append(-(log_probs * advantages * mask).sum())
        tokens += int(mask.sum())
    (torch.stack(losses).sum() / tokens).backward()
    expected = torch.cat([p.grad.flatten() for p in network.parameters()])
    assert torch.linalg.norm(found - expected) <= 1e-4 * torch.linalg.norm(expected)


def test_a_resumed_run_is_the_one_that_was_never_stopped(model, sums, run, tmp_path):
    folder, steps = run
    two = "trainer.total_training_steps=2"
    trained(model, sums, tmp_path / "again", two, "trainer.save_freq=1")
    again = trained(
        model,
        sums,
        tmp_path / "again",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.resume_changes=[trainer.total_training_steps,actor_rollout_ref.actor.optim]",
    )
    for key in ("agent/alice/grad_norm", "agent/carol/grad_norm", "team/vote", "agent/alice/score"):
        assert again[-1][key] == steps[-1][key]
    from safetensors.torch import load_file

    for agent in ("alice", "carol"):
        name = f"global_step_3/{agent}/actor/lora_adapter/adapter_model.safetensors"
        one, other = load_file(folder / name), load_file(tmp_path / "again" / name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_plain_sentences_are_evaluated(model, tmp_path, monkeypatch):
    """Sums in plain English, answered as the model pleases: what it says is read, whatever its form."""
    monkeypatch.chdir(tmp_path)
    lines = [
        {
            "data_source": "my_sums",
            "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        }
        for a in range(2, 10)
        for b in range(2, 6)
    ]
    Path("sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    limits = ["data.max_prompt_length=128", "data.max_response_length=32"]
    result = evaluate.run([str(model), "task=sums.jsonl", "name=plain", *limits])
    (dump,) = Path("outputs/evaluations/plain").rglob("*.jsonl")
    said = [json.loads(line) for line in dump.read_text().splitlines()]
    assert len(said) == len(lines)
    with_number = [line for line in said if re.search(r"\d", line["output"])]
    assert all(line["answer"] is not None for line in with_number), "a text with a number has an answer"
    assert result["teams"][0]["accuracy"] > 0.1


def test_the_team_serves_and_chats(run):
    folder, _ = run
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "marl", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert " at http://" in line, process.stderr.read()
        url = re.search(r"at (http://\S+)/v1", line)[1]
        question = {"role": "user", "content": "Tom has 7 apples and buys 5 more. How many is that?"}
        body = {"model": "team", "messages": [question], "seed": 5}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
        assert len(reply["choices"][0]["transcript"]) == 4 and reply["choices"][0]["message"]["content"].strip()
    finally:
        process.terminate()
        process.communicate(timeout=60)
    typed = "What is 7 + 5?\n/quit\n"
    chat = subprocess.run(
        [sys.executable, "-m", "marl", "chat", str(folder)], input=typed, env=environment, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert chat.returncode == 0, chat.stderr
    assert "round 2" in chat.stdout and "team" in chat.stdout


def test_it_imitates(model, sums, tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"What is {a} + 3?", "answer": f"It is {a + 3}."} for a in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    method = (f"data.train_files={path}", "data.val_files=null", "method=sft", "method.source=rows", "sharing=shared")
    more = (
        "actor_rollout_ref.model.lora_rank=0",
        "data.train_batch_size=8",
        "trainer.total_training_steps=4",
        "actor_rollout_ref.actor.optim.lr=5e-5",
    )
    steps = trained(model, sums, tmp_path / "sft", *method, *more, "trainer.save_freq=-1", "trainer.save_final=false")
    losses = [metrics["agent/alice/loss"] for metrics in steps]
    assert losses[-1] < 0.7 * losses[0] and all(map(math.isfinite, losses))
