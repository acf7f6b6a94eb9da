"""``sharing``: which agents share weights, what contradicts it, and what policies on one base may have apart."""

import re
from pathlib import Path

import pytest

from marl.config.errors import ConfigError
from marl.config.kinds import adapter_policies, frozen_policies
from marl.config.policies import ADAPTER_RANK, Sharing, apply_sharing, own_settings, policies_by_agent
from marl.config.rules import check
from marl.config.rules.agents import adapters_fit_their_base, is_of_the_adapter
from marl.platform.adapters import owner, unnamed
from marl.preflight.prepare import prepare
from marl.run_setup import Setup


@pytest.fixture
def shared(compose_config, cold_assets):
    """The quick start's configuration under a mode, as ``prepare`` checks it."""

    def make(*overrides):
        config = compose_config(f"assets={cold_assets}", *overrides)
        apply_sharing(config)
        check(config)
        return config

    return make


DOCUMENTED = [
    words
    for words in re.findall(
        r"^python -m marl.main --config-name quickstart (sharing.*)$",
        Path("docs/teams.md").read_text().partition("## Who shares weights")[2],
        re.MULTILINE,
    )
    if "outputs/earlier" not in words  # what an earlier run left: tests/stack/test_adapter_weights.py
]


def test_the_documentation_shows_every_mode():
    assert {words.split()[0] for words in DOCUMENTED} == {f"sharing={mode.value}" for mode in Sharing}


@pytest.mark.parametrize("words", DOCUMENTED)
def test_a_command_of_the_documentation_is_prepared(compose_config, cold_assets, words):
    setup = prepare(compose_config(f"assets={cold_assets}", *words.split()))
    assert len(setup.policies) == (1 if words.startswith(("sharing=shared", "sharing=groups")) else 2)
    assert len(setup.pools) == (2 if words.startswith("sharing=individual") else 1)


PAIRED = ("agents.alice.policy=pair", "agents.carol.policy=pair")
PARTITIONS = {
    "sharing=null": {"alice": ["alice"], "carol": ["carol"]},
    "sharing=individual": {"alice": ["alice"], "carol": ["carol"]},
    "sharing=individual agents.alice.policy_by_round=[a1,a2]": {"alice": ["a1", "a2"], "carol": ["carol"]},
    "sharing=shared": {"alice": ["team"], "carol": ["team"]},
    "sharing=shared agents.carol.policy=solver": {"alice": ["solver"], "carol": ["solver"]},
    "sharing=groups agents.alice.policy=pair agents.carol.policy=pair": {"alice": ["pair"], "carol": ["pair"]},
    "sharing=groups agents.alice.policy=one agents.carol.policy_by_round=[one,two]": {
        "alice": ["one"],
        "carol": ["one", "two"],
    },
    "sharing=lora": {"alice": ["alice"], "carol": ["carol"]},
    "sharing=lora agents.alice.policy=pair agents.carol.policy=pair": {"alice": ["pair"], "carol": ["pair"]},
}


@pytest.mark.parametrize("overrides", PARTITIONS)
def test_a_mode_is_a_partition_of_agents_onto_policies(shared, overrides):
    assert policies_by_agent(shared(*overrides.split()).agents) == PARTITIONS[overrides]


CONTRADICTIONS = {
    "sharing=grups": ["sharing=grups", "individual, shared, groups, lora", "Did you mean 'groups'"],
    "sharing=individual agents.alice.policy=pair agents.carol.policy=pair": ["alice and carol", "'pair'", "groups"],
    "sharing=individual agents.carol.policy=alice": ["alice and carol", "agents.carol.policy"],
    "sharing=shared agents.alice.policy=one agents.carol.policy=two": ["one, two", "unset", "sharing=groups"],
    "sharing=shared agents.alice.policy_by_round=[one,two]": ["one, two, team", "policy_by_round"],
    "sharing=shared +policies.alice.model.lora_rank=8 +policies.carol.model.lora_rank=4": [
        "policies.alice",
        "expected one of team",
    ],
    "sharing=groups agents.alice.policy=one": ["agent carol", "set agents.carol.policy"],
    "sharing=lora actor_rollout_ref.model.lora.merge=true": ["lora.merge=true", "sharing=individual"],
    "sharing=lora actor_rollout_ref.actor.strategy=fsdp": ["strategy=fsdp", "use fsdp2"],
    "sharing=lora +policies.alice.model.lora_rank=0": ["policies.alice.model.lora_rank=0", "rank 1 or more"],
    "sharing=lora +policies.alice.model.path=other": ["policies.alice.model.path=other", "alice and carol", "pool"],
    "sharing=lora +policies.carol.actor.fsdp_config.model_dtype=bf16": ["policies.carol.actor.fsdp_config.model_dtype"],
    "sharing=lora +policies.carol.precision=bf16": ["policies.carol.precision=bf16", "another pool"],
    "sharing=lora +policies.carol.rollout.dtype=bfloat16": ["policies.carol.rollout.dtype=bfloat16"],
}


