"""Every recipe: its files, its script down to the workers' settings, and two steps on a CPU."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from marl.main import run
from marl.preflight.prepare import prepare
from tests.builders import slow_but
from tests.stack.conftest import ROOT, overrides_of

RECIPES = ["at_grpo", "cory", "maporl", "marft", "multi_agent_grpo", "qmix"]
MINI_BATCHES = ("actor_rollout_ref.actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")
SMALLER = (
    "hardware=cpu",
    "resources.one_process=true",
    "trainer.n_gpus_per_node=1",
    "trainer.critic_warmup=0",
    "data.train_batch_size=4",
    *(f"{key}=4" for key in MINI_BATCHES),
    "data.max_prompt_length=600",
    "actor_rollout_ref.model.lora_rank=0",
    "data.max_response_length=8",
    "trainer.total_training_steps=2",
    "trainer.save_freq=-1",
    "trainer.logger=[file]",
)


def test_every_recipe_is_complete():
    assert sorted(path.parent.name for path in (ROOT / "recipe").glob("*/run.sh")) == RECIPES
    for name in RECIPES:
        folder = ROOT / "recipe" / name
        assert (folder / f"{name}.yaml").read_text().startswith("# @package _global_")
        assert (folder / "REQUIRED_VERL.txt").read_text().strip() == "verl>=0.9.1,<0.10"
        readme = (folder / "README.md").read_text()
        for part in ("bash recipe/", "Hardware", "Settings", "Expected curve", "Known failure", "arXiv"):
            assert part in readme or (part == "arXiv" and name == "multi_agent_grpo"), (name, part)


@pytest.fixture(params=slow_but(RECIPES, "at_grpo", "qmix"))
def overrides(request, environment, tmp_path):
    return request.param, overrides_of(ROOT / "recipe" / request.param / "run.sh", environment, tmp_path)


def test_a_recipe_is_composed_for_its_gpus(overrides, compose_config):
    name, given = overrides
    smaller = [f"{key}=8" for key in ("data.train_batch_size", *MINI_BATCHES)]
    config = prepare(compose_config(*given, *smaller, name="marl")).config
    assert config.actor_rollout_ref.rollout.name == "vllm" and config.trainer.n_gpus_per_node == 8
    shipped = OmegaConf.load(ROOT / "recipe" / name / f"{name}.yaml")
    chosen = {group.removeprefix("override /"): option for entry in shipped.defaults for group, option in entry.items()}
    assert {group: config[group].name for group in chosen} == chosen


@pytest.mark.slow
@pytest.mark.parametrize("overrides", RECIPES, indirect=True)
def test_a_recipe_runs_two_steps_on_a_cpu(overrides, compose_config, tmp_path):
    name, given = overrides
    samples = [] if name == "at_grpo" else ["actor_rollout_ref.rollout.n=2"]
    config = compose_config(*given, *SMALLER, *samples, f"trainer.default_local_dir={tmp_path}/run", name="marl")
    trainer = run(config)
    assert trainer.step_number == 2 and (tmp_path / "run" / "summary.json").is_file()
    steps = [json.loads(line)["data"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [step for step in steps if "timing_s/step" in step][-1]
    assert last["team/episodes"] == 4 * config.actor_rollout_ref.rollout.n
    assert all(last[f"agent/{agent}/log_prob_gap_max"] <= 1e-5 for agent in config.agents)


def test_rewards_of_the_instruction_variants():
    from recipe.multi_agent_grpo.rewards import compute_score, exact_number, extract, likeness, variety, well_formed

    assert [exact_number(text, "1,234") for text in ("it is 1234", "1,234.0", "1233", "none")] == [1, 1, 0, 0]
    assert [extract(text) for text in ("<response>7</response> of 9", "4 <response>7", "so 7.", "none")] == [
        "7",
        "7",
        "7",
        None,
    ]
    assert likeness("abcd", "abcd") == 100 and likeness("abcd", "bcde") == pytest.approx(75) and likeness("", "a") == 0
    assert variety("aabb") == 2 and variety("") == 0
    assert well_formed("<response> 4") == well_formed("<response>4</response>") == 10 and well_formed("4") == 0
    hybrid = {"exact": 100.0, "like": 0.5, "varied": 0.1, "format": 1.0}
    shown = {"answer": "2 + 2 = 4. <response>4</response>"}
    right = compute_score("x", shown["answer"], "4", shown, **hybrid)
    assert right["score"] == pytest.approx(100 + 50 + 0.1 * len(set(shown["answer"])) + 10) and right["acc"] == 1
    wrong = compute_score("x", "2 + 2 = 4. <response>5</response>", "4", shown, **hybrid)
    assert 50 < wrong["score"] < right["score"] and wrong["acc"] == wrong["exact"] == 0, "a high score is not right"
    assert compute_score("x", "<response>4", "4")["score"] == 1


def test_the_problems_of_the_instruction_variants_go_from_easy_to_hard():
    from recipe.multi_agent_grpo.rewards import compute_score

    folder, questions = ROOT / "recipe" / "multi_agent_grpo", set()
    for name, count in (("problems", 20), ("held_out", 6)):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        levels = [row["extra_info"]["level"] for row in rows]
        assert len(rows) == count and levels == sorted(levels, key=["easy", "medium", "hard"].index)
        assert {*levels} == {"easy", "medium", "hard"}
        questions |= {row["prompt"][0]["content"] for row in rows}
        for row in rows:
            truth, solution = row["reward_model"]["ground_truth"], row["extra_info"]["answer"]
            assert compute_score(row["data_source"], solution, truth, row["extra_info"])["acc"] == 1
            sums = re.findall(r"([\d./+*() -]+) = ([\d./]*\d)", solution)
            assert all(eval(left) == pytest.approx(eval(right)) for left, right in sums) and sums[-1][1] == truth, row
    assert len(questions) == 26, "no question twice"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_instruction_variants_run_on_their_own_problems(compose_config, tiny_model, tmp_path):
    """One option and a model: texts, template, stop, rewards and problems are there."""
    given = [
        "hydra.searchpath=[pkg://recipe]",
        "+multi_agent_grpo=variants",
        f"actor_rollout_ref.model.path={tiny_model}",
    ]
    smaller = [word for word in SMALLER if not word.startswith("actor_rollout_ref.model")]
    dumps = [f"trainer.default_local_dir={tmp_path}/run", f"trainer.rollout_data_dir={tmp_path}/played"]
    run(compose_config(*given, *smaller, *dumps, name="marl"))
    played = [
        json.loads(line) for path in (tmp_path / "played").glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    asked = [
        re.search("<instruction>(.*)</instruction><question>(.*)</question>", str(row["input"]))[1] for row in played
    ]
    assert len(played) == 2 * 4 * 2 * 4 and len(set(asked)) == 4
    assert all({"exact", "like", "varied", "format"} < {*row} for row in played)
    by_agent = {(row["agent"], text) for row, text in zip(played, asked, strict=True)}
    assert len(by_agent) > 4, "an agent gets another instruction in another sample"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where the quick start makes its model, once for all recipes."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_command_of_its_curve_is_one_that_runs(name, cache, tmp_path):
    """The README's command for the tiny task, cut to two steps."""
    readme = (Path(ROOT) / "recipe" / name / "README.md").read_text()
    (arguments,) = re.findall(r'^make quickstart ARGS="(.*)"$', readme, re.MULTILINE)
    here = [
        f"trainer.default_local_dir={tmp_path}", "trainer.total_training_steps=2", "resources.one_process=true",
        "data.train_batch_size=4", "trainer.save_freq=-1",
    ]  # fmt: skip
    command = [sys.executable, "-m", "marl.quickstart", *arguments.split(), *here]
    environment = os.environ | {"MARL_CACHE": str(cache)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what ``pip install`` of the wheel puts there, and no more."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("marl", "configs", "recipe", "examples", "hydra_plugins"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, f"--target={folder}", source], check=True, timeout=600)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_recipe_runs_from_the_wheel_in_a_folder_of_the_users(installed, environment, tmp_path):
    environment = environment | {"PYTHONPATH": str(installed), "VERL_USE_EXTERNAL_MODULES": "recipe.leave_one_out"}

    def runs(*words):
        ran = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return ran.stdout

    run = f"trainer.default_local_dir={tmp_path}/run"
    runs("bash", installed / "recipe" / "maporl" / "run.sh", *SMALLER, "actor_rollout_ref.rollout.n=2", run)
    assert (tmp_path / "run" / "summary.json").is_file()
    assert "scale: 1.0" in runs(sys.executable, "-m", "marl", "train", "--cfg", "job", "learner=leave_one_out")
    script = next((installed / "marl" / "examples").glob("*grpo_debate.sh"))
    assert f"path: {environment['MODEL']}" in runs("bash", script, "--cfg", "job")
    where = "import marl, recipe, marl.examples.data_preprocess.gsm8k; print(marl.__file__, *recipe.__path__)"
    assert runs(sys.executable, "-c", where).count(str(installed)) == 2
