"""A run's identity: what run.json says, what a resumed run may change, and that runs keep to their own folders."""

import fcntl
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from marl.config.errors import ConfigError
from marl.config.external import PLATFORM, VARIABLE
from marl.config.identity import MAY_DIFFER, code_fingerprint, identity_of, refused
from marl.config.schema import Placement, new_run
from marl.preflight.run_folder import RUN, claimed, family_of, note_restart, restarts_of, to_resume
from marl.utils import folders
from marl.utils.secret_masking import MASKED
from tests.builders import writing


@pytest.fixture
def config(tmp_path):
    """As much of a configuration as identities read, with real files."""
    (tmp_path / "train.jsonl").write_text("one\n")
    (tmp_path / "reward.py").write_text("def compute_score(): ...\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return OmegaConf.create(
        {
            "seed": 0,
            "agents": {"alice": {"role": "a"}, "carol": {"role": "c"}},
            "learner": {"name": "grpo", "lam": 0.9},
            "data": {"train_files": [str(tmp_path / "train.jsonl")], "val_files": [], "prompt_key": "prompt"},
            "reward": {"custom_reward_function": {"path": str(tmp_path / "reward.py")}},
            "actor_rollout_ref": {
                "model": {"path": str(tmp_path / "model"), "tokenizer_path": None},
                "actor": {"optim": {"total_training_steps": 5}},
            },
            "trainer": {
                "default_local_dir": str(tmp_path / "run"),
                "total_training_steps": 5,
                "resume_mode": "auto",
                "resume_from_path": None,
                "resume_changes": [],
                "logger": ["file"],
                "save_freq": 1,
            },
            "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"HF_HOME": "/secret/home"}}}},
        }
    )


def changed(config, **changes):
    other = config.copy()
    for key, value in changes.items():
        OmegaConf.update(other, key.replace("__", "."), value)
    return other


def differing(config, other, *allowed):
    return refused(identity_of(config), identity_of(other), allowed)


def save(config, *steps):
    """Checkpoints as a run leaves them at these steps."""
    with claimed(config) as folder:
        for step in steps:
            with writing(folder, step, {"family": family_of(folder)}) as inside:
                (inside / RUN).write_text((folder / RUN).read_text())
                folders.write_state(inside, {"step": step})
        (folder / "metrics.jsonl").write_text("{}\n")
    return folder


def test_equal_runs_have_one_identity(config):
    assert differing(config, config.copy()) == {}


@pytest.mark.parametrize(
    "key,value",
    [("seed", 1), ("learner.lam", 0.8), ("learner.name", "ippo"), ("agents.alice.role", "b"), ("data.prompt_key", "q")],
)
def test_another_setting_is_another_run(config, key, value):
    before = OmegaConf.select(config, key)
    assert differing(config, changed(config, **{key: value})) == {key: (before, value)}
    assert differing(config, changed(config, **{key: value}), key.split(".")[0]) == {}


def test_a_key_that_is_new_or_gone_is_a_difference(config):
    other = changed(config)
    other.learner.clip = 2.0
    del other.learner.lam
    assert differing(config, other) == {"learner.clip": (None, 2.0), "learner.lam": (0.9, None)}


def test_how_long_where_and_how_often_may_differ(config):
    other = changed(
        config, trainer__total_training_steps=9, actor_rollout_ref__actor__optim__total_training_steps=9,
        trainer__logger=["console"], trainer__save_freq=-1, trainer__default_local_dir="/elsewhere",
        controller__degenerate_steps=9,
    )  # fmt: skip
    assert differing(config, other) == {}


def test_the_order_of_agents_counts(config):
    other = changed(config)
    other.agents = {"carol": config.agents.carol, "alice": config.agents.alice}
    assert differing(config, other) == {"order of agents": (["alice", "carol"], ["carol", "alice"])}


@pytest.mark.parametrize("name", ["train.jsonl", "reward.py", "model/config.json"])
def test_files_are_known_by_their_contents(config, tmp_path, name):
    before = identity_of(config)
    (tmp_path / name).write_text("another")
    (difference,) = refused(before, identity_of(config), ())
    assert difference.startswith("contents of ")


