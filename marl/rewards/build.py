"""The reward function of a run, from its configuration."""

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

from marl.rewards.base import TIMEOUT_KEY, Reward
from marl.rewards.builtin import Builtin, run_here
from marl.rewards.custom import Custom, custom_function
from marl.rewards.extractors import answer_rules
from marl.rewards.mathematics import load_verifier
from marl.rewards.processes import Processes


def build_reward(config: Any, cleanup: ExitStack) -> Reward:
    """The user's function or the built-in ones, in ``judge.processes`` processes, which ``cleanup`` ends, or in
    this one."""
    count, timeout_s = config.judge.processes, config.judge.timeout_s
    custom, failures = custom_function(config), Counter[str]()
    rules = answer_rules(config)
    name = f"{custom.name} of {custom.path}" if custom else "the built-in reward function"
    if custom is not None and custom.is_async:
        return Reward(custom, timeout_s, failures, name)
    if not count:
        return Reward(custom or Builtin(run=run_here, failures=failures, rules=rules), failures=failures, name=name)
    processes = Processes(count, timeout_s, TIMEOUT_KEY, prepare=custom.load if custom else load_verifier)
    cleanup.callback(processes.stop)
    return Reward(
        in_processes(processes, custom) if custom else Builtin(run=processes.run, failures=failures, rules=rules),
        failures=failures,
        name=name,
    )


def in_processes(processes: Processes, function: Custom) -> Callable[..., Awaitable[Any]]:
    async def compute_score(**arguments: Any) -> Any:
        return await processes.run(function, arguments)

    return compute_score
