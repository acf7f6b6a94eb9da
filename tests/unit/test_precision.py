"""One key decides in what trainer, critics and servers compute; verl's own keys may not say otherwise."""

import logging

import pytest
from omegaconf import OmegaConf

from marl.config.engines import servers_are_comparable
from marl.config.errors import ConfigError
from marl.config.policies import own_settings
from marl.config.precision import CPU_GAPS, OF_CRITICS, OF_POLICIES, gap_alarm
from marl.config.rules import check
from marl.report.alarms import warn_of_gaps

HALF = "{param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}"
VERLS_KEYS = (
    "actor_rollout_ref.rollout.dtype=bfloat16",
    f"actor_rollout_ref.actor.fsdp_config.mixed_precision={HALF}",
)


@pytest.fixture
def resolved(compose_config, cold_assets):
    def build(*overrides):
        config = compose_config(f"assets={cold_assets}", *overrides)
        OmegaConf.resolve(config)
        return config

    return build


def decided(config):
    return [OmegaConf.select(config, key) for key in (*OF_POLICIES, *OF_CRITICS)]


def of_policy(config, name):
    own = config.copy()
    own.actor_rollout_ref = own_settings(config, name)
    return own


@pytest.mark.parametrize("hardware,default", [("cpu", "fp32"), ("gpu", "bf16")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_key_sets_trainer_reference_server_and_critic(resolved, hardware, default, precision):
    config = resolved(f"hardware={hardware}", f"precision={precision}")
    server = {"fp32": "float32", "bf16": "bfloat16"}
    assert decided(config) == [precision, precision, server[precision], precision]
    both = {"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    assert config.actor_rollout_ref.actor.fsdp_config.mixed_precision == both
    assert config.actor_rollout_ref.actor.fsdp_config.model_dtype == config.critic.fsdp.model_dtype == "fp32"
    unset = resolved(f"hardware={hardware}")
    assert decided(unset) == [default, default, server[default], default]


def test_a_policy_may_have_a_precision_of_its_own(resolved):
    config = resolved("+policies.alice.precision=bf16", "precision=fp32")
    check(config)
    alice, carol = (of_policy(config, name) for name in ("alice", "carol"))
    assert decided(alice)[:3] == ["bf16", "bf16", "bfloat16"]
    assert decided(carol)[:3] == ["fp32", "fp32", "float32"]
    assert gap_alarm(alice) > gap_alarm(carol)


@pytest.mark.parametrize(
    "overrides,expected",
    [
        (["precision=fp8"], "^precision=fp8: expected one of fp32, bf16, null"),
        (["precision=16"], "^precision=16: expected"),
        (["+policies.alice.precision=half"], r"^policies\.alice: precision=half: expected"),
        (
            ["precision=bf16", "actor_rollout_ref.rollout.dtype=float32"],
            r"rollout\.dtype=float32: precision=bf16 sets it",
        ),
        (["precision=fp32", *VERLS_KEYS[1:]], r"actor\.fsdp_config\.mixed_precision\.param_dtype=bf16: precision=fp32"),
        (
            ["precision=bf16", "critic.fsdp.mixed_precision.param_dtype=fp32"],
            r"critic\.fsdp\.mixed_precision\.param_dtype=fp32.*precision=null",
        ),
        (
            ["+policies.alice.precision=bf16", "+policies.alice.rollout.dtype=float32"],
            r"^policies\.alice: .*rollout\.dtype=float32: precision=bf16",
        ),
        (
            ["precision=bf16", "+policies.alice.rollout.dtype=float32"],
            r"^policies\.alice: .*dtype=float32: precision=bf16",
        ),
    ],
)
def test_what_is_no_precision_or_contradicts_it_is_refused(resolved, overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        check(resolved(*overrides))


def test_without_the_key_verls_own_keys_hold(resolved):
    config = resolved(*VERLS_KEYS)
    check(config)
    assert decided(config) == ["bf16", "fp32", "bfloat16", "fp32"]


@pytest.mark.parametrize(
    "overrides,warns",
    [
        ([], True),
        (["precision=bf16"], True),
        (["precision=fp32", "hardware=gpu"], True),
        (["hardware=gpu"], False),
        (["precision=bf16", "hardware=gpu"], False),
        (["precision=bf16", "controller.log_prob_gap_alarm=0.6"], False),
    ],
)
def test_a_gap_of_half_a_nat_is_plausible_on_an_accelerator_in_bf16_alone(resolved, caplog, overrides, warns):
    config = of_policy(resolved(*overrides), "alice")
    with caplog.at_level(logging.WARNING):
        warn_of_gaps({"alice": 0.5}, 3, {"alice": gap_alarm(config)})
    assert bool(caplog.records) == warns


def test_a_server_in_another_precision_than_its_trainer_is_not_held_to_full_precision(resolved):
    mixed = gap_alarm(of_policy(resolved(*VERLS_KEYS[:1]), "alice"))
    assert mixed == gap_alarm(of_policy(resolved("precision=bf16"), "alice")) > gap_alarm(resolved("precision=fp32"))


@pytest.mark.parametrize("word,full", [("fp32", True), ("float32", True), ("32", True), ("bf16", False), ("16", False)])
def test_every_word_of_verls_for_a_dtype_means_the_same_to_all(resolved, word, full):
    """To the alarm, to the source of old log-probs, and to the rule that compares it with ``precision``."""
    key = f"actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype={word}"
    config, sampling = resolved(key), {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    own = of_policy(config, "alice")
    assert gap_alarm(own) == CPU_GAPS["fp32" if full else "bf16"]
    assert servers_are_comparable(config, "alice", own.actor_rollout_ref, lambda *_: sampling) is full
    if full:
        check(resolved("precision=fp32", key))
    else:
        with pytest.raises(ConfigError, match="precision=fp32 sets it"):
            check(resolved("precision=fp32", key))
