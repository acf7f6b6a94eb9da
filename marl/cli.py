"""The ``marl`` command: maps each subcommand to the module that runs it."""

import sys

from marl.command_group import COMPLETIONS, Command, Group, exit_code_of

RUN, LOOK, SET_UP = "Runs", "Results", "Setting up"

COMMANDS = {
    "train": Command(
        "marl.main",
        "train a team",
        RUN,
        (
            "marl train --config-name quickstart learner=mappo trainer.default_local_dir=outputs/mappo",
            "marl train data.train_files=mine.csv data.val_files=null 'data.columns={prompt: question, answer: a}' "
            "data.train_batch_size=32 actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
            "marl train -m --config-name quickstart seed=0,1,2        # a sweep; rerun it to continue",
        ),
    ),
    "quickstart": Command(
        "marl.quickstart.__main__",
        "train two tiny agents on this machine",
        RUN,
        ("marl quickstart", "marl quickstart --config-name game credit=own trainer.total_training_steps=60"),
    ),
    "plan": Command(
        "marl.commands.plan",
        "print a run's batches and memory without starting it",
        RUN,
        ("marl plan --config-name quickstart",),
        "takes the keys of marl train",
    ),
    "run-one": Command(
        "marl.commands.run_one",
        "play one conversation and print it",
        RUN,
        (
            """marl run-one runner=debate question="What is 2+2?" answers="['#### 4','#### 5','#### 4']\"""",
            "marl run-one model=tiny runner=debate",
            "marl run-one dump=outputs/quickstart/latest/validation/105.jsonl episode=3 --config-name quickstart",
        ),
        "takes the keys of marl train, and model= question= truth= answers= row= dump= episode= instead= (docs/debugging.md)",
    ),
    "report": Command(
        "marl.commands.report",
        "write a report of a run or a sweep: Markdown, JSON, curves",
        LOOK,
        ("marl report outputs/quickstart/latest", "marl report outputs/quickstart        # all runs in it"),
        options=True,
    ),
    "compare": Command(
        "marl.commands.compare",
        "compare runs: medians over seeds, settings, costs, transitions, credit",
        LOOK,
        ("marl compare outputs/mappo outputs/quickstart", "marl compare outputs/quickstart --out comparison"),
        options=True,
    ),
    "export": Command(
        "marl.commands.export",
        "write a checkpoint's policies as Hugging Face models or PEFT adapters",
        LOOK,
        (
            "marl export outputs/quickstart/latest",
            "marl export outputs/quickstart/latest --step 105 --to models --merged",
        ),
        options=True,
    ),
    "ensemble": Command(
        "marl.commands.ensemble",
        "compare the agents' vote and joint answers with each agent alone",
        LOOK,
        ("marl ensemble --config-name quickstart ensemble.checkpoint=outputs/quickstart/latest/global_step_105",),
        "takes the keys of marl train, and ensemble.* (docs/ensembles.md)",
    ),
    "init": Command(
        "marl.commands.init",
        "write a small project: learner, runner, world, reward, data, test",
        SET_UP,
        ("marl init my_team", "cd my_team && python -m pytest && ./train.sh"),
        options=True,
    ),
    "info": Command(
        "marl.commands.info",
        "learners, runners, credits, methods, worlds, rewards, engines, settings",
        SET_UP,
        ("marl info", "marl info learners", "marl info learners happo --yaml", "marl info settings controller"),
        options=True,
    ),
    "doctor": Command(
        "marl.commands.doctor",
        "check this machine and suggest fixes",
        SET_UP,
        ("marl doctor", "RAY_ADDRESS=head:6379 marl doctor"),
        options=True,
    ),
    "replay": Command(
        "marl.commands.replay",
        "play a recorded step again without servers, and compare",
        LOOK,
        (
            "marl train --config-name quickstart controller.keep_ledger=true",
            "marl replay outputs/quickstart/latest step=12",
        ),
        "takes RUN, step=N and from=TURN (docs/debugging.md)",
    ),
    "eval": Command(
        "marl.commands.evaluate",
        "measure trained teams on the same tasks",
        LOOK,
        (
            "marl eval outputs/quickstart/latest",
            "marl eval outputs/quickstart/latest outputs/mappo n=4 baselines=[solo,vote]",
        ),
    ),
    "collect": Command(
        "marl.commands.collect",
        "play tasks with a team, and keep the best episodes to learn from",
        LOOK,
        (
            "marl collect outputs/quickstart/latest --filter-reward 1 --best-of 2 --out best.jsonl",
            "marl train --config-name quickstart method=sft method.source=episodes data.train_files=[best.jsonl] data.val_files=null",
        ),
        "takes runs, checkpoints or models, --out --filter-reward --best-of, task= n= (docs/commands.md), and the keys of marl train",
    ),
    "chat": Command(
        "marl.commands.chat",
        "ask a trained team, and read its debate",
        LOOK,
        ("marl chat outputs/quickstart/latest", "marl chat outputs/quickstart/latest --model team/alice --seed 1"),
    ),
    "serve": Command(
        "marl.commands.serve",
        "put a trained team behind an OpenAI-compatible endpoint",
        LOOK,
        ("marl serve outputs/quickstart/latest --port 8000",),
    ),
}
"""In the order of the help. One more entry makes a command: its module's ``main`` gets the remaining arguments, as Hydra's do, or it
declares options of its own (``options=True``)."""


def main(words: list[str] | None = None) -> int:
    """Run a command, and return its exit code: 0, 1 for a failure, 2 for a wrong command line, 130 for Ctrl-C."""
    return exit_code_of(Group(COMMANDS | COMPLETIONS), sys.argv[1:] if words is None else words)


if __name__ == "__main__":
    sys.exit(main())
