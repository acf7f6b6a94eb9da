"""Bad input on the command line: exit code 2 and one sentence with the remedy, never a traceback."""

import json
import os
import re
import sys
from contextlib import contextmanager, suppress

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from marl import cli, main as marl_main
from marl.config.command_options import chat, read, serve
from marl.config.errors import ConfigError, explain
from marl.main import exit_code
from marl.report import dump
from marl.types import Episode, Score, Task


@pytest.fixture
def refused(monkeypatch, capsys):
    """Types a command, and returns the one line that it is refused with."""

    def refused(*words):
        assert cli.main(list(words)) == 2
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        return said.err

    return refused


def test_a_project_that_cannot_be_written(refused):
    assert "/proc/mine: cannot be written" in (said := refused("init", "/proc/mine")) and "choose a folder" in said


def test_an_unknown_configuration_is_answered_with_the_nearest(refused):
    said = refused("train", "--config-name", "quickstrat")
    assert "--config-name quickstrat: no such configuration" in said and "Did you mean 'quickstart'?" in said
    assert said.count("\n") == 1 and "game, marl, quickstart, split_information" in said


@pytest.mark.parametrize("parser", [serve, chat])
def test_an_unknown_option_is_answered_with_the_nearest(parser):
    options, keys = read(parser(), ["run", "runner.num_rounds=3"])
    assert (options.source, keys) == ("run", ["runner.num_rounds=3"])
    with pytest.raises(
        ConfigError, match=r"--data-sorce: marl \w+ has no such option; .*Did you mean '--data-source'\?"
    ):
        read(parser(), ["run", "--data-sorce", "x"])
    with pytest.raises(ConfigError, match=r"-x: marl"):
        read(parser(), ["run", "-x"])


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"7\n", b"[]\n", b'{"agent": "a"}\n', b'{"episode": 3}\n', b"not json\n"]
)
def test_a_dump_that_is_something_else_is_named(tmp_path, content):
    path = tmp_path / "3.jsonl"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"^{re.escape(str(path))}, line 1: .*expected a line that trainer\.rollout_data_dir"
    ):
        list(dump.read(path, lambda _, truth: str, lambda _, truth: str))


def test_a_dump_may_end_in_empty_lines(tmp_path):
    """As an editor leaves it."""
    task = Task("t", [{"role": "user", "content": "?"}], "4", "x", lambda _: "4")
    path = dump.write([Episode(task, 0, ["a"], seed=1, score=Score(0.0, None), failure="lost")] * 2, 1, tmp_path)
    whole = path.read_text()
    path.write_text(whole.replace("\n", "\n\n", 1) + " \n\n")
    assert len(list(dump.read(path, lambda _, truth: str, lambda _, truth: str))) == 2
    path.write_text(f"{whole}\nnot json\n")
    with pytest.raises(ValueError, match=r"jsonl, line 4: "):
        list(dump.read(path, lambda _, truth: str, lambda _, truth: str))


@pytest.mark.slow
def test_commands_that_load_more_refuse_in_a_sentence(refused, tmp_path, cold_assets):
    binary = tmp_path / "3.jsonl"
    binary.write_bytes(bytes(range(256)))
    here = ("--config-name", "quickstart", f"assets={cold_assets}")
    assert f"dump={binary}, line 1: " in refused("run-one", f"dump={binary}", "episode=1", *here)
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"config": {}}))
    assert "measures=[similarity: cannot be read" in refused("eval", str(run), "measures=[similarity")
    assert "no such option" in refused("serve", str(run), "--prot", "8000")


def test_hydras_own_words_stay_for_another_missing_file():
    from hydra.errors import MissingConfigException

    assert explain(MissingConfigException("no defaults", "x.yaml")) == "no defaults"


@pytest.mark.parametrize("word", ["answers=4", "answers=['4", "answers=[a: b]", "instead=[[4]]"])
def test_a_list_of_something_else_than_texts(refused, word):
    said = refused("run-one", word)
    assert said.startswith(f"configuration error: {word}: expected a list of texts, as in ") and said.count("\n") == 1


