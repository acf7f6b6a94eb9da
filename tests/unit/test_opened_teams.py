"""Teams of saved runs as ``marl eval``, ``serve`` and ``chat`` open them: their configuration, before anything starts."""

import asyncio
import io
import json
import logging
import re
import shlex
import shutil
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import fields
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from rich.console import Console
from transformers import LlamaConfig

from marl.commands import chat, collect, evaluate, replay, serve
from marl.config.errors import ConfigError
from marl.config.external import VARIABLE, find_own_modules, own_modules
from marl.config.identity import leaves, plain_of, settings_of
from marl.config.schema import ControllerConfig, JudgeConfig
from marl.evaluation import evaluate as played, team
from marl.evaluation.saved_settings import ALLOWED, allowed, is_allowed, word_of
from marl.evaluation.source import Source, find
from marl.evaluation.team import config_of
from marl.preflight.prepare import prepare
from marl.serving.refusals import TOO_LONG, Refused
from marl.utils import folders, manifest
from marl.utils.deadlines import DeadlinePassed

RAY = "ray_kwargs.ray_init"
TOKENIZER = "actor_rollout_ref.model.tokenizer_path"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
CODE = {
    "actor_rollout_ref.model.trust_remote_code": True,
    "actor_rollout_ref.model.external_lib": "stranger",
    TOKENIZER: "org/elsewhere",
    ATTENTION: "org/kernel",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls": "stranger.Worker",
    "data.custom_cls.path": "pkg://stranger",
    "trusted_targets": ["stranger"],
    "policies.alice.model.trust_remote_code": True,
    f"{RAY}.address": "ray://stranger:10001",
    f"{RAY}.runtime_env.py_executable": "touch marker;",
    f"{RAY}.runtime_env.env_vars.LD_PRELOAD": "/stranger.so",
    f"{RAY}.runtime_env.worker_process_setup_hook": "stranger.hook",
    f"{RAY}.runtime_env.working_dir": "https://stranger/code.zip",
}


@pytest.fixture
def saved(compose_config, cold_assets, tmp_path, monkeypatch):
    """A run's folder with one checkpoint, whose trained base is a copy that tests may remove."""
    monkeypatch.setattr(
        team, "composed", lambda words: compose_config("learner=grpo", "credit=own", *words, name="marl")
    )

    def saved(*words):
        shutil.copytree(cold_assets / "model", tmp_path / "base")
        run = tmp_path / "run"
        model = f"actor_rollout_ref.model.path={tmp_path / 'base'}"
        setup = prepare(compose_config(f"assets={cold_assets}", f"trainer.default_local_dir={run}", model, *words))
        step = run / "global_step_2"
        for name in ("alice", "carol"):
            shutil.copytree(tmp_path / "base", step / name / "actor" / "huggingface")
        folders.write_state(step, {"step": 2, "policies": ["alice", "carol"]})
        return Source(step, 2, json.loads(json.dumps(settings_of(setup.config), default=str)))

    return saved


def put(tree, key, value):
    *parts, last = key.split(".")
    for part in parts:
        tree = tree.setdefault(part, {})
    tree[last] = value


def value_of(config, key):
    for part in key.split("."):
        config = (config or {}).get(part)
    return config


DANGEROUS = re.compile(
    r"path|files?$|dir|url|address|env|_cls|module|hook|cmd|command|exec|lib|engine_kwargs|trust|_target_|callback|server"
)


def test_every_setting_that_a_saved_run_brings_is_allowed_with_a_reason(compose_config):
    """All others, which are most keys of ``--cfg job``, have their default."""
    trees = [plain_of(compose_config("runner=game")), plain_of(compose_config("+agents.bob.role=b", name="marl"))]
    trees[0]["policies"] = {"alice": trees[0]["actor_rollout_ref"] | {"pool": "one", "thinking": "auto"}}
    trees[0]["judge"]["extractors"] = {"mine": "flexible"}
    keys = {key: value for tree in trees for key, value in leaves(json.loads(json.dumps(tree, default=str)))}
    taken = {key for key, value in keys.items() if is_allowed(key, value)}
    assert {key for tree in trees for key, _ in leaves(allowed(tree))} == taken and len(taken) < len(keys) / 5
    dangerous = {key for key in taken if DANGEROUS.search(key.removeprefix("actor_rollout_ref"))}
    assert dangerous == {"data.train_files", "data.val_files"}
    for pattern, reason in ALLOWED.items():
        assert reason and any(re.fullmatch(pattern, key) for key in taken), pattern


