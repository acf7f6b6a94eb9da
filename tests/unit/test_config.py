"""Configurations: what composes, what is refused, and what the refusal says."""

import copy
import importlib
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf, open_dict

from marl.cluster.critic_group import CriticGroup
from marl.cluster.launch import check_cluster
from marl.cluster.layout import policy_configs
from marl.cluster.session import use_platform
from marl.config.dataset_rows import check_files, check_row
from marl.config.errors import ConfigError, explain
from marl.config.external import VARIABLE, check_modules, find_own_modules, naming_modules, naming_own
from marl.config.overrides import find_verl, new_agents
from marl.config.policies import sequence_parallel
from marl.config.rules import RULES, check
from marl.main import ConfigError as MainConfigError
from marl.preflight.compatibility import warn_of_two_penalties
from marl.preflight.prepare import prepare
from marl.run_setup import Setup
from marl.utils.registry import did_you_mean
from tests.builders import same_for_all

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


@pytest.fixture
def quickstart(compose_config, cold_assets):
    return lambda *overrides: compose_config(f"assets={cold_assets}", *overrides)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_configuration_composes(compose_config, name):
    config = compose_config(name=name)
    OmegaConf.resolve(config)
    assert config.learner.name and config.runner.name and config.credit.name and config.agents


def test_a_verl_user_finds_every_key_where_it_was(compose_config):
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base="1.3"):
        theirs = OmegaConf.to_container(compose("ppo_trainer"))
    ours = OmegaConf.to_container(compose_config(name="marl"))

    def missing(theirs, ours, path=""):
        for key, value in theirs.items():
            if key not in ours:
                yield f"{path}{key}"
            elif isinstance(value, dict):
                yield from missing(value, ours[key], f"{path}{key}.")

    assert list(missing(theirs, ours)) == []


@pytest.mark.parametrize(
    "overrides,said",
    [
        (["learner.gama=1"], ["unknown key 'learner.gama'", "Did you mean 'gamma'"]),
        (["trainer.total_trainin_steps=1"], ["'trainer.total_trainin_steps'", "Did you mean 'total_training_steps'"]),
        (["agents.alice.temprature=1"], ["agents.alice.temprature", "Did you mean 'temperature'"]),
        (["lerner=grpo"], ["unknown key 'lerner'", "Did you mean 'learner'"]),
        (["learner=grop"], ["unknown option learner=grop", "Did you mean 'grpo'"]),
        (["runner=debaet"], ["runner=debaet", "Did you mean 'debate'"]),
        (["learner.gamma=much"], ["wrong value for 'learner.gamma'", "much", "Float"]),
        (["runner.num_rounds=2.5"], ["'runner.num_rounds'", "2.5", "Integer"]),
        (["resources.placement=together"], ["together", "separate", "colocated"]),
        (["controller.old_log_probs=servers"], ["servers", "auto", "server", "trainer"]),
        (["agents.alice.trainable=perhaps"], ["agents.alice.trainable", "perhaps", "bool"]),
        (["credit=team", "credit.of=everybody"], ["everybody", "round", "final", "answer"]),
    ],
)
def test_a_wrong_key_or_value_is_named_with_the_nearest(quickstart, overrides, said):
    with pytest.raises(Exception) as caught:
        quickstart(*overrides)
    text = explain(caught.value)
    assert all(part in text for part in said), text
    assert "\n" not in text.strip()


def test_the_nearest_key_is_looked_for_in_the_same_group_first(quickstart):
    def said(override):
        with pytest.raises(Exception) as caught:
            quickstart(override)
        return explain(caught.value)

    assert "Did you mean 'critic_warmup'" in said("trainer.critic_warm_up=1")
    assert "Did you mean 'data.train_batch_size'" in said("trainer.train_batch_size=8")
    assert "Did you mean 'critic.cliprange_value'" in said("trainer.cliprange_value=8")
    assert "Did you mean" not in said("trainer.frequency=8")
    assert "Did you mean" not in said("credit=nobody")


def test_a_guess_that_is_not_near_is_not_made():
    known = ("own", "team", "reinforce_plus_plus", "gamma", "lam")
    assert did_you_mean("none", known) == did_you_mean("ppo", known) == did_you_mean("lr", known) == ""
    assert did_you_mean("gama", known) == " Did you mean 'gamma'?"
    assert did_you_mean("reinforce", known) == " Did you mean 'reinforce_plus_plus'?"


@pytest.mark.parametrize(
    "override",
    [
        "agents.alice.role=Solve it, step by step.",
        "+agents.eve.role=Note: 1, 2",
        "agents.alice.role=Sum (or product",
        "agents.alice.role=Say {a: b",
        """agents.alice.role=Don't say "no", please""",
        "runner.instruction=Now, answer",
    ],
)
def test_a_text_that_has_to_be_quoted_is_shown_quoted(quickstart, override):
    with pytest.raises(Exception) as caught:
        quickstart(override)
    text, (key, _, value) = explain(caught.value), override.partition("=")
    assert "quote a text" in text and "\n" not in text, text
    shown = shlex.split(text[text.index("as in ") + len("as in ") :])[0]
    assert shown.startswith(f"{key.rpartition('.')[2]}=")
    written = quickstart(f"{key}={shown.partition('=')[2]}")
    assert OmegaConf.select(written, key.lstrip("+")) == value


def test_modules_of_ones_own_are_found_or_named(tmp_path, monkeypatch):
    (tmp_path / "mine_alone.py").write_text("")
    (tmp_path / "mine_too").mkdir()
    (tmp_path / "mine_too" / "__init__.py").write_text("import nothing_of_this_name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != ""])
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine_alone")
    find_own_modules()
    assert sys.path[0] == str(tmp_path)
    find_own_modules()
    assert sys.path.count(str(tmp_path)) == 1
    for name in ("mine_aloan", "mine_alone.part", "no_package.part", ".mine", ""):
        with pytest.raises(ConfigError, match=re.escape(f"there is no module {name!r}")):
            check_modules(f"mine_alone,{name}")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        check_modules("mine_too.part")
    check_modules("")


def test_modules_that_a_run_names_are_quoted_and_may_be_anything():
    hostile = {"mine;touch gone": "/x/$(touch gone)"}
    with pytest.raises(ConfigError) as caught, naming_modules(hostile):
        raise ConfigError("runner=mine")
    variables = shlex.split(str(caught.value).partition("name them: ")[2])
    assert variables == ["PYTHONPATH=/x/$(touch gone):$PYTHONPATH", f"{VARIABLE}=mine;touch gone", "marl", "…"]
    for modules in (None, ["mine"], "mine", {"mine": 1}):
        with pytest.raises(ConfigError, match="^runner=mine$"), naming_modules(modules):
            raise ConfigError("runner=mine")


def test_only_folders_of_installed_packages_are_searched_anyway(monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/home/marl")
    told = naming_own({"a": "/home/marl-team", "b": "/home/marl/lib/site-packages", "c": "/usr/lib/dist-packages"})
    assert told == f"PYTHONPATH=/home/marl-team:$PYTHONPATH {VARIABLE}=a,b,c "


def test_a_cluster_that_is_too_small_says_what_is_left_to_do(quickstart, monkeypatch):
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 1.0, "GPU": 1.0})
    use_platform("cpu")
    with pytest.raises(ConfigError, match=r"ask for 2 CPU .* Set resources\.placement=colocated"):
        check_cluster(prepare(quickstart()))
    with pytest.raises(ConfigError, match=r"ask for 2 CPU .*They already share a pool") as caught:
        check_cluster(prepare(quickstart("resources.placement=colocated", "trainer.n_gpus_per_node=2")))
    assert "Set resources.placement=colocated" not in str(caught.value)


