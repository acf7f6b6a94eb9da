"""This framework, with its defaults, step by step.

    python -m benchmarks.systems.ours LOAD [key=value ...]

Everything is in this process unless ``resources.one_process=false`` says otherwise.
"""

import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from hydra import compose, initialize_config_module

from benchmarks.gate import Gate, Stopped
from benchmarks.work import PROMPT, Load, Work, checksum, model_folder, questions, tokenizer_folder
from marl.build import build
from marl.cluster.session import session
from marl.config.overrides import hydra_overrides
from marl.preflight.prepare import prepare
from marl.utils.garbage import freeze_gc

REWARD = Path(__file__).parents[1] / "reward.py"
JUDGE = Path(__file__).parents[1] / "judge.py"
MANY = 10**6
DEBATE = ("runner=debate", "runner.peer_template='{text}'", "runner.separator=''", "runner.instruction=''")


class Run:
    """A trainer whose steps are taken one at a time, and counted on their way."""

    def __init__(self, load: Load, words: Sequence[str], folder: Path, cleanup: ExitStack) -> None:
        self.load, self.work = load, Work()
        self.gate = Gate()
        self.loop = asyncio.new_event_loop()
        cleanup.callback(self.loop.close)
        with initialize_config_module("marl.configs", version_base="1.3"):
            setup = prepare(compose("marl", overrides=hydra_overrides([*overrides(load, folder), *words])))
        cleanup.enter_context(session(setup))
        self.trainer = self.wait(build(setup, cleanup))
        self.wait(self.trainer.sync_weights())
        freeze_gc()
        self.watch()
        if load.ragged:
            self.shorten()
        if load.serial:
            self.one_after_another()

    def wait(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def watch(self) -> None:
        """Count what the servers answered and what is trained, and the CPU seconds of the rollout."""
        collect, assign_credit = self.trainer.collect, self.trainer.learner.assign_credit

        async def collected(tasks: Any) -> Any:
            with self.gate.part("rollout"):
                collection = await collect(tasks)
            self.count_turns(collection.episodes)
            return collection

        def credited(batch: Any) -> Any:
            self.count_rows(batch)
            return assign_credit(batch)

        self.trainer.collect, self.trainer.learner.assign_credit = collected, credited

    def count_turns(self, episodes: Sequence[Any]) -> None:
        for turn in (turn for episode in episodes for turn in episode.turns):
            self.work.samples += 1
            self.work.prompt_tokens += len(turn.prompt_ids)
            self.work.response_tokens += len(turn.response_ids)

    def count_rows(self, batch: Any) -> None:
        for rows in batch.rows.values():
            self.work.forwarded_tokens += len(rows["input_ids"].values())
            self.work.trained_tokens += int(rows["response_mask"].values().sum())

    def shorten(self) -> None:
        """Limit every answer on its own: each length up to ``response`` is drawn once before any is drawn again."""
        draw, lengths = random.Random(0), []  # type: ignore[var-annotated]

        def limited(generate: Any) -> Any:
            async def shorter(*arguments: Any, sampling_params: Any, **settings: Any) -> Any:
                if not lengths:
                    lengths.extend(draw.sample(range(1, self.load.response + 1), self.load.response))
                params = {**sampling_params, "max_tokens": lengths.pop()}
                return await generate(*arguments, sampling_params=params, **settings)

            return shorter

        for client in self.trainer.controller.clients.values():
            client.server.generate = limited(client.server.generate)

    def one_after_another(self) -> None:
        """Score the episodes after the rollout, read tasks when they are wanted, and wait for every dump."""
        trainer, write = self.trainer, self.trainer.dumps.write
        controller = trainer.controller
        collect, score = controller.collect, controller._score

        async def unscored(episode: Any) -> Any:
            return episode

        async def collected(*arguments: Any) -> Any:
            controller._score = unscored
            try:
                return await collect(*arguments)
            finally:
                controller._score = score

        controller.collect = collected
        trainer.tasks.reads_ahead = False

        async def written(*arguments: Any) -> None:
            await write(*arguments)
            await trainer.dumps.flush()

        trainer.dumps.write = written

    def servers(self) -> list[Any]:
        return [handle for group in self.trainer.policies.values() for handle in group.servers.server_handles]

    def prefilled_tokens(self) -> float:
        async def ask() -> list[dict[str, float]]:
            return await asyncio.gather(*(server.get_stats.remote() for server in self.servers()))

        return sum(stats["prefilled_tokens"] for stats in self.wait(ask()))

    def checksum(self) -> float:
        """The servers' models, which have the trainer's weights after every step."""

        async def ask() -> list[float]:
            return await asyncio.gather(*(server.__ray_call__.remote(model_checksum) for server in self.servers()))

        handles = self.servers()
        if self.trainer.config.resources.one_process:
            return sum(model_checksum(handle._target) for handle in handles)
        return sum(self.wait(ask()))

    async def step(self) -> Any:
        """A step and all of its dump, which would go on being written while the clocks stand still."""
        metrics = await self.trainer.step(await self.trainer.tasks.next())
        await self.trainer.dumps.flush()
        return metrics

    def steps(self) -> None:
        """Step whenever it is this system's turn. Raises Stopped after the last one."""
        trainer, prefilled = self.trainer, self.prefilled_tokens()
        self.gate.ready(self.checksum())
        while True:
            self.gate.begin()
            self.work = Work()
            trainer.step_number += 1
            metrics = self.wait(self.step())
            self.gate.stop_clocks()
            before, prefilled = prefilled, self.prefilled_tokens()
            self.gate.report(
                self.work,
                self.checksum(),
                prefilled=prefilled - before,
                fewest_prefilled=self.load.fewest_prefilled,
                forwarded=self.work.forwarded_tokens,
                fewest_forwarded=self.load.fewest_forwarded,
                overhead=metrics["perf/overhead_share"],
            )


def model_checksum(server: Any) -> float:
    return checksum([server.model])


def overrides(load: Load, folder: Path) -> list[str]:
    """The configuration: the work, and what is not part of it turned off."""
    write_rows(folder / "train.parquet", questions())
    write_rows(folder / "test.parquet", questions(4))
    words = [
        "hardware=cpu", "agents=schema", "runner=single_turn", "learner=grpo", "credit=own",
        "resources.one_process=true", "judge.answer_rule=flexible",
        f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/test.parquet", "data.shuffle=false",
        f"data.train_batch_size={load.questions}", f"actor_rollout_ref.rollout.n={load.samples}",
        f"data.max_prompt_length={load.contexts[-1] if load.rounds > 1 else PROMPT}",
        f"data.max_response_length={load.response}",
        f"actor_rollout_ref.model.path={model_folder(load.size)}",
        f"actor_rollout_ref.model.tokenizer_path={tokenizer_folder(load.size)}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={load.micro_batch_tokens}",
        "actor_rollout_ref.actor.optim.lr=1.0e-6", "actor_rollout_ref.rollout.max_num_seqs=4096",
        f"reward.custom_reward_function.path={JUDGE if load.judged else REWARD}", "reward.custom_reward_function.name=compute_score",
        "trainer.logger=[]", f"trainer.rollout_data_dir={folder / 'dumps' if load.judged else 'null'}", "trainer.validation_data_dir=null",
        f"trainer.default_local_dir={folder}/run", f"trainer.total_training_steps={MANY}",
        "trainer.save_freq=-1", "trainer.resume_mode=disable",
    ]  # fmt: skip
    for name in (f"agent_{i}" for i in range(load.agents)):
        words += [f"+agents.{name}={{}}"] + [f"agents.{name}.policy=all"] * load.shared
    if load.rounds > 1:
        words += [*DEBATE, f"runner.num_rounds={load.rounds}"]
    return words + ["precision=bf16"] * load.bf16


def write_rows(path: Path, texts: Sequence[str]) -> None:
    rows = [
        {
            "data_source": "benchmark",
            "prompt": [{"role": "user", "content": text}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": index},
        }
        for index, text in enumerate(texts)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def main(load: Load, words: Sequence[str]) -> None:
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="marl_bench")))
        Run(load, words, folder, cleanup).steps()


if __name__ == "__main__":
    try:
        main(Load.loads(sys.argv[1]), sys.argv[2:])
    except Stopped:
        sys.exit(0)