def test_a_saved_run_brings_whatever_decides_a_score():
    """Only those of the controller's settings stay behind that no measured answer depends on."""
    keys = {
        f"{group}.{field.name}"
        for group, config in {"controller": ControllerConfig, "judge": JudgeConfig}.items()
        for field in fields(config)
    }
    training = {
        "controller.train_truncated", "judge.overlong_buffer", "judge.overlong_penalty", "controller.pack_turns",
        "controller.old_log_probs", "controller.log_prob_gap_bound", "controller.log_prob_check_rows",
        "controller.log_prob_gap_alarm", "controller.lazy_agent_share", "controller.degenerate_steps",
    }  # fmt: skip
    machine = {f"controller.{name}" for name in ("num_workers", "ledger", "keep_ledger")}
    machine |= {"judge.processes", "judge.extractors"}
    assert {key for key in keys if is_allowed(key, 1)} == keys - training - machine
    assert allowed({"judge": {"right_at": 50.0}}) == {"judge": {"right_at": 50.0}}


def test_nothing_that_a_saved_run_brings_is_executed_or_read_from_the_environment(saved, tmp_path, monkeypatch, caplog):
    """Each is left out by its name, so that one's own run says what to repeat."""
    monkeypatch.setenv("STRANGE_SECRET", "correct-horse")
    source = saved()
    standard = {key: value_of(source.saved, key) for key in CODE} | {TOKENIZER: None, ATTENTION: "sdpa"}
    (tmp_path / "mark.py").write_text(
        f"open({str(tmp_path / 'marker')!r}, 'w')\n\ndef extract(text):\n    return text\n"
    )
    for key, value in CODE.items():
        put(source.saved, key, value)
    source.saved["judge"]["extractors"] = {"marl": f"{tmp_path / 'mark.py'}:extract"}
    with caplog.at_level(logging.WARNING):
        config = prepare(config_of(source)).config
    assert {key: value_of(config, key) for key in CODE} == standard and not (tmp_path / "marker").exists()
    assert [key for key, value in CODE.items() if word_of(key, value) not in caplog.text] == []
    assert "judge.extractors.marl=" in caplog.text
    words = [word for key, value in CODE.items() for word in shlex.split(word_of(key, value, new=True))]
    assert {key: value_of(config_of(source, words), key) for key in CODE} == CODE
    source.saved["agents"]["alice"]["role"] = "say ${oc.env:STRANGE_SECRET}"
    with pytest.raises(ConfigError, match="agents.alice.role=.*expected a plain value") as refused:
        config_of(source)
    assert "correct-horse" not in str(refused.value)


def test_a_saved_run_sends_nothing_to_a_server_that_nobody_named(saved, monkeypatch):
    """Nor does it load a model that lies elsewhere."""
    monkeypatch.setenv("STRANGE_SECRET", "correct-horse")
    source = saved("+agents.judge.trainable=false")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        endpoint = {"base_url": url, "model": "x", "api_key_env": "STRANGE_SECRET"}
        source.saved["policies"]["judge"] = {"endpoint": endpoint}
        for policy in ("judge", "alice"):
            source.saved["policies"][policy] = {"endpoint": endpoint}
            with (
                pytest.raises(ConfigError, match=r"'policies.judge.endpoint=\{.*STRANGE_SECRET") as refused,
                team.opened(source),
            ):
                pass
        with pytest.raises(BlockingIOError):
            listener.accept()
    config = config_of(source, shlex.split(str(refused.value).partition("add ")[2]))
    assert config.policies.judge.endpoint == endpoint and "endpoint" not in config.policies.alice
    source.saved["policies"]["judge"] = {"model": {"path": "org/elsewhere"}}
    with pytest.raises(ConfigError, match="add policies.judge.model.path=org/elsewhere"):
        config_of(source)
    assert config_of(source, ["policies.judge.model.path=org/mine"]).policies.judge.model.path == "org/mine"


