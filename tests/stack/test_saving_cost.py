"""Cost of saving, and of the ledger, beside training: steps with and without it by turns, within one run. ``-s`` shows the figures."""

import os
import statistics
import time
from collections import defaultdict

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from marl import checkpoint
from marl.utils import folders

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(1200)]
PAIRS, WALL, CPU = 10, 0, 1
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}  # fmt: skip
RUN = (
    "sharing=shared",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "trainer.test_freq=-1",
    "controller.ledger=true",
    "trainer.max_actor_ckpt_to_keep=2",
)


@pytest.fixture
def live(alone, cold_assets, tmp_path):
    """A run whose checkpoints take about as long as its steps."""
    source = next(cold_assets.rglob("config.json")).parent
    folder = tmp_path / "wide"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, **WIDE)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return alone(*RUN, f"actor_rollout_ref.model.path={folder}", "trainer.total_training_steps=1000")


class Clock:
    """Wall and CPU seconds of pieces of work, by name; the CPU's are those of the whole process, its threads too."""

    def __init__(self):
        self.seen = defaultdict(list)

    def time(self, name, work):
        wall, cpu = time.perf_counter(), time.process_time()
        done = work()
        self.seen[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        return done

    def timed(self, name, work):
        return lambda *arguments, **settings: self.time(name, lambda: work(*arguments, **settings))

    def median(self, name, which=WALL):
        return statistics.median(one[which] for one in self.seen[name])

    def more(self, name, than, which=WALL):
        """Median of the pairs' differences, as a share of the median without."""
        pairs = zip(self.seen[name], self.seen[than], strict=True)
        return statistics.median(one[which] - other[which] for one, other in pairs) / self.median(than, which)


def by_turns(clock, pairs, **works):
    """The works one after another, each time in another order: what slows the machine slows all of them."""
    for number in range(pairs):
        for name in list(works) if number % 2 else reversed(works):
            works[name]()


def test_a_step_beside_a_save_is_hardly_longer(live, monkeypatch):
    """Without a save, beside one, and waiting for one; a checkpoint takes about as long as a step."""
    clock = Clock()
    live.trainer.controller.ledger.root = None
    monkeypatch.setattr(folders, "seal", clock.timed("seal", folders.seal))
    monkeypatch.setattr(checkpoint, "finish", clock.timed("write", checkpoint.finish))

    def beside():
        live.wait(checkpoint.save(live.trainer))
        live.step()

    def alone():
        clock.time("step", live.step)

    def with_save():
        clock.time("step and save", beside)
        clock.time("rest", lambda: live.wait(live.trainer.saving.flush()))

    live.step()
    by_turns(clock, PAIRS, alone=alone, with_save=with_save)
    wall, cpu = clock.more("step and save", "step"), clock.more("step and save", "step", CPU)
    print(  # noqa: T201 - the figures
        f"\nstep {clock.median('step'):.2f} s, writing {clock.median('write'):.2f} s (sealing {clock.median('seal'):.2f} s), of which after "
        f"the step {clock.median('rest'):.2f} s; a step with a save: {wall:+.1%} wall, {cpu:+.1%} CPU; load {os.getloadavg()[0]:.1f}"
    )
    assert wall * clock.median("step") < 0.7 * clock.median("write"), "the step waited for the write"


def test_a_ledger_costs_little(live):
    clock, ledger = Clock(), live.trainer.controller.ledger
    root = ledger.root
    assert root is not None

    def step(name, where):
        ledger.close()
        ledger.root = where
        clock.time(name, live.step)

    live.step()
    by_turns(clock, PAIRS, bare=lambda: step("bare", None), noted=lambda: step("noted", root))
    wall, cpu = clock.more("noted", "bare"), clock.more("noted", "bare", CPU)
    print(  # noqa: T201 - the figures
        f"\nstep {clock.median('bare'):.2f} s, with a ledger {wall:+.1%} wall, {cpu:+.1%} CPU; load {os.getloadavg()[0]:.1f}"
    )
    assert cpu < 0.1
