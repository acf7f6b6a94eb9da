"""Bad input on the command line: exit code 2 and one sentence with the remedy, never a traceback."""

import json
import os
import re
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf
from rich.console import Console

from marl import cli, main as marl_main
from marl.config.command_options import chat, read, serve
from marl.config.errors import ConfigError, explain
from marl.config.words import in_order, train_flags
from marl.main import exit_code
from marl.report import dump
from marl.rewards.custom import checked_function, module_of
from marl.types import Episode, Score, Task
from marl.utils import own_frames
from marl.utils.own_frames import own_traceback


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
    assert said.count("\n") == 1 and "game, marl, quickstart, smollm2, split_information" in said


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
    monkeypatch.setattr(marl_main, "prepared", lambda *_: [show("a line"), sys.stdout.flush()])
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


WORDS = {
    "trainer.totl_epochs=3": "unknown key 'trainer.totl_epochs': 'trainer' has no 'totl_epochs'. Did you mean 'total_epochs'?",
    "lr=3": "Did you mean 'actor_rollout_ref.actor.optim.lr'?",
    "+dpo_beta=1": "'dpo_beta' (=1): it has no effect. Did you mean 'method.beta'?",
    "critic.grad_clip=2": "critic.grad_clip=2: it has no effect; use critic.optim.clip_grad",
    "learner=ppo": "unknown option learner=ppo; known: .* Did you mean 'ippo'?",
    "learner=dpo": "It is a method: method=dpo",
    "foo": "foo: expected key=value",
    "--config-name quickstart -cn game": "--config-name game: a second one, after --config-name quickstart",
    "--config nope.yaml": "--config nope.yaml: no such file; expected a YAML file, or one of game, marl",
    "--resume nope": "--resume nope: no such folder",
    "seed=1 --output": "--output: expected a value behind it",
    "+agents.älice.role=x": "'älice' is not a valid name",
    "+agents.judge={role": "+agents.judge={role",
}


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize("words, said", WORDS.items(), ids=str)
def test_words_that_are_wrong_by_themselves(refused, command, words, said):
    printed = refused(command, *words.split())
    assert printed.startswith("configuration error: ") and all(part in printed for part in said.split(" .* "))


def test_flags_of_other_programs_stand_for_keys(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("seed: 3\n")
    with pytest.raises(ConfigError, match=r"no list of defaults.*\ndefaults: \[marl, _self_\]"):
        train_flags(["--config", str(file)])
    file.write_text("defaults: [quickstart, _self_]\n")
    assert train_flags(["--config", str(file), "seed=1"]) == [
        "--config-dir",
        str(tmp_path),
        "--config-name",
        "mine",
        "seed=1",
    ]
    assert train_flags(["--config=quickstart"]) == ["--config-name", "quickstart"]
    assert train_flags(["--output", "my runs/a"]) == ['trainer.default_local_dir="my runs/a"']
    assert train_flags(["--resume", str(tmp_path)]) == [
        "trainer.resume_mode=auto",
        f'trainer.default_local_dir="{tmp_path}"',
    ]
    (point := tmp_path / "global_step_3").mkdir()
    assert train_flags([f"--resume={point}"]) == [
        "trainer.resume_mode=resume_path",
        f'trainer.resume_from_path="{point}"',
    ]
    assert train_flags(["--config-name", "game", "--quiet"]) == ["--config-name", "game", "--quiet"]


def test_overrides_may_stand_behind_flags():
    words = ["~agents.carol", "--config-name", "quickstart", "seed=1", "-m", "--info", "plugins", "--cfg", "job", "x=2"]
    assert in_order(words) == [
        "--config-name",
        "quickstart",
        "-m",
        "--info",
        "plugins",
        "--cfg",
        "job",
        "~agents.carol",
        "seed=1",
        "x=2",
    ]
    assert in_order(["--config-na", "game", "--info", "a=1"]) == ["--config-na", "game", "--info", "a=1"]
    assert get_args_parser().parse_args(in_order(words)).overrides == ["~agents.carol", "seed=1", "x=2"]


def test_flags_of_other_programs_for_eval(refused, tmp_path):
    from marl.commands.evaluate import FLAGS
    from marl.config.words import renamed

    (tmp_path / "tasks.csv").touch()
    words = [
        "--model",
        "run",
        "--environment",
        f"{tmp_path}/tasks.csv",
        "--num_episodes=50",
        "--output",
        f"{tmp_path}/out",
    ]
    assert renamed(words, FLAGS) == [
        "run",
        f"task={tmp_path}/tasks.csv",
        "data.val_max_samples=50",
        f"name={tmp_path}/out",
    ]
    assert "--environment gsm8k: no such file; expected a file of tasks" in refused(
        "eval", "run", "--environment", "gsm8k"
    )
    assert "configuration error: n=two: Value 'two'" in refused("eval", "run", "n=two")
    assert "configuration error: n=0: expected a whole number" in refused("eval", "run", "n=0")


OWN = """\
def helper(text):
    return txet.strip()


def compute(text):
    return helper(text)
"""


@pytest.mark.parametrize("wrap", [False, True])
def test_an_error_in_a_users_file_is_shown_from_that_file_on(tmp_path, capsys, wrap):
    (tmp_path / "mine.py").write_text(OWN)
    module = module_of(f"{tmp_path}/mine.py")

    def work():
        try:
            module.compute("4")
        except NameError as error:
            if not wrap:
                raise
            raise RuntimeError("all episodes of step 1 failed") from error

    assert exit_code(work) == 1
    said = capsys.readouterr().err
    assert f'File "{tmp_path}/mine.py", line 2, in helper' in said and "NameError: name 'txet' is not defined" in said
    assert said.endswith(
        "run failed: RuntimeError: all episodes of step 1 failed\n" if wrap else "name 'txet' is not defined\n"
    )
    assert "marl/main.py" not in said and own_traceback(OSError("full")) is None


def test_an_error_in_our_code_keeps_its_whole_traceback(capsys, monkeypatch):
    monkeypatch.setattr(own_frames, "LIBRARIES", (*own_frames.LIBRARIES, str(Path(__file__).parents[1])))
    assert exit_code(lambda: 1 / 0) == 1
    assert "marl/main.py" in capsys.readouterr().err


def test_a_reward_file_with_a_typo_is_named_with_its_line(tmp_path, compose_config):
    for name, text, said in (
        ("a", "import math\n\nBEST = maths.inf\n", r"NameError: name 'maths' is not defined, in .*/a.py, line 3;"),
        ("b", "x = 1\ndef compute_score(:\n", r"SyntaxError: .*b.py, line 2"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(ConfigError, match=said):
            checked_function(compose_config(f"reward.custom_reward_function.path={tmp_path}/{name}.py"))


def test_a_module_of_the_users_with_a_typo_is_shown_from_its_file_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "typo_world.py").write_text("import marl\n\nregister = marl.nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "typo_world")
    assert cli.main(["info", "worlds"]) == 1
    said = capsys.readouterr().err
    assert f'File "{tmp_path}/typo_world.py", line 3' in said and "catalogue.py" not in said