def test_no_module_is_imported_from_a_runs_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/elsewhere"])
    (tmp_path / "run.json").touch()
    find_own_modules()
    assert sys.path == ["/elsewhere"]
    (tmp_path / "run.json").unlink()
    find_own_modules()
    assert sys.path == [str(tmp_path), "/elsewhere"]


def test_an_evaluation_does_not_score_by_other_rules_in_silence(tmp_path):
    source = Source(tmp_path, 2, {})
    put(source.saved, "reward.custom_reward_function.path", "/stranger.py")
    put(source.saved, "reward.custom_reward_function.reward_kwargs.k", 2)
    said = r"add reward.custom_reward_function.path=/stranger.py \+reward.custom_reward_function.reward_kwargs.k=2, or .*=null"
    with pytest.raises(ConfigError, match=said):
        evaluate.measure(evaluate.Options(), [source], [])


@pytest.mark.slow
def test_a_run_of_a_users_columns_is_evaluated_on_other_files(saved):
    source = saved()
    source.saved["data"]["columns"] = {"prompt": "question", "answer": "a"}
    assert config_of(source, ["data.val_files=other.parquet"]).data.columns is None
    words = ["data.val_files=mine.csv", "data.columns={prompt: q, answer: a}"]
    assert config_of(source, words).data.columns.prompt == "q", "a user's own file may be named, too"


@pytest.mark.slow
def test_a_run_that_was_moved_is_opened_without_its_base_and_its_folders(saved, tmp_path):
    source = saved("trainer.resume_mode=disable")
    moved = source.path.parent.rename(tmp_path / "moved") / source.path.name
    shutil.rmtree(tmp_path / "base")
    (tmp_path / "file").touch()
    gone = {"default_local_dir": f"{tmp_path}/file/run", "rollout_data_dir": f"{tmp_path}/file/rollouts"}
    gone |= {"validation_data_dir": f"{tmp_path}/file/validation", "resume_mode": "resume_path"}
    source.saved["trainer"] |= gone | {"resume_from_path": f"{tmp_path}/file/global_step_1"}
    setup = prepare(config_of(Source(moved, 2, source.saved)))
    assert setup.config.actor_rollout_ref.model.path == str(moved / "alice" / "actor" / "huggingface")
    assert setup.config.trainer.rollout_data_dir is setup.config.trainer.validation_data_dir is None


@pytest.mark.parametrize(
    ("longest", "words", "lengths"),
    [
        (256, [], (128, 128)),
        (1000, [], (500, 500)),
        (256, ["data.max_prompt_length=200"], (200, 56)),
        (256, ["data.max_response_length=1"], (255, 1)),
        (2048, [], (512, 512)),
    ],
)
def test_the_lengths_left_open_fit_the_context_of_a_plain_model(tmp_path, caplog, longest, words, lengths):
    LlamaConfig(max_position_embeddings=longest).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        config = config_of(Source(tmp_path, None), words)
    assert (config.data.max_prompt_length, config.data.max_response_length) == lengths
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.prompt_length, rollout.response_length) == lengths
    told = "is {} tokens, prompt and answer together: using data.max_prompt_length={} data.max_response_length={}"
    assert (told.format(longest, *lengths) in caplog.text) is (longest < 1024)


@pytest.mark.parametrize(
    "words", [["data.max_prompt_length=200", "data.max_response_length=57"], ["data.max_prompt_length=256"]]
)
def test_lengths_beyond_the_context_of_a_plain_model_are_refused_with_some_that_fit(tmp_path, words):
    LlamaConfig(max_position_embeddings=256).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"is 256 tokens.*data.max_prompt_length=128 data.max_response_length=128, or .*max_model_len=N",
    ):
        config_of(Source(tmp_path, None), words)


