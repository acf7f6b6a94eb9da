"""Runs on verl's vLLM servers, and what their tests ask of them."""

import asyncio
import glob
import os
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import ray

from tests.builders import Live

SETTINGS = (
    "hardware=cpu_vllm",
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.free_cache_engine=true",  # servers are put to sleep and woken, which does nothing on a CPU
    "controller.old_log_probs=trainer",
    "trainer.logger=[]",
)
CLOSE, CLOSE_ON_AVERAGE = 5e-5, 1e-6
"""Largest and mean difference of a token's log-prob in server and trainer, in full precision. One token in several
thousand reaches 1e-5."""
POLICIES = ("alice", "carol")


@contextmanager
def running(config, first_sync=True):
    """A run whose servers have their first weights; everything it started has ended afterwards."""
    from marl.build import build
    from marl.cluster.session import session
    from marl.preflight.prepare import prepare

    setup, loop = prepare(config), asyncio.new_event_loop()
    with ExitStack() as cleanup:
        cleanup.callback(loop.close)
        cleanup.enter_context(session(setup))
        trainer = loop.run_until_complete(build(setup, cleanup))
        if first_sync:
            loop.run_until_complete(trainer.sync_weights())
        yield Live(trainer, loop)
        engines = [child for child in psutil.Process().children(recursive=True) if child.name().startswith("VLLM")]
    psutil.wait_procs(engines, timeout=30)


def differences(live, server, policy, samples=4):
    """Gaps between the log-probs of a policy's server and those of a policy's trainer, token by token."""
    rows = live.trainer.batch_of(live.episodes(samples)).rows[server]
    outputs = live.wait(live.trainer.policies[policy].compute_log_prob(rows))
    answers = rows["turn_index"].values() >= 0
    return (outputs["log_probs"].values() - rows["rollout_log_probs"].values())[answers].abs()


def matrix(live):
    """The largest difference between every policy's server and every policy's trainer."""
    return {(a, b): float(differences(live, a, b).max()) for a in POLICIES for b in POLICIES}


def learn(live, policy):
    """Train one policy alone, without giving its weights to its servers."""
    trainer, episodes = live.trainer, live.episodes()
    batch = trainer.batch_of(episodes)
    live.wait(trainer.log_probs(batch))
    trainer.learner.assign_credit(batch)
    live.wait(trainer.policies[policy].update_actor(batch.rows[policy]))


def sync(live, policy):
    live.wait(live.trainer.policies[policy].sync_weights(live.trainer.step_number))


def ask(live, agent="alice", **settings):
    """One request to a policy's server."""
    return live.wait(answer(live, agent, **settings))


def ask_together(live, requests, agent="alice"):
    """All of these requests at once."""

    async def answers():
        return await asyncio.gather(*(answer(live, agent, **settings) for settings in requests))

    return live.wait(answers())


async def answer(live, agent, prompt=None, **params):
    client = live.trainer.controller.clients[agent]
    prompt = prompt or client.encoder.encode([{"role": "user", "content": "you have 3"}])
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 12, "logprobs": True} | params
    return await client.server.generate(request_id="s", prompt_ids=prompt, sampling_params=given)


def process_of(live, policy, index=0):
    """A server's process; the engine's processes are its children."""
    server = live.trainer.policies[policy].servers.server_handles[index]
    return psutil.Process(ray.get(server.__ray_call__.remote(lambda self: os.getpid())))


def engine_of(live, policy):
    children = process_of(live, policy).children(recursive=True)
    return next(child for child in children if "EngineCor" in " ".join([child.name(), *child.cmdline()]))


def abandoned():
    """Segments of engines and weight syncs in /dev/shm that no process uses, as another run's engines would."""
    used = "".join(maps_of(process) for process in glob.glob("/proc/[0-9]*/maps"))
    segments = (path for name in ("psm_*", "vllm_*", "verl_weights_*") for path in glob.glob(f"/dev/shm/{name}"))
    return {path for path in segments if path not in used}


def maps_of(process):
    with suppress(OSError):
        return Path(process).read_text()
    return ""


def servers_compute_what_trainers_compute(live, steps, record_property):
    """Both policies' log-probs, and the version of their turns, after each sync."""
    for _ in range(steps):
        metrics = live.step()
        largest = [value for key, value in metrics.items() if key.endswith("log_prob_gap_max")]
        mean = [value for key, value in metrics.items() if key.endswith("log_prob_gap_mean")]
        assert len(largest) == len(mean) == 2
        record_property("gaps", (max(largest), max(mean)))
        assert max(largest) <= CLOSE and max(mean) <= CLOSE_ON_AVERAGE
    versions = {turn.version for episode in live.episodes() for turn in episode.turns}
    assert versions == {live.trainer.step_number}


def answers_follow_a_policys_own_weights(live):
    """Alice's answers change with a sync of hers alone, and carol's never."""
    for _ in range(2):
        learn(live, "alice")
    behind = matrix(live)
    assert behind["alice", "alice"] > 1e-3, "alice is served with her old weights"
    assert behind["carol", "carol"] <= CLOSE
    sync(live, "alice")
    found = matrix(live)
    assert max(found["alice", "alice"], found["carol", "carol"]) <= CLOSE
    assert min(found["alice", "carol"], found["carol", "alice"]) > 1e-2
