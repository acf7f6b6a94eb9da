"""Episodes in processes of their own: the same episodes, counted by the driver, and ends that name who failed."""

import asyncio
import json
import os
import signal
import time
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import psutil
import pytest
import ray
from omegaconf import OmegaConf, open_dict

from examples import bench_controller
from marl.build import start_controller
from marl.cluster.failures import GroupFailed
from marl.controller.collection import EpisodesFailed
from marl.controller.episode_workers import EpisodeWorkers, SpreadController, spawn
from marl.run_setup import Setup
from marl.runners import RUNNERS, Decide, Runner, decide, register_runner
from marl.utils.deadlines import DeadlinePassed, interrupted_after
from tests.judge import KEY, Judge, completion, serving

REWARDS = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] in BAD:
        HOW
    return {"score": float(len(solution_str) % 3 == 0), "pid": os.getpid(), "parent": os.getppid()}
"""


@register_runner("moody")
class Moody(Runner):
    """Fails on odd samples; or the last episode raises, ends its process or never ends."""

    @dataclass
    class Config(Runner.Config):
        mood: str = "odd"
        decide: Decide = Decide.accuracy

    async def run(self, episode):
        turn = await episode.agents[0].act(episode.agents[0].prompt)
        mood, last = self.config.mood, episode.record.sample == 3 and episode.task.id.endswith("/3")
        if mood == "odd" and episode.record.sample % 2:
            raise RuntimeError("odd samples make me sad")
        if mood == "policy" and last:
            raise GroupFailed("policy 'alice' died")
        if mood == "exit" and last:
            os.write(1, b"I cannot go on\n")
            os._exit(7)
        if mood in ("policy", "exit") or (mood == "sleeps" and last):
            await asyncio.sleep(1000)
        return await decide(self.config.decide, [turn], episode)


class Lasting(EpisodeWorkers):
    """Workers that the next test makes others of."""

    def stop(self):
        ray.get([actor.stop.remote() for actor in self.actors], timeout=20)


@pytest.fixture(scope="module")
def lasting(cluster):
    actors = spawn(2, uuid.uuid4().hex[:8])
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def spread(live, lasting, monkeypatch):
    """``with spread(2, "key=value", …) as controller``: the live run's controller with so many workers."""

    @contextmanager
    def spread(workers, *overrides, runner=None, rewards=None, fresh=False):
        trainer = live.trainer
        config = OmegaConf.create(trainer.config)
        OmegaConf.set_struct(config, False)  # policies' own settings are new keys
        config = OmegaConf.merge(config, OmegaConf.from_dotlist([*overrides]))
        with open_dict(config):
            config.controller.num_workers = workers
            if runner:
                config.runner = OmegaConf.structured(runner)
            if rewards:
                config.reward.custom_reward_function.path = str(rewards)
        tokenizers = {name: client.tokenizer for name, client in trainer.controller.clients.items()}
        before = trainer.controller
        with ExitStack() as cleanup, monkeypatch.context() as patched:
            if not fresh:
                patched.setattr("marl.build.spawn", lambda count, run_id: lasting[:count])
                patched.setattr("marl.build.EpisodeWorkers", Lasting)
            start = start_controller(Setup.of(config), trainer.policies, tokenizers, uuid.uuid4().hex[:8], cleanup)
            trainer.controller = live.wait(start)
            trainer.controller.accuracy.load_state_dict(before.accuracy.state_dict())
            try:
                yield trainer.controller
            finally:
                trainer.controller = before

    return spread


def played(live, samples=4, validate=False):
    trainer = live.trainer
    collection = live.wait(trainer.controller.collect(live.tasks(), samples, trainer.step_number, validate))
    return live.wait(trainer.controller.score(collection.episodes, trainer.step_number)), collection


def contents(episodes):
    """Everything that an episode holds, but for its task's functions."""
    return [asdict(episode) | {"task": episode.task.id} for episode in episodes]


