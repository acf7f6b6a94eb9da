"""Batch arithmetic, memory and shares of a GPU, against numbers that were computed by hand, and the page that shows them."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from transformers import (
    BertConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPTNeoXJapaneseConfig,
    LlamaConfig,
    PegasusConfig,
    Qwen2Config,
)

from marl.commands import plan
from marl.config.errors import ConfigError
from marl.config.policies import longest_row, own_settings
from marl.methods.sft import SFT
from marl.preflight import memory as estimate, plan as page
from marl.preflight.checks import check_adapter_base
from marl.preflight.memory import Memory, ModelSize
from marl.preflight.model_checks import size_of
from marl.preflight.plan import divide_gpus, plan_text, pool_members, summary_text, warnings_of
from marl.preflight.prepare import prepare

TINY = LlamaConfig(
    vocab_size=100,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=160,
    tie_word_embeddings=True,
)
HALF_BILLION = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    intermediate_size=4864,
    tie_word_embeddings=True,
)

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 160, "vocab_size": 100}  # fmt: skip


def test_a_tiny_llama_is_counted_without_being_made():
    size = size_of(TINY, "model")
    block = 4 * 64 * 64 + 3 * 64 * 160 + 2 * 64
    assert (size.parameters, size.largest_block, size.embedding) == (2 * block + 100 * 64 + 64, block, 6400)
    assert (size.layers, size.hidden, size.kv_width, size.vocabulary) == (2, 64, 64, 100)
    assert size.linear_width == 2 * (4 * (64 + 64) + 3 * (64 + 160))


@pytest.mark.parametrize(
    ("make", "setting", "given", "remedy"),
    [
        (Gemma3TextConfig, "use_bidirectional_attention", True, None),
        (Gemma4TextConfig, "use_bidirectional_attention", "all", None),
        (BertConfig, "is_decoder", False, True),
    ],
)
def test_a_model_whose_tokens_attend_to_later_ones_is_refused(make, setting, given, remedy):
    said = rf"model: its {setting}={given} .*override_config.{setting}={json.dumps(remedy)}"
    with pytest.raises(ConfigError, match=said):
        size_of(make(**SMALL, **{setting: given}), "model")
    assert size_of(make(**SMALL, **{setting: remedy}), "model").layers == 2


def test_a_critic_whose_tokens_attend_to_later_ones_is_refused(compose_config, cold_assets, tmp_path):
    Gemma3TextConfig(**SMALL, use_bidirectional_attention=True).save_pretrained(tmp_path)
    options = ("learner=mappo", f"critic.model.path={tmp_path}", "critic.model.tokenizer_path=null")
    setup = prepare(compose_config(f"assets={cold_assets}", *options))
    with pytest.raises(ConfigError, match=r"critic.model.path: its use_bidirectional_attention=True "):
        plan_text(setup)  # by the plan, which every run prints before it starts


@pytest.mark.parametrize(
    "config",
    [
        Gemma4TextConfig(**SMALL, use_bidirectional_attention="vision"),
        GPTNeoXJapaneseConfig(**SMALL, is_decoder=False),
        PegasusConfig(d_model=64, decoder_layers=2, decoder_attention_heads=4, vocab_size=100, is_decoder=False),
    ],
)
def test_a_causal_model_is_taken_whatever_these_settings_are(config):
    assert size_of(config, "model").parameters


def settings(checkpointing=True, lora_rank=0):
    """Settings of a model and its FSDP engine, with weights in full precision that compute in bf16."""
    model = {"enable_gradient_checkpointing": checkpointing, "lora_rank": lora_rank}
    engine = {"model_dtype": "fp32", "mixed_precision": {"param_dtype": "bf16"}, "reshard_after_forward": True}
    return OmegaConf.create(model), OmegaConf.create(engine)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_half_a_billion_parameters_take_16_bytes_each_in_full_precision(ranks):
    size = size_of(HALF_BILLION, "model")
    assert size.parameters == 494_032_768
    kept = estimate.training_memory(size, *settings(), ranks, tokens=1).kept
    assert kept == pytest.approx(16 * 494_032_768 / ranks)


def test_a_rank_keeps_its_share_and_works_on_what_is_gathered():
    size = ModelSize(1000, 200, 4, 10, 20, 5, 50, 150)
    memory = estimate.training_memory(size, *settings(checkpointing=False), 2, tokens=7)
    assert (memory.weights, memory.gradients, memory.moments) == (2000, 2000, 4000)
    # root: 1000 - 4 x 150 = 400; two layers and the gradient of one: 3 x 150
    assert memory.gathered == (400 + 3 * 150) * 2
    assert memory.activations == 7 * (4 * 10 * 2 + 4 * 2 * (8 * 10 + 3 * 5 + 4 * 20))
    assert memory.logits == 7 * 50 * (2 * 2 + 8)


def test_checkpointing_keeps_one_layers_working_set_and_lora_its_own_moments():
    size = ModelSize(1000, 200, 4, 10, 20, 5, 50, 150, linear_width=30)
    memory = estimate.training_memory(size, *settings(lora_rank=3), 1, tokens=7)
    assert memory.activations == 7 * (4 * 10 * 2 + 2 * (8 * 10 + 3 * 5 + 4 * 20))
    assert (memory.weights, memory.gradients, memory.moments) == (4 * 1090, 4 * 90, 8 * 90)


def test_one_more_adapter_costs_its_own_numbers_and_no_base(compose_config, cold_assets):
    words = ("actor_rollout_ref.model.lora_rank=3", "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16")
    setup = prepare(compose_config(f"assets={cold_assets}", "sharing=lora", *words))
    size, own = ModelSize(1000, 200, 4, 10, 20, 5, 50, 150, linear_width=30), own_settings(setup.config, "alice")
    (alice, _) = estimate.batch_of(setup.config, dict.fromkeys(setup.config.agents, 2)).policies
    whole = estimate.policy_memory(own, alice, size, None, adapter_bytes=estimate.ADAPTER_BYTES)
    more = estimate.adapter_memory(whole, own, alice, size)
    assert (whole.weights, more.weights, more.gradients, more.moments, more.server) == (2360, 360, 360, 720, 360)
    first, second = [line.split() for line in plan_text(setup).splitlines() if line.split()[:1] == ["shared"]]
    assert float(first[2]) > 2 * float(second[2]), "the base's weights are counted once"
    assert first[3:5] == second[3:5], "gradients and moments are in full precision whatever the base is in"


def test_one_more_adapter_has_no_engine_of_its_own():
    """Its slot is in the share of a GPU that the first one's server takes."""
    size, batch = ModelSize(1000, 200, 4, 10, 20, 5, 50, 150, linear_width=30), SimpleNamespace(ranks=2, servers=1)
    whole = Memory(weights=1, server=32e9)

    def more(**changes):
        own = SimpleNamespace(model=SimpleNamespace(lora_rank=3), rollout=engine(**changes))
        return estimate.adapter_memory(whole, own, batch, size)

    assert more().server == 0.0
    assert estimate.pool_memory([whole, more()], True) - estimate.pool_memory([whole], True) == 4 * 180
    assert more(engine_kwargs={"vllm": {"kv_cache_memory_bytes": 70}}).server == 90, "beside a cache of a given size"


