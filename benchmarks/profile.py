"""``python -m benchmarks.profile [ours_tiny | quickstart | … [key=value …]] [--steps N] [--functions N]``: where a step goes.

Prints the share of a step's CPU time of each category, and the functions of verl's and ours that take most. Everything is in
one process; a function's share includes the libraries that it calls.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from benchmarks.cases import SYSTEMS
from benchmarks.sampler import Sampler
from benchmarks.work import make_assets

QUICK_START = "quickstart"
OURS = [name for name, system in SYSTEMS.items() if system.module == "ours" and not system.words]
"""The systems that run in one process."""
WARM_UP = 2
Step = Callable[[], object]


def bench_step(name: str, words: Sequence[str], folder: Path, cleanup: ExitStack) -> Step:
    """A step of a benchmark's system."""
    from benchmarks.systems.ours import Run

    make_assets([SYSTEMS[name].load.size])
    run = Run(SYSTEMS[name].load, words, folder, cleanup)
    return steps_of(run.trainer, run.loop)


def quick_start_step(words: Sequence[str], folder: Path, cleanup: ExitStack) -> Step:
    """A step of the quick start in one process."""
    from hydra import compose, initialize_config_module

    from marl.build import build
    from marl.cluster.session import session
    from marl.config.overrides import hydra_overrides
    from marl.preflight.prepare import prepare
    from marl.quickstart.assets import ensure_for

    own = [f"trainer.default_local_dir={folder}/run", "trainer.logger=[]", "resources.one_process=true"]
    with initialize_config_module("marl.configs", version_base="1.3"):
        config = compose(QUICK_START, overrides=hydra_overrides([*own, *words]))
    ensure_for(config, lambda done, of: None)
    setup, loop = prepare(config), asyncio.new_event_loop()
    cleanup.callback(loop.close)
    cleanup.enter_context(session(setup))
    trainer = loop.run_until_complete(build(setup, cleanup))
    loop.run_until_complete(trainer.sync_weights())
    cleanup.callback(lambda: loop.run_until_complete(trainer.dumps.flush()))
    return steps_of(trainer, loop)


def steps_of(trainer: Any, loop: asyncio.AbstractEventLoop) -> Step:
    """Takes the trainer's next step."""
    batches = chain.from_iterable(repeat(trainer.loader))

    def step() -> None:
        trainer.step_number += 1
        loop.run_until_complete(trainer.step(next(batches)))

    return step


def table(sampler: Sampler, steps: int, most: int) -> str:
    total = sampler.seconds.total()
    lines = [f"{total / steps:.3f} CPU s a step"]
    lines += [f"{100 * s / total:5.1f} %  {category}" for category, s in sampler.seconds.most_common()]
    lines += ["", "functions:"]
    lines += [
        f"{100 * s / total:5.1f} %  {category:12s} {place}"
        for (category, place), s in sampler.functions.most_common(most)
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("case", nargs="?", default="ours_tiny", choices=[QUICK_START, *OURS])
    parser.add_argument("--steps", type=int, default=5, help=f"profiled steps, after {WARM_UP} others")
    parser.add_argument("--functions", type=int, default=25, help="number of functions shown")
    options, words = parser.parse_known_args(argv)
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="marl_profile")))
        quick = options.case == QUICK_START
        step = quick_start_step(words, folder, cleanup) if quick else bench_step(options.case, words, folder, cleanup)
        for _ in range(WARM_UP):
            step()
        sampler = Sampler()
        with sampler.on():
            for _ in range(options.steps):
                step()
        print(table(sampler, options.steps, options.functions), file=sys.stderr)


if __name__ == "__main__":
    main()