def test_a_run_is_continued_without_the_files_that_it_does_not_read(compose_config, cold_assets, tmp_path):
    """Ray's latest session on the machine has a file of verl's default name: it is another one tomorrow."""
    (tmp_path / "prometheus.yml").write_text("scrape_configs: []")
    config = compose_config(
        f"assets={cold_assets}", f"actor_rollout_ref.rollout.prometheus.file={tmp_path}/prometheus.yml"
    )
    before = identity_of(config)
    assert set(before["contents"]) == {"actor_rollout_ref.model.path", "data.train_files", "critic.model.path"}
    before["contents"]["actor_rollout_ref.rollout.prometheus.file"] = "sha256:520c"  # as runs have noted it
    (tmp_path / "prometheus.yml").unlink()
    assert refused(before, identity_of(config), ()) == {}


def test_a_file_that_moved_is_the_same_file(config, tmp_path):
    before = identity_of(config)
    (tmp_path / "train.jsonl").rename(tmp_path / "moved.jsonl")
    other = changed(config, data__train_files=[str(tmp_path / "moved.jsonl")])
    assert refused(before, identity_of(other), ()) == {}


def test_another_version_of_a_package_is_named(config):
    before = identity_of(config)
    after = before | {"versions": before["versions"] | {"torch": "0.1"}}
    assert refused(before, after, ()) == {"versions.torch": (before["versions"]["torch"], "0.1")}
    assert refused(before, after, ("versions",)) == {}


def test_secrets_are_masked(config, monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "hidden-in-the-environment")
    config.judge = {
        "api_key": "k1",
        "password": "k2",
        "hf_token": "k3",
        "access_token": "k4",
        "url": "hidden-in-the-environment",
    }
    config.harmless = {"tokenizer_path": "t", "max_tokens": 3, "prompt_key": "p", "api_key": None}
    text = json.dumps(identity_of(config))
    for secret in ("k1", "k2", "k3", "k4", "hidden-in-the-environment", "/secret/home"):
        assert f'"{secret}"' not in text
    shown = identity_of(config)["config"]
    assert shown["judge"]["api_key"] == MASKED
    assert shown["harmless"] == {"tokenizer_path": "t", "max_tokens": 3, "prompt_key": "p", "api_key": None}


def test_a_run_leaves_its_settings_and_versions(config):
    with claimed(config) as folder:
        left = json.loads((folder / RUN).read_text())
    assert left["config"]["learner"] == {"name": "grpo", "lam": 0.9} and left["versions"]["torch"]
    assert left["contents"]["data.train_files"].startswith("sha256:") and left["started"] and left["resumed"] == []


def test_a_resumed_run_is_the_one_that_was_saved(config):
    folder = save(config, 1, 2)
    started = json.loads((folder / RUN).read_text())["started"]
    with claimed(changed(config, trainer__total_training_steps=9)):
        left = json.loads((folder / RUN).read_text())
    assert left["started"] == started and [entry["from"] for entry in left["resumed"]] == [
        str(folder / "global_step_2")
    ]


def test_what_differs_is_refused_by_name_with_both_values(config):
    folder = save(config, 1)
    other = changed(config, seed=3, learner__lam=0.5)
    with pytest.raises(ConfigError) as caught, claimed(other):
        pass
    said = str(caught.value)
    assert (
        str(folder / "global_step_1") in said
        and "seed: saved 0, now 3" in said
        and "learner.lam: saved 0.9, now 0.5" in said
    )
    assert "trainer.resume_changes=[seed,learner.lam]" in said and "trainer.default_local_dir" in said
    assert json.loads((folder / RUN).read_text())["config"]["seed"] == 0, "a refused run leaves nothing"
    with claimed(changed(other, trainer__resume_changes=["seed", "learner.lam"])):
        assert json.loads((folder / RUN).read_text())["config"]["seed"] == 3


def test_a_run_that_ended_before_its_first_checkpoint_is_taken_up_by_itself_alone(config):
    save(config)
    with claimed(config):
        pass
    with pytest.raises(ConfigError, match="seed: saved 0, now 1"), claimed(changed(config, seed=1)):
        pass


