"""``marl eval``, ``serve`` and ``chat``: a trained run is opened again, and answers as in its own validation."""

import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import httpx
import pytest
from rich.console import Console

from marl import main as marl_main
from marl.commands import chat, evaluate
from marl.config.errors import ConfigError
from marl.evaluation.source import find
from marl.preflight.run_folder import locked
from tests.composing import compose
from tests.stack.builders import ADAPTED
from tests.stack.conftest import ROOT


def trained(cold_assets, folder, *overrides):
    """A run of two steps, with a validation and a checkpoint after each; its weights move."""
    marl_main.run(
        compose(
            f"assets={cold_assets}", f"trainer.default_local_dir={folder}", "data.train_batch_size=4",
            "actor_rollout_ref.rollout.n=2", "trainer.logger=[file]", "resources.one_process=true",
            "trainer.total_training_steps=2", "trainer.test_freq=1", "trainer.save_freq=1",
            "trainer.max_actor_ckpt_to_keep=null", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
            "actor_rollout_ref.actor.entropy_coeff=1", "trainer.val_before_train=false", *overrides,
        )
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def run(cold_assets, tmp_path_factory):
    return trained(cold_assets, tmp_path_factory.mktemp("runs") / "debate")


def lines_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(path):
    return [
        (line["task"], line["agent"], line["round"], line["output"], line["team_answer"]) for line in lines_in(path)
    ]


def test_a_checkpoint_answers_as_in_its_own_validation(run, capsys):
    """Every text of the dump, and so every number; another step's weights say something else."""
    result = evaluate.run([str(run)])
    (team,), folder = result["teams"], run / "evaluations" / result["name"]
    (saved,) = [line["data"] for line in lines_in(run / "metrics.jsonl") if line["step"] == 2]
    assert team["step"] == 2 and result["samples"] == 1 and result["task"]["tasks"] == 8
    assert said(folder / "episodes" / "debate@2" / "2.jsonl") == said(run / "validation" / "2.jsonl")
    assert said(run / "validation" / "1.jsonl") != said(run / "validation" / "2.jsonl")
    assert team["accuracy"] == saved["val/team/vote"] and team["failed"] == saved["val/team/failed"]
    assert team["by_round"] == {str(r): saved[f"val/team/accuracy/round_{r}"] for r in (1, 2)}
    assert (folder / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert result["command"] in shown and result["command"] in (folder / "README.md").read_text()


CORY = ("learner=cory", "runner=pioneer_observer", "credit=auto", "learner.exchange_every=1")
HEADS = ("runner.num_rounds=3", "runner.decide=accuracy", "learner=mappo", "credit=team")


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [("sharing=shared",), CORY, HEADS], ids=["shared", "exchanged", "critic"])
def test_other_teams_answer_as_in_their_validation(cold_assets, tmp_path, overrides):
    """One policy for all; policies that agents have exchanged; votes by the agents' accuracy in training, beside a critic."""
    folder = trained(cold_assets, tmp_path / "run", *overrides)
    result = evaluate.run([str(folder)])
    assert said(folder / "evaluations" / result["name"] / "episodes" / "run@2" / "2.jsonl") == said(
        folder / "validation" / "2.jsonl"
    )


@pytest.mark.slow
def test_adapters_are_merged_into_their_base(cold_assets, tmp_path):
    """Merged weights differ from base and adapter in the last bits, and so may a token."""
    folder = trained(cold_assets, tmp_path / "run", *ADAPTED, "actor_rollout_ref.actor.optim.lr=0.1")
    result = evaluate.run([str(folder)])
    again = said(folder / "evaluations" / result["name"] / "episodes" / "run@2" / "2.jsonl")
    was, before = (said(folder / "validation" / f"{step}.jsonl") for step in (2, 1))
    same = [one == other for one, other in zip(again, was, strict=True)]
    assert sum(same) >= 0.9 * len(same) and sum(a == b for a, b in zip(before, was, strict=True)) < 0.9 * len(same)


def brute_pass(right, k):
    subsets = list(itertools.combinations(right, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


def brute_majority(samples, k):
    """Samples: (answer, right)."""
    total = 0.0
    for subset in itertools.combinations(samples, k):
        counts = {}
        for answer, _ in subset:
            if answer is not None:
                counts[answer] = counts.get(answer, 0) + 1
        best = [answer for answer in counts if counts[answer] == max(counts.values())]
        total += sum(any(r for a, r in samples if a == answer) for answer in best) / len(best) if best else 0
    return total / math.comb(len(samples), k)


def recomputed(path):
    """The numbers of a dump, by arithmetic of its own."""
    tasks, turns = {}, lines_in(path)
    for line in turns:
        right = line["failure"] is None and line["team_score"] >= 1
        tasks.setdefault(line["task"], {})[line["sample"]] = (line["team_answer"], right)
    groups = [list(samples.values()) for samples in tasks.values()]
    n = len(groups[0])
    spoken = [line for line in turns if line["agent"] is not None]
    tokens = {a: [t for t in spoken if t["agent"] == a] for a in ("alice", "carol")}
    return {
        "accuracy": sum(right for samples in groups for _, right in samples) / (n * len(groups)),
        "pass@k": {str(k): sum(brute_pass([r for _, r in s], k) for s in groups) / len(groups) for k in (1, 2, n)},
        "majority@k": {str(k): sum(brute_majority(s, k) for s in groups) / len(groups) for k in (1, 2, n)},
        "by_round": {
            str(r): sum(t["score"] >= 1 for t in spoken if t["round"] == r) / sum(t["round"] == r for t in spoken)
            for r in (1, 2)
        },
        "perplexity": {
            a: math.exp(-sum(t["log_prob"] for t in own) / sum(t["sampled_tokens"] for t in own))
            for a, own in tokens.items()
        },
        "sampled_tokens": sum(t["sampled_tokens"] for t in spoken),
    }


def easy(run, folder):
    """The validation's tasks with the answers that this team gives most, so that some are right and others are not."""
    import pyarrow.parquet

    config = json.loads((run / "run.json").read_text())["config"]
    rows = pyarrow.parquet.read_table(config["data"]["val_files"][0]).to_pylist()
    given = {line["task"]: line["team_answer"] for line in lines_in(run / "validation" / "2.jsonl")}
    for i, row in enumerate(rows):
        row["reward_model"]["ground_truth"] = given[f"val/{i}"] or "7"
    path = folder / "easy.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_runs_limit_is_one_on_its_own_validation(run, tmp_path, monkeypatch):
    source = find(str(run))
    limited = replace(source, saved={**source.saved, "data": {**source.saved["data"], "val_max_samples": 2}})
    monkeypatch.setattr(evaluate, "find", lambda word: limited)
    assert evaluate.run([str(run), "name=limited"])["task"]["tasks"] == 2
    assert evaluate.run([str(run), f"task={easy(run, tmp_path)}", "name=whole"])["task"]["tasks"] == 8


def timeless(value):
    if isinstance(value, dict):
        return {
            key: timeless(inner)
            for key, inner in value.items()
            if not key.startswith(("seconds", "sampled_tokens_per_s"))
        }
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_numbers_are_recomputed_from_the_dumps_and_reproduced_by_the_command(run, tmp_path):
    task = easy(run, tmp_path)
    words = [str(run), str(run / "global_step_1"), f"task={task}", "n=4", "measures=[similarity,perplexity]"]
    words += ["baselines=[solo,vote,tokens]", "leave_one_out=true"]
    result = evaluate.run(words)
    folder = run / "evaluations" / result["name"]
    for team in result["teams"]:
        again = recomputed(folder / "episodes" / team["label"] / f"{team['step']}.jsonl")
        assert again.pop("sampled_tokens") == team["cost"]["sampled_tokens"]
        for key, value in again.items():
            assert team[key] == pytest.approx(value, abs=1e-9), key
        assert 0 < team["accuracy"] < 1 and team["interval"].low < team["accuracy"] < team["interval"].high
        assert set(team["solo"]) == set(team["vote"]) == set(team["leave_one_out"]) == {"alice", "carol"}
        assert team["vote"]["alice"]["answers"] == 4, "as many as the team gives"
        for own in team["tokens"].values():
            spent, answer = (
                own["cost"]["sampled_tokens_per_episode"],
                own["cost"]["sampled_tokens_per_episode"] / own["answers"],
            )
            assert spent == pytest.approx(team["cost"]["sampled_tokens_per_episode"], abs=answer), "within one answer"
        assert 0 <= team["similarity"] <= 1
    (difference,) = result["comparisons"]
    first, second = result["teams"]
    assert difference["difference"] == pytest.approx(first["accuracy"] - second["accuracy"])
    program, *typed = shlex.split(result["command"])
    assert (program, typed[0]) == ("marl", "eval")
    written = json.loads((folder / "result.json").read_text())
    assert timeless(json.loads(json.dumps(evaluate.run(typed[1:])))) == timeless(written)


@pytest.mark.slow
def test_a_run_that_imitated_is_evaluated_on_tasks(run, cold_assets, tmp_path):
    """Its own files hold examples."""
    episodes = f"[{run}/validation/2.jsonl]"
    words = ("method=sft", "method.source=episodes", "method.min_score=null", f"data.train_files={episodes}")
    folder = trained(cold_assets, tmp_path / "sft", *words, f"data.val_files={episodes}")
    with pytest.raises(ConfigError, match=r"method=sft.*not tasks; add task=FILE"):
        evaluate.run([str(folder)])
    result = evaluate.run([str(folder), str(run), f"task={easy(run, tmp_path)}"])
    first, second = result["teams"]
    assert (first["step"], first["label"]) == (2, "sft@2") and first["cost"]["sampled_tokens"] > 0
    assert result["comparisons"][0]["difference"] == pytest.approx(first["accuracy"] - second["accuracy"])


@pytest.mark.slow
def test_a_plain_model_is_a_team_of_one(run, cold_assets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = easy(run, tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)agent_prompts names 'alice', which is not an agent.*expected: solo"):
        evaluate.run([str(cold_assets / "model"), f"task={task}"])
    rows = [{**row, "extra_info": {}} for row in lines_in(task)]
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = ["data.max_prompt_length=40", "data.max_response_length=3"]
    result = evaluate.run([str(cold_assets / "model"), f"task={task}", "name=plain", *limits])
    (team,) = result["teams"]
    assert team["step"] is None and list(team["by_agent"]) == ["solo"] and list(team["by_round"]) == ["1"]
    assert (tmp_path / "outputs" / "evaluations" / "plain" / "result.json").is_file()
    with pytest.raises(ConfigError, match="holds the results of another evaluation"):
        evaluate.run([str(cold_assets / "model"), f"task={task}", "name=plain", "n=2", *limits])
    with pytest.raises(ConfigError, match="decodes greedily"):
        evaluate.run([str(cold_assets / "model"), f"task={task}", "n=2", *limits])
    with pytest.raises(ConfigError, match="a model without a run's data; add task=FILE"):
        evaluate.run([str(cold_assets / "model")])


@pytest.mark.slow
def test_bad_input_of_an_evaluation_says_what_to_do(run, tmp_path):
    bare, bad = tmp_path / "bare.jsonl", tmp_path / "bad"
    bare.write_text(json.dumps({"prompt": [{"role": "user", "content": "2+2?"}], "data_source": "x"}) + "\n")
    bad.mkdir()
    shutil.copy(run / "run.json", bad)
    for words, said in (
        ([str(run / "global_step_3")], "Did you mean global_step_2? There are: 1, 2."),
        ([str(run.parent / "debat")], "Did you mean 'debate'?"),
        ([str(run.parent)], "It holds runs: debate; name one of them."),
        ([str(bad)], "there is no whole checkpoint. the run saved none"),
        ([str(run), f"task={bare}"], "no column 'reward_model'"),
        ([str(run), "task=/nowhere.jsonl"], "task=/nowhere.jsonl: no such file"),
        ([str(run), "measures=[similarty]"], "Did you mean 'similarity'?"),
        ([str(run), "n=0"], "marl eval.n=0"),
        ([str(run), "n=x"], "marl eval={'n': 'x'}"),
        ([], "expected a run, a checkpoint or a model"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            evaluate.run(words)
    with locked(bad), pytest.raises(ConfigError, match="still being written: wait for its first checkpoint"):
        find(str(bad))


def test_a_run_that_is_still_written_gives_its_newest_whole_checkpoint(run, tmp_path, caplog):
    folder = tmp_path / "going"
    shutil.copytree(run, folder)
    (weights,) = (folder / "global_step_2" / "carol" / "actor" / "huggingface").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-9])
    with locked(folder):
        assert find(str(folder)).step == 1
    assert "is still being written: its newest whole checkpoint, global_step_1" in caplog.text
    assert "global_step_2 is not used" in caplog.text
    with pytest.raises(ConfigError, match=r"the checkpoint is not whole: carol/.* bytes"):
        find(str(folder / "global_step_2"))


def asking(run, typed, monkeypatch, *options):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(typed) + "\n"))
    shown = io.StringIO()
    talk = chat.chat(*chat.parsed([str(run), "--seed", "3", *options]), Console(file=shown, width=200))
    return talk, shown.getvalue()


@pytest.mark.slow
def test_a_conversation_goes_on_until_it_is_left(run, monkeypatch):
    ask = "there are 8 bags with 4 books . how many ?"
    talk, shown = asking(run, ["how many ?", "how many ?", "/quit", "how many ?"], monkeypatch)
    assert [message["role"] for message in talk] == ["user", "assistant"] * 2, "the question before /quit is the last"
    assert shown.count("round 2 · carol:") == 2 and shown.count(f"team ⟶ {talk[-1]['content']}") >= 1
    talk, shown = asking(run, [ask, "/new", "/nw", ask, *[ask] * 3], monkeypatch)
    assert "/nw: unknown" in shown and "data.max_prompt_length allows 40" in shown and "/new begins a shorter" in shown
    assert shown.count("allows 40") == 2, "of four questions in one conversation two fit"
    assert len(talk) == 4 and talk[2]["content"] == ask, "what could not be answered is forgotten"
    talk, shown = asking(run, ["how many ?"], monkeypatch, "--model", "team/carol")
    assert "alice" not in shown and "team/carol ⟶" in shown
    with pytest.raises(ConfigError, match="--model team/carl: no such model"):
        asking(run, [], monkeypatch, "--model", "team/carl")


def started(process):
    line = process.stdout.readline()
    assert " at http://" in line, process.stderr.read()
    return re.search(r"at (http://\S+)/v1", line)[1]


@pytest.mark.slow
def test_the_command_serves_a_run_and_ends_at_a_signal(run):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MARL_API_KEY": "correct-horse-battery"}
    command = [sys.executable, "-m", "marl.commands.serve", str(run), "--port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url, key = started(process), {"Authorization": "Bearer correct-horse-battery"}
        body = {"model": "team", "messages": [{"role": "user", "content": "how many ?"}], "seed": 5}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 401
        first, again = (httpx.post(f"{url}/v1/chat/completions", json=body, headers=key).json() for _ in range(2))
        assert first["choices"] == again["choices"] and len(first["choices"][0]["transcript"]) == 4
        long = body | {"messages": [{"role": "user", "content": "how many ? " * 30}]}
        refused = httpx.post(f"{url}/v1/chat/completions", json=long, headers=key)
        assert refused.status_code == 400 and "data.max_prompt_length allows 40" in refused.json()["error"]["message"]
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


LM_EVAL = os.environ.get("LM_EVAL") or shutil.which("lm_eval")
TASK = """\
task: marl_notes
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt[0].content}}"
doc_to_target: "{{reward_model.ground_truth}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 3, do_sample: false, temperature: 0.0}
filter_list:
  - name: strict
    filter:
      - {function: regex, regex_pattern: "#### ([0-9]+)"}
      - {function: take_first}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


@pytest.mark.slow
@pytest.mark.skipif(LM_EVAL is None, reason="lm-eval is installed in an environment of its own: LM_EVAL=<its lm_eval>")
def test_lm_eval_scores_the_served_team(run, tmp_path):
    """Its accuracy is that of the answers that the same requests get."""
    task = easy(run, tmp_path)
    (tmp_path / "notes.yaml").write_text(TASK % task)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "marl.commands.serve", str(run), "--port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = started(process)
        model = f"model=team,base_url={url}/v1/chat/completions,num_concurrent=4,max_retries=1,tokenized_requests=False"
        words = [
            "--model",
            "local-chat-completions",
            "--model_args",
            model,
            "--apply_chat_template",
            "--tasks",
            "marl_notes",
        ]
        words += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
        offline = {"HF_HOME": str(tmp_path / "hf"), "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": ""}
        subprocess.run([LM_EVAL, "run", *words], env=os.environ | offline, check=True, timeout=200, capture_output=True)
        rows = lines_in(task)
        right = []
        for row in rows:
            body = {"model": "team", "messages": row["prompt"], "max_tokens": 3, "temperature": 0.0, "seed": 1234}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body | {"stop": ["\n"]}).json()
            text = answer["choices"][0]["message"]["content"]
            right.append(re.findall("#### ([0-9]+)", text)[:1] == [row["reward_model"]["ground_truth"]])
    finally:
        process.kill()
        process.communicate()
    (found,) = (tmp_path / "out").rglob("results_*.json")
    score = json.loads(found.read_text())["results"]["marl_notes"]["exact_match,strict"]
    assert score == pytest.approx(sum(right) / len(right))
