"""The memory plan and the batch arithmetic, against numbers that were computed by hand."""

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
from marl.preflight import batch_plan, memory_plan, plan_report
from marl.preflight.checks import check_adapter_base
from marl.preflight.memory_plan import Memory, ModelSize, Training
from marl.preflight.model_checks import size_of
from marl.preflight.plan_report import plan_text, pool_members, summary_text, warnings_of
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


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_half_a_billion_parameters_take_16_bytes_each_in_full_precision(ranks):
    size = size_of(HALF_BILLION, "model")
    assert size.parameters == 494_032_768
    kept = memory_plan.training_memory(size, Training(ranks=ranks, tokens=1)).kept
    assert kept == pytest.approx(16 * 494_032_768 / ranks)


def test_a_rank_keeps_its_share_and_works_on_what_is_gathered():
    size = ModelSize(1000, 200, 4, 10, 20, 5, 50, 150)
    memory = memory_plan.training_memory(
        size, Training(2, tokens=7, master_bytes=4, compute_bytes=2, checkpointing=False)
    )
    assert (memory.weights, memory.gradients, memory.moments) == (2000, 2000, 4000)
    # root: 1000 - 4 x 150 = 400; two layers and the gradient of one: 3 x 150
    assert memory.gathered == (400 + 3 * 150) * 2
    assert memory.activations == 7 * (4 * 10 * 2 + 4 * 2 * (8 * 10 + 3 * 5 + 4 * 20))
    assert memory.logits == 7 * 50 * (2 * 2 + 8)


def test_checkpointing_keeps_one_layers_working_set_and_lora_its_own_moments():
    size = ModelSize(1000, 200, 4, 10, 20, 5, 50, 150, linear_width=30)
    memory = memory_plan.training_memory(size, Training(1, tokens=7, checkpointing=True, lora_rank=3))
    assert memory.activations == 7 * (4 * 10 * 2 + 2 * (8 * 10 + 3 * 5 + 4 * 20))
    assert (memory.weights, memory.gradients, memory.moments) == (4 * 1090, 4 * 90, 8 * 90)


def test_one_more_adapter_costs_its_own_numbers_and_no_base(compose_config, cold_assets):
    words = ("actor_rollout_ref.model.lora_rank=3", "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16")
    setup = prepare(compose_config(f"assets={cold_assets}", "sharing=lora", *words))
    size, own = ModelSize(1000, 200, 4, 10, 20, 5, 50, 150, linear_width=30), own_settings(setup.config, "alice")
    (alice, _) = batch_plan.batch_of(setup.config, dict.fromkeys(setup.config.agents, 2)).policies
    whole = memory_plan.policy_memory(own, alice, size, None, adapter_bytes=memory_plan.ADAPTER_BYTES)
    more = memory_plan.adapter_memory(whole, own, alice, size)
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
        return memory_plan.adapter_memory(whole, own, batch, size)

    assert more().server == 0.0
    assert memory_plan.pool_memory([whole, more()], True) - memory_plan.pool_memory([whole], True) == 4 * 180
    assert more(engine_kwargs={"vllm": {"kv_cache_memory_bytes": 70}}).server == 90, "beside a cache of a given size"


def test_an_hf_server_holds_a_copy_and_the_cache_of_its_sequences():
    size = ModelSize(1000, 200, 4, 10, 20, 5, 50, 150)
    assert memory_plan.hf_server_memory(size, 2, sequences=3, length=11) == 2000 + 3 * 11 * 4 * 2 * 5 * 2 + 3 * 50 * 16


def test_an_hf_server_keeps_conversations_up_to_its_own_bound_or_all_that_a_step_can_say(compose_config, cold_assets):
    setup = prepare(compose_config(f"assets={cold_assets}"))
    size, own = ModelSize(1000, 200, 4, 10, 20, 5, 50, 150), own_settings(setup.config, "alice")
    alice = batch_plan.batch_of(setup.config, dict.fromkeys(setup.config.agents, 2)).policies[0]

    def kept(**custom):
        OmegaConf.update(own, "rollout.custom", custom, merge=False, force_add=True)
        servers = []
        for own.rollout.enable_prefix_caching in (False, True):
            servers.append(memory_plan.policy_memory(own, alice, size, None).server)
        return servers[1] - servers[0]

    assert alice.turns > 0 and alice.servers == alice.ranks == 1
    assert kept() == alice.turns * longest_row(own.rollout) * 4 * 2 * 5 * 4
    assert kept(prefix_bytes=70) == 70 and kept(prefix_bytes=0) == 0
    for wrong in (-1, 1.5, "4GiB", True):
        with pytest.raises(ConfigError, match="custom.prefix_bytes=.*expected a whole number of bytes"):
            kept(prefix_bytes=wrong)


