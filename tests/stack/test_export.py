"""``marl export``: what transformers and PEFT load is what was trained."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from marl import cli
from marl.config.identity import identity_of
from marl.evaluation import export
from tests.stack.builders import ADAPTED, merged_weights, parameters

NO_MODEL = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]"
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def saved(alone):
    """Start a run, train a step and save it; the run's folder."""

    def saved(*overrides):
        live = alone(*overrides)
        folder = live.trainer.folder
        (folder / "run.json").write_text(json.dumps(identity_of(live.trainer.config), default=str))
        live.step()
        live.wait(live.trainer.save())
        return live, folder

    return saved


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.slow
def test_a_policy_is_loaded_as_it_was_trained(saved, tmp_path):
    live, folder = saved()
    assert cli.main(["export", str(folder), "--to", str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "alice")
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), parameters(live, "policies"), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "carol").chat_template
    origin = json.loads((tmp_path / "out" / "alice" / "export.json").read_text())
    assert origin == {"checkpoint": str(folder / "global_step_1"), "policy": "alice", "kind": "model"}


@pytest.mark.slow
def test_adapters_are_pefts_and_merged_they_are_the_served_models(saved, tmp_path):
    live, folder = saved(*ADAPTED)
    assert cli.main(["export", str(folder / "global_step_1"), "--to", str(tmp_path / "a")]) == 0
    assert cli.main(["export", str(folder), "--step", "1", "--to", str(tmp_path / "m"), "--merged"]) == 0
    for name in ("alice", "carol"):
        settings = json.loads((tmp_path / "a" / name / "adapter_config.json").read_text())
        base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"])
        alone = logits(base)
        adapted = logits(PeftModel.from_pretrained(base, tmp_path / "a" / name))
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "m" / name)
        assert torch.allclose(adapted, logits(merged), atol=1e-5) and not torch.allclose(adapted, alone, atol=1e-5)
        trained = merged_weights(live, name)
        assert all(torch.equal(trained[key], value) for key, value in merged.state_dict().items() if key in trained)
        assert (
            not (tmp_path / "a" / name / "model.safetensors").exists()
            and not (tmp_path / "m" / name / "adapter_config.json").exists()
        )


@pytest.mark.slow
def test_adapters_without_a_merged_model_are_merged(saved, tmp_path):
    live, folder = saved(*ADAPTED, NO_MODEL)
    checkpoint = export.checkpoint_of(folder, None)
    assert not any(export.has_weights(actor / export.MODEL) for actor in checkpoint.glob("*/actor"))
    assert [kind for kind, _ in export.export(checkpoint, tmp_path / "m", merged=True)] == ["model", "model"]
    trained, written = merged_weights(live, "alice"), load_file(tmp_path / "m" / "alice" / "model.safetensors")
    assert all(torch.allclose(trained[key], value, atol=1e-6) for key, value in written.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "m" / "alice").chat_template


@pytest.mark.slow
def test_shards_alone_are_merged_by_verl(saved, tmp_path):
    live, folder = saved(NO_MODEL)
    assert cli.main(["export", str(folder), "--to", str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "alice", dtype=torch.float32)
    pairs = zip(model.parameters(), parameters(live, "policies"), strict=True)
    assert all(torch.allclose(one, two, atol=1e-2) for one, two in pairs), "verl's merger writes bf16"


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused_in_a_sentence(saved, tmp_path, capsys):
    _, folder = saved()
    out = tmp_path / "out"

    def said(*words):
        assert cli.main(["export", *map(str, words), "--to", str(out)]) == 2
        return capsys.readouterr().err

    assert "Did you mean global_step_1?" in said(folder, "--step", 3) and not out.exists()
    assert "Did you mean" in said(folder.parent / f"{folder.name}x") and "no such folder" in said(tmp_path / "none")
    (out / "alice").mkdir(parents=True)
    (out / "alice" / "mine").touch()
    assert "nothing is written over" in said(folder) and not (out / "carol").exists()
    weights = folder / "global_step_1" / "carol" / "actor" / "huggingface" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "model.safetensors" in said(folder, "--step", 1) and "no whole checkpoint" in said(folder)