def gone(pids):
    deadline = time.monotonic() + 20
    while left := [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


TIMED = ("timing_s/", "perf/", "/mfu", "/worker_seconds")


@pytest.mark.slow
def test_workers_go_on_from_each_others_ledgers(live, spread, tmp_path):
    """Two workers play a step; the driver alone, then two others, find every turn and score, and write none."""

    def records():
        return [
            len(line) for path in tmp_path.glob("ledger/*/*.jsonl") for line in path.read_bytes().splitlines() if line
        ]

    kept = ("controller.ledger=true", f"trainer.default_local_dir={tmp_path}")
    with spread(2, *kept):
        first, _ = played(live)
    assert sum(path.stat().st_size > 0 for path in tmp_path.glob("ledger/*/*.jsonl")) == 2
    written = sorted(records())
    for workers in (0, 2):
        with spread(workers, *kept):
            again, _ = played(live)
        assert contents(again) == contents(first) and sorted(records()) == written


@pytest.mark.slow
def test_episodes_metrics_and_weights_are_the_same_whoever_plays(live, spread):
    """The driver or two workers, to the last bit: training samples, a validation, and a step with its metrics."""
    trainer = live.trainer
    live.step()
    live.wait(trainer.save())
    step, folder = trainer.step_number, trainer.folder / f"global_step_{trainer.step_number}"
    state, batch = trainer.controller.accuracy.state_dict(), next(iter(trainer.loader))

    async def back():
        await asyncio.gather(*(group.load(folder / name / "actor") for name, group in trainer.policies.items()))
        await trainer.sync_weights()

    results = []
    for workers in (0, 2):
        with spread(workers) as controller:
            assert isinstance(controller, SpreadController) == (workers > 0)
            controller.accuracy.load_state_dict(state)
            # one task's samples are split between two workers, and sizes are odd
            tasks = live.tasks()[:3]
            collection = live.wait(controller.collect(tasks, 5, step))
            assert [(e.task.id, e.sample) for e in collection.episodes] == [(t.id, s) for t in tasks for s in range(5)]
            assert all(episode.task is tasks[i // 5] for i, episode in enumerate(collection.episodes))
            trained = contents(live.wait(controller.score(collection.episodes, step)))
            validated = contents(played(live, validate=True)[0])
            metrics = live.wait(trainer.step(batch))
            metrics = {key: value for key, value in metrics.items() if not any(part in key for part in TIMED)}
            results.append((trained, validated, metrics, controller.accuracy.state_dict()))
        live.wait(back())
    turns = [turn for episode in results[0][0] for turn in episode["turns"]]
    assert all(turn["log_probs"] and turn["score"] for turn in turns) and len(results[0][2]) > 50
    for mine, theirs in zip(*results, strict=True):
        assert mine == theirs


@dataclass
class ByAccuracy(RUNNERS.get("debate").Config):
    name: str = "debate"
    decide: Decide = Decide.accuracy
    instruction: str = ""


@pytest.mark.slow
def test_the_running_accuracy_is_the_drivers(live, spread):
    """The agent that was right more often in training decides, whoever plays; the scores of workers change nothing in it."""
    answers = {}
    for trusted, other in (("alice", "carol"), ("carol", "alice")):
        for workers in (0, 2):
            with spread(workers, runner=ByAccuracy()) as controller:
                given = {"right": {trusted: 90, other: 0}, "given": {trusted: 90, other: 90}}
                controller.accuracy.load_state_dict(given)
                episodes, _ = played(live, samples=8)
                assert controller.accuracy.state_dict() == given
            answers[trusted, workers] = [episode.answer for episode in episodes]
            last = [episode.trajectory(trusted)[-1] for episode in episodes]
            said = [episode.task.extract(turn.text) for episode, turn in zip(episodes, last, strict=True)]
            assert all(answer == text for answer, text in zip(answers[trusted, workers], said, strict=True) if text)
    assert answers["alice", 0] == answers["alice", 2] != answers["carol", 2] == answers["carol", 0]


@pytest.mark.slow
def test_failures_are_counted_over_the_whole_collection(live, spread):
    """Odd samples fail: 8 of 16, which no worker alone may judge; and in the order of the episodes."""
    with spread(2, "controller.max_error_rate=0.5", runner=Moody.Config(name="moody")) as controller:
        episodes, collection = played(live)
        assert len(episodes) == 8 and [type(error) for error in collection.failures] == [RuntimeError] * 8
        assert "odd samples make me sad" in str(collection.failures[0])
        assert any("in run" in note for note in collection.failures[0].__notes__)
        controller.max_error_rate = 0.4
        with pytest.raises(EpisodesFailed, match="playing episodes failed for 8 of 16 .*RuntimeError: odd samples"):
            played(live)


def rewards_that(tmp_path, how, bad):
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS.replace("HOW", how).replace("BAD", repr(bad)))
    return path


@pytest.mark.slow
def test_rewards_in_workers_have_their_processes_and_their_failures_are_summed(live, spread, tmp_path):
    """The texts of two of four tasks cannot be judged, one in each worker's half: they score 0, as without workers."""
    tasks = {task.extra["index"]: task for task in live.tasks()}
    first, last = min(tasks), max(tasks)
    rewards = rewards_that(tmp_path, "raise ValueError('no')", (first, last))
    results = []
    for workers in (0, 2):
        with spread(workers, rewards=rewards) as controller:
            episodes, collection = played(live)
            assert len(collection.episodes) == len(episodes) == 16
            turns = [turn for episode in episodes for turn in episode.turns]
            bad = [turn.scored.failure is not None for turn in turns]
            assert sum(bad) == 32 and {
                turn.scored.value for turn, is_bad in zip(turns, bad, strict=True) if is_bad
            } == {0.0}
            results.append((controller.reward.metrics(), bad))
            assert not any(controller.reward.metrics().values()), "counted once"
            scores = [turn.score.extra for turn in turns if turn.score.failure is None]
            pids = {score["pid"] for score in scores}
            if workers:
                assert {score["parent"] for score in scores} == set(controller.workers.pids)
        gone(pids)
    assert results[0] == results[1] and results[0][0]["reward/errors"] == 32.0
    said = "the reward function failed for 32 of 64 texts .*RewardError.*ValueError: no"
    for workers in (0, 2):
        with (
            spread(workers, "controller.max_error_rate=0.4", rewards=rewards),
            pytest.raises(EpisodesFailed, match=said),
        ):
            played(live)


@pytest.mark.slow
def test_a_reward_that_hangs_costs_its_own_episodes_and_ends_with_its_worker(live, spread, tmp_path):
    bad = (min(task.extra["index"] for task in live.tasks()),)
    rewards = rewards_that(tmp_path, "time.sleep(1000)", bad)
    with spread(1, "judge.timeout_s=2", "judge.processes=8", rewards=rewards) as controller:
        episodes, _ = played(live)
        failed = {e.task.extra["index"] for e in episodes for turn in e.turns if turn.scored.failure is not None}
        assert len(episodes) == 16 and failed == set(bad) and controller.reward.metrics()["reward/timeouts"] == 16.0
    with spread(1, "judge.timeout_s=100", rewards=rewards, fresh=True) as controller:
        worker = psutil.Process(controller.workers.pids[0])

        async def killed():
            collecting = asyncio.ensure_future(controller.collect(live.tasks(), 4, 1))
            while not (judging := worker.children(recursive=True)):
                await asyncio.sleep(0.1)
            await asyncio.sleep(1)
            worker.kill()
            with pytest.raises(GroupFailed):
                await collecting
            return [child.pid for child in judging]

        gone(live.wait(asyncio.wait_for(killed(), 60)))


def asks(address, **settings):
    fields = {"base_url": address, "model": "m-1", "backoff_s": 0.01} | settings
    return (
        "agents.carol.trainable=false",
        *(f"policies.carol.endpoint.{key}={value}" for key, value in fields.items()),
    )


def echoed(number, body):
    """An answer that the request alone decides; one request in five fails at first."""
    if (place := sum(map(len, map(str, body["messages"]))) + body["seed"]) % 5 == 0 and place not in echoed.failed:
        echoed.failed.add(place)
        return 503, "busy"
    return completion(f"#### {place % 9}")


@pytest.mark.slow
def test_a_server_elsewhere_is_asked_by_all_workers_and_counted_by_the_driver(live, spread):
    results = []
    for workers in (0, 2):
        echoed.failed, judge = set(), Judge(echoed)
        with serving(judge) as address, spread(workers, *asks(address)) as controller:
            episodes, _ = played(live)
            turns = [turn for episode in episodes for turn in episode.turns if turn.agent == "carol"]
            assert len(turns) == 32 and all(turn.text.startswith("####") for turn in turns)
            metrics, requests = controller.metrics(), len(judge.bodies)
            assert metrics["endpoint/carol/requests"] == requests and controller.spent() == {"carol": 7 * 32}
            assert metrics["endpoint/carol/retries"] == len(echoed.failed) == requests - 32 > 0
            assert 0 < metrics["endpoint/carol/seconds"] < 5 and not controller.metrics()["endpoint/carol/requests"]
            results.append([contents(episodes), len(echoed.failed)])
    assert results[0] == results[1]


@pytest.mark.slow
def test_workers_share_what_is_left_of_an_endpoints_budget(live, spread):
    """32 turns of 7 tokens: half as much again is too little for two workers and the driver, and a resumed run knows of them."""
    with serving(Judge()) as address:
        with spread(2, *asks(address, token_budget=3 * 7 * 16)) as controller:
            played(live)
            with pytest.raises(
                GroupFailed, match=r"token_budget=336, and this process its share of what was left, one of 3"
            ):
                played(live)
        with spread(2, *asks(address, token_budget=336)) as controller:
            controller.go_on_from({"carol": 336})
            with pytest.raises(
                GroupFailed, match="has spent 336 tokens of policies.carol.endpoint.token_budget=336; raise it"
            ):
                played(live)


@pytest.mark.slow
def test_an_access_key_that_a_worker_does_not_have_is_named(live, spread, monkeypatch):
    monkeypatch.setenv("OF_THE_DRIVER_ALONE", KEY)
    said = "api_key_env=OF_THE_DRIVER_ALONE: this variable is not set"
    with (
        serving(Judge()) as address,
        spread(1, *asks(address, api_key_env="OF_THE_DRIVER_ALONE")),
        pytest.raises(GroupFailed, match=said) as caught,
    ):
        played(live)
    assert KEY not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mood,said",
    [
        ("policy", "^policy 'alice' died$"),
        ("exit", r"episode worker 1 \(pid \d+\) while playing episodes of step \d+: process episode_worker_.* died"),
    ],
)
def test_a_policy_or_a_worker_that_fails_ends_all_at_once(live, spread, mood, said):
    with spread(2, runner=Moody.Config(name="moody", mood=mood), fresh=mood == "exit") as controller:
        started = time.monotonic()
        with pytest.raises(GroupFailed, match=said) as caught:
            played(live)
        assert time.monotonic() - started < 15
        if mood == "exit":
            assert str(controller.workers.pids[1]) in str(caught.value) and "I cannot go on" in str(caught.value)
    if mood == "exit":
        gone(controller.workers.pids)


@pytest.mark.slow
def test_a_worker_that_does_not_answer_has_a_deadline(live, spread):
    with spread(1, fresh=True) as controller:
        controller.workers.deadline = 3.0
        os.kill(controller.workers.pids[0], signal.SIGSTOP)
        with pytest.raises(
            GroupFailed, match=rf"episode worker 0 \(pid {controller.workers.pids[0]}\) gave no sign of life for 3 s"
        ):
            played(live)
        started = time.monotonic()
    assert time.monotonic() - started < 15
    os.kill(controller.workers.pids[0], signal.SIGKILL)


@pytest.mark.slow
def test_an_episode_that_is_stuck_ends_alone(live, spread):
    overrides = ("controller.episode_timeout_s=3",)
    with spread(2, *overrides, runner=Moody.Config(name="moody", mood="sleeps")):
        episodes, collection = played(live)
    assert len(episodes) == 15 and "sample 3 took longer than controller.episode_timeout_s=3" in str(
        collection.failures[0]
    )


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why(live, spread):
    with (
        pytest.raises(
            GroupFailed, match="an episode worker failed while starting: FileNotFoundError.*/nowhere/rewards.py"
        ),
        spread(1, rewards="/nowhere/rewards.py"),
    ):
        pass


@pytest.mark.slow
def test_what_was_played_by_workers_can_be_resumed_here(live, spread):
    with spread(1) as controller:
        episode = played(live, samples=1)[0][0]
        resumed = live.wait(controller.resume(episode, episode.turns[0], live.trainer.step_number, 1))
        (scored,) = live.wait(controller.score([resumed], live.trainer.step_number))
    assert scored.score is not None and len(scored.turns) == len(episode.turns)


@pytest.mark.slow
def test_settings_of_a_policy_and_of_an_agent_reach_the_workers(live, spread):
    """Only the likeliest token for carol's policy, one token for alice."""
    rollout = live.trainer.policies["carol"].rollout
    before, rollout.top_k = rollout.top_k, 1
    try:
        with spread(1, "agents.alice.max_tokens=1"):
            episodes, _ = played(live)
    finally:
        rollout.top_k = before
    turns = [turn for episode in episodes for turn in episode.turns]
    assert all(set(turn.log_probs) == {0.0} for turn in turns if turn.agent == "carol")
    assert all(len(turn.response_ids) == 1 for turn in turns if turn.agent == "alice")


@pytest.mark.slow
def test_the_bench_of_the_controller(cluster, capsys):
    """Agents speak at the same time: an episode of two rounds takes two turns' time, however many they are."""
    bench_controller.main(
        ["--workers", "0", "1", "--agents", "2", "4", "--tasks", "4", "--samples", "2", "--repeats", "2"]
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    driver, worker, two, four = lines
    assert [driver["workers"], worker["workers"], two["agents"], four["agents"]] == [0, 1, 2, 4]
    assert driver["turns"] == worker["turns"] == 4 * 2 * 2 * 2 and driver["turns_per_second"] > 50
    assert (two["turns"], four["turns"]) == (4, 8)
    assert 0.4 < two["ratio"] < 0.75 and 0.2 < four["ratio"] < 0.5


@pytest.fixture
def sleeps(cluster):
    """A task of Ray's that ends long after the test."""
    asked = ray.remote(num_cpus=0)(lambda: time.sleep(60)).remote()
    yield asked
    ray.cancel(asked, force=True)


def test_a_wait_for_ray_has_a_deadline(sleeps):
    """Ray passes no errors of a signal's handler on, except interrupts."""
    with pytest.raises(DeadlinePassed, match="placing did not end"), interrupted_after(0.5, "placing", "resources.x"):
        ray.get(sleeps, timeout=20)
