"""Hydra calls what a ``_target_`` names: only classes of trusted packages may be named, anywhere in a configuration."""

import pytest
from omegaconf import OmegaConf

from marl.config.errors import ConfigError, plain
from marl.config.hydra_settings import check_hydra_settings
from marl.config.overrides import hydra_overrides
from marl.config.targets import targets_are_trusted, targets_in
from marl.controller.loop_registry import check_loops
from marl.main import CONFIGS, main
from marl.preflight.verl_settings import check_targets

HOSTILE = {
    "actor_rollout_ref.actor._target_=os.system": "actor_rollout_ref.actor._target_=os.system",
    "+data.custom={_target_: builtins.exec, _args_: [1]}": "data.custom._target_=builtins.exec",
    "+scorer.parts=[{deep: {_target_: subprocess.run}}]": "scorer.parts.0.deep._target_=subprocess.run",
    "+policies.alice.actor={_target_: torch.load}": "policies.alice.actor._target_=torch.load",
    "+scorer={_target_: verlike.Judge}": "scorer._target_=verlike.Judge",
    "+scorer={_target_: [os, system]}": "scorer._target_=",
}


@pytest.mark.parametrize("override", HOSTILE)
def test_a_target_elsewhere_is_refused_by_key_and_value(compose_config, override):
    with pytest.raises(ConfigError) as caught:
        targets_are_trusted(compose_config(override))
    said = str(caught.value)
    assert said.startswith(HOSTILE[override]) and "expected a class of marl, verl, recipe" in said
    assert "trusted_targets=[" in said, "the key that allows it"


def test_a_package_that_the_user_trusts_may_be_named(compose_config, monkeypatch):
    config = compose_config("+scorer={_target_: my_package.judges.Judge}")

    def passes(*trusted):
        config.trusted_targets = trusted
        targets_are_trusted(config)

    passes("my_package")
    passes("my_package.judges")
    for other in ((), ("my_pack",), ("my_package.judges.Judg",)):
        with pytest.raises(ConfigError, match="scorer._target_"):
            passes(*other)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "other,my_package")
    passes()


@pytest.mark.parametrize("given", [["os."], [""], [1], ["a b"]])
def test_what_is_trusted_is_a_list_of_modules(compose_config, given):
    config = OmegaConf.create({"trusted_targets": given})
    with pytest.raises(ConfigError, match=r"trusted_targets=.*expected a list of packages or modules"):
        targets_are_trusted(config)


@pytest.mark.parametrize(
    "target,said",
    [
        ("verl.utils.fs.os.system", "Error"),
        ("verl.utils.fs.tempfile.TemporaryFile", "Error"),
        ("marl.main.Path", r"_target_=pathlib\.\S*Path: expected a class of marl"),
        ("verl.nowhere.Config", "Error"),
    ],
)
def test_a_trusted_module_does_not_lend_what_it_has_imported(compose_config, target, said):
    config = compose_config(f"actor_rollout_ref.actor.optim._target_={target}")
    with pytest.raises(ConfigError, match=rf"optim._target_={target}.*expected the dotted name|{said}"):
        check_targets(config)


def test_the_shipped_targets_are_classes_of_verl(compose_config):
    config = compose_config()
    targets = dict(targets_in(plain(config)))
    assert len(targets) > 20 and all(target.startswith("verl.") for target in targets.values())
    check_targets(config)


def test_a_listed_agent_loop_is_of_a_trusted_package(compose_config, tmp_path):
    loops = tmp_path / "loops.yaml"
    loops.write_text("- {name: mine, _target_: os.system, command: 'exit 1', inner: {_target_: x.Y}}")
    rollout = compose_config(
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}"
    ).actor_rollout_ref.rollout
    for trusted in (["verl"], ["verl", "x"]):
        with pytest.raises(
            ConfigError, match=r"agent_loop_config_path: mine._target_=os.system.*trusted_targets=\[os\]"
        ):
            check_loops(rollout, {"alice": "mine"}, trusted)
    with pytest.raises(ConfigError, match="mine.inner._target_=x.Y"):
        check_loops(rollout, {"alice": "mine"}, ["os"])


HYDRAS = {
    "callbacks": {"mine": {"_target_": "os.system", "command": "touch {}"}},
    "job_logging": {"handlers": {"mine": {"()": "os.system", "command": "touch {}"}}},
    "hydra_logging": {"handlers": {"mine": {"class": "logging.os.system", "command": "touch {}"}}},
}


@pytest.mark.parametrize(
    "group,flags",
    [
        ("callbacks", "--config-dir"),
        ("job_logging", "--config-path"),
        ("hydra_logging", "-m seed=0,1 --config-dir"),
    ],
)
def test_hydras_own_settings_call_nothing_else(tmp_path, capsys, group, flags):
    """Hydra builds its callbacks, and logging its handlers, before a configuration reaches us."""
    victim = tmp_path / "victim"
    settings = {
        "hydra": {group: HYDRAS[group]},
        "defaults": ["_self_"] if flags == "--config-path" else ["marl", "_self_"],
    }
    text = OmegaConf.to_yaml(settings).replace("{}", str(victim))
    (tmp_path / "mine.yaml").write_text(text)
    assert main([*flags.split(), str(tmp_path), "--config-name", "mine"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"configuration error: hydra.{group}.") and "os.system" in said and not victim.exists()


INDIRECT = {
    "on the command line": ("{}", ["++hydra.callbacks.mine={_target_: os.system, command: touch}"]),
    "by interpolation": ("hydra: {callbacks: {mine: '${evil}'}}\nevil: {_target_: os.system, command: touch}", []),
    "of one key": ("hydra: {callbacks: {mine: {_target_: '${name}'}}}\nname: os.system", []),
}


@pytest.mark.parametrize("way", INDIRECT)
def test_hydras_own_settings_are_found_wherever_they_are_set(tmp_path, capsys, way):
    text, words = INDIRECT[way]
    (tmp_path / "mine.yaml").write_text(f"defaults: [marl, _self_]\n{text if text != '{}' else ''}\n")
    named = [] if words else ["--config-dir", str(tmp_path), "--config-name", "mine"]
    assert main([*named, *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("configuration error: hydra.callbacks.mine._target_=os.system: expected a class of"), said


def test_hydras_own_plugins_may_be_named():
    for words in (
        ["hydra.job.chdir=false"],
        ["hydra/job_logging=none"],
        ["-m", "seed=0,1", "hydra.sweeper.max_batch_size=1"],
    ):
        check_hydra_settings(hydra_overrides(words), main, CONFIGS)
