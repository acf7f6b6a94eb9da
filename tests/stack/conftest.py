"""One Ray session for all, and one small run that tests can hold in their hands."""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass
class Live:
    """A trainer whose workers and servers are up. ``wait`` runs a coroutine on its loop."""

    trainer: Any
    loop: asyncio.AbstractEventLoop

    def wait(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def tasks(self) -> list:
        return self.trainer.validation[:4]

    def episodes(self, samples: int = 4) -> list:
        collection = self.wait(self.trainer.controller.collect(self.tasks(), samples, self.trainer.step_number))
        return self.wait(self.trainer.controller.score(collection.episodes, self.trainer.step_number))

    def step(self) -> dict:
        self.trainer.step_number += 1
        return self.wait(self.trainer.step(next(iter(self.trainer.loader))))


SMALL = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "trainer.logger=[]")


@pytest.fixture(scope="session")
def cluster(compose_config):
    from marl.main import ray_session

    with ray_session(compose_config("ray_kwargs.ray_init.num_cpus=8")):
        yield


@pytest.fixture(scope="session")
def live(cluster, compose_config, cold_assets, tmp_path_factory):
    from marl.main import build, prepare

    folder = tmp_path_factory.mktemp("live")
    overrides = (f"assets={cold_assets}", f"trainer.default_local_dir={folder}", "resources.placement=colocated")
    config = prepare(compose_config(*overrides, *SMALL))
    loop = asyncio.new_event_loop()
    with ExitStack() as cleanup:
        trainer = loop.run_until_complete(build(config, cleanup))
        loop.run_until_complete(trainer.sync_weights())
        yield Live(trainer, loop)
    loop.close()


@pytest.fixture
def alone(compose_config, cold_assets, tmp_path):
    """Start runs in this process, without Ray: the same parts, up in two seconds."""
    from marl.main import build, prepare, session

    with ExitStack() as cleanup:

        def start(*overrides: str, **options: Any) -> Live:
            small = (f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", *SMALL)
            config = prepare(compose_config(*small, "resources.one_process=true", *overrides, **options))
            cleanup.enter_context(session(config))
            loop = asyncio.new_event_loop()
            cleanup.callback(loop.close)
            trainer = loop.run_until_complete(build(config, cleanup))
            loop.run_until_complete(trainer.sync_weights())
            return Live(trainer, loop)

        yield start