@pytest.mark.parametrize("sweep", ["-m", "--multirun"])
@pytest.mark.parametrize(
    "flag", [["--cfg", "job"], ["--cfg=job"], ["-c", "job"], ["-chydra"], ["--info", "searchpath"]]
)
def test_a_sweep_has_no_one_configuration_to_show(refused, monkeypatch, sweep, flag):
    monkeypatch.setattr(sys, "argv", ["marl"])
    said = refused("train", sweep, *flag, "seed=0,1")
    assert said == (
        f"configuration error: {sweep} {flag[0]}: expected one run to show; leave out {sweep}, and give each swept key "
        "one value\n"
    )


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_a_sweep_has_no_help(refused, monkeypatch, flag):
    monkeypatch.setattr(sys, "argv", ["marl"])
    said = refused("train", "-m", flag, "seed=0,1")
    assert said == f"configuration error: -m {flag}: expected one run to show; leave out -m\n"


@contextmanager
def stdout_to_a_pipe(monkeypatch):
    """Not a fixture, after which pytest would set its own stdout again; yields the end that is read."""
    read, written = os.pipe()
    with os.fdopen(written, "w") as stdout, os.fdopen(read) as reader, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        yield reader


@pytest.mark.parametrize("text", ["a line", "many" * 100_000])
def test_a_reader_that_leaves_ends_a_command_silently(monkeypatch, capfd, text):
    """As in ``marl plan | head -1``; also Python's own flush at its exit."""
    with stdout_to_a_pipe(monkeypatch) as reader:
        reader.close()
        assert exit_code(lambda: sys.stdout.write(text)) == 1
        sys.stdout.flush()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("show", [print, Console().print])
def test_a_run_whose_reader_has_left_says_so(monkeypatch, capfd, show):
    """As in ``marl train | tee log`` whose tee has gone; rich ends the process by itself."""
    monkeypatch.setattr(marl_main, "_run", lambda *_: [show("a line"), sys.stdout.flush()])
    with stdout_to_a_pipe(monkeypatch) as reader, suppress(SystemExit):
        reader.close()
        assert exit_code(lambda: marl_main.run(OmegaConf.create({"verbose": True}))) == 1
    assert capfd.readouterr().err == "run ended: nobody reads its output any more\n"


def test_a_closed_stdout_is_no_failure(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it after >&-
    assert exit_code(lambda: None) == 0 and capsys.readouterr().err == ""


def test_another_broken_pipe_is_a_failure(monkeypatch, capfd):
    def fail():
        raise BrokenPipeError("a worker has gone")

    with stdout_to_a_pipe(monkeypatch):
        assert exit_code(fail) == 1
    assert "Traceback" in (said := capfd.readouterr().err) and "BrokenPipeError: a worker has gone" in said


def fill_the_disk(folder):
    with marl_main.disk_of(folder), open("/dev/full", "w") as file:
        file.write("x")


FAULTS = {
    "a long path": (lambda folder: (folder / ("x" * 300)).mkdir(), ["x" * 300, "File name too long", "name a shorter path"]),
    "a folder in a file": (lambda folder: (folder / "file" / "run").mkdir(), ["file/run", "Not a directory", "trainer.default_local_dir"]),
    "a full disk": (fill_the_disk, ["No space left on device; free some space"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS)
def test_a_path_that_cannot_be_written_is_named_without_a_traceback(tmp_path, capsys, kind):
    work, said = FAULTS[kind]
    (tmp_path / "file").touch()
    assert exit_code(lambda: work(tmp_path)) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"run failed: {tmp_path}") and error.count("\n") == 1
    assert [part for part in said if part not in error] == [], error


@pytest.mark.parametrize(
    "text, line", [("a: {b: c/${d}}", 1), ("a: 1\n\tb: 2", 2), ("a: 1\n- 2", 2)], ids=["braces", "tab", "list"]
)
def test_a_file_that_is_not_yaml_is_named_with_its_line(refused, tmp_path, text, line):
    (tmp_path / "mine.yaml").write_text(text)
    said = refused("train", "--config-dir", str(tmp_path), "--config-name", "mine")
    assert f"{tmp_path / 'mine.yaml'}, line {line}: not YAML: " in said and "quote texts" in said


def test_an_unknown_option_of_run_one_is_no_word_of_hydras(refused):
    said = refused("run-one", "--bogus", "runner=debate")
    assert said == (
        "configuration error: --bogus: marl run-one has no such option; expected --config-name, --config-dir or key=value\n"
    )
