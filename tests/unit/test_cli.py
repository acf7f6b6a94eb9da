"""The ``marl`` command: a subcommand is a file and a line of the table."""

import sys
from importlib.util import find_spec
from pathlib import Path

import marl.commands
from marl import cli


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["marl", *words])
    return cli.main()


def test_every_command_has_its_module_and_every_module_its_command():
    modules = {command.module for command in cli.COMMANDS.values()}
    assert all(find_spec(module) for module in modules)
    files = {f"marl.commands.{path.stem}" for path in Path(marl.commands.__path__[0]).glob("[a-z]*.py")}
    assert files == {module for module in modules if module.startswith("marl.commands.")}


def test_a_command_of_one_line_and_one_file(monkeypatch, tmp_path, capsys):
    (tmp_path / "count.py").write_text(
        "import sys\ndef main(arguments):\n    print(len(arguments), sys.argv)\n    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "count", raising=False)
    monkeypatch.setitem(cli.COMMANDS, "count", cli.Command("count", "count the arguments"))
    assert run(monkeypatch, "count", "a=1", "b=2") == 3
    assert capsys.readouterr().out == "2 ['marl count', 'a=1', 'b=2']\n"


def test_another_word_gets_the_list_of_commands(monkeypatch, capsys):
    assert [run(monkeypatch, *words) for words in ([], ["trian"], ["--help"])] == [2, 2, 0]
    usage = capsys.readouterr().err
    assert all(usage.count(f"marl {word} ") == 3 for word in cli.COMMANDS)