@pytest.mark.parametrize("overrides", CONTRADICTIONS)
def test_a_contradiction_names_key_value_and_remedy(shared, overrides):
    with pytest.raises(ConfigError) as caught:
        shared(*overrides.split())
    assert all(part in str(caught.value) for part in CONTRADICTIONS[overrides]), str(caught.value)


def test_adapters_on_a_server_that_cannot_hold_several_are_refused(shared):
    with pytest.raises(ConfigError, match=r"rollout\.name=sglang.*sharing=lora.*with hf or vllm"):
        shared("sharing=lora", "actor_rollout_ref.rollout.name=sglang", "trainer.device=cuda")
    shared("sharing=lora", "actor_rollout_ref.rollout.name=vllm", "trainer.device=cuda")


def test_an_adapter_of_a_rank_that_vllm_has_no_room_for_is_refused(shared):
    config = shared("sharing=lora", "+policies.carol.model.lora_rank=513")
    config.actor_rollout_ref.rollout.name = "vllm"
    with pytest.raises(ConfigError, match=r"policies.carol: .*lora_rank=513: vLLM .* rank 512 at most; lower it, or"):
        adapters_fit_their_base(config)
    config.policies.carol.model.lora_rank = 512
    adapters_fit_their_base(config)


def test_lora_alone_is_enough_and_a_rank_that_is_set_stays(shared):
    assert shared("sharing=lora").actor_rollout_ref.model.lora_rank == ADAPTER_RANK
    assert shared("sharing=lora", "actor_rollout_ref.model.lora_rank=4").actor_rollout_ref.model.lora_rank == 4
    assert shared("sharing=individual").actor_rollout_ref.model.lora_rank == 0


def test_adapters_differ_in_rank_update_and_sampling(shared):
    config = shared(
        "sharing=lora", "+policies.alice.model.lora_rank=8", "+policies.alice.model.target_modules=[q_proj]",
        "+policies.alice.actor.optim.lr=0.5", "+policies.alice.actor.optim.clip_grad=2.0",
        "+policies.alice.actor.kl_loss_coef=0.3", "+policies.alice.actor.ppo_epochs=2",
        "+policies.alice.rollout.temperature=0.7",
    )  # fmt: skip
    assert own_settings(config, "alice").model.lora_rank == 8
    assert own_settings(config, "carol").model.lora_rank == ADAPTER_RANK


ENDPOINT = "+policies.carol.endpoint={base_url: 'http://localhost:8000/v1', model: m-1}"
UNTRAINED = ("agents.carol.trainable=false", "credit=own")


def test_an_endpoint_is_no_part_of_what_is_shared(shared):
    for mode in ("shared", "lora"):
        config = shared(f"sharing={mode}", *UNTRAINED, ENDPOINT)
        assert policies_by_agent(config.agents) == {
            "alice": ["team" if mode == "shared" else "alice"],
            "carol": ["carol"],
        }
    assert adapter_policies(config) == ["alice"]


def test_a_policy_that_nobody_trains_is_an_adapter_where_a_base_is_trained(shared):
    beside, apart = (
        shared("sharing=lora", *UNTRAINED),
        shared("sharing=lora", *UNTRAINED, "resources.pools={mine:{policies:[carol]}}"),
    )
    assert adapter_policies(beside) == ["alice", "carol"] and frozen_policies(beside) == []
    assert adapter_policies(apart) == ["alice"] and frozen_policies(apart) == ["carol"]
    whole = shared(*UNTRAINED)
    assert adapter_policies(whole) == [] and frozen_policies(whole) == ["carol"]


