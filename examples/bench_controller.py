"""Controller overhead: turns per second with 0, 1 and 2 workers, and with agents that speak simultaneously.

    python examples/bench_controller.py

The controller, its clients, runner and rewards are a run's own; the server is this bench's: it answers every request with
the same tokens, at once or after a while, and any number of them at the same time.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from hydra import compose, initialize_config_module

from marl.build import ServedPolicy, start_controller, tokenizer_of
from marl.cluster.layout import policy_config
from marl.cluster.session import session
from marl.config.overrides import hydra_overrides
from marl.controller.tasks import validation_tasks
from marl.preflight.prepare import prepare
from marl.quickstart.assets import Recipe, ensure
from marl.rollout.servers import CoalescingClient
from marl.run_setup import Setup
from marl.types import Task
from marl.utils.garbage import freeze_gc


class InstantServer:
    """The waist of the ``hf`` server, and nothing behind it."""

    def __init__(self, tokens: list[int], seconds: float) -> None:
        self.answer = (tokens, [-1.0] * len(tokens), "completed", 1)
        self.seconds = seconds

    async def generate_many(self, requests: Sequence[tuple]) -> list[tuple]:
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return [self.answer] * len(requests)


def prepared(folder: Path, tokens: int, *overrides: str) -> Setup:
    """The quick start's debate with other numbers, of agents that share one policy."""
    words = [
        f"assets={folder}", f"trainer.default_local_dir={folder / 'run'}", "judge.answer_rule=strict",
        "controller.ledger=false",  # the same steps are played again and again
        "agents.alice.policy=both", "agents.carol.policy=both", f"data.max_response_length={tokens}",
        f"data.max_prompt_length={100 + 40 * tokens}", f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={100 + 41 * tokens}", "actor_rollout_ref.rollout.max_num_seqs=4096", *overrides,
    ]  # fmt: skip
    with initialize_config_module("marl.configs", version_base="1.3"):
        return prepare(compose("quickstart", overrides=hydra_overrides(words)))


@contextmanager
def controller_of(setup: Setup, server: Any, loop: asyncio.AbstractEventLoop) -> Iterator[tuple[Any, list[Task]]]:
    """A run's controller before the bench's server, and its tasks."""
    config = setup.config
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    own = policy_config(config, "both", 0, "bench", 1)
    groups = {"both": ServedPolicy(own, CoalescingClient(own, None, servers=[server]))}
    with ExitStack() as cleanup:
        start = start_controller(setup, groups, {"both": tokenizer}, uuid.uuid4().hex[:8], cleanup)
        controller, tasks = loop.run_until_complete(start), validation_tasks(config, tokenizer)
        freeze_gc()  # as a run does
        yield controller, tasks


def turns_a_second(setup: Setup, server: Any, tasks: int, samples: int, repeats: int, loop: Any) -> dict[str, float]:
    """The best of several collections: turns a second, and the driver's CPU time of a turn."""
    best: dict[str, float] = {"turns_per_second": 0.0}
    with controller_of(setup, server, loop) as (controller, rows):
        rows = (rows * (1 + tasks // len(rows)))[:tasks]
        for step in range(repeats + 1):  # the first one fills the encoders' caches
            started, cpu = time.perf_counter(), time.process_time()
            collection = loop.run_until_complete(controller.collect(rows, samples, step))
            episodes = loop.run_until_complete(controller.score(collection.episodes, step))
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
            turns = sum(len(episode.turns) for episode in episodes)
            if step and turns / seconds > best["turns_per_second"]:
                best = {
                    "turns": turns,
                    "turns_per_second": turns / seconds,
                    "driver_cpu_ms_per_turn": 1e3 * cpu / turns,
                }
    return {"workers": setup.config.controller.num_workers, **best}


def at_the_same_time(setup: Setup, server: Any, repeats: int, loop: Any) -> dict[str, float]:
    """The best of several episodes, one at a time: its length, beside the sum of the lengths of its turns."""
    best: dict[str, float] = {}
    with controller_of(setup, server, loop) as (controller, rows):
        for step in range(repeats + 1):
            seconds = timed_turns(controller)
            started = time.perf_counter()
            loop.run_until_complete(controller.collect(rows[:1], 1, step))
            episode = time.perf_counter() - started
            if step and episode < best.get("episode_s", float("inf")):
                best = {"episode_s": episode, "sum_of_turns_s": sum(seconds), "turns": len(seconds)}
    best["ratio"] = best["episode_s"] / best["sum_of_turns_s"]
    return {"agents": len(setup.config.agents), **best}


def timed_turns(controller: Any) -> list[float]:
    """Seconds of every turn that the controller's client takes from now on."""
    client, seconds = controller.clients["both"], []
    act = type(client).act

    async def timed(*arguments: Any, **settings: Any) -> Any:
        started = time.perf_counter()
        turn = await act(client, *arguments, **settings)
        seconds.append(time.perf_counter() - started)
        return turn

    client.act = timed
    return seconds


def show(numbers: dict[str, float]) -> None:
    print(json.dumps(numbers), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--agents", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8, help="of an answer")
    parser.add_argument("--answer-s", type=float, default=0.02)
    given = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        ensure(folder, Recipe("smudged_note", steps=1, batch=4, train_problems=64, test_problems=given.tasks), seed=0)
        setup = prepared(folder, given.tokens)
        with session(setup):
            answer = tokenizer_of(setup.config.actor_rollout_ref.model).encode("4") * given.tokens
            actor = ray.remote(InstantServer).options(num_cpus=0)
            instant, slow = actor.remote(answer, 0.0), actor.remote(answer, given.answer_s)
            for workers in given.workers:
                setup = prepared(folder, given.tokens, f"controller.num_workers={workers}")
                show(turns_a_second(setup, instant, given.tasks, given.samples, given.repeats, loop))
            for agents in given.agents:
                more = [f"+agents.agent_{index}.policy=both" for index in range(2, agents)]
                show(at_the_same_time(prepared(folder, given.tokens, *more), slow, given.repeats, loop))
            for server in (instant, slow):
                ray.kill(server)
    loop.close()


if __name__ == "__main__":
    main()