def test_a_run_that_got_nowhere_leaves_its_folder_free(config):
    with claimed(config):
        pass
    with claimed(changed(config, seed=1, trainer__resume_mode="disable")) as folder:
        assert json.loads((folder / RUN).read_text())["config"]["seed"] == 1


def test_without_resuming_a_run_does_not_write_over_another(config):
    folder = save(config, 1)
    with (
        pytest.raises(ConfigError, match=rf"default_local_dir={folder} holds the results.*resume_mode=auto"),
        claimed(changed(config, trainer__resume_mode="disable")),
    ):
        pass


def test_two_runs_at_once_do_not_share_a_folder(config):
    with (
        claimed(config) as folder,
        pytest.raises(ConfigError, match=rf"default_local_dir={folder}: another run is writing into it \(process \d+"),
        claimed(config),
    ):
        pass
    with claimed(config):
        pass


def test_a_killed_run_leaves_no_lock(config):
    code = f"""
import os
from omegaconf import OmegaConf
from marl.preflight.run_folder import locked
from pathlib import Path
with locked(Path({config.trainer.default_local_dir!r})):
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    with claimed(config):
        pass


def from_path(config, path, **changes):
    return changed(config, trainer__resume_mode="resume_path", trainer__resume_from_path=str(path), **changes)


def test_going_back_does_not_lose_the_later_checkpoints(config, tmp_path):
    folder = save(config, 1, 2, 3)
    with (
        pytest.raises(ConfigError, match="later checkpoints, global_step_2, global_step_3.*default_local_dir"),
        claimed(from_path(config, folder / "global_step_1")),
    ):
        pass
    with claimed(from_path(config, folder / "global_step_3")):
        pass
    branch = tmp_path / "branch"
    with claimed(from_path(config, folder / "global_step_1", trainer__default_local_dir=str(branch))):
        left = json.loads((branch / RUN).read_text())
    assert left["resumed"][0]["from"] == str(folder / "global_step_1")
    assert [path.name for path in folders.complete(folder)] == [f"global_step_{step}" for step in (1, 2, 3)]


def test_a_renamed_checkpoint_in_the_runs_own_folder_is_resumed_by_its_step(config):
    """`best`, as a user may name a copy."""
    folder = save(config, 1, 2)
    for step in (1, 2):
        shutil.copytree(folder / f"global_step_{step}", folder / f"best_{step}")
    with claimed(from_path(config, folder / "best_2")):
        pass
    with (
        pytest.raises(ConfigError, match="later checkpoints, global_step_2, which"),
        claimed(from_path(config, folder / "best_1")),
    ):
        pass


def test_a_named_checkpoint_is_compared_too(config, tmp_path):
    folder = save(config, 1)
    other = from_path(config, folder / "global_step_1", trainer__default_local_dir=str(tmp_path / "b"), seed=1)
    with pytest.raises(ConfigError, match="seed: saved 0, now 1"), claimed(other):
        pass


def test_a_named_checkpoint_does_not_go_on_in_a_third_runs_folder(config, tmp_path):
    folder = save(config, 1)
    third = save(changed(config, trainer__default_local_dir=str(tmp_path / "third"), seed=7), 1)
    with (
        pytest.raises(ConfigError, match="holds the results of another run"),
        claimed(from_path(config, folder / "global_step_1", trainer__default_local_dir=str(third))),
    ):
        pass


def test_a_path_that_is_no_checkpoint_is_a_configuration_error(config, tmp_path):
    with (
        pytest.raises(ConfigError, match="resume_from_path=.*holds no trainer.json"),
        claimed(from_path(config, tmp_path)),
    ):
        pass


def test_every_run_has_a_folder_of_its_own_and_latest_leads_to_the_newest(config, tmp_path):
    names = [f"{new_run()}-seed3" for _ in range(20)]
    assert len(set(names)) == 20
    for name in names[:2]:
        with claimed(changed(config, trainer__default_local_dir=str(tmp_path / "runs" / name))) as folder:
            assert (tmp_path / "runs" / "latest").resolve() == folder


def test_a_shipped_configuration_names_a_new_folder_each_time_and_one_within_a_run(compose_config):
    first, second = compose_config(name="quickstart"), compose_config(name="quickstart")
    folder = first.trainer.default_local_dir
    assert folder.startswith("outputs/quickstart/") and folder.endswith("-seed0")
    assert first.trainer.validation_data_dir == f"{folder}/validation"
    assert second.trainer.default_local_dir != folder
    assert compose_config("seed=3", name="quickstart").trainer.default_local_dir.endswith("-seed3"), "that of the run"


def test_the_documentation_lists_what_may_differ():
    rows = re.search(r"\| may differ \|.*?\n\n", Path("docs/runs.md").read_text(), re.DOTALL)[0]
    assert set(re.findall(r"`([^`]+)`", rows)) == set(MAY_DIFFER)


def stamped(tmp_path, config, name, **changes):
    """The configuration of a command given anew: its folder is named by the time."""
    folder = str(tmp_path / "runs" / name)
    own = {"trainer__default_local_dir": folder, "trainer__rollout_data_dir": f"{folder}/rollouts"}
    return changed(config, **own, **changes)


FIRST, SECOND, THIRD = (f"2026010{day}-093000-5f2e-seed0" for day in (1, 2, 3))


def killed(config, *steps):
    """As :func:`save`, but the run does not come to its end."""
    with pytest.raises(KeyboardInterrupt), claimed(config) as folder:
        for step in steps:
            with writing(folder, step, {"family": family_of(folder)}) as inside:
                folders.write_state(inside, {"step": step})
        raise KeyboardInterrupt
    return folder


def test_the_same_command_continues_a_run_that_was_killed_and_leaves_a_finished_one_alone(config, tmp_path, caplog):
    first = killed(stamped(tmp_path, config, FIRST), 1, 2)
    again = stamped(tmp_path, config, SECOND)
    with claimed(again) as folder:
        assert folder == first and again.trainer.default_local_dir == str(first)
        assert again.trainer.rollout_data_dir == f"{first}/rollouts"
        left = json.loads((first / RUN).read_text())
        assert left["config"]["trainer"]["default_local_dir"] == str(first)
        assert left["resumed"][0]["from"] == str(first / "global_step_2") and "finished" not in left
    assert f"continuing {first}, which did not finish; trainer.resume_mode=disable" in caplog.text
    assert "finished" in json.loads((first / RUN).read_text())
    with claimed(stamped(tmp_path, config, THIRD)) as folder:
        assert folder.name == THIRD


def test_a_folder_of_a_users_own_pattern_is_continued_too_and_latest_points_at_it(config, tmp_path):
    stamps = [name.removesuffix("-seed0") for name in (FIRST, SECOND, THIRD)]
    for ending, other in (("-happo", "-mappo"), ("", "-x"), ("-a-seed1", "-seed1")):
        first = killed(stamped(tmp_path, config, stamps[0] + ending), 1)
        killed(stamped(tmp_path, config, stamps[1] + other), 1)
        with claimed(stamped(tmp_path, config, stamps[2] + ending)) as folder:
            assert folder == first and (folder.parent / "latest").resolve() == first


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"learner__lam": 0.5}, "learner.lam: 0.9 then, 0.5 now"),
        ({"trainer__total_training_steps": 9}, "trainer.total_training_steps: 5 then, 9 now"),
        ({"resources__pools": {"pool": [4]}}, "resources.pools.pool: None then, [4] now"),
        ({"trainer__resume_mode": "disable"}, ""),
        ({"trainer__val_only": True}, ""),
    ],
)
def test_a_run_of_other_settings_is_not_continued_and_they_are_named(config, tmp_path, caplog, changes, said):
    first = killed(stamped(tmp_path, config, FIRST), 1)
    with claimed(stamped(tmp_path, config, SECOND, **changes)) as folder:
        assert folder.name == SECOND
    assert (f"{first} did not finish, and is not continued" in caplog.text) is bool(said) and said in caplog.text
    assert folders.complete(first) == [first / "global_step_1"]


def test_a_run_without_a_checkpoint_or_with_another_process_is_not_continued(config, tmp_path):
    killed(stamped(tmp_path, config, FIRST))
    with claimed(stamped(tmp_path, config, SECOND)) as folder:
        assert folder.name == SECOND
        with writing(folder, 1, {"family": family_of(folder)}) as inside:
            folders.write_state(inside, {"step": 1})
        with claimed(stamped(tmp_path, config, THIRD)) as other:
            assert other.name == THIRD


def test_the_newest_with_these_settings_is_continued_whatever_else_was_killed(config, tmp_path):
    """As where a machine lost its power in the middle of a sweep."""
    first = killed(stamped(tmp_path, config, FIRST), 1)
    killed(stamped(tmp_path, config, SECOND, learner__lam=0.5), 1)
    with claimed(stamped(tmp_path, config, THIRD)) as folder:
        assert folder == first


@pytest.mark.parametrize("record", ["{", "{}", "[]", '{"config": 3}'])
def test_a_record_that_cannot_be_read_costs_its_run_alone(config, tmp_path, caplog, record):
    first, second = killed(stamped(tmp_path, config, FIRST), 1), killed(stamped(tmp_path, config, SECOND, seed=1), 1)
    (second / RUN).write_text(record)
    with claimed(stamped(tmp_path, config, THIRD)) as folder:
        assert folder == first
    assert f"{second} is not continued: its run.json cannot be read" in caplog.text


def test_a_validation_alone_does_not_finish_a_run(config):
    folder = killed(config, 1)
    with claimed(changed(config, trainer__val_only=True)):
        pass
    assert "finished" not in json.loads((folder / RUN).read_text())


@pytest.mark.parametrize(
    "changes",
    [{}, {"trainer__total_training_steps": None}, {"learner__lam": 0.5, "trainer__resume_changes": ["learner.lam"]}],
)
def test_the_same_command_continues_a_run_that_was_validated_meanwhile(config, tmp_path, changes):
    """Whatever the validation was told, which needs neither the run's length nor its learner."""
    first = killed(stamped(tmp_path, config, FIRST), 1, 2)
    began = json.loads((first / RUN).read_text())
    recorded(first, 3)
    with claimed(changed(config, trainer__default_local_dir=str(first), trainer__val_only=True, **changes)) as folder:
        recorded(first, 2)
    left = json.loads((first / RUN).read_text())
    assert folder == first and left["config"] == began["config"] and len(left["resumed"]) == 1
    with claimed(stamped(tmp_path, config, SECOND)) as folder:
        assert folder == first
        others = "learner__lam" in changes
        assert ledgers(first) == ([] if others else ["step_2", "step_3"]), "a score of another reward is not the run's"
        assert not json.loads((first / RUN).read_text()).get("validated_with_other_settings")


