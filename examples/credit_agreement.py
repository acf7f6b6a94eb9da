"""Rank correlation over turns of each credit scheme with replay credit, on the quick start's task.

    python examples/credit_agreement.py --steps 30 --alternatives 16 --finishes 2 learner.std=false

Replay credit estimates a turn's effect on the team's return from its alternatives; every other scheme is a cheaper
estimate. Credits are as the run's learner computes them: a learner without a critic compares all schemes, one with
critics only its own. Arguments with ``=`` are configuration keys.
"""

import argparse
import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from torch import Tensor

from marl.batch.joint import JointBatch
from marl.build import build
from marl.cluster.session import session
from marl.config.overrides import hydra_overrides
from marl.controller.alternative_rollouts import AlternativeRollouts
from marl.learners import CREDITS
from marl.learners.replay_credit import ReplayCredit, ReturnOf
from marl.preflight.prepare import prepare
from marl.quickstart.assets import prepared
from marl.run_setup import make_learner
from marl.types import Episode

CREDITS_COMPARED: dict[str, dict[str, Any]] = {
    "own": {},
    "team": {},
    "team of=final": {"of": "final"},
    "team of=answer": {"of": "answer"},
    "mixed": {},
    "joint": {},
    "influence": {},
    "influence gamma=1": {"gamma": 1.0},
    "shapley": {},
    "counterfactual": {},
}


def spearman(x_N: Tensor, y_N: Tensor) -> float:
    """Correlation of ranks; ties share the mean of theirs. NaN where one of the two is constant."""
    ranks = torch.stack([mean_ranks(x_N), mean_ranks(y_N)])
    return float(torch.corrcoef(ranks)[0, 1])


def mean_ranks(x_N: Tensor) -> Tensor:
    _, index_N, count_G = x_N.unique(return_inverse=True, return_counts=True)
    return (count_G.cumsum(0) - (count_G - 1) / 2).double()[index_N]


@contextmanager
def started(overrides: Sequence[str], loop: Any) -> Iterator[Any]:
    """A trainer in this process."""
    words = ["resources.one_process=true", "trainer.logger=[]", *overrides]
    with initialize_config_module("marl.configs", version_base="1.3"):
        config = compose("quickstart", overrides=hydra_overrides(words))
    setup = prepared(config, prepare)
    with session(setup), ExitStack() as cleanup:
        trainer = loop.run_until_complete(build(setup, cleanup))
        loop.run_until_complete(trainer.sync_weights())
        yield trainer


def advantages(trainer: Any, episodes: Sequence[Episode], credit: str, options: dict[str, Any]) -> list[float]:
    """Every turn's advantage under a credit scheme, as the run's learner computes it."""
    config = OmegaConf.create(trainer.config)
    config.credit = OmegaConf.merge(OmegaConf.structured(CREDITS.get(credit).Config(name=credit)), options)
    batch = trainer.batch_of(episodes)
    learner = make_learner(config)
    learner.credit.add_evidence(batch, episodes)
    learner.assign_credit(batch)
    return of_turns(batch)


def own_advantages(trainer: Any, loop: Any, episodes: Sequence[Episode]) -> list[float]:
    """Every turn's advantage under the run's own learner and credit, critics included."""
    batch = trainer.batch_of(episodes)
    loop.run_until_complete(trainer.critics.value(episodes, batch))
    if trainer.learner.fits_first:
        loop.run_until_complete(trainer.fit_critics(batch))
    trainer.learner.assign_credit(batch)
    return of_turns(batch)


def of_turns(batch: JointBatch) -> list[float]:
    found: dict[int, float] = {}
    for rows in batch.rows.values():
        for index, own in zip(rows["turn_index"].unbind(), rows["advantages"].unbind(), strict=True):
            found.update(zip(index.tolist(), own.tolist(), strict=True))
    return [found[cell] for cells in batch.cells for cell in cells]


def measure(trainer: Any, loop: Any, given: argparse.Namespace) -> tuple[list[tuple[str, list[float]]], list[int]]:
    """Each credit's rank correlation with replay credit over all turns and round by round, and how many turns those are."""
    controller, step = trainer.controller, trainer.step_number + 1
    collection = loop.run_until_complete(controller.collect(trainer.validation[: given.tasks], given.samples, step))
    episodes = loop.run_until_complete(controller.score(collection.episodes, step))
    compared = CREDITS_COMPARED if trainer.learner.critics is None else {}
    by_credit = {name: advantages(trainer, episodes, name.split()[0], own) for name, own in compared.items()}
    by_credit[f"{trainer.config.learner.name}, {trainer.config.credit.name}"] = own_advantages(trainer, loop, episodes)
    replayed = [episode for episode in episodes if episode.sample < given.replayed]
    plan = ReplayCredit.Config(
        "replay",
        alternatives=given.alternatives,
        finishes=given.finishes,
        of=ReturnOf[given.of],
        train_alternatives=False,
    )
    rollouts = AlternativeRollouts(controller, step, lambda turn: True)
    print(loop.run_until_complete(ReplayCredit(plan).gather(replayed, rollouts)).metrics, flush=True)
    turns = [turn for episode in episodes for turn in episode.turns]
    tried = [i for i, turn in enumerate(turns) if turn.outcomes]
    truth = torch.tensor([outcome_gain(turns[i].outcomes) for i in tried])
    rounds = torch.tensor([turns[i].round for i in tried])
    parts = [rounds > 0, *(rounds == r for r in sorted(set(rounds.tolist())))]
    table = []
    for name, values in by_credit.items():
        own = torch.tensor(values)[tried]
        table.append((name, [spearman(own[part], truth[part]) for part in parts]))
    return table, [int(part.sum()) for part in parts]


def outcome_gain(outcomes: Sequence[float]) -> float:
    return outcomes[0] - sum(outcomes[1:]) / len(outcomes[1:])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=0, help="of training before it")
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="episodes of a task, which learners compare")
    parser.add_argument("--replayed", type=int, default=2, help="of them, so many are replayed")
    parser.add_argument("--alternatives", type=int, default=16)
    parser.add_argument("--finishes", type=int, default=2)
    parser.add_argument("--of", choices=[of.name for of in ReturnOf], default="final")
    given, overrides = parser.parse_known_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    loop = asyncio.new_event_loop()
    with started(overrides, loop) as trainer:
        batches = iter(trainer.loader)
        for _ in range(given.steps):
            trainer.step_number += 1
            loop.run_until_complete(trainer.step(next(batches)))
        table, turns = measure(trainer, loop, given)
    loop.close()
    columns = ["all", *(f"round {r}" for r in range(1, len(turns)))]
    print(f"{'Spearman, ' + str(given.steps) + ' steps':24}" + "".join(f"{column:>9}" for column in columns))
    for name, numbers in table:
        print(f"{name:24}" + "".join(f"{number:9.3f}" for number in numbers))
    print(f"{'turns':24}" + "".join(f"{count:9}" for count in turns))


if __name__ == "__main__":
    main()
