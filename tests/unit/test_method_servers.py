"""Servers that share an accelerator with the trainer: they sleep while it works, and a weight sync wakes them."""

import asyncio
from types import SimpleNamespace

import pytest

from marl.marl_trainer import MARLTrainer, Played
from marl.methods.examples import Selection
from marl.methods.rft import RFT
from marl.methods.spin import SPIN
from marl.utils.metrics import PhaseTimer


class Servers:
    """Policy whose servers answer between a sync and their release alone, and are synced while they sleep alone."""

    def __init__(self):
        self.awake, self.held, self.own, self.reference, self.busy = False, None, "policy", "reference", []

    async def free_servers(self):
        self.awake = False

    async def exchange_reference(self):
        self.own, self.reference = self.reference, self.own

    def sync(self):
        assert not self.awake, "verl's sync takes the accelerator, where an awake server still has its cache"
        self.awake, self.held = True, self.own

    def answer(self):
        assert self.awake, "a sleeping server is asked"
        return self.held


class Quiet:
    """A trainer's parts, which the tests of servers do without."""

    async def play(self, tasks, phase):
        self.answers.append(self.policies["a"].answer())
        return Played(SimpleNamespace(started=0, refused=0, retried=0), [], [])

    async def learn(self, examples, phase, scored):
        assert not self.policies["a"].awake, "the trainer computes beside an awake server"
        return {}

    async def validate_by_play(self):
        self.answers.append(self.policies["a"].answer())
        return {}


async def nothing(*arguments):
    return {}


@pytest.fixture
def trainer():
    """Make the trainer of a method after its first sync."""

    def make(kind):
        made = object.__new__(type("Trainer", (Quiet, MARLTrainer), {}))
        group = Servers()

        async def to_step(step):
            group.sync()
            return {}

        made.policies, made.critics, made.answers = {"a": group}, SimpleNamespace(groups={}), []
        made.references = SimpleNamespace(groups={"a": group}, update_freq=0)
        made.method = kind(kind.Config("x"))
        made.method.of_episodes = lambda episodes, speakers: Selection([])
        made.weights = SimpleNamespace(to_step=to_step)
        made.dumps = SimpleNamespace(write_played=nothing)
        made.controller = SimpleNamespace(metrics=dict)
        made.speakers, made.encoders, made.limits, made.step_number = {}, {}, {}, 1
        asyncio.run(made.sync_weights())
        return made

    return make


def test_an_opponents_servers_sleep_before_both_syncs_of_a_validation(trainer):
    live = trainer(SPIN)
    asyncio.run(live.validate())
    assert live.answers == ["policy"] and live.policies["a"].answer() == "reference"


@pytest.mark.parametrize(("kind", "plays"), [(RFT, "policy"), (SPIN, "reference")])
def test_every_step_ends_with_servers_that_answer(trainer, kind, plays):
    live = trainer(kind)
    for _ in range(3):
        asyncio.run(live.method.step(live, []))
    assert live.answers == [plays] * 3 and live.policies["a"].answer() == plays


def test_a_step_counts_what_its_servers_computed():
    """A method plays, too: without their spans the rollout would be overhead, and servers would keep them for ever."""
    spans = [(1.0, 2.0)]

    async def record_server_spans():
        group.busy += spans

    group = SimpleNamespace(busy=[], record_server_spans=record_server_spans)
    live = object.__new__(MARLTrainer)
    live.policies, live.packed, live.step_number = {"a": group}, [], 1
    live.controller = SimpleNamespace(
        policy_map=SimpleNamespace(at=lambda step: SimpleNamespace(labels=lambda names: {}))
    )
    live.trained_agents = []
    live.method, live.tasks = SimpleNamespace(update=nothing), SimpleNamespace(read_ahead=nothing)
    live.references = SimpleNamespace(renew=nothing)
    asyncio.run(live.learn([], PhaseTimer()))
    assert group.busy == spans
