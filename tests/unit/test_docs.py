"""The documents' examples are run."""

import asyncio
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from marl.config.kinds import adapter_policies, frozen_policies
from marl.config.overrides import find_verl
from marl.config.placement import PoolSize
from marl.config.policies import own_settings
from marl.preflight.compatibility import check_facts, choose_credit
from marl.preflight.prepare import prepare
from marl.run_setup import Setup
from marl.runners import scripted
from marl.types import Task
from tests.builders import BUILT_IN, slow_but
from tests.multinode import hosts

RUNNERS_DOC = Path("docs/runners.md").read_text()
GPU_COMMANDS = {
    name: shlex.split(re.search(r"bash marl/marl\.sh ((?:.*\\\n)*.*)", Path(name).read_text())[1].replace("\\\n", ""))
    for name in ("README.md", "docs/clusters.md")
}
CLUSTERS_DOC = Path("docs/clusters.md").read_text()
ENGINES_DOC = Path("docs/engines.md").read_text()
HEAD = "defaults: [marl, override agents: [schema], override runner: {name}, _self_]\n"
BLOCKS = re.findall(r"```yaml\n(.*?)```", RUNNERS_DOC, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", RUNNERS_DOC, re.DOTALL) for line in block.splitlines()]


def test_every_runner_has_its_section():
    sections = re.findall(r"^## (\w+)$", RUNNERS_DOC, re.MULTILINE)
    assert sorted(sections) == BUILT_IN
    assert HEAD.format(name="<name>") in RUNNERS_DOC
    for name in BUILT_IN:
        assert any(re.search(rf"name: {name}\b", block) for block in BLOCKS), name


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_yaml_is_composed_and_played(tmp_path, block):
    name = re.search(r"name: (\w+)", block)[1]
    (tmp_path / "experiment.yaml").write_text(HEAD.format(name=name) + block)
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        overrides = ["hydra.searchpath=[pkg://marl.configs]", "hardware=cpu"]
        config = compose("experiment", overrides=find_verl(overrides))
    choose_credit(config)
    setup = Setup.of(config)
    check_facts(setup)
    runner, agents = setup.runner, list(config.agents)
    task = Task("t", [{"role": "user", "content": "2+2?"}], "4", "x", lambda text: text if text.isdigit() else None)
    record = asyncio.run(
        scripted.play(runner, task, agents, scripted.scripted(scripted.listed(["4", "5", "AGAIN", "7"])))
    )
    assert {turn.agent for turn in record.turns} <= set(agents) and len(record.turns) >= len(agents) - 1


def test_its_commands_are_those_that_tests_run():
    """tests/stack/test_run_one.py runs each kind: with a script, with a model, from a record, a runner of one's own."""
    words = [shlex.split(line, comments=True) for line in COMMANDS]
    assert len(words) == 6 and all("run-one" in command for command in words)


def shell_of(text):
    """The commands of the code blocks, without their comments."""
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", "")
    return [command.strip() for line in blocks.splitlines() for command in line.partition(" #")[0].split(";")]


@pytest.mark.parametrize("name", GPU_COMMANDS)
def test_the_commands_of_ray_are_those_that_hosts_run(name):
    """tests/multinode runs them, and a job of the same form."""
    lines = [line for line in shell_of(Path(name).read_text()) if re.search(r"\bray (start|job|get)", line)]
    assert lines[:3] == [hosts.MAKE_TOKEN, hosts.HEAD, hosts.JOIN.format("<head's address>")]
    (job,) = lines[3:]
    assert f"{hosts.SUBMIT} python -m marl.main " in job
    assert f"RAY_ADDRESS={hosts.DASHBOARD}" in Path(name).read_text()


@pytest.fixture
def prepared_with_data(compose_config, cold_assets, tmp_path):
    """Prepare a command with the tiny model, and as many of the README's row as the command's batch names."""

    def prepared(words):
        row = re.search(r"```json\n(.*)\n```", Path("README.md").read_text())[1]
        words = [word for word in words if not word.startswith(("data.train_f", "data.val_f"))]
        batch = int(next(word for word in words if word.startswith("data.train_batch_size=")).partition("=")[2])
        (tmp_path / "rows.jsonl").write_text(f"{row}\n" * batch)
        files = [f"data.{key}={tmp_path}/rows.jsonl" for key in ("train_files", "val_files")]
        here = [f"actor_rollout_ref.model.path={cold_assets}/model", f"trainer.default_local_dir={tmp_path}"]
        return prepare(compose_config(*words, *files, *here, name="marl")), batch

    return prepared


@pytest.mark.parametrize("name", GPU_COMMANDS)
def test_a_command_for_gpus_is_prepared_with_a_batch_of_data(name, prepared_with_data):
    run, batch = prepared_with_data(GPU_COMMANDS[name])
    assert run.config.trainer.device == "cuda" and run.config.actor_rollout_ref.rollout.name == "vllm"
    assert run.config.data.train_batch_size == batch


def test_the_job_on_a_cluster_is_prepared(prepared_with_data):
    """The README's: the keys of its command for one GPU, and its own after them."""
    (job,) = [line for line in shell_of(Path("README.md").read_text()) if line.startswith(hosts.SUBMIT)]
    first, *own = job.partition("marl.main ")[2].split()
    run, _ = prepared_with_data([*GPU_COMMANDS["README.md"], *own])
    assert first == "<keys>"
    assert run.pools == {"shared": PoolSize(8, 2)} and run.config.trainer.device == "cuda"


def ladder():
    """The overrides of each step from a laptop to two nodes, by its comment."""
    section = Path("docs/teams.md").read_text().partition("## From one model to a team")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    steps = re.findall(r"^# (\d+)\. .*\n(.*)$", block, re.MULTILINE)
    assert len(steps) == len(block.splitlines()) // 2 == 10 and [int(number) for number, _ in steps] == [*range(1, 11)]
    return [shlex.split(command) for _, command in steps]


def step_of(number):
    head, *overrides = [ladder()[number - 1][:5], *ladder()[number - 1][5:]]
    assert head == ["python", "-m", "marl.main", "--config-name", "quickstart"]
    return overrides


@pytest.fixture
def prepared_step(compose_config, cold_assets, monkeypatch):
    """A step's resolved run, with the tiny model for every model and as if the machine had the GPUs."""
    monkeypatch.setattr("marl.cluster.session.fitting_platform", lambda device: None)

    def prepared_step(number):
        words = [word.replace("/models/llama", f"{cold_assets}/model") for word in step_of(number)]
        return prepare(compose_config(f"assets={cold_assets}", *words))

    return prepared_step


LADDER = {
    1: lambda run: len(run.policies) == 1,
    2: lambda run: list(run.policies) == ["alice", "carol"],
    3: lambda run: own_settings(run.config, "carol").rollout.temperature == 0.8,
    4: lambda run: frozen_policies(run.config) == ["carol"],
    5: lambda run: adapter_policies(run.config) == ["alice", "carol"],
    6: lambda run: [own_settings(run.config, name).model.lora_rank for name in run.policies] == [8, 4, 8],
    7: lambda run: run.pools == {"shared": PoolSize(8, 1)},
    8: lambda run: sum(run.ranks_by_pool.values()) == 8 and len(run.pools) == 2,
    9: lambda run: adapter_policies(run.config) and sum(run.ranks_by_pool.values()) == 8,
    10: lambda run: run.pools == {"big": PoolSize(4, 2), "small": PoolSize(4, 1)},
}
"""Each step's claim, by its command."""


@pytest.mark.parametrize("number", slow_but(LADDER, 10))
def test_every_step_of_the_ladder_is_prepared_and_is_what_it_says(prepared_step, number):
    run = prepared_step(number)
    assert LADDER[number](run), (run.pools, run.policies)


def test_the_keys_and_hardware_of_engines_are_there(compose_config):
    keys = set(re.findall(r"`((?:actor_rollout_ref\.)?rollout\.[\w.]+|controller\.\w+)", ENGINES_DOC))
    keys = {key if key.startswith(("actor", "controller")) else f"actor_rollout_ref.{key}" for key in keys}
    hardware = set(re.findall(r"`hardware=(\w+)`", ENGINES_DOC))
    assert len(keys) > 6 and hardware == {"gpu", "cpu_vllm"}
    for name in hardware:
        config = compose_config(f"hardware={name}", name="marl")
        assert [key for key in keys if OmegaConf.select(config, key, default=KeyError) is KeyError] == []
        assert config.actor_rollout_ref.rollout.name == "vllm"


def test_the_keys_of_clusters_are_there(compose_config):
    config = compose_config(name="marl")
    keys = set(re.findall(r"`((?:trainer|resources|controller|data)\.\w+)", CLUSTERS_DOC))
    assert len(keys) > 6 and all(OmegaConf.select(config, key, default="none") != "none" for key in keys)
    deadlines = re.findall(r"\| `(resources\.\w+)` \| (\d+) s", CLUSTERS_DOC)
    assert len(deadlines) == 3 and all(OmegaConf.select(config, key) == float(seconds) for key, seconds in deadlines)


def test_the_messages_and_keys_of_symptoms_are_there(compose_config):
    source = "".join(path.read_text() for path in Path("marl").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # a message over several lines
    page = Path("docs/symptoms.md").read_text()
    messages = re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE)
    others = {"CUDA out of memory", "No space left on device", "marl doctor"}
    said = {part.strip() for text in re.findall("`(.*?)`", str(messages)) for part in text.split("…")} - others
    assert len(said) > 15 and [text for text in said if text not in source] == []
    keys = set(re.findall(r"`((?:actor_rollout_ref|critic|data|controller|resources|reward|trainer)\.[\w.]+)", page))
    config = compose_config("learner=mappo", name="marl")
    assert len(keys) > 15
    assert [key for key in keys if OmegaConf.select(config, key, default=KeyError) is KeyError] == []