def test_a_plain_model_of_a_short_context_answers(cold_assets, tmp_path):
    row = {
        "prompt": [{"role": "user", "content": "how many ?"}],
        "data_source": "q",
        "reward_model": {"ground_truth": "4"},
    }
    (tmp_path / "task.jsonl").write_text(json.dumps(row))
    with team.opened(find(str(cold_assets / "model")), [f"data.val_files={tmp_path / 'task.jsonl'}"]) as alone:
        collected = alone.controller.collect(alone.tasks(), 1, 0, validate=True)
        assert [episode.answer for episode in alone.loop.run_until_complete(collected).episodes]


@pytest.fixture
def with_modules(saved, tmp_path, monkeypatch):
    """A run whose runner is of a module that its training imported."""
    (tmp_path / "project" / "mine_a").mkdir(parents=True)
    for file in ("__init__", "parts"):
        (tmp_path / "project" / "mine_a" / f"{file}.py").touch()
    with monkeypatch.context() as training:
        training.syspath_prepend(tmp_path / "project")
        training.setenv(VARIABLE, "marl.platform.cpu,mine_a.parts,mine_a")
        source = saved()
        identity = {"config": source.saved, "agents_in_order": ["alice", "carol"], "modules": own_modules()}
    source.saved["runner"]["name"] = "mine"
    for folder in (source.path, source.path.parent):
        (folder / "run.json").write_text(json.dumps(identity))
    manifest.seal(source.path, {"step": 2})
    monkeypatch.delenv(VARIABLE, raising=False)
    return source.path


def test_modules_that_a_run_imported_are_named_where_they_are_missing(with_modules, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("marl.evaluation.recorded_run.RecordedRun.must_hold", lambda *_: None)
    own = {collect: ["--out", str(tmp_path / "a.jsonl")], replay: ["step=3"], serve: ["--port", "0"]}
    told = f"PYTHONPATH={tmp_path / 'project'}:$PYTHONPATH {VARIABLE}=mine_a.parts,mine_a marl …\n"
    for command in (evaluate, chat, serve, collect, replay):
        words = [str(with_modules.parent if command is replay else with_modules), *own.get(command, [])]
        with monkeypatch.context() as here:
            assert command.main(words) == 2
            said = capsys.readouterr().err
            assert "runner=mine" in said and said.endswith(f"only if you name them: {told}")
            here.syspath_prepend(tmp_path / "project")
            here.setenv(VARIABLE, "mine_a.parts,mine_a")
            assert command.main(words) == 2 and VARIABLE not in capsys.readouterr().err


def test_modules_are_no_remedy_for_errors_that_are_not_of_the_runs_settings(with_modules, tmp_path, capsys):
    with_name = {"name": "mine", "command": "marl eval other"}
    (with_modules.parent / "evaluations" / "mine").mkdir(parents=True)
    (with_modules.parent / "evaluations" / "mine" / "result.json").write_text(json.dumps(with_name))
    (tmp_path / "task.jsonl").touch()
    for words in (["task=gone.jsonl"], [f"task={tmp_path / 'task.jsonl'}", "name=mine"]):
        assert evaluate.main([str(with_modules), *words]) == 2
        said = capsys.readouterr().err
        assert ("no such file" in said or "choose another name" in said) and VARIABLE not in said


def test_hardware_of_a_run_is_refused_by_name(tmp_path):
    with pytest.raises(
        ConfigError, match="hardware=gpu: .*is opened with the settings that it was saved with.*trainer.device"
    ):
        config_of(Source(tmp_path, 2, {}), ["hardware=gpu"])


def test_a_run_without_validation_asks_for_a_task(tmp_path):
    for files in (None, []):
        with pytest.raises(ConfigError, match="task: the run has no validation files; add task=FILE"):
            evaluate.files_of(evaluate.Options(), [Source(tmp_path, 2, {"data": {"val_files": files}})])


def test_servers_that_cannot_be_placed_end_at_the_deadline(tmp_path, monkeypatch):
    """verl's constructors wait for Ray without a limit."""
    monkeypatch.setattr(team, "make_groups", lambda *_: time.sleep(20))
    monkeypatch.setattr(team, "start_deadline", lambda *_: (0.05, "placing the worker groups", "resources.timeout_s"))
    setup = SimpleNamespace(config=OmegaConf.create({"resources": {"one_process": True}}), policies=[], pools={})
    with ExitStack() as cleanup, pytest.raises(DeadlinePassed, match="placing the worker groups.*resources.timeout_s"):
        asyncio.run(team.start(setup, Source(tmp_path, 2, {}), cleanup))


def test_the_command_of_an_evaluation_is_masked(tmp_path):
    token = "hf_" + "abcdefghijklmnopqrstuvwx"
    said = evaluate.command_of(evaluate.Options(), [Source(tmp_path, 2, {})], ["a.parquet"], [f"verbose={token}"])
    assert token not in said and "verbose=" in said


def test_the_command_of_an_evaluation_holds_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine_b.py", "b.jsonl", "1", "my file.py"):
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VARIABLE, "mine_b")
    path, file = "reward.custom_reward_function.path", str(tmp_path / "b.jsonl")
    words = [f"{path}=mine_b.py", "data.val_files=[b.jsonl,b.jsonl]", "n=1", "a.path=gone/model", "b.path=pkg://mine_b"]
    words += ["data.val_files=[b.jsonl, 'b.jsonl' ]", f"{path}='my file.py'"]
    said = evaluate.command_of(evaluate.Options(), [Source(tmp_path, 2, {})], [file], words)
    modules, rest = said.split(" marl eval ")
    assert modules == f"PYTHONPATH={tmp_path}:$PYTHONPATH {VARIABLE}=mine_b"
    mended = [f"{path}={tmp_path}/mine_b.py", f"data.val_files=[{file},{file}]", *words[2:-2]]
    mended += [f"data.val_files=[{file}, '{file}' ]", f"{path}='{tmp_path}/my file.py'"]
    assert shlex.split(rest) == [str(tmp_path), f"task={file}", *mended]


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_played(tmp_path):
    (tmp_path / "evaluations").touch()
    with pytest.raises(ConfigError, match=r"evaluations/mine: cannot be written .*expected a folder"):
        evaluate.folder_of(Source(tmp_path / "global_step_2", 2, {}), "mine", "marl eval")


