"""Each phase has the deadline of its key, or that of all, and the error of a late call names the key."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from marl.build import start_deadline
from marl.cluster.layout import policy_configs
from marl.cluster.policy_group import PolicyGroup
from marl.config.deadlines import Deadline, Phase, deadlines_of, request_deadline
from marl.config.errors import ConfigError
from marl.config.rules import check
from marl.utils.deadlines import wait_with_deadline

KEYS = {phase: f"resources.{phase.value}_timeout_s" for phase in Phase}


@pytest.mark.parametrize("phase", Phase)
def test_a_phase_has_its_own_deadline_and_the_others_that_of_all(compose_config, phase):
    found = deadlines_of(compose_config("resources.timeout_s=9", f"{KEYS[phase]}=3").resources)
    assert found.pop(phase) == Deadline(3, KEYS[phase])
    assert set(found.values()) == {Deadline(9, "resources.timeout_s")} and len(found) == len(Phase) - 1


def test_the_start_includes_the_placement_of_every_pool(compose_config):
    config = compose_config("resources.start_timeout_s=100", "resources.placement_timeout_s=3600")
    assert start_deadline(config, pools=2)[0] == 100 + 2 * 3600
    config.resources.one_process = True
    assert start_deadline(config, pools=1)[0] == math.inf


def test_an_error_of_the_call_is_not_its_deadline():
    """A rank's own timeout, as Ray hands it on, tells what was late there."""

    async def raises():
        raise TimeoutError("server 1 took no weights for 5 s")

    with pytest.raises(TimeoutError, match="took no weights") as raised:
        asyncio.run(wait_with_deadline(60, "update", raises()))
    assert type(raised.value) is TimeoutError


async def late():
    await asyncio.sleep(60)


CALLS = {
    Phase.start: lambda group: group.start_workers(),
    Phase.save: lambda group: group.save(Path("folder")),
    Phase.update: lambda group: group.renew_reference(),
    Phase.sync: lambda group: group.weight_digest(0),
    Phase.request: lambda group: group.record_server_spans(),
}


class Workers:
    """Ranks that never answer."""

    world_size = 1

    def __getattr__(self, name):
        return lambda *arguments: [late()]


@pytest.mark.parametrize("phase", Phase)
def test_a_late_call_ends_by_the_deadline_of_its_phase_and_names_its_key(compose_config, phase):
    own = compose_config("resources.timeout_s=50", f"{KEYS[phase]}=0.01")
    group = PolicyGroup("alice", own, Workers(), "pool", deadlines_of(own.resources))
    server = SimpleNamespace(take_spans=SimpleNamespace(remote=late))
    group.servers = SimpleNamespace(server_handles=[server])
    with pytest.raises(TimeoutError, match=rf"policy 'alice'.*within 0.01 s.*raise {KEYS[phase]}$"):
        asyncio.run(CALLS[phase](group))


def test_a_call_without_a_phase_names_the_deadline_of_all():
    with pytest.raises(TimeoutError, match=r"x did not end within 0.01 s.*raise resources.timeout_s$"):
        asyncio.run(wait_with_deadline(0.01, "x", late()))


def test_servers_hear_the_deadline_of_a_sync(compose_config):
    configs = policy_configs(compose_config("resources.sync_timeout_s=7"), ["alice"], "r", 1)
    custom = configs["alice"].actor_rollout_ref.rollout.custom
    assert (custom["timeout_s"], custom["timeout_key"]) == (7, "resources.sync_timeout_s")


@pytest.mark.parametrize("value", ["0", "-1", "inf"])
def test_a_deadline_is_a_number_above_zero(compose_config, cold_assets, value):
    with pytest.raises(ConfigError, match=r"resources.save_timeout_s=.*above 0"):
        check(compose_config(f"assets={cold_assets}", f"resources.save_timeout_s={value}"))


@pytest.mark.parametrize(
    "own,tokens,expected",
    [
        (None, 100, (600.0, "resources.timeout_s")),
        (None, 32_000, (3200.0, "resources.request_timeout_s")),
        (50.0, 32_000, (50.0, "resources.request_timeout_s")),
    ],
)
def test_a_last_answer_that_is_long_is_no_fault(compose_config, own, tokens, expected):
    words = [f"resources.request_timeout_s={own}"] if own else []
    assert request_deadline(compose_config(*words).resources, tokens) == expected