def test_a_run_that_left_turns_alone_is_continued(config, tmp_path):
    first = killed(stamped(tmp_path, config, FIRST))
    (first / "ledger" / "step_1").mkdir(parents=True)
    with claimed(stamped(tmp_path, config, SECOND)) as folder:
        assert folder == first


def test_a_run_may_be_alive_where_there_are_no_locks(config, tmp_path, monkeypatch, caplog):
    first = killed(stamped(tmp_path, config, FIRST), 1)

    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with claimed(stamped(tmp_path, config, SECOND)) as folder:
        assert folder.name == SECOND
    assert f"to continue it, set trainer.default_local_dir={first}" in caplog.text


def test_what_a_killed_save_left_is_cleaned_before_the_next_run(config):
    folder = killed(config, 1)
    folders.begin(folder, 2)
    with claimed(config):
        assert not list(folder.glob(".tmp_*"))


def test_checkpoints_of_another_run_are_not_continued(config, tmp_path):
    """Copied over from a run with the same settings."""
    ours, theirs = save(config, 1), save(changed(config, trainer__default_local_dir=str(tmp_path / "b")), 2)
    shutil.copytree(theirs / "global_step_2", ours / "global_step_2")
    with claimed(config) as folder:
        resumed = json.loads((folder / RUN).read_text())["resumed"]
    assert resumed[-1]["from"] == str(ours / "global_step_1")
    shutil.rmtree(ours / "global_step_1")
    with pytest.raises(ConfigError, match="global_step_2: another run saved it"), claimed(config):
        pass


