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
from omegaconf import OmegaConf

from marl.cluster.critic_group import CriticGroup
from marl.cluster.launch import check_cluster
from marl.cluster.layout import policy_configs
from marl.cluster.session import use_platform
from marl.config.errors import ConfigError, explain
from marl.config.external import VARIABLE, check_modules, find_own_modules, naming_modules, naming_own
from marl.config.keys import check_keys
from marl.config.overrides import find_verl, new_agents
from marl.config.policies import sequence_parallel
from marl.config.rules import check
from marl.data.rows import check_files, check_row
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
    "+controller.reward_processes=2": ["It is 'judge.processes' now"],
    "+controller.extractors={mine: math}": ["It is 'judge.extractors' now"],
    "+controller.num_worker=2": ["'controller.num_worker'", "Did you mean 'num_workers'"],
    "+resources.placment=x": ["'resources.placment'", "Did you mean 'placement'"],
    "++agents.alice.temprature=1": ["'agents.alice.temprature'", "Did you mean 'temperature'"],
    "++trainer.savefreq=1": ["'trainer.savefreq'", "Did you mean 'save_freq'"],
}


@pytest.mark.parametrize("override", ADDED)
def test_an_added_key_that_nobody_reads_is_refused_with_the_nearest(quickstart, override):
    with pytest.raises(ConfigError) as caught:
        config = quickstart(override)
        check_keys(config)
        prepare(config)
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
        prepare(quickstart("judge.overlong_buffer=2", *words))


@pytest.mark.parametrize(
    "learner,warned", [("grpo", True), ("grpo learner.gamma=0", False), ("leave_one_out", False)], ids=str
)
def test_a_longer_conversation_earns_more_where_rewards_are_summed(quickstart, caplog, learner, warned):
    """A learner without a gamma reads a turn's own reward."""
    from recipe import leave_one_out  # noqa: F401

    prepare(quickstart("credit=own", "runner.stop_on_consensus=true", *f"learner={learner}".split()))
    assert ("may end a conversation early" in caplog.text) == warned


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
    code = "import sys, marl.config.rules, marl.data.rows, marl.config.schema; print([m for m in ('torch', 'ray', 'verl') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def test_the_error_that_main_raises_is_the_one_that_rules_raise(quickstart):
    assert MainConfigError is ConfigError
    config = copy.deepcopy(quickstart())
    OmegaConf.resolve(config)
    check(config)


def test_recipes_can_be_found_by_name():
    assert importlib.import_module("recipe.leave_one_out")
