"""``model.lora_adapter_path`` under ``sharing=lora``: the folders that a policy's adapter may start from."""

import json
import logging
import shutil

import pytest
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from marl.config.errors import ConfigError
from marl.modules.adapters import check_adapter, check_start, first_weights
from marl.preflight.prepare import absolutise, prepare

KEY = "policies.alice.model"
OWN = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def saved(cold_assets, tmp_path_factory):
    """An adapter as PEFT itself saves it."""
    folder = tmp_path_factory.mktemp("adapter")
    base = AutoModelForCausalLM.from_pretrained(cold_assets / "model")
    get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=OWN["target_modules"])).save_pretrained(folder)
    return folder


@pytest.fixture
def start(cold_assets, saved):
    """Check the start of an adapter; by ``shape``, on another base."""

    def start(folder=saved, shape=None, **changes):
        path = str(cold_assets / "model")
        settings = {"path": path, "exclude_modules": None, "target_parameters": None, "lora_adapter_path": str(folder)}
        model = OmegaConf.create(settings | OWN | changes)
        check_start(AutoConfig.from_pretrained(path, **(shape or {})), model, KEY)

    return start


REFUSED = {
    "lora_rank": ({"lora_rank": 8}, [f"its r is 4, and {KEY}.lora_rank=8", "set lora_rank"]),
    "lora_alpha": ({"lora_alpha": 16}, [f"its lora_alpha is 8, and {KEY}.lora_alpha=16"]),
    "fewer layers": ({"target_modules": ["q_proj"]}, ["it changes", "v_proj, which this run's does not", "target_modules"]),
    "more layers": ({"target_modules": "all-linear"}, ["this run's changes", "which it does not", "target_modules"]),
    "a deeper base": ({"shape": {"num_hidden_layers": 3}}, ["this run's changes", "layers.2", f"{KEY}.path"]),
    "a wider base": ({"shape": {"hidden_size": 32}}, ["has the shape (4, 64)", "(4, 32) fits", f"set {KEY}.path"]),
    "no folder": ({"folder": "/none"}, ["lora_adapter_path=/none", "no adapter_config.json", "a folder that PEFT saved"]),
}  # fmt: skip


@pytest.mark.parametrize("targets", [False, 5, [1], "nope", {"a": "b"}])
def test_layers_that_are_none_are_named(cold_assets, targets):
    model = OmegaConf.create({"exclude_modules": None, "target_parameters": None} | OWN | {"target_modules": targets})
    with pytest.raises(ConfigError, match=r"^m.target_modules=.*; expected some of q_proj, .*, or all-linear$"):
        check_adapter(AutoConfig.from_pretrained(cold_assets / "model"), model, "m", linear_only=True)


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_does_not_fit_is_refused(start, case):
    changes, parts = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        start(**changes)
    assert all(part in str(caught.value) for part in ("lora_adapter_path=", *parts)), str(caught.value)


@pytest.mark.parametrize(
    "settings,says",
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"peft_type": "IA3"}, "peft_type=IA3"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(start, saved, tmp_path, settings, says):
    with pytest.raises(ConfigError, match=f"{says}.*expected plain LoRA"):
        start(changed(saved, tmp_path, lambda own: own | settings))


def changed(saved, folder, text_of):
    """A copy of an adapter with other settings."""
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(text_of(json.loads(file.read_text()))))
    return folder


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_an_adapter_of_a_base_that_its_start_changed_is_refused(start, saved, tmp_path, how):
    folder = changed(saved, tmp_path, lambda settings: settings | {"init_lora_weights": how})
    with pytest.raises(ConfigError, match=f"init_lora_weights={how}, which changes the base.*merge it into the base"):
        start(folder)


@pytest.mark.parametrize("how", [None, False, "gaussian", "eva"])
def test_plain_starts_are_accepted(start, saved, tmp_path, how):
    start(changed(saved, tmp_path, lambda settings: settings | {"init_lora_weights": how}))


def test_settings_that_are_none_are_refused(start, saved, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: .*adapter_config.json holds a list.*whole files"):
        start(changed(saved, tmp_path, lambda settings: [settings]))


def test_a_file_that_was_cut_short_is_refused(start, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match="cannot be read.*whole files"):
        start(tmp_path)


def test_a_base_of_another_name_is_warned_of(start, saved, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        start()
        assert not caplog.text
        start(changed(saved, tmp_path, lambda settings: settings | {"base_model_name_or_path": "org/other"}))
    assert "was trained on org/other, and this run puts it on" in caplog.text


def test_a_start_is_checked_before_anything_runs(compose_config, cold_assets, saved):
    words = (f"assets={cold_assets}", "sharing=lora", f"+{KEY}.lora_adapter_path={saved}")
    with pytest.raises(ConfigError, match=rf"{KEY}.lora_adapter_path=.*its r is 4, and {KEY}.lora_rank=16"):
        prepare(compose_config(*words))


@pytest.mark.parametrize("path", ["adapter", "~/adapter"])
def test_folders_are_made_absolute(tmp_path, monkeypatch, path):
    """Workers have other working directories."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "adapter").mkdir()
    config = OmegaConf.create({
        "actor_rollout_ref": {"model": {}, "ref": {"model": {"path": path}}}, "critic": {"model": {}}, "data": {"train_files": [], "val_files": []},
        "policies": {"alice": {"model": {"lora_adapter_path": path}}, "bob": {"ref": {"model": {"path": path}}}, "carol": None},
        "trainer": dict.fromkeys(("default_local_dir", "rollout_data_dir", "validation_data_dir", "resume_from_path")),
        "reward": {"custom_reward_function": {"path": path}}, "method": {},
    })  # fmt: skip
    absolutise(config)
    assert config.reward.custom_reward_function.path == str(tmp_path / "adapter")
    config.reward.custom_reward_function.path = "pkg://mine"
    absolutise(config)
    assert config.reward.custom_reward_function.path == "pkg://mine"
    assert config.policies.alice.model.lora_adapter_path == str(tmp_path / "adapter")
    references = config.actor_rollout_ref.ref, config.policies.bob.ref
    assert [own.model.path for own in references] == [str(tmp_path / "adapter")] * 2


def test_an_adapter_starts_from_nothing_where_no_folder_is_named():
    assert first_weights(OmegaConf.create({"lora_adapter_path": None})) is None