@pytest.mark.parametrize("part", ["alice/actor", "central/critic"])
def test_another_number_of_ranks_is_refused_before_models_are_loaded(config, part):
    """In a folder that is named; a search for an unfinished run passes it by."""
    pools = {"placement": Placement.separate, "pools": {}}
    read = {"checkpoint": {"load_contents": ["model"]}}
    parts = {"actor_rollout_ref": {"actor": read}, "critic": read, "policies": {}, "sharing": None}
    config = OmegaConf.merge(
        config, {"trainer": {"nnodes": 1, "n_gpus_per_node": 1, "val_only": True}, "resources": pools, **parts}
    )
    with (
        claimed(config) as folder,
        writing(folder, 1, {"family": family_of(folder), "world_size": {part: 2}}) as inside,
    ):
        (inside / RUN).write_text((folder / RUN).read_text())
        folders.write_state(inside, {"step": 1})
        (inside / part).mkdir(parents=True)
        torch.save({}, inside / part / "model_world_size_2_rank_0.pt")
    said = rf"global_step_1: {part} was saved by 2 ranks, and this run has 1; resume"
    with pytest.raises(ConfigError, match=said), claimed(config):
        pass
    changes = {"trainer__n_gpus_per_node": 2, "trainer__resume_changes": ["trainer"]}
    with claimed(changed(config, **changes)):
        pass