ADDED = {
    "+trainer.total_training_step=5": ["'trainer.total_training_step'", "Did you mean 'total_training_steps'"],
    "+trainer.train_batch_size=5": ["'trainer.train_batch_size'", "Did you mean 'data.train_batch_size'"],
    "+data.max_promt_length=5": ["'data.max_promt_length'", "Did you mean 'max_prompt_length'"],
    "+algorithm.gama=1": ["'algorithm.gama'", "Did you mean 'gamma'"],
    "+algorithm.kl_ctrl.kl_coeff=1": ["'algorithm.kl_ctrl.kl_coeff'", "Did you mean 'kl_coef'"],
    "+critic.optim.learning_rate=1": ["'critic.optim.learning_rate'", "=1"],
    "+reward.reward_kwargs.x=1": ["'reward.reward_kwargs'"],
    "+actor_rollout_ref.ref.model.paht=x": ["'actor_rollout_ref.ref.model.paht'", "Did you mean 'path'"],
    "+actor_rollout_ref.actr.optim.lr=1": ["'actor_rollout_ref.actr'", "Did you mean 'actor'"],
    "+actor_rollout_ref.actor.clip_ratoi=1": ["clip_ratoi", "Did you mean 'clip_ratio'"],
    "+lerner.gamma=1": ["'lerner'", "Did you mean 'learner'"],
    "+seeds=1": ["'seeds'", "Did you mean 'seed'"],
    "+learner.gama=1": ["'learner.gama'", "Did you mean 'gamma'"],
    "+runner.rounds=3": ["'runner.rounds'", "Did you mean 'num_rounds'"],
    "+credit.gamm=3": ["'credit.gamm'", "Did you mean 'gamma'"],
    "+controller.num_worker=2": ["'controller.num_worker'", "Did you mean 'num_workers'"],
    "+resources.placment=x": ["'resources.placment'", "Did you mean 'placement'"],
    "++agents.alice.temprature=1": ["'agents.alice.temprature'", "Did you mean 'temperature'"],
    "++trainer.savefreq=1": ["'trainer.savefreq'", "Did you mean 'save_freq'"],
}


@pytest.mark.parametrize("override", ADDED)
def test_an_added_key_that_nobody_reads_is_refused_with_the_nearest(quickstart, override):
    with pytest.raises(ConfigError) as caught:
        prepare(quickstart(override))
    assert all(part in str(caught.value) for part in ADDED[override]), str(caught.value)


