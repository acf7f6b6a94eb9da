"""Servers that share an accelerator with the trainer: they sleep while it works, and a weight sync wakes them."""

import asyncio
from types import SimpleNamespace

import pytest

from marl.config.errors import ConfigError
from marl.marl_trainer import MARLTrainer
from marl.method_trainer import HybridTrainer, MethodTrainer, OpponentTrainer, TwoStreams
from marl.methods.examples import Selection
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
        return [], {}

    async def learn(self, examples, phase):
        assert not self.policies["a"].awake, "the trainer computes beside an awake server"
        return {}


@pytest.fixture
def trainer(monkeypatch):
    """Make a trainer of some class after its first sync."""

    async def validate(self):
        self.answers.append(self.policies["a"].answer())
        return {}

    async def sync_weights(self):
        self.policies["a"].sync()
        return {}

    monkeypatch.setattr(MARLTrainer, "validate", validate)
    monkeypatch.setattr(MARLTrainer, "sync_weights", sync_weights)

    def make(kind):
        made = object.__new__(type("Trainer", (Quiet, kind), {}))
        group = Servers()
        made.policies, made.critics, made.answers = {"a": group}, SimpleNamespace(groups={}), []
        made.references = SimpleNamespace(groups={"a": group}, update_freq=0)
        made.method = SimpleNamespace(of_episodes=lambda episodes, speakers: Selection([]))
        made.dumps = SimpleNamespace(write_played=wrote)
        made.controller = SimpleNamespace(metrics=dict)
        made.speakers, made.encoders, made.limits, made.step_number = {}, {}, {}, 1
        asyncio.run(made.sync_weights())
        return made

    return make


def test_a_hybrid_computes_while_its_servers_sleep(trainer):
    live = trainer(HybridTrainer)
    for _ in range(2):
        asyncio.run(live.imitate([[]]))
    assert live.policies["a"].answer() == "policy"


def test_an_opponents_servers_sleep_before_both_syncs_of_a_validation(trainer):
    live = trainer(OpponentTrainer)
    asyncio.run(live.validate())
    assert live.answers == ["policy"] and live.policies["a"].answer() == "reference"


def test_a_hybrid_names_what_it_cannot_go_on_from():
    streams = TwoStreams(None, None)
    with pytest.raises(ConfigError, match="the checkpoint is of a run of another method.*resume_mode=disable"):
        streams.load_state_dict({"_iterator": None})


def test_a_step_counts_what_its_servers_computed():
    """A method plays, too: without their spans the rollout would be overhead, and servers would keep them for ever."""
    spans = [(1.0, 2.0)]

    async def nothing(*arguments):
        return {}

    async def record_server_spans():
        group.busy += spans

    group = SimpleNamespace(busy=[], record_server_spans=record_server_spans)
    live = object.__new__(MethodTrainer)
    live.policies, live.packed, live.step_number = {"a": group}, [], 1
    live.controller = SimpleNamespace(policy_map=SimpleNamespace(at=lambda step: SimpleNamespace(labels=dict)))
    live.trained_agents = []
    live.method, live.tasks = SimpleNamespace(update=nothing), SimpleNamespace(read_ahead=nothing)
    live.references = SimpleNamespace(renew=nothing)
    asyncio.run(live.learn([], PhaseTimer()))
    assert group.busy == spans


async def wrote(episodes, step):
    """Nothing is kept."""


@pytest.mark.parametrize(("kind", "plays"), [(MethodTrainer, "policy"), (OpponentTrainer, "reference")])
def test_every_step_ends_with_servers_that_answer(trainer, kind, plays):
    live = trainer(kind)
    for _ in range(3):
        asyncio.run(live.step([]))
    assert live.answers == [plays] * 3 and live.policies["a"].answer() == plays
