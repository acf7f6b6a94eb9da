"""A team of three model families, one of which sees a sliding window: they debate and learn together, and every setting of
``actor_rollout_ref`` can be a policy's own."""

import pytest
import torch

from marl.main import run
from marl.rollout.attention import ATTENTION, NEAR_ATTENTION
from tests import families
from tests.families import AGENTS

STEPS, AFTER, LIFT = 25, 0.85, 0.35
"""With seed 0 it goes from .42 to .93 in 25 steps."""


@pytest.fixture
def team(tmp_path):
    return lambda **options: families.make(tmp_path / "team", **options)


@pytest.fixture
def learn(compose_config, team, tmp_path):
    """Accuracy of the second round before and after a short training."""

    def learn(seed, *overrides):
        config = compose_config(
            *team(steps=200, seed=seed),
            f"trainer.default_local_dir={tmp_path}/run",
            "resources.one_process=true",
            f"trainer.total_training_steps={STEPS}",
            *overrides,
            name="split_information",
        )
        trainer = run(config)
        assert trainer.log_prob_gap_max <= 2e-5, "every server's log-probs are its trainer's"
        history = trainer.history
        return history[min(history)]["accuracy/round_2"], history[max(history)]["accuracy/round_2"]

    return learn


def learned(before, after):
    return after >= AFTER and after - before >= LIFT


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_three_families_learn_to_debate(learn, seed):
    before, after = learn(seed)
    assert learned(before, after), f"{before:.3f} -> {after:.3f}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_one_family_that_does_not_learn_the_team_does_not(learn):
    before, after = learn(0, "+policies.carol.actor.optim.lr=1e-12")
    assert not learned(before, after), f"{before:.3f} -> {after:.3f}"


OWN = {
    "alice": {"actor.optim.lr": 2e-4, "rollout.temperature": 0.7},
    "carol": {"actor.optim.lr": 3e-3, "actor.ppo_epochs": 2, "actor.use_kl_loss": "true", "actor.kl_loss_coef": 0.3},
    "bob": {
        "actor.ppo_mini_batch_size": 2, "actor.optim.clip_grad": 0.01, "rollout.max_num_seqs": 5,
        "rollout.custom.exact": "false",
    },
}  # fmt: skip
"""Settings that each policy has for itself; the others keep the run's."""


class Record:
    """The acts of a policy's trainer and server: rates, gradients and rows of its updates, requests and their number at once."""

    def __init__(self, group):
        engine, self.server = group.workers.worker.actor.engine, group.servers.server_handles[0]._target
        self.rates, self.norms, self.rows, self.temperatures, self.at_once = [], [], [], set(), 0
        train, step = engine.train_batch, self.server.engine.step

        def trained(data, *rest, **options):
            self.rows.append(len(data))
            return train(data, *rest, **options)

        def decoded():
            ended, rows = step(), self.server.engine.rows
            self.temperatures |= {draft.request.temperature for draft in [*ended, *rows]}
            self.at_once = max(self.at_once, len(rows))
            return ended

        def stepped(optimizer, *_):
            (settings,) = optimizer.param_groups
            self.rates.append(settings["lr"])
            self.norms.append(torch.stack([p.grad.to_local().norm() for p in settings["params"]]).norm().item())

        engine.train_batch, self.server.engine.step = trained, decoded
        engine.optimizer.register_step_pre_hook(stepped)


@pytest.mark.slow
def test_settings_of_a_policy_are_what_its_workers_did(alone, team):
    words = [f"+policies.{name}.{key}={value}" for name, own in OWN.items() for key, value in own.items()]
    run_wide = (
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.entropy_coeff=10",  # a gradient, whatever these models answer
        "+actor_rollout_ref.rollout.custom.exact=true",
    )
    live = alone(*team(steps=1, train=8, test=8), *run_wide, *words, "controller.pack_turns=false")
    did = {name: Record(live.trainer.policies[name]) for name in AGENTS}
    metrics = live.step()
    alice, carol, bob = did["alice"], did["carol"], did["bob"]
    assert (alice.rates, carol.rates, bob.rates) == ([2e-4], [3e-3] * 2, [1e-3] * 2)
    assert (alice.rows, carol.rows, bob.rows) == ([32], [32] * 2, [16] * 2)
    assert max(bob.norms) == pytest.approx(0.01, rel=1e-3) and min(alice.norms + carol.norms) > 0.02
    assert (alice.temperatures, carol.temperatures, bob.temperatures) == ({0.7}, {1.0}, {1.0})
    assert bob.at_once == 5 < min(alice.at_once, carol.at_once)
    attention = [d.server.model.config._attn_implementation for d in (alice, carol, bob)]
    assert attention == [ATTENTION, ATTENTION, NEAR_ATTENTION]
    penalties = {key: value for key, value in metrics.items() if "kl_coef" in key}
    assert penalties == {"agent/carol/kl_coef": 0.3}