def test_an_hf_server_holds_a_copy_and_the_cache_of_its_sequences():
    size = ModelSize(1000, 200, 4, 10, 20, 5, 50, 150)
    rollout = {"dtype": "bfloat16", "max_num_seqs": 3, "prompt_length": 7, "response_length": 4}
    rollout = OmegaConf.create(rollout | {"enable_prefix_caching": False})
    batch = SimpleNamespace(turns=9, ranks=2, servers=1)
    server = 2000 + 3 * 11 * 4 * 2 * 5 * 2 + 3 * 50 * 16
    assert estimate.hf_server_memory(rollout, batch, size) == server / 2


def test_an_hf_server_keeps_conversations_up_to_its_own_bound_or_all_that_a_step_can_say(compose_config, cold_assets):
    setup = prepare(compose_config(f"assets={cold_assets}"))
    size, own = ModelSize(1000, 200, 4, 10, 20, 5, 50, 150), own_settings(setup.config, "alice")
    alice = estimate.batch_of(setup.config, dict.fromkeys(setup.config.agents, 2)).policies[0]

    def kept(**custom):
        OmegaConf.update(own, "rollout.custom", custom, merge=False, force_add=True)
        servers = []
        for own.rollout.enable_prefix_caching in (False, True):
            servers.append(estimate.policy_memory(own, alice, size, None).server)
        return servers[1] - servers[0]

    assert alice.turns > 0 and alice.servers == alice.ranks == 1
    assert kept() == alice.turns * longest_row(own.rollout) * 4 * 2 * 5 * 4
    assert kept(prefix_bytes=70) == 70 and kept(prefix_bytes=0) == 0
    for wrong in (-1, 1.5, "4GiB", True):
        with pytest.raises(ConfigError, match="custom.prefix_bytes=.*expected a whole number of bytes"):
            kept(prefix_bytes=wrong)


