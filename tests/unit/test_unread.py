"""Keys without effect are refused: every key of ``--cfg job`` has a reader, or a sentence that says what to use instead."""

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from marl.config.errors import ConfigError, plain
from marl.config.identity import leaves
from marl.config.keys import IDLE, UNREAD, check_keys, known_keys, unread
from marl.config.policies import own_settings

MARL = Path(__file__).parents[2] / "marl"
VERL = Path(importlib.util.find_spec("verl").origin).parent

ENGINE = ("workers/engine/fsdp/transformer_impl.py", "workers/engine/base.py", "utils/fsdp_utils.py", "utils/qat/*.py")
SERVERS = ("workers/rollout/vllm_rollout/*.py", "workers/rollout/sglang_rollout/*.py", "workers/rollout/*.py")
ADAPTER = ("workers/config/model.py", *ENGINE, *SERVERS, "models/transformers/*.py")
READERS = {
    "actor_rollout_ref.actor.optim": (*ENGINE, "workers/config/optimizer.py"),
    "critic.optim": (*ENGINE, "workers/config/optimizer.py"),
    "actor_rollout_ref.actor.fsdp_config": (
        *ENGINE,
        "workers/config/engine.py",
        "workers/config/actor.py",
        "workers/engine/utils.py",
    ),
    "actor_rollout_ref.ref.fsdp_config": (
        *ENGINE,
        "workers/config/engine.py",
        "workers/config/actor.py",
        "workers/engine/utils.py",
    ),
    "critic.fsdp": (*ENGINE, "workers/config/engine.py", "workers/config/critic.py", "workers/engine/utils.py"),
    "actor_rollout_ref.actor.checkpoint": ("utils/checkpoint/*.py",),
    "critic.checkpoint": ("utils/checkpoint/*.py",),
    "actor_rollout_ref.actor": (
        "workers/engine_workers.py",
        "workers/utils/losses.py",
        "trainer/ppo/core_algos.py",
        "workers/config/actor.py",
    ),
    "actor_rollout_ref.ref": ("workers/engine_workers.py", "workers/config/actor.py"),
    "actor_rollout_ref.rollout.multi_turn": ("experimental/agent_loop/tool_agent_loop.py",),
    "actor_rollout_ref.rollout.checkpoint_engine": ("workers/engine_workers.py",),
    "actor_rollout_ref.rollout": ("workers/engine_workers.py", *SERVERS),
    "actor_rollout_ref.model": ADAPTER,
    "critic.model": ADAPTER,
    "critic": ("workers/config/critic.py", "trainer/ppo/core_algos.py"),
    "data": ("utils/dataset/rl_dataset.py", "trainer/ppo/utils.py"),
    "algorithm": ("trainer/ppo/core_algos.py", "trainer/ppo/rollout_corr_helper.py"),
}
"""Files of verl's that a run executes, by the groups whose keys they read. ``workers/config`` passes keys on where it is built."""
INTERPOLATED = {
    f"actor_rollout_ref.{role}.{key}"
    for role in ("actor", "ref")
    for key in (
        "entropy_from_logits_with_chunking",
        "entropy_from_logits_chunk_size",
        "entropy_checkpointing",
        "pad_to_length",
    )
}
"""Defaults of other keys, by an interpolation."""
PASSED_ON = ("ray_kwargs.ray_init.", "model_engine")
"""Arguments of another library's function, and verl's choice of files."""


@cache
def read_in(*patterns):
    """The attributes and strings in files of verl's."""
    return words_of({file for pattern in patterns for file in VERL.glob(pattern)})


@cache
def ours():
    """The same of this package without its tables of defaults and bounds, which name keys and read none."""
    tables = {MARL / "config" / name for name in ("values.py", "schema.py", "keys.py", "identity.py")}
    return words_of({*MARL.rglob("*.py")} - tables)


def words_of(files):
    return {word for file in files for word in re.findall(r"""[.\"'](\w+)\b""", file.read_text())}


