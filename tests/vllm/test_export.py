"""``marl export``: vLLM opens what was exported, and computes what transformers and PEFT compute with it."""

import json
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from marl import cli
from tests.vllm import open_folder
from tests.vllm.builders import CLOSE, POLICIES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
IDS = list(range(5, 30))
RUN = (
    "hardware=cpu", "resources.one_process=true", "sharing=lora", "actor_rollout_ref.actor.optim.lr=0.02",
    "+policies.carol.model.target_modules=[q_proj,down_proj]", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.val_before_train=false", "trainer.test_freq=-1",
)  # fmt: skip


@pytest.fixture(scope="module")
def exported(wide_assets, tmp_path_factory):
    """The folders of a trained team: its adapters, and its models with the adapters merged in."""
    folder = tmp_path_factory.mktemp("exported")
    places = f"assets={wide_assets}", f"trainer.default_local_dir={folder / 'run'}"
    command = [sys.executable, "-m", "marl.main", "--config-name", "split_information", *RUN, *places]
    subprocess.run(command, check=True, timeout=300)
    assert cli.main(["export", str(folder / "run"), "--to", str(folder / "adapters")]) == 0
    assert cli.main(["export", str(folder / "run"), "--to", str(folder / "merged"), "--merged"]) == 0
    return folder


def read_by_transformers(model):
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0]
    return logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]


def read_by_vllm(*folders):
    command = [sys.executable, open_folder.__file__, *map(str, folders), json.dumps(IDS)]
    answer = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    return torch.tensor(json.loads(answer.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", POLICIES)
def test_vllm_opens_a_merged_model(exported, name):
    folder = exported / "merged" / name
    expected = read_by_transformers(AutoModelForCausalLM.from_pretrained(folder))
    assert (read_by_vllm(folder) - expected).abs().max() <= CLOSE


@pytest.mark.parametrize("name", POLICIES)
def test_vllm_opens_an_adapter_on_its_base(exported, name):
    folder = exported / "adapters" / name
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(base)
    alone = read_by_transformers(model)
    expected = read_by_transformers(PeftModel.from_pretrained(model, folder))
    assert (read_by_vllm(base, folder) - expected).abs().max() <= CLOSE
    assert (expected - alone).abs().max() > 100 * CLOSE, "the adapter says what the base says"
