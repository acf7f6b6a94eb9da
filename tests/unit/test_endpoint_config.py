"""Endpoints in a configuration: what is refused, and that access keys are never shown."""

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict

from marl.config.endpoints import Endpoint, endpoint_of, endpoints_are_valid
from marl.config.errors import ConfigError
from marl.config.identity import identity_of, refused, settings_of
from marl.config.rules.agents import policies_are_acted_with, policies_change_known_keys
from marl.preflight.memory import batch_of
from marl.run_setup import Setup
from tests.judge import KEY

GOOD = {"base_url": "http://localhost:8000/v1", "model": "m-1"}


@pytest.fixture(scope="module")
def base(compose_config):
    return compose_config("agents.carol.trainable=false", "credit=own")


@pytest.fixture
def with_endpoint(base):
    def make(beside=None, **changes):
        config = base.copy()
        with open_dict(config):
            config.policies = {"carol": {"endpoint": GOOD | changes} | (beside or {})}
        return config

    return make


def check(config):
    for rule in (policies_are_acted_with, policies_change_known_keys, endpoints_are_valid):
        rule(config)


def test_an_endpoint_has_defaults_and_takes_their_types(with_endpoint):
    config = with_endpoint(timeout_s=5, extra_body={"max_tokens": None})
    check(config)
    assert endpoint_of(config, "carol") == Endpoint(**GOOD, timeout_s=5.0, extra_body={"max_tokens": None})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"api_key": KEY}, "endpoint.api_key: .*remove it.*api_key_env"),
        ({"api_key_env": KEY}, "api_key_env: expected the name of an environment variable"),
        ({"api_key_env": "UNSET_JUDGE_KEY"}, "api_key_env=UNSET_JUDGE_KEY: this variable is not set"),
        ({"modle": "x"}, "unknown key 'policies.carol.endpoint.modle'.*Did you mean 'model'"),
        ({"model": " "}, "endpoint.model= : expected"),
        ({"base_url": ""}, "base_url=: expected an address"),
        ({"base_url": "localhost:8000"}, "base_url=localhost:8000: expected an address"),
        ({"base_url": "http://h/v1/chat/completions"}, "expected the part before"),
        ({"base_url": "http://[::1/v1"}, r"base_url=http://\[::1/v1: expected an address"),
        ({"base_url": "http://h:80a/v1"}, "base_url=http://h:80a/v1: expected an address"),
        ({"base_url": f"http://user:{KEY}@[::1/v1"}, "base_url holds a user"),
        ({"base_url": f"https://user:{KEY}@h/v1"}, "base_url holds a user"),
        ({"base_url": f"https://h/v1?key={KEY}"}, "base_url holds a user"),
        ({"timeout_s": 0}, r"timeout_s=0.0: expected a finite number above 0"),
        ({"timeout_s": KEY}, r"endpoint.timeout_s: the value has another type"),
        ({"max_attempts": 0}, "max_attempts=0: expected a whole number at least 1"),
        ({"requests_per_minute": -1}, "requests_per_minute=-1.0: expected"),
        ({"token_budget": 0}, "token_budget=0: expected"),
        ({"max_concurrent": 1.5}, "max_concurrent: the value has another type"),
        ({"log_probs": "perhaps"}, "log_probs: the value has another type"),
    ],
)
def test_bad_endpoints_are_refused_without_their_secrets(with_endpoint, changes, words):
    with pytest.raises(ConfigError, match=words) as caught:
        check(with_endpoint(**changes))
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"model": {"path": "x"}}, "policies.carol.model has no effect beside"),
        ({"rollout": {"dtype": "float32"}}, "policies.carol.rollout.dtype has no effect"),
    ],
)
def test_an_endpoint_has_no_model_of_ours(with_endpoint, beside, words):
    check(with_endpoint({"rollout": {"temperature": 0.2}, "thinking": "none"}))
    with pytest.raises(ConfigError, match=words):
        check(with_endpoint(beside))


def test_endpoints_are_never_trained(with_endpoint):
    config = with_endpoint()
    config.agents.carol.trainable = True
    with pytest.raises(ConfigError, match=r"agent 'carol' .*no weights to train; set agents.carol.trainable=false"):
        check(config)
    config = with_endpoint()
    config.agents.alice.policy_by_round = ["alice", "carol"]
    with pytest.raises(ConfigError, match=r"agent 'alice' acts with this policy and is trained"):
        check(config)
    config = with_endpoint()
    config.agents.carol.agent_loop = "tool_agent"
    with pytest.raises(ConfigError, match="agents.carol.agent_loop=tool_agent: agent loops work on token ids"):
        check(config)


def test_an_endpoint_takes_no_pool_and_no_rows(with_endpoint):
    config = with_endpoint(requests_per_minute=600, token_budget=10**6)
    setup = Setup.of(config)
    assert setup.policies == ["alice"] and setup.endpoints == ["carol"] and setup.ranks_by_pool == {"alice": 1}
    assert [policy.policy for policy in batch_of(config, {"alice": 2, "carol": 2}).policies] == ["alice"]


def test_keys_are_masked_wherever_they_are_spelt(with_endpoint, monkeypatch):
    """The name of the variable is shown; its value is not, even in the middle of another text."""
    monkeypatch.setenv("JUDGE", KEY)
    config = with_endpoint(api_key_env="JUDGE", extra_body={"note": f"Bearer {KEY}", "user": "team"})
    shown = settings_of(config)["policies"]["carol"]["endpoint"]
    assert shown["api_key_env"] == "JUDGE" and shown["extra_body"] == {"note": "***", "user": "team"}
    assert KEY not in json.dumps(shown)


def test_a_resumed_run_may_ask_elsewhere_but_not_another_model(with_endpoint):
    def saved(**changes):
        config = OmegaConf.create({key: with_endpoint(**changes)[key] for key in ("agents", "policies")})
        return identity_of(config)

    moved = saved(base_url="http://other:1/v1", timeout_s=9, token_budget=5)
    assert refused(saved(), moved, ()) == {}
    assert list(refused(saved(), saved(model="m-2"), ())) == ["policies.carol.endpoint.model"]
    assert list(refused(saved(), saved(extra_body={"top_p": 1}), ())) == ["policies.carol.endpoint.extra_body.top_p"]


TEAMS = Path("docs/teams.md").read_text()
COMMANDS = re.findall(r"^python -m marl.main --config-name (\w+) (agents.*)$", TEAMS, re.MULTILINE)


@pytest.mark.parametrize(("name", "words"), COMMANDS)
def test_the_commands_of_the_documentation_pass_the_rules(compose_config, monkeypatch, name, words):
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    config = compose_config(*shlex.split(words), name=name)
    check(config)
    setup = Setup.of(config)
    assert setup.endpoints == (["carol"] if "endpoint" in words else []) and "alice" in setup.policies


def test_the_documentation_names_every_key_and_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\| ", TEAMS, re.MULTILINE))
    assert len(COMMANDS) == 5 and list(rows) == [option.name for option in fields(Endpoint)]
    for key, shown in rows.items():
        default = getattr(Endpoint(), key)
        assert shown == ("" if default == "" else "null" if default is None else str(default).lower()), key
    listed = re.search(r"policies.<name>.endpoint.\{(.*?)\}", Path("docs/configuration.md").read_text())[1]
    assert listed.split(",") == list(rows)