def test_a_server_alone_may_have_another_model_and_engine_than_the_base(shared):
    own = (
        "resources.pools={mine:{policies:[carol]}}",
        "+policies.carol.model.path=org/name",
        "+policies.carol.rollout.name=vllm",
    )
    config = shared("sharing=lora", *UNTRAINED, *own, "trainer.device=cuda")
    assert own_settings(config, "carol").rollout.name == "vllm"


@pytest.mark.parametrize(
    "overrides,pools",
    [
        (["sharing=lora", "resources.pools={big:{gpus:4,policies:[alice]}}"], {"big": 4, "shared": 1}),
        (["sharing=lora", "resources.pools={shared:{gpus:2}}"], {"shared": 2}),
        (["sharing=lora"], {"shared": 1}),
        (
            ["sharing=lora", "resources.pools={left:{policies:[alice]},right:{policies:[carol]}}"],
            {"left": 1, "right": 1},
        ),
        (["sharing=lora", "learner=mappo", "credit=own"], {"shared": 1, "central_critic": 1}),
        (["sharing=shared"], {"team": 1}),
        (["sharing=individual"], {"alice": 1, "carol": 1}),
    ],
)
def test_adapters_of_one_base_take_one_pool(shared, overrides, pools):
    assert Setup.of(shared(*overrides)).ranks_by_pool == pools


def test_policies_of_different_pools_may_have_different_bases(shared):
    pools = "resources.pools={left:{policies:[alice]},right:{policies:[carol]}}"
    config = shared("sharing=lora", pools, "+policies.alice.rollout.dtype=bfloat16")
    assert own_settings(config, "alice").rollout.dtype == "bfloat16"


@pytest.mark.parametrize(
    "path,own",
    [
        ("actor.optim.lr", True),
        ("actor.optim.optimizer", True),
        ("actor.clip_ratio_low", True),
        ("actor.fsdp_config.param_offload", False),
        ("model.lora_alpha", True),
        ("model.lora_adapter_path", True),
        ("model.path", False),
        ("rollout.val_kwargs.temperature", True),
        ("rollout.dtype", False),
        ("ref.model.path", False),
    ],
)
def test_what_is_the_adapters_own(path, own):
    assert is_of_the_adapter(tuple(path.split("."))) == own


TARGETS = {
    "actor_rollout_ref.model.target_modules=[q_prj]": ["target_modules=['q_prj']", "some of q_proj, k_proj"],
    "+policies.carol.model.target_modules=[q_prj]": ["policies.carol.model.target_modules=['q_prj']", "all-linear"],
    "actor_rollout_ref.model.target_modules=[embed_tokens,q_proj]": ["model.embed_tokens is none", "some of q_proj"],
}


@pytest.mark.parametrize("override", TARGETS)
def test_an_adapter_of_layers_that_there_are_not_is_refused(compose_config, cold_assets, override):
    with pytest.raises(ConfigError) as caught:
        prepare(compose_config(f"assets={cold_assets}", "sharing=lora", override))
    assert all(part in str(caught.value) for part in TARGETS[override]), str(caught.value)


@pytest.mark.parametrize("name", ["lora_a", "layers", "0", "model", "alice"])
def test_the_parameters_of_an_adapter_of_any_name_are_found_and_unnamed(name):
    key = f"base_model.model.model.layers.0.self_attn.q_proj.lora_A.{name}.weight"
    assert owner(key) == name
    assert unnamed(key, name) == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize("agent", ["alice", "carol"])
def test_a_name_that_torch_has_taken_is_refused(compose_config, cold_assets, agent):
    words = ("sharing=lora", f"agents.{agent}.policy=update")
    with pytest.raises(ConfigError, match="policy 'update': .*expected another name, such as update_1"):
        prepare(compose_config(f"assets={cold_assets}", *words))
    prepare(compose_config(f"assets={cold_assets}", "agents.alice.policy=update"))