def recorded(folder, *steps):
    for step in steps:
        (folder / "ledger" / f"step_{step}").mkdir(parents=True, exist_ok=True)


def ledgers(folder):
    return sorted(path.name for path in (folder / "ledger").glob("step_*"))


def test_turns_of_a_detour_with_other_settings_are_not_read_by_the_run(config):
    """Neither the checkpoint nor the command knows of the detour; the folder's ``run.json`` does."""
    folder = save(config, 5)
    recorded(folder, 6)
    with pytest.raises(KeyboardInterrupt), claimed(config):
        assert ledgers(folder) == ["step_6"], "the same run's own"
        raise KeyboardInterrupt
    detour = changed(config, learner__lam=0.5, trainer__resume_changes=["learner.lam"])
    with pytest.raises(KeyboardInterrupt), claimed(detour):
        recorded(folder, 6, 7)
        raise KeyboardInterrupt
    with claimed(config):
        assert ledgers(folder) == []


def begun_elsewhere(config, tmp_path, **changes):
    """A run that goes on from another's checkpoint and is killed before it has one of its own: its settings, and the source."""
    source = save(changed(config, trainer__default_local_dir=str(tmp_path / "before")), 10) / "global_step_10"
    begun = from_path(config, source, **changes)
    with pytest.raises(KeyboardInterrupt), claimed(begun) as folder:
        (folder / "metrics.jsonl").write_text("{}\n")
        recorded(folder, 11)
        raise KeyboardInterrupt
    return begun, source


def test_a_run_that_was_killed_before_its_own_first_checkpoint_goes_on_from_where_it_began(config, tmp_path):
    begun, source = begun_elsewhere(config, tmp_path)
    auto = changed(begun, trainer__resume_mode="auto", trainer__resume_from_path=None)
    for again in (begun, auto, auto):
        with pytest.raises(KeyboardInterrupt), claimed(again) as folder:
            assert to_resume(again.trainer, folder) == (source, {}) and ledgers(folder) == ["step_11"]
            raise KeyboardInterrupt
    resumed = json.loads((folder / RUN).read_text())["resumed"]
    assert [entry["from"] for entry in resumed] == 4 * [str(source)]
    with writing(folder, 12, {"family": family_of(folder)}) as inside:
        folders.write_state(inside, {"step": 12})
    assert to_resume(auto.trainer, folder) == (folder / "global_step_12", {})
    with pytest.raises(ConfigError, match="holds the results of another run"), claimed(begun):
        pass


def test_a_run_that_was_killed_before_it_began_goes_on_from_there_too(config, tmp_path):
    """It may have been killed while its models were loaded; its settings count from its first turns on."""
    source = save(changed(config, trainer__default_local_dir=str(tmp_path / "before")), 10) / "global_step_10"
    begun = from_path(config, source, learner__lam=0.5, trainer__resume_changes=["learner.lam"])
    auto = changed(config, trainer__resume_mode="auto")
    for again in (begun, from_path(config, source), auto, auto):
        with pytest.raises(KeyboardInterrupt), claimed(again) as folder:
            assert to_resume(again.trainer, folder) == (source, {})
            raise KeyboardInterrupt