def test_teams_of_other_tasks_are_named_before_anything_is_played(tmp_path, monkeypatch):
    monkeypatch.setattr(played, "evaluate", lambda *_: pytest.fail("played"))
    monkeypatch.setattr(played, "digest_of", lambda source, words: source.path.name)
    sources = [Source(tmp_path / name, 2, {"data": {"val_files": []}}) for name in ("one", "two")]
    (tmp_path / "task.jsonl").touch()
    with pytest.raises(ConfigError, match="read different tasks from the same files"):
        evaluate.measure(evaluate.Options(task=str(tmp_path / "task.jsonl")), sources, [])


def test_folders_may_have_an_equals_sign_in_their_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    _, teams, words = evaluate.parsed(["lr=1", "other", "seed=2", "n=1"])
    assert (teams, words) == (["lr=1", "other"], ["seed=2"])
    folder, own, changes = replay.parsed(["lr=1", "step=2", "seed=3"])
    assert (folder, own, changes) == (tmp_path / "lr=1", {"step": "2"}, ("seed=3",))


@pytest.mark.parametrize(("code", "advised"), [(TOO_LONG, True), ("needs_scores", False)])
def test_a_new_conversation_is_advised_where_the_old_one_is_too_long(code, advised):
    def play(*_, **__):
        raise Refused(400, "no", code)

    shown, options = io.StringIO(), SimpleNamespace(model="team", seed=None)
    talk = chat.Talk(Console(file=shown), lambda done: done, SimpleNamespace(play=play), options)
    talk.hear("how many ?")
    assert ("/new begins a shorter conversation" in shown.getvalue()) is advised


def test_what_is_typed_in_another_encoding_is_asked_in_unicode():
    asked = []

    def play(_, messages, *__, **___):
        asked.append(messages[-1]["content"])
        raise Refused(400, "no", "needs_scores")

    options = SimpleNamespace(model="team", seed=None)
    talk = chat.Talk(Console(file=io.StringIO()), lambda done: done, SimpleNamespace(play=play), options)
    talk.hear(b"caf\xe9 how many ?".decode("utf-8", "surrogateescape"))
    assert asked == ["caf\ufffd how many ?"]
