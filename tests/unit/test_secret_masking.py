"""Secrets are masked wherever a run saves, prints, logs or sends its settings."""

import json
import logging
import sys
import time
from types import SimpleNamespace

import pytest
from hydra._internal.utils import get_args_parser

from marl.config.errors import ConfigError
from marl.main import exit_code, main, shown_by
from marl.report.dump import write
from marl.rollout.hf import server_name
from marl.types import Score
from marl.utils import secret_masking
from marl.utils.secret_masking import hide, masked, masked_logs, masked_text
from marl.utils.tracking import MetricsFile
from tests.builders import episode

PASSWORD = "correct7horse"
HUB = "hf_" + "aB3" * 10


@pytest.mark.parametrize(
    "text,shown",
    [
        (f"postgres://ann:{PASSWORD}@db:5432/runs", "postgres://***@db:5432/runs"),
        (f"https://{HUB}@host/org/name.git", "https://***@host/org/name.git"),
        (f"GET https://host/v1?user=ann&api_key={PASSWORD}&n=2", "GET https://host/v1?user=ann&api_key=***&n=2"),
        (f"unknown key 'judge.api_key' (={PASSWORD}): it has", "unknown key 'judge.api_key' (=***): it has"),
        (f"{{'WANDB_API_KEY': '{PASSWORD}', 'lr': 1}}", "{'WANDB_API_KEY': ***, 'lr': 1}"),
        (f'{{"password": "{PASSWORD} and more", "lr": 1}}', '{"password": ***, "lr": 1}'),
        (f"judge:\n  api_key: {PASSWORD} too\n  n: 2", "judge:\n  api_key: ***\n  n: 2"),
        (f"Authorization: Bearer {PASSWORD}{PASSWORD}", "Authorization: Bearer ***"),
        (f"cannot log in with {HUB}: 401", "cannot log in with ***: 401"),
        ("key sk-proj-" + "a1" * 20, "key ***"),
        ("AKIAIOSFODNN7EXAMPLE is refused", "*** is refused"),
    ],
)
def test_a_secret_in_a_text_is_masked(text, shown):
    found = masked_text(text)
    assert PASSWORD not in found and HUB not in found
    assert found == shown


@pytest.mark.parametrize(
    "text",
    [
        "learner.lam=0.9: expected a number from 0 to 1",
        "policies.carol.endpoint.api_key: a configuration is printed and saved, and holds no access key; remove it",
        "policies.carol.endpoint.api_key_env=JUDGE_API_KEY: this variable is not set",
        "data.max_prompt_length=64: the prompt has 65 tokens; see https://example.org/docs",
        "judge:\n  api_key: null\n  max_tokens: 3",
        "the bearer of this message, actor_rollout_ref.model.tokenizer_path=/models/qwen",
        "mail ann@example.org",
    ],
)
def test_a_text_without_secrets_stays_as_it_is(text):
    assert masked_text(text) == text


@pytest.mark.parametrize("part", ["a", "a.", "a=", "a://", "'a' (="])
def test_a_long_text_is_masked_in_linear_time(part):
    """A quadratic expression would take minutes."""
    began = time.monotonic()
    masked_text(part * 100_000)
    assert time.monotonic() - began < 10


def test_values_of_secret_variables_are_masked_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("PLAIN", "nothing-secret")
    assert masked_text("wandb: 0123456789abcdef, nothing-secret") == "wandb: ***, nothing-secret"
    assert masked({"note": ["at 0123456789abcdef"]}) == {"note": ["at ***"]}


def test_what_is_hidden_stays_hidden(monkeypatch):
    monkeypatch.setattr(secret_masking, "HIDDEN", set())
    assert masked_text(f"said {PASSWORD}") == f"said {PASSWORD}"
    hide([PASSWORD, "agent"])
    assert masked_text(f"agent said {PASSWORD}") == "agent said ***", "a short one is a word"


@pytest.mark.parametrize("error,code", [(RuntimeError, 1), (ConfigError, 2)])
def test_an_error_is_printed_without_secrets(capsys, error, code):
    def fail():
        raise error(f"judge.password={PASSWORD}: cannot open postgres://ann:{PASSWORD}@db")

    assert exit_code(fail) == code
    printed = capsys.readouterr().err
    assert "judge.password=***: cannot open postgres://***@db" in printed and PASSWORD not in printed
    assert ("Traceback" in printed) == (code == 1)


@pytest.mark.parametrize("flag", [["--cfg", "job"], ["--cfg=job"], ["--cf", "job"], ["-cjob"]])
def test_a_printed_configuration_holds_no_secrets(capsys, monkeypatch, flag):
    monkeypatch.setattr(sys, "argv", ["marl"])
    words = [*flag, "--package", "judge", f"+judge.password={PASSWORD}", "+judge.model=m"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "password: ***" in printed and "model: m" in printed and PASSWORD not in printed


def test_every_flag_of_hydras_that_prints_the_configuration_is_known():
    shows = [
        "--cfg=job",
        "--cf=job",
        "-cjob",
        "-rcjob",
        "-mcall",
        "-ri",
        "-c=all",
        "--info",
        "--inf=config",
        "--in",
        "--i",
        "-i",
        "-iall",
    ]
    for word in [*shows, "--help", "--hel", "-h", "-hi"]:
        read = get_args_parser().parse_args([word])
        assert shown_by(["seed=1", word]) == word and (read.cfg or read.info or read.help), word
    others = ["-cn=quickstart", "-cp=x", "-cd=x", "--config-name=x", "--hydra-help", "-m", "-r", "--resolve", "i=c"]
    assert [word for word in others if shown_by([word])] == []


def test_a_log_record_holds_no_secrets(caplog):
    logger = logging.getLogger("marl.test")
    with masked_logs():
        logger.warning("asked %s with %s", "https://host", f"api_key={PASSWORD}")
        try:
            raise ValueError(f"password={PASSWORD}")
        except ValueError:
            logger.exception("failed")
    assert "asked https://host with api_key=***" in caplog.text and "ValueError: password=***" in caplog.text
    assert PASSWORD not in caplog.text
    logger.warning("password=%s", "afterwards")
    assert "password=afterwards" in caplog.text


def test_the_metrics_file_holds_no_secrets(tmp_path):
    MetricsFile(tmp_path / "metrics.jsonl", 0).log({"agent/secret/loss": 0.5, "note": f"api_key={PASSWORD}"}, 1)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["data"] == {
        "agent/secret/loss": 0.5,
        "note": "api_key=***",
    }


def test_a_dump_holds_no_secret_of_a_reward_that_failed(tmp_path):
    record = episode("t", 0, [[0.0], [1.0]])
    record.turns[0].score = Score(0.0, None, failure=f"HTTPError: https://ann:{PASSWORD}@judge/v1")
    write([record], 1, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "1.jsonl").open()]
    assert [line["reward_failure"] for line in lines] == ["HTTPError: https://***@judge/v1", None]


def test_the_name_of_a_server_is_no_secret():
    """Errors name the server that died; the hub's tokens begin with hf_."""
    name = server_name(SimpleNamespace(custom={"run_id": "1f2e3d4c", "policy": "carol"}), 0)
    assert masked_text(f"process {name} died") == f"process {name} died"
