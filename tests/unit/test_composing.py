"""Configurations of tests are those that Hydra composes from files."""

from dataclasses import dataclass

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from marl.config.overrides import hydra_overrides
from marl.learners import LEARNERS, register_learner
from marl.learners.grpo import GRPO
from tests import composing


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quickstart", ["seed=3", "learner=happo", "learner.gamma=.5", "trainer.logger=[]"]),
        ("quickstart", ["+agents.eve.role='a, b'", "~trainer.logger", "agents.eve.policy=alice"]),
        ("quickstart", ["agents.alice.policy=one", "agents={}"]),
        ("quickstart", ["resources.pools={big:{gpus:2,policies:[alice]}}", "resources.pools.big.nodes=2"]),
        ("quickstart", ["+policies.carol.endpoint={base_url:'http://h/v1',model:m}", "+policies.carol.thinking=none"]),
        ("game", ["+policies.alice.actor.use_kl_loss=true", "credit=team", "data.train_batch_size=4"]),
    ],
)
def test_what_is_kept_and_set_is_what_hydra_composes(name, words):
    theirs = composing.composed(name, hydra_overrides(words))
    for _ in range(2):  # read, and kept
        mine = composing.compose(*words, name=name)
        assert OmegaConf.to_yaml(mine) == OmegaConf.to_yaml(theirs) and OmegaConf.is_struct(mine)
        assert OmegaConf.get_type(mine.learner) is OmegaConf.get_type(theirs.learner)
        mine.learner.gamma = 0.123  # nobody else's


def test_packaged_files_are_read_once(monkeypatch):
    words = hydra_overrides(["learner=mappo"])
    theirs = OmegaConf.to_yaml(composing.composed("quickstart", words))
    monkeypatch.setattr(composing, "READ_PACKAGED", None)
    assert composing.LOADED and OmegaConf.to_yaml(composing.composed("quickstart", words)) == theirs


@pytest.mark.parametrize(
    "word",
    [
        "learner.gama=1",
        "learner=grop",
        "learner.gamma=much",
        "+learner.gamma=1",
        "runner.instruction=Now, answer",
        "a.b=[c",
    ],
)
def test_what_hydra_refuses_is_refused_in_its_words(word):
    with pytest.raises(HydraException) as theirs:
        composing.composed("quickstart", hydra_overrides([word]))
    with pytest.raises(type(theirs.value)) as mine:
        composing.compose(word)
    assert str(mine.value) == str(theirs.value)


def test_an_option_that_was_registered_again_is_another_one(monkeypatch):
    monkeypatch.setattr(LEARNERS, "_entries", dict(LEARNERS._entries))
    for default in (0.1, 0.2):

        class Again(GRPO):
            @dataclass
            class Config(GRPO.Config):
                gamma: float = default

        register_learner("composed_again")(Again)
        assert composing.compose("learner=composed_again").learner.gamma == default
