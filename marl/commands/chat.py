"""``marl chat RUN|CHECKPOINT|MODEL``: ask the team from the terminal and read its debate.

/new begins another conversation, /quit or the end of the input leaves.
"""

import argparse
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.text import Text

from marl.commands.serve import answerable
from marl.config.command_options import chat as chat_options, read
from marl.config.errors import ConfigError
from marl.evaluation.source import find
from marl.main import exit_code
from marl.types import Episode, Message, Turn
from marl.utils.quiet import quiet
from marl.utils.registry import did_you_mean
from marl.utils.secret_masking import masked_logs

PROMPT = "you > "


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: chat(*parsed(sys.argv[1:] if arguments is None else arguments)))


def parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    return read(chat_options(), arguments)


def chat(options: argparse.Namespace, words: Sequence[str], console: Console | None = None) -> list[Message]:
    """Answer until the user leaves; returns the last conversation."""
    from marl.evaluation.team import opened
    from marl.serving.player import Player

    source, console = find(options.source), console or Console(highlight=False)
    with ExitStack() as stack:
        stack.enter_context(quiet("verbose=true" in words))
        stack.enter_context(masked_logs())
        asked = stack.enter_context(answerable(source, options, words))
        team = stack.enter_context(opened(source, asked))
        player = Player(team, options.data_source)
        must_be_one(options.model, player.models)
        say(console, f"{options.model} of {source.path}; /new begins another conversation, /quit leaves", "dim")
        talk = Talk(console, team.loop.run_until_complete, player, options)
        for line in lines(console):
            talk.hear(line)
        return talk.messages


def must_be_one(model: str, known: Iterable[str]) -> None:
    if model not in known:
        hint = did_you_mean(model, known)
        raise ConfigError(f"--model {model}: no such model;{hint} expected one of {', '.join(known)}")


def lines(console: Console) -> Iterator[str]:
    """Lines that the user types, up to /quit or the end."""
    while True:
        try:
            line = console.input(Text(PROMPT)) if sys.stdin.isatty() else input()
        except EOFError:
            return
        if line.strip() == "/quit":
            return
        if line.strip():
            yield line.strip()


def say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)


class Talk:
    """One conversation: what was asked and answered stays for the next question."""

    def __init__(self, console: Console, wait: Any, player: Any, options: argparse.Namespace) -> None:
        self.console, self.wait, self.player, self.options = console, wait, player, options
        self.messages: list[Message] = []

    def hear(self, line: str) -> None:
        """A question, or a command."""
        if line == "/new":
            self.messages = []
            say(self.console, "a new conversation", "dim")
        elif line.startswith("/"):
            say(self.console, f"{line}: unknown; expected a question, /new or /quit", "red")
        else:
            self.ask(line)

    def ask(self, question: str) -> None:
        """Show the debate as it goes on, and the answer. A question that cannot be answered leaves the conversation as it was."""
        from marl.report.conversation import answering_turn
        from marl.rollout.chat_completion import writable
        from marl.serving.refusals import TOO_LONG, Refused

        asked = [*self.messages, {"role": "user", "content": writable(question)}]
        seed = secrets.randbits(62) if self.options.seed is None else self.options.seed
        try:
            episode = self.wait(self.player.play(self.options.model, asked, {}, seed, heard=self.show))
        except Refused as error:
            shorter = ". /new begins a shorter conversation" if error.code == TOO_LONG else ""
            say(self.console, f"{error}{shorter}", "red")
            return
        answer = answering_turn(episode).text
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        say(self.console, f"{self.options.model} ⟶ {answer}", "bold green")

    def show(self, turn: Turn, episode: Episode) -> None:
        say(self.console, f"round {turn.round} · {turn.agent}: {turn.text}", "dim")


if __name__ == "__main__":
    sys.exit(main())
