"""``marl replay``: a recorded step without servers gives the run's own batch, advantages and update, to the last bit."""

import copy
import json
import shutil

import pytest
import torch

from marl import main as marl_main
from marl.commands import replay as command
from marl.controller.client import PolicyClient
from marl.controller.ledger import read_step
from marl.marl_trainer import MARLTrainer
from marl.rollout.hf_server import HFServer
from tests.stack.builders import ADAPTED

pytestmark = pytest.mark.slow
STEPS = 4
RUN = (
    "resources.one_process=true", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2", "trainer.test_freq=2",
    "trainer.val_before_train=false", "trainer.logger=[file]", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4",
    "controller.keep_ledger=true", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
)  # fmt: skip


REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return sum(map(ord, solution_str)) % 5 / 4\n"
)
"""Scores that differ, whatever a model says that was hardly trained."""


class Batches(dict):
    """The batches of a process's updates, by step: copies, as the update finds them."""


@pytest.fixture(scope="module")
def batches():
    kept, update = Batches(), MARLTrainer.update

    async def noted(self, batch):
        kept[self.step_number] = copy.deepcopy(batch)
        return await update(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MARLTrainer, "update", noted)
        yield kept


@pytest.fixture(scope="module")
def run(compose_config, cold_assets, tmp_path_factory, batches):
    """A run that kept its ledgers, and the batches of its updates."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    reward = folder.parent / "reward.py"
    reward.write_text(REWARD)
    train(compose_config, cold_assets, folder, reward, "learner=mappo")
    return folder, dict(batches)


def train(compose_config, assets, folder, reward, *changes):
    places = (f"assets={assets}", f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts")
    marl_main.run(compose_config(*RUN, *places, f"reward.custom_reward_function.path={reward}", *changes))


@pytest.fixture
def folder(run):
    return run[0]


@pytest.fixture
def serverless(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("a replay needs no server")

    monkeypatch.setattr(HFServer, "__init__", refuse)


def same(one, other):
    if isinstance(one, torch.Tensor):
        if one.is_nested:
            return same(one.values(), other.values()) and same(one.offsets(), other.offsets())
        return torch.equal(one, other) or bool(
            torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    return all(same(one[key], other[key]) for key in one.keys() | other.keys())


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_step_gives_the_same_batch_advantages_and_update(run, batches, serverless, capsys, step):
    """From the first weights or from the checkpoint before it, and over a step between; steps 2 and 4 end in a checkpoint, the
    others at another step's ledger."""
    folder, recorded = run
    batches.clear()
    assert command.main([str(folder), f"step={step}"]) == 0, capsys.readouterr()
    shown = capsys.readouterr().out
    assert shown.endswith("equal\n") and "differ" not in shown
    assert [what in shown for what in (f"global_step_{step} (", f"step {step + 1} began")] == [step % 2 == 0, step < 4]
    again, was = batches[step], recorded[step]
    for policy, rows in was.rows.items():
        assert "advantages" in rows and same(dict(rows), dict(again.rows[policy]))
    for grid in ("rewards_ERA", "scores_ERA", "mask_ERA"):
        if hasattr(was, grid):
            assert same(getattr(was, grid), getattr(again, grid))


def replayed(folder, capsys, *words):
    """Exit code, and what is printed."""
    code = command.main([str(folder), *words])
    said = capsys.readouterr()
    return code, said.err + said.out


