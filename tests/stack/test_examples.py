"""Every script of ``examples/``: composed down to the workers' settings for its GPUs, and run for two steps on a CPU."""

import re
import subprocess
import sys

import pytest
from verl.utils.config import omega_conf_to_dataclass

from marl.cluster.layout import parts_of, policy_configs
from marl.cluster.workers.critic_worker import critic_settings
from marl.preflight.prepare import prepare
from tests.builders import slow_but
from tests.stack.conftest import ROOT, overrides_of

SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.sh"))


@pytest.mark.parametrize("script", slow_but(SCRIPTS, "gsm8k_mappo_debate.sh"))
def test_a_script_is_composed_down_to_the_settings_of_its_workers(script, environment, compose_config, tmp_path):
    overrides = overrides_of(ROOT / "examples" / script, environment, tmp_path)
    # the tiny data has eight rows; everything else is as for eight GPUs
    smaller = [
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "critic.ppo_mini_batch_size=2",
    ]
    setup = prepare(compose_config(*overrides, *smaller, name="marl"))
    config = setup.config
    assert config.trainer.device == "cuda" and config.actor_rollout_ref.rollout.name == "vllm"
    assert setup.ranks_by_pool == {"shared": 8}
    configs = policy_configs(config, ["agent_0", "agent_1"], "run", 10)
    for own in configs.values():
        actor = omega_conf_to_dataclass(own.actor_rollout_ref.actor)
        rollout = omega_conf_to_dataclass(own.actor_rollout_ref.rollout)
        assert (actor.strategy, actor.optim.lr, rollout.name) == ("fsdp2", 1e-6, "vllm")
        assert actor.optim.total_training_steps == 10 and rollout.gpu_memory_utilization == 0.4  # half of .8
    parts = parts_of(setup, configs)
    assert [part.is_critic for part in parts] == [False, False, *[True] * len(setup.pool_by_critic)]
    for part in parts:
        if part.is_critic:
            settings = critic_settings(part.arguments["config"])
            assert (settings.strategy, settings.engine.max_token_len_per_gpu) == ("fsdp2", 16384)
        else:
            assert part.arguments["role"] == "actor_rollout_ref", "each of these scripts has references"


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_two_steps_on_a_cpu(script, environment, tmp_path):
    through_ray = script == "gsm8k_grpo_debate.sh"
    where = "ray_kwargs.ray_init.num_cpus=4" if through_ray else "resources.one_process=true"
    ran = subprocess.run(
        [
            "bash", ROOT / "examples" / script, "hardware=cpu", where, "trainer.n_gpus_per_node=1", "trainer.critic_warmup=0",
            "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=2", "data.max_prompt_length=400", "data.max_response_length=8",
            "trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.logger=[console]",
            f"trainer.default_local_dir={tmp_path}",
        ],
        env=environment, capture_output=True, text=True, timeout=200, cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    second = next(line for line in ran.stdout.splitlines() if line.startswith("step:2"))
    numbers = dict(re.findall(r"(\S+?):(-?[0-9.e+-]+|nan|inf)(?: - |$)", second.split(" - ", 1)[1] + " - "))
    assert float(numbers["agent/agent_0/log_prob_gap_max"]) <= 1e-5
    assert float(numbers["agent/agent_0/grad_norm"]) >= 0 and float(numbers["team/episodes"]) == 8
    assert (tmp_path / "summary.json").is_file()


def test_there_is_no_script_that_these_tests_do_not_know():
    assert SCRIPTS == ["gsm8k_grpo_debate.sh", "gsm8k_ippo_debate.sh", "gsm8k_mappo_debate.sh"]
    programs = ["bench_controller.py", "check_gsm8k_rewards.py", "credit_agreement.py", "gsm8k.py"]
    assert sorted(path.name for path in (ROOT / "examples").glob("**/*.py")) == programs


@pytest.mark.slow
@pytest.mark.parametrize("learner", ["grpo", "mappo", "vdn"])
def test_credits_are_compared_with_replay_credit(learner, cold_assets, tmp_path):
    words = [
        "--steps=1",
        "--tasks=4",
        "--samples=2",
        "--alternatives=2",
        "--finishes=1",
        f"learner={learner}",
        "credit=team",
    ]
    here = [f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", "data.train_batch_size=4"]
    command = [sys.executable, ROOT / "examples" / "credit_agreement.py", *words, *here]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = [line.split("  ") for line in ran.stdout.splitlines() if re.match(r"(own|turns|\w+, team) ", line)]
    assert len(rows) == (3 if learner == "grpo" else 2)
