"""Code that comes with a model is not executed unless the user says so."""

import json

import pytest
from omegaconf import OmegaConf

from marl.config.errors import ConfigError
from marl.config.identity import leaves
from marl.modules.pretrained import load_config, load_tokenizer

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).write_text("executed")
class Config(LlamaConfig):
    model_type = "stranger"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


@pytest.fixture
def stranger(tmp_path, bpe_tokenizer, monkeypatch):
    """A model's folder with code of its own, and the file that this code writes."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = tmp_path / "model", tmp_path / "marker"
    bpe_tokenizer.save_pretrained(folder)
    (folder / "stranger.py").write_text(CODE.format(marker=str(marker)))
    classes = {"AutoConfig": "stranger.Config", "AutoModelForCausalLM": "stranger.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "stranger", "auto_map": classes, **SIZES}))
    known = json.loads((folder / "tokenizer_config.json").read_text())
    known |= {"auto_map": {"AutoTokenizer": ["stranger.Tokenizer", "stranger.Tokenizer"]}, "tokenizer_class": "Strange"}
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    return folder, marker


def model_of(folder, trust):
    return OmegaConf.create(
        {
            "path": str(folder),
            "tokenizer_path": None,
            "trust_remote_code": trust,
            "override_config": {},
            "custom_chat_template": None,
        }
    )


def test_no_shipped_configuration_trusts_remote_code(compose_config):
    for name in ("marl", "quickstart"):
        found = dict(leaves(OmegaConf.to_container(compose_config(name=name), resolve=False)))
        keys = {key: value for key, value in found.items() if key.endswith("trust_remote_code")}
        assert keys["actor_rollout_ref.model.trust_remote_code"] is False and keys["data.trust_remote_code"] is False
        for key, value in keys.items():
            assert value in (False, None, "${actor_rollout_ref.model.trust_remote_code}"), key


def test_a_models_own_code_is_refused_by_the_key_that_allows_it(stranger):
    folder, marker = stranger
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.model.path=.*actor_rollout_ref.model.trust_remote_code"):
        load_config(model_of(folder, False), "actor_rollout_ref.model")
    assert not marker.exists()


def test_a_tokenizers_own_code_is_not_executed(stranger):
    folder, marker = stranger
    try:
        load_tokenizer(model_of(folder, False), "actor_rollout_ref.model")
    except ConfigError as error:
        assert "actor_rollout_ref.model.path=" in str(error)
    assert not marker.exists()


def test_code_that_is_trusted_is_executed(stranger):
    """The proof that the tests above would see it run."""
    folder, marker = stranger
    assert load_config(model_of(folder, True), "model").model_type == "stranger" and marker.exists()
