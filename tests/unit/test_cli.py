"""The ``marl`` command: a subcommand is a file and a line of the table."""

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import marl.commands
from marl import cli
from marl.command_group import COMPLETIONS, SHELLS
from marl.commands import run_one
from marl.config import command_options
from marl.config.external import VARIABLE
from marl.config.short_help import option_names
from tests import composing


@pytest.fixture
def run(monkeypatch):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["marl", *words])
        return cli.main()

    return run


def test_every_command_has_its_module_and_every_module_its_command():
    modules = {command.module for command in cli.COMMANDS.values()}
    assert all(find_spec(module) for module in modules)
    files = {f"marl.commands.{path.stem}" for path in Path(marl.commands.__path__[0]).glob("[a-z]*.py")}
    assert files == {module for module in modules if module.startswith("marl.commands.")}


def test_a_command_of_one_line_and_one_file(monkeypatch, tmp_path, capsys, run):
    (tmp_path / "count.py").write_text(
        "import sys\ndef main(arguments):\n    print(arguments, sys.argv)\n    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "count", raising=False)
    monkeypatch.setitem(cli.COMMANDS, "count", cli.Command("count", "count the arguments"))
    words = ["-cn", "game", "a=1", "--cfg", "job", "-m", "--", "b=2"]
    assert run("count", *words) == 3
    assert capsys.readouterr().out == f"{words} {['marl count', *words]}\n"


def test_a_command_of_its_own_options_and_its_errors(monkeypatch, tmp_path, capsys, run):
    (tmp_path / "greet.py").write_text(
        "import click\nfrom marl.config.errors import ConfigError\n"
        "@click.command()\n@click.argument('how')\ndef command(how):\n"
        "    if how == 'wrong':\n        raise ConfigError('how=wrong: expected well')\n"
        "    if how == 'stop':\n        raise KeyboardInterrupt\n"
        "    if how == 'fail':\n        raise OSError('api_key=abcdefghijkl')\n    return 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "greet", raising=False)
    monkeypatch.setitem(
        cli.COMMANDS, "greet", cli.Command("greet", "greet", examples=("marl greet well",), options=True)
    )
    assert [run("greet", how) for how in ("well", "fail", "wrong", "stop")] == [0, 1, 2, 130]
    said = capsys.readouterr().err
    assert "error: how=wrong: expected well" in said and "abcdefghijkl" not in said and "OSError" in said
    assert run("greet") == run("greet", "well", "--lod") == 2
    assert run("greet", "--help") == 0 and "marl greet well" in capsys.readouterr().out


def test_an_unknown_command_is_answered_with_the_nearest(capsys, run):
    assert [run("trian"), run("zzzz")] == [2, 2]
    first, _, second, _ = capsys.readouterr().err.splitlines()
    assert "unknown command 'trian'. Did you mean 'train'?" in first and "Did you mean" not in second
    assert all(name in second for name in cli.COMMANDS)


def test_the_help_is_a_screen_and_every_command_has_examples(capsys, run):
    assert run() == 2 and run("--help") == 0
    page = capsys.readouterr().out
    assert len(page.splitlines()) <= 40 and all(f"\n  {word} " in page for word in cli.COMMANDS)
    for name in cli.COMMANDS | COMPLETIONS:
        assert run(name, "--help") == 0
        page = capsys.readouterr().out
        assert "usage:" in page.lower() and f"  marl {name}" in page.partition("Examples:")[2], name
        assert len(page.splitlines()) <= 45 and "\x1b" not in page


@pytest.mark.parametrize("name", ["serve", "chat"])
def test_the_help_lists_every_option_of_a_command_that_also_takes_keys(run, capsys, name):
    assert run(name, "--help") == 0
    said = capsys.readouterr().out
    parser = getattr(command_options, name)()
    flags = [flag for action in parser._actions for flag in action.option_strings]
    assert "--data-source" in flags and all(f"  {flag}" in said or f", {flag}" in said for flag in flags)
    assert all(action.help for action in parser._actions) and "key of the configuration" in said


@pytest.mark.slow
def test_the_help_of_eval_lists_all_its_words_and_their_choices(run, capsys):
    from marl.commands.evaluate import Options
    from marl.evaluation.evaluate import BASELINES
    from marl.evaluation.statistics import MEASURES

    assert run("eval", "-h") == 0
    said = capsys.readouterr().out
    assert all(f"  {name}=" in said for name in Options.__dataclass_fields__)
    assert all(f"{name}:" in said for name in BASELINES) and all(name in said for name in MEASURES)


def test_help_among_other_words_starts_no_other_command(monkeypatch, capsys, run):
    """With modules of the user's, too, which only Hydra's own help would name."""
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "json")
    for words in (["eval", "--help"], ["serve", "run", "-h"], ["replay", "run", "step=1", "--help"]):
        assert run(*words) == 0 and f"usage: marl {words[0]}" in capsys.readouterr().out


def test_the_help_of_train_gives_way_to_own_modules(monkeypatch, run):
    asked = []
    monkeypatch.setenv(VARIABLE, "json")
    module = SimpleNamespace(main=lambda words: asked.append(words) or 0)
    monkeypatch.setattr("marl.command_group.import_module", lambda name: module)
    assert run("train", "--help") == 0 and asked == [["--help"]]


def completed(*words, **environment):
    command = [sys.executable, "-m", "marl", *words]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60)