def is_read(key):
    group = next((group for group in READERS if key.startswith(f"{group}.")), None)
    return key.rpartition(".")[2] in ours() | read_in(*READERS.get(group, ()))


@pytest.fixture(scope="module")
def job():
    from tests.composing import compose

    return dict(leaves(plain(compose(name="marl"))))


def test_every_key_of_a_run_is_read_or_refused(job):
    unknown = [
        key
        for key in job
        if not unread(key)
        and not key.endswith("_target_")
        and key not in INTERPOLATED
        and not key.startswith(PASSED_ON)
        and not is_read(key)
    ]
    assert not unknown
    text = repr(known_keys())
    assert all(f"oc.select:{key}," in text for key in INTERPOLATED)
    assert {key.rpartition(".")[2]: is_read(key) for key in ("trainer.esi_redundant_time", "data.gen_batch_size", "critic.grad_clip")} == {
        "esi_redundant_time": False, "gen_batch_size": False, "grad_clip": False,
    }  # fmt: skip


def test_no_pattern_is_idle_and_ours_set_no_key_that_nothing_reads(compose_config, job):
    import fnmatch

    assert not [pattern for pattern in (*UNREAD, *IDLE) if not fnmatch.filter(job, pattern)]
    for words in ((), ("hardware=cpu_vllm",)):
        check_keys(compose_config(*words))


@pytest.mark.parametrize(
    "words, said",
    {
        "actor_rollout_ref.actor.grad_clip=0.5": "use actor_rollout_ref.actor.optim.clip_grad",
        "critic.grad_clip=3": "use critic.optim.clip_grad",
        "+policies.alice.actor.grad_clip=1.0": "policies.alice.actor.grad_clip=1.0: it has no effect; use actor",
        "reward_model.enable=true": "use reward.custom_reward_function",
        "reward.reward_model.enable=true": "use reward.custom_reward_function",
        "sandbox_fusion.url=http://x": "use reward.custom_reward_function",
        "algorithm.filter_groups.enable=true": "use learner.drop_equal",
        "reward.reward_manager.name=dapo": "use reward.custom_reward_function",
        "+dpo_beta=0.1": "'dpo_beta' (=0.1): it has no effect. Did you mean 'method.beta'?",
        "+mine=3": "unknown key 'mine' (=3): it has no effect.",
        "+gamma=0.9": "unknown key 'gamma' (=0.9): it has no effect.",
    }.items(),
)
def test_a_key_that_nothing_reads_names_the_one_that_is_read(compose_config, words, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_keys(compose_config(words))


def test_all_of_them_are_named_at_once(compose_config):
    with pytest.raises(ConfigError) as refused:
        check_keys(compose_config("critic.grad_clip=3", "reward.num_workers=2", "trainer.v1.trainer_mode=async"))
    assert [line.split("=")[0] for line in str(refused.value).splitlines()] == [
        "critic.grad_clip", "reward.num_workers", "trainer.v1.trainer_mode",
    ]  # fmt: skip


def test_a_key_of_ones_own_is_read_where_another_refers_to_it(compose_config):
    check_keys(compose_config("+mine=3", "seed=${mine}"))
    check_keys(compose_config("+data.custom_cls.path=mine.py", "data.return_raw_chat=false"))


def test_clip_ratio_is_the_default_of_both_sides(compose_config):
    config = compose_config("actor_rollout_ref.actor.clip_ratio=0.1", "+policies.alice.actor.clip_ratio=0.3")
    OmegaConf.resolve(config)
    sides = [
        (own.actor.clip_ratio_low, own.actor.clip_ratio_high)
        for own in (own_settings(config, name) for name in ("carol", "alice"))
    ]
    assert sides == [(0.1, 0.1), (0.3, 0.3)]
    config = compose_config("actor_rollout_ref.actor.clip_ratio=0.1", "actor_rollout_ref.actor.clip_ratio_high=0.4")
    assert (config.actor_rollout_ref.actor.clip_ratio_low, config.actor_rollout_ref.actor.clip_ratio_high) == (0.1, 0.4)