@pytest.mark.parametrize("record", ["{", "{}", '{"started": "x"}'])
def test_a_record_that_cannot_be_read_hinders_no_start_from_a_named_checkpoint(config, tmp_path, record):
    source = save(changed(config, trainer__default_local_dir=str(tmp_path / "before")), 10) / "global_step_10"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN).write_text(record)
    with claimed(from_path(config, source)) as folder:
        assert json.loads((folder / RUN).read_text())["resumed"][-1]["from"] == str(source)


def test_a_run_whose_beginning_is_damaged_does_not_start_from_scratch(config, tmp_path):
    begun, source = begun_elsewhere(config, tmp_path)
    (source / "trainer.json").unlink()
    auto = changed(begun, trainer__resume_mode="auto", trainer__resume_from_path=None)
    with pytest.raises(ConfigError, match=rf"began from {source}.*trainer.json is missing.*Restore it"), claimed(auto):
        pass


def test_a_run_that_began_elsewhere_with_other_settings_is_continued_with_them(config, tmp_path):
    begun, source = begun_elsewhere(config, tmp_path, learner__lam=0.5, trainer__resume_changes=["learner.lam"])
    auto = changed(begun, trainer__resume_mode="auto", trainer__resume_from_path=None, trainer__resume_changes=[])
    with claimed(auto) as folder:
        assert to_resume(auto.trainer, folder) == (source, {}) and ledgers(folder) == ["step_11"]
    with (
        pytest.raises(ConfigError, match=rf"{folder} was saved.*learner.lam: saved 0.5, now 0.9"),
        claimed(changed(auto, learner__lam=0.9)),
    ):
        pass


def test_a_run_whose_own_checkpoints_were_removed_starts_from_scratch(config, tmp_path, monkeypatch):
    """Its folder may be named by a relative path."""
    monkeypatch.chdir(tmp_path)
    for where in ("run", str(tmp_path / "run")):
        there = changed(config, trainer__default_local_dir=where)
        folder = save(there, 1)
        with claimed(there):
            shutil.rmtree(folder / "global_step_1")
        with claimed(there):
            assert to_resume(there.trainer, folder) == (None, {})


def test_what_came_after_the_checkpoint_is_remembered(config):
    """Restarts and resumes that no checkpoint has seen."""
    folder = killed(config, 1)
    note_restart(folder, "OSError: x", "there")
    for resumes in (1, 2):
        with pytest.raises(KeyboardInterrupt), claimed(config):
            assert restarts_of(folder) == 1
            assert len(json.loads((folder / RUN).read_text())["resumed"]) == resumes
            raise KeyboardInterrupt


def test_a_finished_run_stays_finished_when_it_is_validated(config):
    folder = save(config, 1)
    with claimed(changed(config, trainer__val_only=True)):
        pass
    assert "finished" in json.loads((folder / RUN).read_text())
    with pytest.raises(KeyboardInterrupt), claimed(changed(config, trainer__total_training_steps=9)):
        raise KeyboardInterrupt
    assert "finished" not in json.loads((folder / RUN).read_text()), "it goes on"


OWN = {"mine": "mine.py", "team.learner": "team/reward.py", "spaced.learner": "spaced/learner.py"}
"""A module's own file, another one of its package, and one in a folder that is no package."""


@pytest.mark.parametrize("module", OWN)
def test_the_sources_of_own_modules_are_part_of_the_code(tmp_path, monkeypatch, module):
    for name in ("mine.py", "team/__init__.py", "team/learner.py", "team/reward.py", "spaced/learner.py", "other.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    without = code_fingerprint.__wrapped__()
    monkeypatch.setenv(VARIABLE, f"{PLATFORM},{module}")
    before = code_fingerprint.__wrapped__()
    (tmp_path / "other.py").write_text("CHANGED = True")
    assert without != before == code_fingerprint.__wrapped__()
    (tmp_path / OWN[module]).write_text("CHANGED = True")
    assert code_fingerprint.__wrapped__() != before
    for name in ("team", "spaced"):
        sys.modules.pop(name, None)
