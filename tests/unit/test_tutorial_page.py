"""docs/tutorial.md without running it: its length, its commands, its keys, and how its quotations are compared."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import marl.preflight.prepare  # noqa: F401 - registers our groups
from marl import cli
from marl.config.overrides import find_verl
from tests import tutorial
from tests.tutorial import Shown, missing_lines

HYDRAS = ("train", "plan")
PROGRAMS = {"marl", "python", "curl", "kill", "echo", "timeout"}


def words_of(command):
    """The program's name and the words of a command that stands alone, behind ``timeout`` or behind a pipe; no redirections."""
    words = shlex.split(re.sub(r"\s(\d?>&?\s*\S+|&$)", " ", command.rpartition(" | ")[2]).removesuffix("&"))
    if words[0] == "timeout":
        words = words[words.index("marl") :]
    return words[0], words[1:]


MARL = [words for shown in tutorial.commands() for name, words in [words_of(shown.command)] if name == "marl"]


def test_fifteen_commands_at_most_one_to_a_block():
    commands = tutorial.commands()
    assert len(commands) + len(tutorial.BEFORE) <= tutorial.MOST
    assert all(f"`{command}`" in tutorial.text() for command in tutorial.BEFORE)
    assert len(commands) == tutorial.text().count("```bash") and all("\n" not in shown.command for shown in commands)
    programs = {word for shown in commands for word in re.findall(r"(?:^|\| )(\w+)", shown.command)}
    assert programs <= PROGRAMS
    needed = {"doctor", "plan", "train", "report", "eval", "compare", "serve", "chat", "export"}
    assert needed <= {words[0] for words in MARL}


@pytest.fixture
def experiment(tmp_path):
    for name, text in tutorial.files().items():
        (tmp_path / name).write_text(text)
    assert set(tutorial.files()) == {"questions.py", "reward.py", "debate.yaml"}

    def composed(*words):
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            return compose("debate", overrides=find_verl(["hydra.searchpath=[pkg://marl.configs]", *words]))

    return composed


@pytest.mark.parametrize("words", [words for words in MARL if words[0] in HYDRAS], ids=" ".join)
def test_the_words_of_training_compose(experiment, words):
    named = [word for word in words[1:] if "=" in word]
    assert words[1:5] == ["--config-dir", ".", "--config-name", "debate"] and len(words) == 5 + len(named)
    config = experiment(*named)
    assert config.runner.name == "debate" and list(config.agents) == ["alice", "carol"]
    for key, _, value in (word.partition("=") for word in named):
        found = OmegaConf.select(config, key)
        assert str(found.name if OmegaConf.is_dict(found) else found).lower() == value


@pytest.mark.parametrize("words", [words for words in MARL if words[0] not in HYDRAS], ids=" ".join)
def test_the_words_of_other_commands_are_known(experiment, words):
    name, *rest = words
    module = import_module(cli.COMMANDS[name].module)
    if cli.COMMANDS[name].options:
        with module.command.make_context(name, rest):
            return
    *_, left = module.parsed(rest)
    config = experiment()
    assert [
        word for word in left if "=" not in word or OmegaConf.select(config, word.partition("=")[0], default=0) == 0
    ] == []


def test_the_files_do_what_the_text_says(tmp_path, monkeypatch):
    import csv

    monkeypatch.chdir(tmp_path)
    spaces = {name: {} for name in ("questions.py", "reward.py")}
    for name, space in spaces.items():
        exec(compile(tutorial.files()[name], name, "exec"), space)
    rows = list(csv.DictReader(Path("questions.csv").read_text().splitlines()))
    assert len(rows) == 1000 and {*rows[0]} == {"question", "answer"}
    score = spaces["reward.py"]["compute_score"]
    texts = ("#### 12", "#### 13", "12", "#### 12 #### 12", "")
    assert [score("mine", text, "12") for text in texts] == [1.0, 0.0, 0.0, 0.0, 0.0]


PRINTED = """\
step  1/80  0:40 left  4,018 tokens/s  vote 0.574
results: /tmp/x/outputs/grpo/20261122-222006-d117-seed0
| mine | 2 | 0.939 [0.909, 0.970] | -0.030 |
"""


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        (["step 2/60  1:02 left  18 tokens/s  vote 0.9"], 0),
        (["step 2/60  1:02 left  18 tokens/s  team vote 0.9"], 1),
        (["results: …/outputs/grpo/20270101-000000-aaaa-seed1"], 0),
        (["results: …/outputs/mappo/20270101-000000-aaaa-seed1"], 1),
        (["| mine | 1 | 0.1 [0.2, 0.3] | +1.2 |"], 0),
        (["| mine | 1 | 0.1 | +1.2 |"], 1),
        (["step 2/60  1:02 left …", "…", "| mine | … |"], 0),
        (["| mine | … |", "step 2/60  1:02 left …"], 1),
        (["step …", "no such line", "results: …"], 1),
    ],
)
def test_quotations_are_compared_by_their_form(lines, missing):
    """Numbers and stamps may differ, words may not; lines come in their order."""
    assert len(missing_lines(Shown("", tuple(lines)), PRINTED)) == missing