def test_as_a_module_with_its_version_and_for_a_pipe():
    done = completed("--version")
    assert done.returncode == 0 and done.stdout.startswith("marl ") and "verl 0.9" in done.stdout
    assert completed("nothing").returncode == 2


@pytest.mark.parametrize("settings", [{}, {"NO_COLOR": "1"}])
def test_headings_are_bold_on_a_terminal_unless_colours_are_unwanted(settings):
    words = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", sys.executable, "-m", "marl", "--help"]
    done = subprocess.run(words, env=os.environ | settings, capture_output=True, text=True, timeout=60)
    assert ("\x1b[1mRuns:" in done.stdout) is not bool(settings) and "Runs:" in done.stdout


def test_bash_completes_commands_and_options(tmp_path):
    (tmp_path / "marl").write_text(f'#!/bin/sh\nexec {sys.executable} -m marl "$@"\n')
    (tmp_path / "marl").chmod(0o755)
    script = 'source <(marl completion bash)\nCOMP_WORDS=({}) COMP_CWORD={} COMPREPLY=()\n_marl_completion marl\necho "${{COMPREPLY[@]}}"\n'
    lines = [("marl qu", 1), ("marl train learner = hap", 4), ("marl train learner =", 3), ("marl train cred", 2)]
    source = "".join(script.format(*line) for line in lines)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", source], env=os.environ | {"PATH": path}, capture_output=True, text=True)
    quick, happo, learners, credit = done.stdout.splitlines()
    assert (quick, happo, credit) == ("quickstart", "happo", "credit=") and "mappo" in learners.split(), done.stderr


def test_every_shell_has_its_script(capsys, run):
    for shell in SHELLS:
        assert run("completion", shell) == 0 and "_MARL_COMPLETE" in capsys.readouterr().out
    assert run("completion", "cmd") == 2


DOCS = ("README.md", "docs/commands.md", "docs/your-data.md", "docs/runs.md", "docs/evaluation.md", "docs/serving.md")
COMPOSED = ("train", "quickstart", "plan", "run-one")
"""Commands whose words are keys of the configuration, beside those of ``marl run-one``."""
PARSED = ("eval", "collect", "serve", "chat", "replay")
SHOWN = [
    *(
        f"marl {line.removeprefix('marl').strip()}"
        for name in DOCS
        for line in re.findall(r"^(?:python -m marl\.cli|(?=marl ))(.*)$", Path(name).read_text(), re.MULTILINE)
        if ": train" not in line
    ),
    *(
        line
        for command in (cli.COMMANDS | COMPLETIONS).values()
        for line in command.examples
        if line.startswith("marl ")
    ),
]


@pytest.mark.parametrize("line", sorted(set(SHOWN)))
def test_what_is_shown_can_be_typed(line):
    """The command is there, and so are its options and choices; tests of their own run each command."""
    _, name, *words = shlex.split(line.partition(" > ")[0].removesuffix("…"), comments=True)
    described = (cli.COMMANDS | COMPLETIONS)[name]
    if described.options:
        with import_module(described.module).command.make_context(name, words):
            return
    if name in PARSED:
        *_, left = import_module(described.module).parsed(words)
        assert [word for word in left if "=" not in word] == [], line
    if name in COMPOSED and "-m" not in words:
        config = words[words.index("--config-name") + 1] if "--config-name" in words else "marl"
        own = run_one.Options.__dataclass_fields__ if name == "run-one" else ()
        keys = [word for word in words if re.match(r"[\w.+/]+=", word) and word.partition("=")[0] not in own]
        composing.compose(*keys, name=config)  # raises for a key that there is not
    for group, equals, value in (word.partition("=") for word in words):
        if equals and group in option_names():
            assert set(value.split(",")) <= option_names()[group], line


def test_the_folders_of_the_examples_are_those_that_examples_train_in():
    examples = [line for command in cli.COMMANDS.values() for line in command.examples]
    made = re.findall(r"default_local_dir=(outputs/\w+)", " ".join(examples))
    named = re.findall(r"outputs/\w+", " ".join(examples))
    assert set(named) == {"outputs/quickstart", *made}
    replayed = [line for line in examples if line.startswith("marl replay")]
    assert replayed and "controller.keep_ledger=true" in " ".join(cli.COMMANDS["replay"].examples)


def test_the_document_lists_every_command():
    listed = re.findall(r"^\| `marl ([\w-]+)`", Path("docs/commands.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(cli.COMMANDS | COMPLETIONS)