def test_policies_of_a_pool_keep_all_and_work_one_after_another():
    members = [Memory(weights=10, activations=5, server=3), Memory(weights=20, activations=7, server=4)]
    assert estimate.pool_memory(members, asleep=False) == 30 + 7 + 7
    assert estimate.pool_memory(members, asleep=True) == 30 + 7


def engine(**changes):
    rollout = {"name": "vllm", "dtype": "bfloat16", "gpu_memory_utilization": 0.4, "engine_kwargs": {}}
    return OmegaConf.create(rollout | {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1} | changes)


def test_an_engine_takes_its_share_of_the_card_or_a_cache_of_a_given_size():
    size = ModelSize(1000, 200, 4, 10, 20, 5, 50, 150)
    assert estimate.engine_memory(engine(), size, 80e9) == 32e9
    assert estimate.engine_memory(engine(), size, None) == 0.0, "on a machine without a GPU"
    given = engine(engine_kwargs={"vllm": {"kv_cache_memory_bytes": 70}})
    assert estimate.engine_memory(given, size, None) == 1000 * 2 / 2 + 70


def test_a_policy_that_nobody_trains_has_a_server_alone(compose_config, cold_assets):
    options = (f"assets={cold_assets}", "hardware=gpu", "agents.carol.trainable=false", "credit=own")
    members, _ = pool_members(prepare(compose_config(*options)), 80e9)
    (_, trained), (_, frozen) = members["alice"][0], members["carol"][0]
    assert frozen == Memory(server=trained.server) and frozen.server > 0


@pytest.mark.parametrize("tied,merge,load,refused", [
    (True, False, "dummy", True), (False, False, "dummy", False), (True, True, "dummy", False), (True, False, "safetensors", False),
])  # fmt: skip
def test_adapters_on_tied_embeddings_need_a_base_with_weights(tied, merge, load, refused):
    model = SimpleNamespace(path="m", lora_rank=8, lora=SimpleNamespace(merge=merge))
    own = SimpleNamespace(model=model, rollout=SimpleNamespace(name="vllm", load_format=load))
    expected = (
        pytest.raises(ConfigError, match="rollout.load_format=dummy: m ties .*set load_format=safetensors")
        if refused
        else nullcontext()
    )
    with expected:
        check_adapter_base(own, tied, "actor_rollout_ref.model")


def test_a_steps_arithmetic(compose_config, cold_assets):
    setup = prepare(
        compose_config(
            f"assets={cold_assets}",
            "+agents.bob.policy=alice",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.ppo_epochs=2",
            "trainer.n_gpus_per_node=2",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "agents.carol.trainable=false",
        )
    )
    config = setup.config
    batch = estimate.batch_of(config, dict.fromkeys(config.agents, 2))
    assert (batch.episodes, batch.turns) == (32 * 8, 32 * 8 * 3 * 2)
    alice, carol = batch.policies
    assert (alice.agents, alice.rows, alice.mini_batches, alice.rows_per_mini_batch) == (("alice", "bob"), 1024, 4, 256)
    assert (alice.updates, alice.ranks, alice.servers, alice.tokens) == (8, 2, 1, 128 * 43)
    assert (carol.rows, carol.updates) == (0, 0)
    text = plan_text(setup)
    assert "32 tasks x 8 samples = 256 episodes" in text and "1536 turns" in text and "4 x 256 rows" in text
    assert "share a row (controller.pack_turns): alice\n" in text
    assert "\x1b" not in text and max(map(len, text.splitlines())) < 140