def test_policies_of_a_pool_keep_all_and_work_one_after_another():
    members = [Memory(weights=10, activations=5, server=3), Memory(weights=20, activations=7, server=4)]
    assert memory_plan.pool_memory(members, asleep=False) == 30 + 7 + 7
    assert memory_plan.pool_memory(members, asleep=True) == 30 + 7


def engine(**changes):
    rollout = {"name": "vllm", "dtype": "bfloat16", "gpu_memory_utilization": 0.4, "engine_kwargs": {}}
    return OmegaConf.create(rollout | {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1} | changes)


def test_an_engine_takes_its_share_of_the_card_or_a_cache_of_a_given_size():
    size = ModelSize(1000, 200, 4, 10, 20, 5, 50, 150)
    assert memory_plan.engine_memory(engine(), size, 80e9) == 32e9
    assert memory_plan.engine_memory(engine(), size, None) == 0.0, "on a machine without a GPU"
    given = engine(engine_kwargs={"vllm": {"kv_cache_memory_bytes": 70}})
    assert memory_plan.engine_memory(given, size, None) == 1000 * 2 / 2 + 70


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
    batch = batch_plan.batch_of(config, dict.fromkeys(config.agents, 2))
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
    assert plan.main([*words, "--cluster=1x1x80GB"]) == 2


def test_a_run_begins_with_what_it_trains_and_a_steps_size_alone(compose_config, cold_assets):
    setup = prepare(compose_config(f"assets={cold_assets}"))
    first, second = summary_text(setup).splitlines()
    assert re.match(r"training alice \(0.1\d* M parameters\), carol .*: learner=grpo .* on train.parquet$", first)
    assert second.startswith("a step: 32 tasks x 8 samples")


@pytest.mark.parametrize("gigabytes,expected", [(1000, 16384), (0.5, 4096), (0, 64)])
def test_a_micro_batch_follows_the_machines_memory_unless_it_is_set(
    compose_config, cold_assets, monkeypatch, caplog, gigabytes, expected
):
    monkeypatch.setattr(plan_report.psutil, "virtual_memory", lambda: SimpleNamespace(total=gigabytes * 1e9))
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
    critic = memory_plan.critic_memory(config.critic, 2, size)
    assert (critic.weights, critic.moments, critic.logits) == (2000, 4000, 0.0)  # 1000 numbers of 4 bytes over 2 ranks
    assert memory_plan.critic_memory(config.critic, 2, size, target=True).kept - critic.kept == 2000
    own = own_settings(config, "alice")
    (alice, _) = batch_plan.batch_of(config, dict.fromkeys(config.agents, 2)).policies
    with_reference, without = (
        memory_plan.policy_memory(own, alice, size, None, reference) for reference in (True, False)
    )
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
    (alice, _) = batch_plan.batch_of(setup.config, dict.fromkeys(setup.config.agents, 2)).policies
    setup.sizes["alice"] = replace(setup.sizes["alice"], vocabulary=150_000)
    assert plan_report.member_memory(setup, own, alice, None).logits == pytest.approx(logits)


def test_untrained_policies_hold_no_reference_and_a_pool_sleeps_only_if_all_its_servers_do(
    compose_config, cold_assets, monkeypatch
):
    shown = {}
    monkeypatch.setattr(
        plan_report, "memory_text", lambda pools, asleep: shown.update(pools=pools, asleep=asleep) or ""
    )
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
    batch = batch_plan.batch_of(config, dict.fromkeys(config.agents, 3))
    assert {policy.policy: policy.rows for policy in batch.policies} == {"alice": 256, "later": 1024, "carol": 256}
    assert {policy.policy: policy.agents for policy in batch.policies}["later"] == ("alice", "carol")