def copy_of(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy", symlinks=True)


def test_another_reward_function_shows_what_it_changes(folder, serverless, tmp_path, capsys):
    """The turns are the recorded ones, their scores the new function's."""
    other = tmp_path / "reward.py"
    other.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.25\n")
    code, said = replayed(folder, capsys, "step=3", f"reward.custom_reward_function.path={other}")
    assert code == 1 and said.endswith("different\n")
    assert "contents of reward.custom_reward_function.path" in said and "replayed 0.25" in said
    assert "score: recorded" in said and "output" not in said


def test_another_setting_of_the_learner_shows_what_it_changes(folder, serverless, capsys):
    code, said = replayed(folder, capsys, "step=3", "learner.whiten=false")
    assert code == 1 and "other than in the run: learner.whiten: True then, False now" in said
    assert "advantage: recorded" in said and "score: recorded" not in said


def test_scores_are_computed_again_on_request(folder, serverless, capsys):
    assert replayed(folder, capsys, "step=3", "rescore=true")[0] == 0


def test_a_ledger_of_other_weights_is_refused(folder, compose_config, cold_assets, tmp_path, capsys):
    """The ledger of a run with the same seeds, whose policies moved further in its first step."""
    other, run = tmp_path / "other", copy_of(folder, tmp_path)
    changes = ("learner=mappo", "trainer.total_training_steps=2", "actor_rollout_ref.actor.optim.lr=0.01")
    train(compose_config, cold_assets, other, folder.parent / "reward.py", *changes)
    shutil.rmtree(run / "ledger" / "step_2")
    shutil.copytree(other / "ledger" / "step_2", run / "ledger" / "step_2")
    code, said = replayed(run, capsys, "step=2")
    assert code == 2 and "step_2 was written with other weights" in said and "policy 'alice', policy 'carol'" in said


def test_a_missing_ledger_is_named(folder, tmp_path, capsys):
    run = copy_of(folder, tmp_path)
    shutil.rmtree(run / "ledger" / "step_3")
    code, said = replayed(run, capsys, "step=4")
    assert code == 2 and "no turns of step 3, of steps 3 to 4" in said and "controller.keep_ledger=true" in said


def test_a_missing_turn_is_named(folder, serverless, tmp_path, capsys):
    run = copy_of(folder, tmp_path)
    (path,) = run.glob("ledger/step_3/*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"kind":"turn"' not in line]
    turns = [line for line in lines if line not in kept]
    path.write_bytes(b"".join(kept + turns[1:]))
    code, said = replayed(run, capsys, "step=3")
    lost = json.loads(turns[0][9:])["content"]
    assert code == 2 and f"policy '{lost['policy']}' is asked for a turn that the ledger does not hold" in said
    assert f"/{lost['agent']}:" in said


@pytest.fixture
def generated(monkeypatch):
    seeds, act = set(), PolicyClient.act

    async def counted(self, *arguments, seed, **options):
        seeds.add(seed)
        return await act(self, *arguments, seed=seed, **options)

    monkeypatch.setattr(PolicyClient, "act", counted)
    return seeds


@pytest.mark.parametrize("kind", ["round", "turn"])
def test_it_goes_on_live_from_a_turn(folder, generated, capsys, kind):
    """With the same weights and seeds the servers say the same again."""
    turns = {
        seed: content for (kind, seed, _), content in read_step(folder / "ledger" / "step_4").items() if kind == "turn"
    }
    later = {seed for seed, turn in turns.items() if turn["round"] == 2 and turn["version"] == 3}
    lines = map(json.loads, (folder / "rollouts" / "4.jsonl").read_text().splitlines())
    one = next(line for line in lines if line["agent"] == "carol" and line["round"] == 2)
    where = {"round": "2", "turn": f"{one['task']}/{one['sample']}/carol/2"}[kind]
    code, said = replayed(folder, capsys, "step=4", f"from={where}")
    assert code == 0, said
    assert generated == {"round": later, "turn": {one["seed"]}}[kind]


@pytest.mark.parametrize("where", ["3", "train/0/99/alice/1", "alice"])
def test_a_turn_that_was_not_recorded_is_no_place_to_go_on_from(folder, capsys, where):
    code, said = replayed(folder, capsys, "step=4", f"from={where}")
    assert code == 2 and "from=" in said


TEAMS = {
    "one policy": ("sharing=shared", "learner=ippo"),
    "adapters": (*ADAPTED, "learner=mappo"),
    "branches": ("learner=at_grpo", "runner=tree", "credit=own"),
    "alternatives": ("learner=grpo", "credit=replay"),
    "exchange": ("learner=cory", "runner=pioneer_observer", "credit=auto", "learner.exchange_every=2"),
    "mixer": ("learner=vdn", "credit=team", "learner.target_update_every=2"),
    "frozen": ("agents.carol.trainable=false", "learner=ippo"),
}


@pytest.mark.parametrize("team", TEAMS)
def test_every_kind_of_team_is_replayed(compose_config, cold_assets, tmp_path, capsys, team):
    """The ledger also holds the evidence that episodes leave beside their turns, and the makings of further rollouts."""
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    changes = ("trainer.total_training_steps=3", *TEAMS[team])
    train(compose_config, cold_assets, tmp_path / "run", reward, *changes)
    code, said = replayed(tmp_path / "run", capsys, "step=3")
    assert code == 0 and "global_step_3 (weights, optimizers, learner): equal" in said, said