def test_the_command_prints_the_plan(cold_assets, tmp_path, capsys):
    words = [f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", "--config-name=quickstart"]
    assert plan.main(words) == 0
    said = capsys.readouterr().out
    assert "a step: " in said and "memory of one rank" in said


def test_a_run_begins_with_what_it_trains_and_a_steps_size_alone(compose_config, cold_assets):
    setup = prepare(compose_config(f"assets={cold_assets}"))
    first, second = summary_text(setup).splitlines()
    assert re.match(r"training alice \(0.1\d* M parameters\), carol .*: learner=grpo .* on train.parquet$", first)
    assert second.startswith("a step: 32 tasks x 8 samples")


@pytest.mark.parametrize("gigabytes,expected", [(1000, 16384), (0.5, 4096), (0, 64)])
def test_a_micro_batch_follows_the_machines_memory_unless_it_is_set(
    compose_config, cold_assets, monkeypatch, caplog, gigabytes, expected
):
    monkeypatch.setattr(page.psutil, "virtual_memory", lambda: SimpleNamespace(total=gigabytes * 1e9))
    key, words = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", (f"assets={cold_assets}", "learner=mappo")
    config = prepare(compose_config(*words, f"{key}=${{token_limit:}}")).config
    assert OmegaConf.select(config, key) == expected and config.critic.ppo_max_token_len_per_gpu == 16384
    lowered = [record.message for record in caplog.records if key in record.message]
    assert lowered == [one for one in lowered if one.startswith(f"{key}={expected}: the default, 16384")]
    assert len(lowered) == (expected < 16384)
    assert OmegaConf.select(prepare(compose_config(*words)).config, key) == 8192, "as the quick start sets it"


def test_a_plan_says_where_every_turn_is_a_row(compose_config, cold_assets):
    setup = prepare(compose_config(f"assets={cold_assets}", "learner=gspo"))
    assert "every turn is a row (controller.pack_turns)" in plan_text(setup)


def test_a_plan_of_a_method_that_reads_speaks_of_examples_and_of_no_play(compose_config, cold_assets):
    setup = prepare(compose_config(f"assets={cold_assets}"))
    text = plan_text(replace(setup, method=SFT(SFT.Config("sft"))))
    assert "a step learns from data.train_batch_size=32 examples" in text and "nothing is played" in text
    assert "controller.pack_turns" not in text and "episodes" not in text


def test_estimates_above_the_machines_memory_raise_a_warning():
    config = SimpleNamespace(trainer=SimpleNamespace(device="cuda", n_gpus_per_node=1))
    assert warnings_of(config, {"a": 9e9}, 10e9) == [] == warnings_of(config, {"a": 9e9}, None)
    (warning,) = warnings_of(config, {"a": 9e9, "b": 11e9}, 10e9)
    assert "pool 'b'" in warning and "11.0 GB" in warning and "10.0 GB" in warning and "ppo_max_token_len" in warning


def test_a_critic_has_no_logits_and_a_reference_is_one_more_copy(compose_config, cold_assets):
    setup = prepare(
        compose_config(
            f"assets={cold_assets}", "learner=mappo", "algorithm.use_kl_in_reward=true", "trainer.n_gpus_per_node=2"
        )
    )
    config, size = setup.config, ModelSize(1000, 200, 4, 10, 20, 5, 50, 150)
    critic = estimate.critic_memory(config.critic, 2, size)
    assert (critic.weights, critic.moments, critic.logits) == (2000, 4000, 0.0)  # 1000 numbers of 4 bytes over 2 ranks
    assert estimate.critic_memory(config.critic, 2, size, target=True).kept - critic.kept == 2000
    own = own_settings(config, "alice")
    (alice, _) = estimate.batch_of(config, dict.fromkeys(config.agents, 2)).policies
    with_reference, without = (estimate.policy_memory(own, alice, size, None, reference) for reference in (True, False))
    assert (with_reference.reference, without.reference) == (2000, 0)
    assert with_reference.kept - without.kept == 2000
    text = plan_text(setup)
    assert "central critic" in text and "reference" in text


@pytest.mark.parametrize(
    "device,logits", [("cpu", 64 * 2**20 * (2 * 4 + 8) / 4), ("cuda", 8192 * 150_000 * (2 * 4 + 8))]
)
def test_a_cpu_keeps_no_more_logits_of_a_large_vocabulary_than_it_slices(compose_config, cold_assets, device, logits):
    """A GPU's may be verl's, which are whole."""
    setup = prepare(compose_config(f"assets={cold_assets}"))
    setup.config.trainer.device = device
    own = own_settings(setup.config, "alice")
    (alice, _) = estimate.batch_of(setup.config, dict.fromkeys(setup.config.agents, 2)).policies
    setup.sizes["alice"] = replace(setup.sizes["alice"], vocabulary=150_000)
    assert page.policy_memory(setup, own, alice, None).logits == pytest.approx(logits)


def test_untrained_policies_hold_no_reference_and_a_pool_sleeps_only_if_all_its_servers_do(
    compose_config, cold_assets, monkeypatch
):
    shown = {}
    monkeypatch.setattr(page, "memory_text", lambda pools, asleep: shown.update(pools=pools, asleep=asleep) or "")
    options = (
        "agents.carol.trainable=false",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "resources.placement=colocated",
    )
    plan_text(
        prepare(compose_config(f"assets={cold_assets}", *options, "+policies.carol.rollout.free_cache_engine=true"))
    )
    memory = dict(shown["pools"]["shared"])
    assert memory["alice"].reference > 0 and memory["carol"].reference == 0
    assert shown["asleep"] == {"shared": False}


def test_policies_of_rounds_have_rows_of_their_rounds(compose_config, cold_assets):
    rounds = [f"agents.{name}.policy_by_round=[{name},later]" for name in ("alice", "carol")]
    config = prepare(compose_config(f"assets={cold_assets}", "runner.num_rounds=3", *rounds)).config
    batch = estimate.batch_of(config, dict.fromkeys(config.agents, 3))
    assert {policy.policy: policy.rows for policy in batch.policies} == {"alice": 256, "later": 1024, "carol": 256}
    assert {policy.policy: policy.agents for policy in batch.policies}["later"] == ("alice", "carol")


SERVER = {"name": "vllm", "dtype": "bfloat16", "gpu_memory_utilization": 0.8}
SERVER |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}