def test_what_somebody_reads_may_be_added(quickstart, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(bonus=0.0, **_): return bonus")
    prepare(
        quickstart(
            "+actor_rollout_ref.model.override_config.attention_dropout=0.0",
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4",
            "+actor_rollout_ref.actor.policy_loss.dro_beta=0.1",
            f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
            "+reward.custom_reward_function.reward_kwargs.bonus=1.0",
            "+data.apply_chat_template_kwargs.enable_thinking=false",
            "+data.filter_prompts=false",
            "+ray_kwargs.ray_init.object_store_memory=100000000",
            "+agents.eve.role=x",
            "+policies.alice.actor.optim.lr=0.1",
            "++trainer.total_training_steps=5",
            "+of_my_own.folder=/data",
        )
    )


def test_a_data_set_of_ones_own_reads_keys_of_its_own(quickstart, tmp_path):
    (tmp_path / "rows.py").write_text("class Rows: ...")
    with pytest.raises(ConfigError, match="data.temperature_of_rows"):
        prepare(quickstart("+data.temperature_of_rows=1"))
    prepare(quickstart(f"data.custom_cls.path={tmp_path / 'rows.py'}", "+data.temperature_of_rows=1"))


def test_a_learner_of_ones_own_is_an_option_without_yaml(quickstart):
    from recipe import leave_one_out  # noqa: F401

    assert quickstart("learner=leave_one_out", "learner.scale=2").learner.scale == 2.0


def test_agents_are_added_and_typed_from_the_command_line(quickstart):
    assert new_agents(["+agents.bob={role: pick, stop: ['a, b'], trainable: false}"]) == [
        "+agent@agents.bob=schema", 'agents.bob.role="pick"', 'agents.bob.stop=["a, b"]', "agents.bob.trainable=false",
    ]  # fmt: skip
    assert new_agents(["+agents.bob.role=x", "+agents.bob.trainable=false", "seed=1"]) == [
        "+agent@agents.bob=schema",
        "agents.bob.role=x",
        "agents.bob.trainable=false",
        "seed=1",
    ]
    lines = quickstart("+agents.bob.role='first line\nsecond line'")
    assert lines.agents.bob.role == "first line\nsecond line" and lines.agents.bob.trainable
    config = quickstart("+agents.bob.role=hello", "+agents.eve={}")
    assert list(config.agents) == ["alice", "carol", "bob", "eve"] and config.agents.bob.role == "hello"
    with pytest.raises(Exception, match="rool"):
        quickstart("+agents.bob.rool=hello")


def test_the_users_search_path_is_kept():
    verl = "hydra.searchpath=[pkg://verl.trainer.config]"
    assert find_verl(["hydra.searchpath=[file:///x]"]) == ["hydra.searchpath=[pkg://verl.trainer.config,file:///x]"]
    assert find_verl(["--config-name", "q", "a=1", "--cfg", "job"]) == [
        "--config-name",
        "q",
        verl,
        "a=1",
        "--cfg",
        "job",
    ]
    assert find_verl(["--cfg", "job"]) == [verl, "--cfg", "job"]


DRO = "actor_rollout_ref.actor.policy_loss.loss_mode=dro"
SAVED = "actor_rollout_ref.actor.checkpoint.save_contents"
BAD = {
    DRO: [f"{DRO} with", "dro_beta=None", "set it, as in +actor_rollout_ref"],
    f"{DRO} +actor_rollout_ref.actor.policy_loss.dro_beta=0": ["dro_beta=0", "above 0"],
    "+policies.alice.actor.policy_loss.loss_mode=dro": ["policies.alice: ", "dro_beta=None"],
    "actor_rollout_ref.actor.ppo_mini_batch_size=5": ["train_batch_size=32", "32 % 5 = 2", "Choose a divisor"],
    "actor_rollout_ref.actor.ppo_mini_batch_size=0": ["ppo_mini_batch_size=0"],
    "actor_rollout_ref.actor.use_dynamic_bsz=false": ["use_dynamic_bsz", "ppo_max_token_len_per_gpu"],
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40": ["40 + 3 = 43"],
    "hardware=gpu actor_rollout_ref.rollout.name=trtllm": ["no place for more than one policy", "use hf, vllm, sglang"],
    "hardware=gpu actor_rollout_ref.rollout.checkpoint_engine.backend=nccl": ["backend=nccl", "set naive"],
    "hardware=gpu actor_rollout_ref.rollout.temperature=2.5": ["rollout.temperature=2.5", "expected at most 2"],
    "hardware=gpu agents.alice.temperature=2.1": ["agents.alice.temperature=2.1", "expected at most 2"],
    "hardware=gpu actor_rollout_ref.rollout.name=sglang controller.request_seeds=always": ["SGLang ignores the seeds"],
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2": ["1 ranks", "1 % 2 = 1"],
    "trainer.n_gpus_per_node=0": ["at least 1"],
    "resources.max_restarts=-1": ["resources.max_restarts=-1", "expected a whole number"],
    "actor_rollout_ref.actor.strategy=fsdp": ["does not run on a CPU", "fsdp2"],
    "actor_rollout_ref.rollout.name=vllm": ["does not run on a CPU", "hf"],
    "critic.enable=true": ["critic.enable=True", "leave it null"],
    "critic.level=turns": ["critic.level=turns", "turn, token", "Did you mean 'turn'"],
    "critic.ppo_mini_batch_size=5": ["critic.ppo_mini_batch_size=5", "divisor of 32"],
    "credit=team learner=qmix critic.level=token": ["critic.level=token", "set critic.level=turn"],
    "credit=team learner=vdn critic.ppo_epochs=2": ["critic.ppo_epochs=2", "learner.mixer_epochs"],
    "credit=team learner=vdn learner.target_update_every=0": ["learner.target_update_every=0", "at least 1"],
    "learner=qmix": ["credit=influence", "credit=team alone"],
    "critic.use_dynamic_bsz=false": ["critic.use_dynamic_bsz", "ppo_max_token_len_per_gpu"],
    "agents.alice.policy=central": ["central"],
    "agents.alice.policy=a agents.alice.policy_by_round=[b]": ["agents.alice.policy=a", "both name its policy"],
    "agents.alice.policy_by_round=[alice,later] +policies.later.rollout.temperature=0.5": [
        "{'alice': 1.0, 'later': 0.5}",
        "set agents.alice.temperature",
    ],
    "agents.alice.policy_by_round=[a/b]": ["agents.alice.policy_by_round=['a/b']", "letters"],
    "runner=summary runner.summariser=alica": ["runner.summariser=alica", "Did you mean 'alice'"],
    "runner=critique +agents.bob={} +agents.eve={}": ["runner=critique", "2 to 3 agents", "names 4"],
    "runner=debate_graph runner.start=begin": ["runner.start", "'begin'", "discuss"],
    "runner=router runner.menu='{workrs}'": ["runner.menu", "'workrs'"],
    "runner=single_turn learner.train_rounds=[2]": ["learner.train_rounds=[2]", "runner=single_turn ends in round 1"],
    "runner=tree runner.num_branches=0": ["runner.num_branches=0", "at least 1"],
    "runner=tree runner.num_branches=1": ["runner.num_branches=1", "without siblings", "runner.train=path"],
    "critic.forward_micro_batch_size=abc": ["critic.forward_micro_batch_size=abc: expected", "a whole number"],
    "controller.thinking=atuo": ["controller.thinking=atuo", "Did you mean 'auto'"],
    "+policies.alice.thinking={start:a}": ["policies.alice.thinking={'start': 'a'}", "two different texts"],
    "controller.no_answer_score=inf": ["controller.no_answer_score=inf", "finite"],
    "algorithm.adv_estimator=gae": ["adv_estimator=gae", "learner=grpo", "ippo"],
    "learner=magrpo credit=team algorithm.adv_estimator=rloo": ["adv_estimator=rloo", "learner=magrpo", "grpo"],
    "algorithm.adv_estimator=rlo": ["adv_estimator=rlo", "Did you mean 'rloo'"],
    "controller.pack_turns=true actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum": [
        "seq-mean-token-sum",
        "token-mean",
    ],
    "controller.pack_turns=true actor_rollout_ref.actor.policy_loss.loss_mode=gspo": [
        "loss_mode=gspo",
        "pack_turns=false",
    ],
    "controller.pack_turns=true learner=mappo critic.level=token": ["critic.level=turn"],
    "controller.old_log_probs=server learner=happo": ["controller.old_log_probs=server", "learner=happo", "auto"],
    "algorithm.rollout_correction.bypass_mode=true learner=happo": ["bypass_mode=true with learner=happo"],
    "controller.pack_turns=true algorithm.rollout_correction={bypass_mode:true,rollout_is:token,rollout_is_batch_normalize:true}": [
        "rollout_is_batch_normalize=true",
        "pack_turns=false",
    ],
    "controller.pack_turns=true actor_rollout_ref.actor.policy_loss.loss_mode=sapo": ["loss_mode=sapo", "sequences"],
    "controller.pack_turns=true learner=ippo critic.level=token critic.loss_agg_mode=seq-mean-token-mean": [
        "critic.loss_agg_mode=seq-mean-token-mean",
        "pack_turns=false",
    ],
    "controller.pack_turns=atuo": ["controller.pack_turns=atuo", "Did you mean 'auto'"],
    "baseline=sole": ["baseline=sole", "Did you mean 'solo'"],
    "baseline=null": ["baseline=None", "solo, vote, untrained", "[] for none"],
    "baseline=5": ["baseline=5", "expected a list"],
    f"{SAVED}=[modle,optimizer,extra]": [f"{SAVED}=['modle', 'optimizer', 'extra']", "Did you mean 'model'"],
    f"{SAVED}=all": [f"{SAVED}=all", "expected a list of model, optimizer, extra, hf_model"],
    f"{SAVED}=[optimizer,extra]": [f"{SAVED}=['optimizer', 'extra']", "no weights", "trainer.save_final=false"],
    f"+policies.carol{SAVED.removeprefix('actor_rollout_ref')}=[extra]": ["policies.carol: ", "no weights"],
    "actor_rollout_ref.actor.checkpoint.load_contents=[weights]": [
        "load_contents=['weights']",
        "weights is nothing to save",
    ],
    "critic.checkpoint.save_contents=[hf_model]": ["critic.checkpoint.save_contents=['hf_model']", "no weights"],
    "trainer.ref_update_freq=5": ["ref_update_freq=5", "use_kl_loss=true"],
    "actor_rollout_ref.model.lora_rank=4": ["lora_rank=4", "lora.merge=true"],
    "trainer.ref_update_freq=-1": ["ref_update_freq=-1"],
    "actor_rollout_ref.ref.model.path=/nowhere/ref": ["actor_rollout_ref.ref.model.path=/nowhere/ref"],
    "actor_rollout_ref.ref.model.path=org/name actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora.merge=true": [
        "ref.model.path=org/name",
        "unset",
    ],
    "algorithm.rollout_correction.rollout_is=tokens": ["rollout_is=tokens", "Did you mean 'token'"],
    "algorithm.rollout_correction.rollout_is=sequence controller.pack_turns=true": [
        "rollout_is=sequence",
        "pack_turns",
    ],
    "algorithm.kl_ctrl.type=foo": ["algorithm.kl_ctrl.type=foo", "adaptive"],
    "critic.optim.lr=-1": ["critic.optim.lr=-1"],
    "actor_rollout_ref.actor.optim.lr=1000": ["actor.optim.lr=1000: expected", "at most 1"],
    "critic.optim.lr=10": ["critic.optim.lr=10: expected", "at most 1"],
    "controller.failure_score=1e300": ["controller.failure_score=1e+300: expected", "at most 1e+15"],
    "critic.ppo_epochs=-3": ["critic.ppo_epochs=-3"],
    "trainer.critic_warmup=5": ["trainer.critic_warmup=5", "learner=grpo"],
    "agents.alice.policy=a_critic": ["a_critic"],
    "algorithm.rollout_correction.rollout_rs=token_k1": ["rollout_rs=token_k1", "rollout_rs_threshold"],
    "resources.one_process=true trainer.n_gpus_per_node=2": ["one rank", "n_gpus_per_node=2"],
    "resources.pools={p:{gpus:2}}": ["resources.pools.p: it has no members", "leave it out"],
    "actor_rollout_ref.rollout.name=vllm resources.weight_check=digest": ["rollout.name=vllm"],
    "resources.one_process=true controller.num_workers=2": ["controller.num_workers=2", "one_process=false"],
    "controller.num_workers=-1": ["controller.num_workers=-1", "at least 0"],
    "actor_rollout_ref.rollout.n=1": ["rollout.n=1", "at least 2"],
    "actor_rollout_ref.model.path=/nowhere/model": ["/nowhere/model", "config.json"],
    "data.train_files=/nowhere/train.parquet": ["data.train_files=/nowhere/train.parquet", "no such file"],
    "data.val_files=/nowhere/test.parquet": ["data.val_files"],
    "trainer.resume_mode=atuo": ["resume_mode=atuo", "Did you mean 'auto'"],
    "trainer.resume_mode=resume_path": ["resume_from_path=None"],
    "trainer.resume_changes=[learnr.lam]": ["resume_changes=['learnr.lam']", "Did you mean 'learner'"],
    "actor_rollout_ref.model.trust_remote_code=null": ["model.trust_remote_code=None", "expected true or false"],
    "trusted_targets=os": ["trusted_targets=os", "a list of packages"],
    "+trainer.hook._target_=os.system": ["trainer.hook._target_=os.system", "trusted_targets=[os]"],
    "trainer.resume_changes=seed": ["resume_changes=seed", "expected a list"],
    "trainer.total_training_steps=-3": ["-3", "at least 0"],
    "+policies.bob.thinking=none": ["policies.bob", "alice, carol"],
    "+policies.alice.model.paht=x": ["policies.alice.model.paht", "Did you mean 'path'"],
    "+policies.alice.pool=x": ["unknown key 'policies.alice.pool'"],
    "+policies.alice.actor.ppo_mini_batch_size=64": ["policies.alice", "32 % 64"],
    "+policies.alice.rollout.name=vllm": ["policies.alice", "does not run on a CPU"],
    "+policies.alice.rollout.n=2": ["policies.alice.rollout.n=2", "same episodes"],
    "+policies.alice.model.path=/nowhere": ["policies.alice", "/nowhere"],
    "agents.alice.temperature=0": ["agents.alice.temperature=0", "1e-05 at least"],
    "actor_rollout_ref.rollout.temperature=0": ["rollout.temperature=0"],
    "learner.train_rounds=[3]": ["learner.train_rounds=[3]", "ends in round 2"],
    "learner.train_rounds=[]": ["learner.train_rounds=[]"],
    "controller.reward_processes=-1": ["controller.reward_processes=-1", "at least 1", "in the driver"],
    "controller.reward_timeout_s=0": ["controller.reward_timeout_s=0", "above 0"],
    "controller.reward_timeout_s=nan": ["controller.reward_timeout_s=nan", "above 0"],
    "runner=debate_graph runner.edges.0.limit=0": ["runner.edges[0].limit=0", "at least 1"],
    "reward.custom_reward_function.name=mine": ["reward.custom_reward_function.name=mine", "path is null"],
    "actor_rollout_ref.rollout.name=foo": ["rollout.name=foo does not run on a CPU", "use hf"],
    "reward.custom_reward_function.path=/nowhere/r.py": ["reward.custom_reward_function.path=/nowhere/r.py", "no such"],
    "custom_reward_function.path=/nowhere/r.py": ["custom_reward_function.path=/nowhere/r.py", "compute_score("],
    "+policies.alice.actor=5": ["policies.alice.actor=5", "group"],
    "agents.alice.policy=a/b": ["agents.alice.policy=a/b", "letters"],
    "agents.alice.max_tokens=4": ["agents.alice.max_tokens=4", "data.max_response_length=3"],
    "actor_rollout_ref.rollout.max_model_len=42": ["max_model_len=42", "40 + 3"],
    "runner.peer_template='{agnt}'": ["runner.peer_template", "'agnt'"],
    "runner.foresee_request='{peer}?'": ["runner.foresee_request='{peer}?'", "no field 'peer'", "{agent}"],
    "runner=single_turn runner.instruction_template='{instruct}{question}'": [
        "runner.instruction_template",
        "no field 'instruct'",
        "{instruction}, {question}",
    ],
    "runner.foreseen_template='{answer}'": ["runner.foreseen_template", "no field 'answer'", "{agent}, {text}"],
    "method=rft method.peers_weight=1 method.peers_request='{peer}?'": [
        "method.peers_request='{peer}?'",
        "no field 'peer'",
    ],
    "data.columns=question": ["data.columns=question", "expected {prompt: <column>"],
    "data.val_share=1": ["data.val_share=1", "at most 0.9"],
    "trainer.logger=[clearml]": ["clearml is not installed", "the package clearml: install it"],
    "trainer.log_val_generations=-1": ["log_val_generations=-1"],
    "trainer.logger=[fiel]": ["'fiel'", "Did you mean 'file'"],
    "trainer.default_local_dir=/dev/null/x": ["trainer.default_local_dir=/dev/null/x", "is not a folder"],
    "custom_reward_function.path=1e400": ["custom_reward_function.path=inf", "not a path", "a Python file"],
    "custom_reward_function.path=[a]": ["custom_reward_function.path=['a']", "not a path"],
    "actor_rollout_ref.rollout.temperature=1e-300": ["rollout.temperature=1e-300", "at least 1e-05"],
    "agents.alice.temperature=1e-7": ["agents.alice.temperature=1e-07", "1e-05 at least", "trainable=false"],
    "data.custom_cls.path=/nowhere.py": ["data.custom_cls.path=/nowhere.py", "no such file"],
    "trainer.nnodes=65": ["trainer.nnodes=65", "at most 64"],
    "actor_rollout_ref.actor.optim.betas=[0.9]": ["betas=[0.9]", "two numbers"],
    "agents.alice.agent_loop=tool_agnet": [
        "agents.alice.agent_loop=tool_agnet",
        "Did you mean 'tool_agent'",
        "@register",
    ],
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent": ["agents.<name>.agent_loop=tool_agent"],
    "actor_rollout_ref.rollout.multi_turn.function_tool_path=/nowhere.py": ["/nowhere.py", "agents.<name>.agent_loop"],
    "agents.alice.agent_loop=tool_agent actor_rollout_ref.rollout.multi_turn.function_tool_path=/nowhere.py": [
        "function_tool_path=/nowhere.py",
        "@function_tool",
    ],
    "agents.alice.agent_loop=tool_agent actor_rollout_ref.rollout.agent.agent_loop_config_path=/nowhere.yaml": [
        "agent_loop_config_path=/nowhere.yaml",
        "name and _target_",
    ],
    "agents.alice.agent_loop=tool_agent actor_rollout_ref.rollout.multi_turn.format=hermse": ["Did you mean 'hermes'"],
    "controller.overlong_buffer=2 controller.overlong_penalty=0": [
        "overlong_penalty=0",
        "overlong_buffer=2 would cost",
    ],
    "controller.overlong_penalty=0.5": ["overlong_penalty=0.5", "with controller.overlong_buffer=0"],
    "controller.overlong_buffer=2 credit=team credit.of=answer": ["overlong_buffer=2", "credit=team credit.of=answer"],
    "controller.overlong_buffer=2 credit=team credit.of=answer credit.alpha0=0.5": [
        "overlong_buffer=2",
        "credit=team credit.of=answer",
    ],
    "controller.overlong_buffer=2 credit=shapley": ["overlong_buffer=2", "credit=shapley", "such as own"],
    "controller.overlong_buffer=2 credit=replay": ["overlong_buffer=2", "credit=replay"],
    "controller.overlong_buffer=2 runner=game": [
        "controller.overlong_buffer=2",
        "runner=game",
        "set it to 0",
    ],
    "controller.log_prob_check_rows=0": ["controller.log_prob_check_rows=0", "at least 1"],
    "controller.log_prob_gap_bound=-1": ["controller.log_prob_gap_bound=-1", "at least 0"],
    "controller.old_log_probs=trainer algorithm.rollout_correction.bypass_mode=true": [
        "controller.old_log_probs=trainer",
        "bypass_mode=True",
        "old_log_probs=server",
    ],
    "controller.old_log_probs=server algorithm.rollout_correction.rollout_is=token": [
        "controller.old_log_probs=server",
        "rollout_is=token",
        "old_log_probs=trainer",
        "bypass_mode=true",
    ],
    "algorithm.rollout_correction.bypass_mode=true actor_rollout_ref.actor.policy_loss.loss_mode=gspo": [
        "algorithm.rollout_correction.bypass_mode=True",
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "vanilla",
    ],
    "algorithm.rollout_correction.bypass_mode=true +policies.alice.actor.policy_loss.loss_mode=gspo": [
        "policies.alice",
        "loss_mode=gspo",
    ],
    "critic.optim.betas=[2,3]": ["critic.optim.betas=[2, 3]", "two numbers"],
    "critic.optim.weight_decay=often": ["critic.optim.weight_decay=often"],
    "critic.fsdp.param_offload=often": ["critic.fsdp.param_offload=often", "true or false"],
    "critic.fsdp.model_dtype=fp8": ["critic.fsdp.model_dtype=fp8", "bf16"],
    "+critic.fsdp.mixed_precision={param_dtype:fp8}": ["critic.fsdp.mixed_precision.param_dtype=fp8", "bf16"],
    "determinism=strickt": ["determinism=strickt", "Did you mean 'strict'"],
    "determinism=strict hardware=gpu actor_rollout_ref.rollout.name=vllm": [
        "rollout.name=vllm",
        "full_determinism=true",
    ],
    "determinism=strict +actor_rollout_ref.rollout.custom.exact=false": ["custom.exact=false", "leave it out"],
    "determinism=strict controller.request_seeds=never": ["request_seeds=never", "set auto or always"],
    "determinism=strict data.seed=null": ["data.seed=null", "data.shuffle=true"],
    "determinism=strict actor_rollout_ref.actor.fsdp_config.full_determinism=true": ["fails where it warns"],
    "precision=fp8": ["precision=fp8", "fp32, bf16, or null"],
    "precision=bf16 actor_rollout_ref.rollout.dtype=float32": [
        "rollout.dtype=float32",
        "precision=bf16",
        "precision=null",
    ],
    "precision=bf16 critic.fsdp.mixed_precision.param_dtype=fp32": ["param_dtype=fp32", "precision=null"],
    "agents={}": ["agents"],
}


def test_a_row_may_be_as_long_as_all_ranks_of_a_sequence_hold(quickstart):
    """The quick start's rows are 43 tokens, and two ranks hold 24 each."""
    few = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24"
    with pytest.raises(ConfigError, match=r"ppo_max_token_len_per_gpu=24.*43 tokens"):
        check(quickstart(few))
    check(quickstart(few, "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"))
    check(quickstart(few, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"))


def test_a_row_fits_the_passes_without_gradients_too(quickstart):
    """verl's engines on GPUs refuse it in the step that brings it; the reference splits sequences as the policy does."""
    sequence, reference = (
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
    )
    few = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24"
    with pytest.raises(
        ConfigError, match=r"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24.*43 tokens; .*least 43"
    ):
        check(quickstart(few))
    check(quickstart(few, sequence))
    few = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24"
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24.*43 tokens"):
        check(quickstart(few, reference))
    check(quickstart(few))
    check(quickstart(few, reference, sequence))


def test_a_reference_splits_sequences_as_its_policy_does(quickstart):
    for key in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"):
        config = quickstart(
            f"+policies.carol.actor.{key}=2",
            "+policies.carol.actor.ppo_max_token_len_per_gpu=24",
            "actor_rollout_ref.actor.use_kl_loss=true",
        )
        alice, carol = (own.actor_rollout_ref for own in policy_configs(config, ["alice", "carol"], "run", 9).values())
        assert [sequence_parallel(own[part]) for own in (alice, carol) for part in ("actor", "ref")] == [1, 1, 2, 2]


def test_passes_without_gradients_follow_a_policys_own_token_budget(quickstart):
    own, key = "+policies.carol.actor.ppo_max_token_len_per_gpu=4096", "log_prob_max_token_len_per_gpu"
    config = quickstart(own)
    alice, carol = (own.actor_rollout_ref for own in policy_configs(config, ["alice", "carol"], "run", 9).values())
    assert carol.actor.ppo_max_token_len_per_gpu == carol.rollout[key] == carol.ref[key] == 4096
    assert alice.actor.ppo_max_token_len_per_gpu == alice.rollout[key] == alice.ref[key] != 4096
    config = quickstart(own, f"+policies.carol.ref.{key}=2048", f"actor_rollout_ref.rollout.{key}=512")
    carol = policy_configs(config, ["carol"], "run", 9)["carol"].actor_rollout_ref
    assert (carol.rollout[key], carol.ref[key]) == (512, 2048), "what was set stays"


def test_a_critic_reads_as_much_as_all_ranks_of_a_sequence_hold(quickstart):
    config = quickstart("critic.ppo_max_token_len_per_gpu=24", "critic.fsdp.ulysses_sequence_parallel_size=2")
    group = CriticGroup("central", config, None, "pool", same_for_all(1.0))
    assert group.longest == 48


def test_a_checkpoint_may_be_named_from_the_home_folder(quickstart, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "global_step_4").mkdir()
    check(quickstart("trainer.resume_mode=resume_path", "trainer.resume_from_path='~/global_step_4'"))


@pytest.mark.parametrize("reward, loss, own", itertools.product([False, True], repeat=3))
def test_a_kl_penalty_that_counts_twice_is_said(caplog, reward, loss, own):
    actor = {"actor": {"use_kl_loss": loss}}
    policies = {"alice": {"actor": {"use_kl_loss": own}}}
    config = {"algorithm": {"use_kl_in_reward": reward}, "actor_rollout_ref": actor, "policies": policies}
    warn_of_two_penalties(OmegaConf.create(config))
    assert ("counts twice" in caplog.text) is (reward and (loss or own))


def test_a_home_folder_that_cannot_be_written_is_named(quickstart, monkeypatch):
    """Reading data writes into a cache below it."""
    for name in ("HF_DATASETS_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    with pytest.raises(
        ConfigError, match=r"^HF_DATASETS_CACHE=.*: /dev/null is not a folder; set HF_DATASETS_CACHE to"
    ):
        check(quickstart())
    monkeypatch.setenv("HF_HOME", str(quickstart().assets))
    check(quickstart())


def test_one_rank_has_no_collective_that_could_be_late(quickstart):
    check(quickstart("resources.timeout_s=100"))


@pytest.mark.slow
def test_an_overlong_penalty_that_has_an_effect_is_taken(quickstart):
    for words in (["credit=own"], ["credit=team"], ["credit=mixed", "credit.of=answer"]):
        prepare(quickstart("controller.overlong_buffer=2", *words))


@pytest.mark.parametrize(
    "learner,warned", [("grpo", True), ("grpo learner.gamma=0", False), ("leave_one_out", False)], ids=str
)
def test_a_longer_conversation_earns_more_where_rewards_are_summed(quickstart, caplog, learner, warned):
    """A learner without a gamma reads a turn's own reward."""
    from recipe import leave_one_out  # noqa: F401

    prepare(quickstart("credit=own", "runner.stop_on_consensus=true", *f"learner={learner}".split()))
    assert ("may end a conversation early" in caplog.text) == warned


JUDGE = "agents.carol.trainable=false credit=own +policies.carol.endpoint={base_url:'http://localhost:1/v1',model:m"
"""A policy that a server elsewhere answers for, to be closed with a brace."""
GPU = "hardware=gpu actor_rollout_ref.rollout"
BAD |= {
    "sharing=grups": ["sharing=grups", "Did you mean 'groups'"],
    "sharing=individual agents.carol.policy=alice": ["alice and carol", "agents.carol.policy"],
    "sharing=shared agents.alice.policy=one agents.carol.policy=two": ["one, two", "unset", "sharing=groups"],
    "sharing=groups agents.alice.policy=one": ["agent carol", "set agents.carol.policy"],
    "sharing=lora actor_rollout_ref.model.lora.merge=true": ["lora.merge=true", "sharing=individual"],
    "sharing=lora actor_rollout_ref.actor.strategy=fsdp": ["strategy=fsdp", "use fsdp2"],
    "sharing=lora +policies.alice.model.path=other": ["policies.alice.model.path=other", "alice and carol", "pool"],
    f"{GPU}.name=trtllm": ["rollout.name=trtllm", "use hf, vllm, sglang"],
    f"{GPU}.checkpoint_engine.backend=nccl": ["checkpoint_engine.backend=nccl", "set naive"],
    f"{GPU}.temperature=2.5": ["rollout.temperature=2.5", "lower it, or use hf"],
    "hardware=gpu agents.alice.temperature=2.1": ["agents.alice.temperature=2.1", "lower it, or use hf"],
    f"{GPU}.name=sglang controller.request_seeds=always": ["request_seeds=always", "deterministic"],
    "agents.carol.trainable=false credit=own +policies.carol.model.lora_adapter_path=x": [
        "lora_adapter_path=x",
        "merge",
    ],
    f"{JUDGE},modle:x}}": ["policies.carol.endpoint.modle", "Did you mean 'model'"],
    f"{JUDGE},timeout_s:0}}": ["endpoint.timeout_s=0.0", "above 0"],
    f"{JUDGE.replace('http://', '')}}}": ["base_url=localhost:1/v1", "expected an address"],
    f"{JUDGE},api_key_env:UNSET_JUDGE_KEY}}": ["api_key_env=UNSET_JUDGE_KEY", "not set"],
    f"{JUDGE}}} agents.carol.trainable=true": ["agent 'carol'", "set agents.carol.trainable=false"],
    f"determinism=strict {JUDGE}}}": ["policies.carol.endpoint", "determinism=null"],
    f"{JUDGE}}} +policies.carol.rollout.dtype=float32": ["policies.carol.rollout.dtype has no effect"],
}


BAD |= {
    "method=spin method.source=rows": ["method.source=rows", "from play"],
    "method=sft learner=mappo": ["learner=mappo with method=sft", "leave learner=grpo"],
    "method=dpo method.loss=ipo method.label_smoothing=0.1": ["label_smoothing=0.1", "method.loss=sigmoid"],
    "method=sft": ["no column 'messages' or 'answer'", "method.*_key"],
    "method=hybrid": ["method.files=[]", "parquet or jsonl"],
    "method=hybrid method.files=[${data.train_files}] learner=mappo trainer.critic_warmup=2": [
        "trainer.critic_warmup=2",
        "train no critic",
        "method=sft",
    ],
    "method=hybrid method.files=[${data.train_files}] learner=cory runner=pioneer_observer credit=auto": [
        "learner=cory",
        "exchange policies",
        "learner.exchange_every=0",
    ],
}

BAD_METHODS = {
    "method=sft actor_rollout_ref.actor.use_kl_loss=true": ["with method=sft", "no KL penalty"],
    "method=sft actor_rollout_ref.actor.ppo_mini_batch_size=16": ["ppo_mini_batch_size=16", "data.train_batch_size"],
    "method=rft controller.overlong_buffer=2": ["controller.overlong_buffer=2", "method=rft", "set it to 0"],
    "method=dpo method.compare_by=team controller.overlong_buffer=2": ["controller.overlong_buffer=2", "method=dpo"],
    "method=rft actor_rollout_ref.actor.ppo_epochs=2": ["ppo_epochs=2", "method.epochs=2"],
    "method=rft baseline=[solo]": ["baseline=['solo'] with method=rft", "method=rl"],
    "method=rft learner=cory": ["learner=cory with method=rft", "leave learner=grpo"],
    "method=dpo method.source=play actor_rollout_ref.rollout.n=1": ["rollout.n=1", "no contrast"],
    "method=dpo method.reference=false trainer.ref_update_freq=2": ["no reference to renew", "dpo, spin"],
    "method=madpo method.source=play actor_rollout_ref.rollout.n=1": ["rollout.n=1", "no contrast"],
    "method=madpo method.compare_by=own": ["compare_by=own with method=madpo", "method=dpo"],
    "method=madpo method.pairs_per_task=0": ["method.pairs_per_task=0", "whole number"],
    "method=sft method.from_agent=alice": ["method.from_agent=alice with method.source=rows", "method.source=episodes"],
    "method=sft method.target=team_answer": ["method.target=team_answer with method.source=rows", "leave it out"],
    "method=hybrid method.files=[${data.train_files}] method.target=team_answer": [
        "method.target=team_answer with method.imitates=rows",
        "leave it out",
    ],
    "method=rft method.target=team_answer method.from_agent=alice": ["nobody's turn", "leave one of them out"],
    "method=rft method.from_agent=[alice]": ["method.from_agent=['alice']", "a map of names"],
    "method=rft method.from_agent={alise:carol}": ["'alise' is no trained agent", "Did you mean 'alice'"],
    "method=rft method.from_agent={alice:carl}": [
        "names 'carl', who does not speak in this run",
        "Did you mean 'carol'",
    ],
    "method=sft method.peers_weight=0.5": ["method.peers_weight=0.5 with method.source=rows", "method.source=episodes"],
    "method=hybrid method.imitates=episodes method.files=[${data.train_files}] method.peers_weight=1 runner.foresee=true "
    "runner.foresee_request=who": ["runner.foresee_request='who'", "set both to the same text"],
    "method=world_model method.peers_weight=0": ["method.peers_weight=0", "above 0"],
    "method=world_model method.source=rows": ["method.source=rows", "from episodes or play"],
    "method=dpo method.beta=0": ["method.beta=0", "above 0"],
    "method=spin sharing=lora": ["method=spin", "lora_rank=0"],
    "method=spin actor_rollout_ref.ref.fsdp_config.model_dtype=bf16": [
        "ref.fsdp_config.model_dtype=bfloat16",
        "in float32",
        "set it to that of actor",
    ],
    "method=spin": [
        "train.parquet: 64 rows cannot be used:\n  row 0: ",
        "extra_info.answer is None",
        "reward_model.ground_truth",
    ],
    "method=spin method.reference=false": ["method.reference=false", "leave it true"],
    "method=sft method.answer_key=reward_model.ground_truth data.max_prompt_length=1": [
        "data.train_files: an example of agent 'alice' has",
        "allow 4",
        "leave it out",
    ],
    "method=dpo": ["no column 'chosen'", "method.*_key"],
    "method=sft method.source=episodes": ["train.parquet", "expected a dump", "method.source=rows"],
    "method=hybrid method.files=[none.jsonl]": ["method.files=none.jsonl", "no such file"],
    "method=hybrid method.sft_steps=120": ["method.sft_steps=120", "method=sft"],
    "method=hybrid method.imitates=play": ["method.imitates=play", "rows or episodes"],
}


@pytest.fixture(scope="module")
def bad(compose_config, cold_assets):
    """Each bad configuration, composed once."""
    composed = {}

    def bad(override):
        if override not in composed:
            words = [] if override == "agents={}" else override.split()
            composed[override] = compose_config(f"assets={cold_assets}", *words)
        return composed[override]

    return bad


@pytest.mark.parametrize("override", [override for override in BAD if override != "agents={}"])
def test_rules_between_keys_name_the_remedy(bad, override):
    with pytest.raises(ConfigError) as caught:
        prepare(bad(override))
    assert all(part in str(caught.value) for part in BAD[override]), str(caught.value)


@pytest.mark.parametrize(
    "key,value",
    [
        ("agents.alice.stop", "[[x]]"),
        ("agents.alice.policy_by_round", "[{a:1}]"),
        ("learner.train_rounds", "[[x]]"),
        ("learner.group_by", "[[x]]"),
    ],
)
def test_a_list_of_plain_values_holds_no_list_and_no_group(bad, key, value):
    with pytest.raises(ConfigError, match=rf"{key}=\[.*: expected a list of plain values, as in {key}=\[a,b\]"):
        prepare(bad(f"{key}={value}"))


@pytest.mark.slow
@pytest.mark.parametrize("override", BAD_METHODS)
def test_methods_name_the_remedy(bad, override):
    with pytest.raises(ConfigError) as caught:
        prepare(bad(override))
    assert all(part in str(caught.value) for part in BAD_METHODS[override]), str(caught.value)


@pytest.mark.slow
def test_every_rule_was_broken_by_a_test(bad):
    """A rule that no configuration above breaks is a rule without a test."""
    broken = set()
    for override in BAD:
        if len(broken) == len(RULES):
            break
        config = copy.deepcopy(bad(override))
        if override == "agents={}":
            with open_dict(config):
                config.agents = {}
        OmegaConf.resolve(config)
        for rule in set(RULES) - broken:
            try:
                rule(config)
            except ConfigError:
                broken.add(rule)
    assert [f"{rule.__module__}.{rule.__name__}" for rule in RULES if rule not in broken] == []


def test_one_reward_function_is_named(quickstart, tmp_path):
    keys = ("reward.custom_reward_function", "custom_reward_function")
    overrides = []
    for number, key in enumerate(keys):
        (tmp_path / f"{number}.py").write_text("def compute_score(**_): return 1.0")
        overrides.append(f"{key}.path={tmp_path / f'{number}.py'}")
    with pytest.raises(ConfigError, match=r"0\.py and custom_reward_function\.path=.*1\.py name two"):
        prepare(quickstart(*overrides))
    prepare(quickstart(overrides[1]))


def test_at_least_one_agent_is_trained(quickstart):
    with pytest.raises(ConfigError, match="no agent is trainable"):
        prepare(quickstart("agents.alice.trainable=false", "agents.carol.trainable=false"))


def test_a_right_configuration_passes_and_its_paths_are_absolute(quickstart):
    config = prepare(quickstart()).config
    assert Path(config.actor_rollout_ref.model.path).is_absolute() and Path(config.data.train_files[0]).is_absolute()


def test_a_policy_differs_from_the_others_where_it_says_so(quickstart):
    config = prepare(
        quickstart("+policies.carol.actor.optim.lr=0.5", "resources.pools={own:{policies:[carol]}}")
    ).config
    alice, carol = policy_configs(config, ["alice", "carol"], "run", 9).values()
    assert (alice.actor_rollout_ref.actor.optim.lr, carol.actor_rollout_ref.actor.optim.lr) == (1e-3, 0.5)
    custom = carol.actor_rollout_ref.rollout.custom
    assert custom.seed != alice.actor_rollout_ref.rollout.custom.seed
    assert {key: value for key, value in custom.items() if key != "seed"} == {
        "policy": "carol",
        "run_id": "run",
        "replica_offset": 1024,
        "timeout_s": 600.0,
        "timeout_key": "resources.timeout_s",
    }
    assert carol.actor_rollout_ref.actor.optim.total_training_steps == 9


@pytest.mark.parametrize(
    "overrides,pools",
    [
        ([], {"alice": 1, "carol": 1}),
        (["learner=ippo"], {"alice": 1, "carol": 1, "alice_critic": 1, "carol_critic": 1}),
        (["learner=ippo", "agents.carol.trainable=false"], {"alice": 1, "carol": 1, "alice_critic": 1}),
        (["learner=mappo"], {"alice": 1, "carol": 1, "central_critic": 1}),
        (["learner=vdn"], {"alice": 1, "carol": 1, "alice_critic": 1, "carol_critic": 1}),
        (["learner=qmix", "learner.share_utilities=true"], {"alice": 1, "carol": 1, "utility_critic": 1}),
        (["learner=mappo", "resources.pools={alice:{critics:[central]}}"], {"alice": 1, "carol": 1}),
        (["learner=mappo", "resources.placement=colocated"], {"shared": 1}),
        (["resources.placement=colocated"], {"shared": 1}),
        (["agents.alice.policy=both", "agents.carol.policy=both"], {"both": 1}),
        (["resources.pools={p:{policies:[alice,carol]}}", "trainer.n_gpus_per_node=2"], {"p": 2}),
    ],
)
def test_pools(quickstart, overrides, pools):
    assert Setup.of(quickstart(*overrides)).ranks_by_pool == pools


def test_the_driver_takes_the_platform_of_the_device_and_not_its_own_nodes():
    from verl.plugin.platform import get_platform

    assert use_platform("cuda") == "nvidia" and get_platform().ray_resource_name() == "GPU"
    assert use_platform("cpu") == "cpu" and get_platform().ray_resource_name() == "CPU"
    with pytest.raises(ConfigError, match="trainer.device=tpu.*nvidia"):
        use_platform("tpu")


ROW = {
    "prompt": [{"role": "user", "content": "2+2?"}],
    "data_source": "x",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"agent_prompts": {"alice": [{"role": "user", "content": "2+~?"}], "carol": None}},
}


@pytest.mark.parametrize(
    "change,said",
    [
        ({"prompt": "2+2?"}, ["row 3", "'prompt'", "list of messages"]),
        ({"prompt": []}, ["'prompt'"]),
        ({"prompt": [{"role": "user"}]}, ["holds", "list of messages"]),
        ({"data_source": None}, ["data_source is None"]),
        ({"reward_model": None}, ["reward_model is None", "ground_truth"]),
        ({"reward_model": {"style": "rule"}}, ["ground_truth"]),
        (
            {"extra_info": {"agent_prompts": {"alise": [{"role": "user", "content": "x"}]}}},
            ["'alise'", "Did you mean 'alice'"],
        ),
        ({"extra_info": {"agent_prompts": {"alice": "x"}}}, ["agent_prompts.alice"]),
    ],
)
def test_a_bad_row_is_named(change, said):
    check_row(ROW, "file, row 0", "prompt", ["alice", "carol"])
    with pytest.raises(ConfigError) as caught:
        check_row(ROW | change, "file, row 3", "prompt", ["alice", "carol"])
    assert all(part in str(caught.value) for part in said), str(caught.value)


def test_a_missing_column_and_an_unreadable_file_are_named(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"promt": "x", "data_source": "x"}]), path)
    with pytest.raises(ConfigError, match="no column 'prompt'; it has promt, data_source. Did you mean 'promt'"):
        check_files(str(path), "prompt", [])
    path.write_text("not parquet")
    with pytest.raises(ConfigError, match="rows.parquet: cannot be read"):
        check_files([str(path)], "prompt", [])


def test_checking_a_configuration_imports_neither_torch_nor_ray():
    code = "import sys, marl.config.rules, marl.config.dataset_rows, marl.config.schema; print([m for m in ('torch', 'ray', 'verl') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def test_the_error_that_main_raises_is_the_one_that_rules_raise(quickstart):
    assert MainConfigError is ConfigError
    config = copy.deepcopy(quickstart())
    OmegaConf.resolve(config)
    check(config)


def test_recipes_can_be_found_by_name():
    assert importlib.import_module("recipe.leave_one_out")
