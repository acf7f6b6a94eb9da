"""Messages of libraries about themselves are not shown; ours and the user's always are."""

import builtins
import logging
import os
import warnings

import pytest

from marl.utils import quiet as quieting
from marl.utils.quiet import quiet

RAY = {"__name__": "ray.experimental.tqdm_ray"}
exec("def safe_print(*words): print(*words)", RAY)  # as Ray does in the builtin one's place
SITE = os.path.join(os.sep, "x", "site-packages")


def speak(module, sentence, by="print"):
    """Print, warn or log from a module of this name."""
    code = {"print": "print(sentence)", "warn": "warnings.warn(sentence)", "ray": "through_ray(sentence)"}[by]
    exec(code, {"__name__": module, "sentence": sentence, "warnings": warnings, "through_ray": RAY["safe_print"]})


@pytest.mark.parametrize("by", ["print", "ray"])
def test_prints_of_libraries_are_dropped_and_others_are_not(capsys, by):
    with quiet():
        for module in ("verl.utils.dataset", "torch", "verl.utils.tracking", "verlain", "my_rewards", "marl.main"):
            speak(module, module, by)
    assert capsys.readouterr().out.split() == ["verl.utils.tracking", "verlain", "my_rewards", "marl.main"]


def test_a_warning_is_dropped_where_a_library_raises_it():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet():
            for module in ("verl.workers.engine", "torch", "my_rewards"):
                speak(module, module, "warn")
    assert [str(warning.message) for warning in caught] == ["my_rewards"]


def log(path, level):
    logger = logging.getLogger(path)
    logger.handle(logger.makeRecord(path, level, path, 1, f"{path} {level}", (), None))


def test_log_records_are_filtered_by_file_and_errors_pass(caplog):
    verl, own = (
        os.path.join(SITE, "verl", "utils", "logger", "aggregate_logger.py"),
        os.path.join(os.sep, "home", "me", "verl_rewards.py"),
    )
    caplog.set_level(logging.INFO)
    with quiet():
        for path, level in ((verl, logging.INFO), (verl, logging.WARNING), (verl, logging.ERROR), (own, logging.INFO)):
            log(path, level)
    assert [record.message for record in caplog.records] == [f"{verl} 40", f"{own} 20"]


def test_verbose_shows_everything_and_so_does_what_comes_after(capsys, monkeypatch):
    monkeypatch.setattr(builtins, "print", builtins.print)  # puts it back, whatever happens
    before = builtins.print, logging.Logger.handle
    with quiet(verbose=True):
        speak("verl", "one")
    with pytest.raises(KeyError), quiet():
        kept = builtins.print
        raise KeyError("errors are nobody's to hide")
    assert (builtins.print, logging.Logger.handle) == before
    speak("verl", "two")
    exec("kept('three')", {"__name__": "verl", "kept": kept})
    with quiet():
        builtins.print = through = lambda *words: kept(*words)  # as Ray does, in the middle of a run
    assert builtins.print is through, "somebody else's: it stays"
    assert capsys.readouterr().out.split() == ["one", "two", "three"]


def test_what_is_set_before_the_imports_and_left_with_verbose(monkeypatch):
    for key in quieting.BEFORE_IMPORTS:
        monkeypatch.setenv(key, "")  # what is set below is taken back at the end
        del os.environ[key]
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    quieting.quiet_imports(["verbose=true"])
    assert [key for key in quieting.BEFORE_IMPORTS if key in os.environ] == ["TRANSFORMERS_VERBOSITY"]
    quieting.quiet_imports(["trainer.device=cpu"])
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info", "the user's own"
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