def run_of(parameters, pools=None, **policies):
    """A run of policies with these numbers of parameters, whose servers share a pool unless ``pools`` names others."""
    rollout = OmegaConf.create({"actor_rollout_ref": {"rollout": SERVER}, "policies": policies, "sharing": None})
    sizes = {name: ModelSize(count, 0, 0, 0, 0, 0, 0, 0) for name, count in parameters.items()}
    own = pools or dict.fromkeys(parameters, "shared")
    return SimpleNamespace(config=rollout, sizes=sizes, pool_by_policy=own, pools=dict.fromkeys(own.values()))


def shares(run):
    divide_gpus(run)
    return {name: own_settings(run.config, name).rollout.gpu_memory_utilization for name in run.sizes}


def test_servers_of_a_pool_divide_its_share_by_their_weights():
    assert shares(run_of({"a": 300, "b": 100})) == pytest.approx({"a": 0.6, "b": 0.2})
    halved = run_of({"a": 600, "b": 100}, a={"rollout": {"tensor_model_parallel_size": 2}})
    assert shares(halved) == pytest.approx({"a": 0.6, "b": 0.2})
    assert shares(run_of({"a": 300, "b": 100}, {"a": "p", "b": "q"})) == {"a": 0.8, "b": 0.8}, "each GPU has one"


def test_a_share_of_its_own_is_kept_and_the_others_divide_what_it_leaves():
    run = run_of({"a": 300, "b": 100, "c": 100}, a={"rollout": {"gpu_memory_utilization": 0.5}})
    assert shares(run) == pytest.approx({"a": 0.5, "b": 0.15, "c": 0.15})


def test_our_own_server_takes_no_share():
    run = run_of({"a": 300, "b": 100}, b={"rollout": {"name": "hf"}})
    assert shares(run)["a"] == 0.8


TOO_MUCH = {
    "their own": ({"a": 0.5, "b": 0.45}, 0.8, "policies.a.rollout.gpu_memory_utilization=0.5, policies.b.rollout"),
    "nothing left": ({"a": 0.8}, 0.8, "actor_rollout_ref.rollout.gpu_memory_utilization=0.8 for all servers of a GPU"),
    "all": ({}, 0.95, "actor_rollout_ref.rollout.gpu_memory_utilization=0.95 for all"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOO_MUCH)
def test_more_than_a_gpu_has_is_refused(case):
    fixed, together, said = TOO_MUCH[case]
    run = run_of({"a": 300, "b": 100}, **{n: {"rollout": {"gpu_memory_utilization": s}} for n, s in fixed.items()})
    run.config.actor_rollout_ref.rollout.gpu_memory_utilization = together
    with pytest.raises(ConfigError, match=rf"^pool 'shared': .*{re.escape(said)}.*at most 0.9 of a GPU.*its own pool$"):
        divide_gpus(run)


def test_a_run_of_two_engines_on_one_gpu_has_their_parts(compose_config, cold_assets, monkeypatch):
    """On a machine without a GPU, which is only asked what the cluster's machines would have."""
    monkeypatch.setattr("marl.cluster.session.fitting_platform", lambda device: None)
    words = ["hardware=gpu", "resources.placement=colocated", "actor_rollout_ref.rollout.gpu_memory_utilization=.6"]
    words += [f"assets={cold_assets}", "actor_rollout_ref.rollout.dtype=bfloat16"]
    setup = prepare(compose_config(*words))
    assert own_settings(setup.config, "carol").rollout.gpu_memory_utilization == pytest.approx(0.3)
    adapted = prepare(compose_config(*words, "sharing=lora"))
    assert own_settings(adapted.config, "carol").rollout.gpu_memory_utilization == 0.6, "adapters have one engine"
