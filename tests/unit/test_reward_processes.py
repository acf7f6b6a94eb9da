"""Reward functions in processes: what hangs, dies or fails costs its own answer, by name, and no other."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import timeit
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack

import psutil
import pytest
from omegaconf import OmegaConf

from marl.config.errors import ConfigError
from marl.config.schema import JudgeConfig
from marl.rewards import Reward, RewardError, RewardUnavailable, build_reward, extractor
from marl.rewards.processes import Processes
from marl.types import Task

FUNCTIONS = """
import asyncio, ctypes, os, pathlib, sys, time

with open(pathlib.Path(__file__).with_suffix(".loads"), "a") as log:
    log.write(f"{os.getpid()}\\n")

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(one)

def by_text(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        while True:
            pass
    if solution_str == "hang in C":
        time.sleep(1000)
    if solution_str == "die":
        os._exit(3)
    if solution_str == "segfault":
        ctypes.string_at(0)
    if solution_str == "raise":
        raise Odd(1, 2)
    if solution_str == "exit":
        sys.exit(5)
    if solution_str == "odd":
        return lambda: None
    return {"score": float(solution_str == ground_truth), "pid": os.getpid(), "index": extra_info["index"]}

def with_kwargs(data_source, solution_str, ground_truth, extra_info, bonus):
    return bonus

async def slow(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(1000 if solution_str == "hang" else 0)
    return 0.5
"""


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def built(functions):
    """``built(name, processes=2, timeout_s=…)``: the reward of a configuration that names a custom function."""
    with ExitStack() as cleanup:

        def build(name="by_text", processes=2, timeout_s=20.0, **more):
            judging = OmegaConf.structured(JudgeConfig(processes=processes, timeout_s=timeout_s, **more))
            node = {"path": str(functions), "name": name, "reward_kwargs": {"bonus": 0.75}} if name else {"path": None}
            if name != "with_kwargs":
                node.pop("reward_kwargs", None)
            config = OmegaConf.create({"judge": judging, "reward": {"custom_reward_function": node}})
            return build_reward(config, cleanup)

        yield build


def task(source="x", truth="4"):
    return Task("train/7", [], truth, source, extractor(source), {"index": 7})


def judge(reward, *texts, **options):
    async def all_at_once():
        return await asyncio.gather(*(reward.judge(task(**options), text) for text in texts), return_exceptions=True)

    return asyncio.run(all_at_once())


def workers():
    return {child.pid for child in multiprocessing.active_children() if "pebble" in child.name}


def test_a_function_is_loaded_once_in_each_process_and_judges_there(built, functions):
    scores = judge(built(), *(["4"] * 30), "5")
    pids = {score.extra["pid"] for score in scores}
    assert [score.value for score in scores] == [1.0] * 30 + [0.0] and scores[0].extra["index"] == 7
    assert os.getpid() not in pids and 1 <= len(pids) <= 2
    loads = [int(pid) for pid in functions.with_suffix(".loads").read_text().split()]
    assert len(loads) == len(set(loads)) and {*pids, os.getpid()} <= set(loads)


@pytest.mark.parametrize(
    "text,said,kind",
    [
        ("hang", "task train/7: it took longer than judge.timeout_s=2 s", "timeouts"),
        pytest.param("hang in C", "judge.timeout_s=2 s", "timeouts", marks=pytest.mark.slow),
        ("die", "task train/7: its process died with exit code 3", "deaths"),
        ("segfault", f"task train/7: its process died with exit code {-signal.SIGSEGV}", "deaths"),
        ("raise", r"task train/7.*: Odd: 1 \(.*functions.py, line 22\)", "errors"),
        ("exit", "task train/7: SystemExit: 5", "errors"),
        ("odd", "task train/7: .*pickle", "errors"),
    ],
)
def test_failures_are_named_and_counted_and_others_continue(built, text, said, kind):
    reward = built(timeout_s=2.0)
    results = judge(reward, *["4"] * 5, text, *["4"] * 5)
    failed = results.pop(5)
    assert [score.value for score in results] == [1.0] * 10
    with pytest.raises(RewardError, match=said):
        raise failed
    metrics = reward.metrics()
    assert {key: count for key, count in metrics.items() if count} == {f"reward/{kind}": 1.0}
    assert not any(reward.metrics().values()) and len(metrics) == 6


@pytest.mark.slow
def test_every_crash_is_reported_and_the_pool_survives(built):
    results = judge(built(), *["die"] * 3, "4", *["die"] * 3)
    assert [type(result) for result in results[:3] + results[4:]] == [RewardError] * 6
    assert results[3].value == 1.0


def test_a_text_whose_process_was_killed_by_the_machine_is_judged_again(tmp_path):
    died = tmp_path / "died"
    once = f"import os, pathlib; p = pathlib.Path({str(died)!r}); p.exists() or (p.touch(), os._exit(9))"

    async def run():
        processes = Processes(1, timeout_s=60.0)
        try:
            return await processes.run(timeit.timeit, {"stmt": once, "number": 1})
        finally:
            processes.stop()

    assert asyncio.run(run()) > 0 and died.exists()


def test_an_unavailable_pool_is_an_infrastructure_failure(monkeypatch):
    async def broken(*_):
        raise BrokenProcessPool("no memory")

    processes = Processes(1, timeout_s=20.0)
    monkeypatch.setattr(processes, "_ask", broken)
    monkeypatch.setattr(processes, "_running", lambda: None)
    monkeypatch.setattr(processes, "_drop", lambda pool: None)

    async def compute_score(**_):
        return await processes.run(len, {})

    with pytest.raises(RewardUnavailable, match="task train/7.*cannot be started: no memory"):
        asyncio.run(Reward(compute_score).judge_or_fail(task(), "4", 0.0))


@pytest.mark.parametrize("noticed_s", [0.0, 0.5])
def test_a_pool_whose_processes_died_between_two_calls_is_replaced(noticed_s):
    async def run():
        processes = Processes(1, timeout_s=20.0)
        pid = await processes.run(os.getpid, {})
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(noticed_s)
        again = await processes.run(os.getpid, {})
        processes.stop()
        return pid, again

    pid, again = asyncio.run(run())
    assert pid != again


def test_an_episode_that_is_given_up_frees_its_process(built):
    async def run(reward):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await reward.judge(task(), "hang")
        return await asyncio.wait_for(reward.judge(task(), "4"), 10)

    assert asyncio.run(run(built(processes=1, timeout_s=100.0))).value == 1.0


def test_processes_start_when_they_are_needed_and_end_with_the_run(functions):
    config = {
        "judge": OmegaConf.structured(JudgeConfig),
        "reward": {"custom_reward_function": {"path": str(functions), "name": "by_text"}},
    }
    with ExitStack() as cleanup:
        reward = build_reward(OmegaConf.create(config), cleanup)
        assert not workers()
        assert judge(reward, "4")[0].value == 1.0
        assert len(started := workers()) == 2
    assert not workers() and not any(psutil.pid_exists(pid) for pid in started)


def test_string_rules_start_no_process(built):
    reward = built(name=None)
    assert judge(reward, "#### 4", source="openai/gsm8k")[0].value == 1.0
    assert judge(reward, "#### 4", source="marl/smudged_note")[0].value == 1.0
    assert judge(reward, r"\boxed{4}", r"none", source="aime_2024")[0].value == 1.0
    assert not workers()


def test_without_processes_a_function_runs_in_the_driver(built):
    reward = built(processes=0)
    assert judge(reward, "4")[0].extra["pid"] == os.getpid()
    with pytest.raises(RewardError, match="task train/7.*: Odd: 1"):
        raise judge(reward, "raise")[0]
    with pytest.raises(RewardError, match="task train/7.*: SystemExit: 5"):
        raise judge(reward, "exit")[0]
    assert not workers() and reward.metrics()["reward/errors"] == 2.0


def test_an_async_function_has_a_deadline(built):
    reward = built("slow", timeout_s=0.3)
    hung, judged = judge(reward, "hang", "4")
    assert judged.value == 0.5 and not workers()
    with pytest.raises(RewardError, match="train/7: it took longer than judge.timeout_s=0.3 s"):
        raise hung
    assert reward.metrics()["reward/timeouts"] == 1.0


@pytest.mark.parametrize("processes", [0, 1])
def test_reward_kwargs_reach_the_function(built, processes):
    assert judge(built("with_kwargs", processes), "4")[0].value == 0.75


def test_a_function_that_is_not_there_is_named(built):
    with pytest.raises(ConfigError, match=r"custom_reward_function.name=by_txt: .*Did you mean 'by_text'"):
        built("by_txt")


@pytest.mark.slow
def test_loading_a_file_is_not_in_the_deadline_of_a_text(built, functions):
    slow = "import multiprocessing, time\nif multiprocessing.parent_process() is not None: time.sleep(2.5)\n"
    functions.write_text(slow + FUNCTIONS)
    assert judge(built(timeout_s=1.5), "4")[0].value == 1.0


@pytest.mark.parametrize("key", ["reward.custom_reward_function", "custom_reward_function"])
def test_verls_key_and_its_older_one(compose_config, tmp_path, key):
    path = tmp_path / "mine.py"
    path.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): return 0.25")
    config = compose_config(f"{key}.path={path}", "judge.processes=0", name="marl")
    before = OmegaConf.to_container(config, resolve=False)
    assert judge(build_reward(config, ExitStack()), "4")[0].value == 0.25
    assert OmegaConf.to_container(config, resolve=False) == before


DRIVER = """
    import asyncio, os, sys, time
    print("main", flush=True)
    from marl.rewards.processes import Processes

    from marl_test_spin import spin

    async def run():
        processes = Processes(1, timeout_s=100.0)
        print(await processes.run(os.getpid, {}), flush=True)
        await processes.run(spin, {})

    if __name__ == "__main__":
        asyncio.run(run())
"""


@pytest.mark.slow
def test_children_do_not_import_the_main_module_and_end_with_a_driver_that_is_killed(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    (tmp_path / "marl_test_spin.py").write_text("def spin():\n    print('spins', flush=True)\n    while True: pass")
    driver = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert driver.stdout.readline() == "main\n"
        child = psutil.Process(int(driver.stdout.readline()))
        assert driver.stdout.readline() == "spins\n"
    finally:
        driver.kill()
        driver.wait()
    _, alive = psutil.wait_procs([child], timeout=10)
    for process in alive:
        process.kill()
    assert not alive and driver.stdout.read() == ""
