"""Frame of the command line: the table of commands as a click group whose modules are imported when they are run.

click parses the commands that have options; Hydra's words (``key=value``, ``-m``, ``--cfg job``) pass through it untouched.
"""

import os
import sys
import traceback
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from marl.config.command_options import HELPS
from marl.config.external import find_own_modules
from marl.config.short_help import GROUPS, help_text, option_names, takes_short_help
from marl.utils.near import did_you_mean
from marl.utils.own_frames import own_traceback
from marl.utils.quiet import quiet_imports

PROGRAM = "marl"
HELP = {"help_option_names": ["-h", "--help"]}
SHELLS = ("bash", "zsh", "fish")
HEAD = """\
marl: train teams of language models together

usage: marl COMMAND [options] [key=value …]      marl COMMAND --help      marl --version
"""
EXAMPLES = (
    "marl quickstart",
    "marl train --config-name quickstart learner=mappo seed=3",
    "source <(marl completion bash)",
)


@dataclass(frozen=True)
class Command:
    module: str
    """Imported only when the command is run."""
    help: str
    section: str = "Others"
    examples: tuple[str, ...] = ()
    takes: str = ""
    """Arguments, in a sentence, of a command without options."""
    options: bool = False
    """Its module holds a click ``command``; else ``main`` takes the words after it and returns the exit code."""


COMPLETIONS = {
    "completion": Command(
        "marl.command_group",
        "print a shell's completion script",
        "Setting up",
        (
            "source <(marl completion bash)",
            "source <(marl completion zsh)",
            "marl completion fish > ~/.config/fish/completions/marl.fish",
        ),
        options=True,
    )
}


class Group(click.Group):
    """Commands of the table, each loaded by its name."""

    def __init__(self, commands: dict[str, Command]) -> None:
        super().__init__(PROGRAM, context_settings=HELP, invoke_without_command=False)
        self.table = commands
        self.params.append(click.Option(["--version"], is_flag=True, callback=show_versions, expose_value=False))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.table:
            return None
        described = self.table[name]
        return loaded(described) if described.options else HydraCommand(name, described)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in self.table:
            near = did_you_mean(args[0], self.table)
            raise click.UsageError(f"unknown command {args[0]!r}.{near} Known: {', '.join(self.table)}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(HEAD)
        for section in dict.fromkeys(command.section for command in self.table.values()):
            formatter.write(f"\n{heading(section)}\n")
            for name, command in self.table.items():
                if command.section == section:
                    formatter.write(f"  {name:<12}{command.help}\n")
        formatter.write(examples_text(EXAMPLES))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names alone: click would load every command for its help."""
        return [
            CompletionItem(name, help=item.help) for name, item in self.table.items() if name.startswith(incomplete)
        ]


class HydraCommand(click.Command):
    """A command whose words are all Hydra's or its module's own."""

    def __init__(self, name: str, described: Command) -> None:
        super().__init__(name, add_help_option=False)
        self.described = described

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return ctx.args

    def invoke(self, ctx: click.Context) -> int:
        words = ctx.args
        if takes_short_help(words) or (self.name != "train" and {*HELP["help_option_names"]} & {*words}):
            click.echo(self.get_help(ctx))
            return 0
        sys.argv = [f"{PROGRAM} {self.name}", *words]
        quiet_imports(words)
        find_own_modules()
        if self.name in ("train", "plan") and (wrong := wrong_words(words)):
            click.echo(wrong, err=True)
            return 2
        code: int = import_module(self.described.module).main(words)
        return code

    def get_help(self, ctx: click.Context) -> str:
        examples = examples_text(self.described.examples)
        if self.name == "train":
            return f"{help_text().rstrip()}\n{examples}".rstrip()
        if self.name in HELPS:
            return f"{HELPS[self.name]().rstrip()}\n{examples}".rstrip()
        usage = f"usage: marl {self.name} [option=name …] [key=value …]\n\n{self.described.help}"
        takes = f"; {self.described.takes}" if self.described.takes else "; takes the keys of marl train"
        return f"{usage}{takes}\n{examples}".rstrip()

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Options of Hydra's groups: ``learner=`` is completed to the learners."""
        before = [word for word in ctx.args if word != "="]
        if before and before[-1] in GROUPS:  # bash cuts words at the sign
            return [CompletionItem(name) for name in sorted(option_names()[before[-1]]) if name.startswith(incomplete)]
        group, equals, value = incomplete.partition("=")
        if not equals:
            return [CompletionItem(f"{name}=") for name in GROUPS if name.startswith(group)]
        known = sorted(option_names().get(group, ()))
        return [CompletionItem(f"{group}={name}") for name in known if name.startswith(value)]


def wrong_words(words: list[str]) -> str | None:
    """Error that the words alone show, found before torch is imported; None for none."""
    from marl.config.errors import ConfigError  # imports Hydra, which a help need not wait for
    from marl.config.overrides import hydra_overrides
    from marl.config.words import check_words, train_flags
    from marl.utils.secret_masking import masked_text

    try:
        check_words(hydra_overrides(train_flags(words)))
    except ConfigError as error:
        return masked_text(f"configuration error: {error}")
    return None


def loaded(described: Command) -> click.Command:
    """The click command in a module, with the table's examples below its help."""
    quiet_imports(sys.argv)
    find_own_modules()
    command: click.Command = import_module(described.module).command
    command.context_settings = {**HELP, **command.context_settings}
    command.epilog = "\b" + examples_text(described.examples)
    return command


def heading(text: str) -> str:
    """A heading; click removes the colours where the output is no terminal."""
    return click.style(f"{text}:", bold=True)


def examples_text(examples: tuple[str, ...]) -> str:
    return "\n".join(["", heading("Examples"), *(f"  {line}" for line in examples), ""]) if examples else ""


def show_versions(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    """Versions of the packages that decide what a run computes, read without importing one."""
    if not wanted or ctx.resilient_parsing:
        return
    names = ("verl", "torch", "transformers", "ray")
    beside = ", ".join(f"{name} {version_of(name)}" for name in names)
    click.echo(f"marl {version_of('marl')} (Python {sys.version.split()[0]}, {beside})")
    ctx.exit()


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def exit_code_of(group: Group, words: list[str]) -> int:
    """The exit code of a command line, its errors printed."""
    try:
        plain: dict[str, Any] = {"color": False} if os.environ.get("NO_COLOR") else {}  # else as the terminal has it
        code = group.main(list(words), PROGRAM, standalone_mode=False, **plain)
    except click.Abort:  # click's word for Ctrl-C
        click.echo("interrupted", err=True)
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}\n{usage_hint(error)}", err=True)
        return error.exit_code
    except Exception as error:
        return failed(error)
    return code if isinstance(code, int) else 0


def failed(error: Exception) -> int:
    """Print an error that a command raised: wrong input in a sentence, any other with its traceback, from the user's code on."""
    from marl.config.errors import ConfigError  # imports Hydra, which a help need not wait for
    from marl.utils.secret_masking import masked_text

    if isinstance(error, ConfigError):
        click.echo(masked_text(f"error: {error}"), err=True)
        return 2
    click.echo(masked_text(own_traceback(error) or "".join(traceback.format_exception(error))), err=True)
    return 1


def usage_hint(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"see {context.command_path if context else PROGRAM} --help"


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> int:
    """Print the script that completes marl's words in SHELL: commands, and the options learner=, runner=, credit= …"""
    kind = get_completion_class(shell)
    assert kind is not None  # one of SHELLS
    click.echo(kind(Group({}), {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())
    return 0
