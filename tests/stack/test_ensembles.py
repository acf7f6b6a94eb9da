"""``marl ensemble``: the agents of a run alone and together, in one table."""

import json
import random
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from marl.cli import main as cli
from marl.commands.ensemble import run
from marl.config.errors import ConfigError
from marl.config.policies import own_settings
from marl.evaluation.ensemble_answers import Ensemble
from marl.evaluation.load import weights_of
from marl.evaluation.source import saved_weights
from marl.preflight.prepare import prepare
from marl.quickstart.model import build_model
from marl.report.ensemble_table import Way
from marl.runners import majority
from marl.types import Score, Turn
from marl.utils.seeding import derive_seed
from marl.utils.trees import load_tree

DOC = (Path(__file__).parents[2] / "docs" / "ensembles.md").read_text()
NAMES = ["alice", "carol", "mean of agents", "best", "vote", "distribution", "hidden"]


@pytest.fixture
def composed(compose_config, cold_assets, tmp_path):
    def compose(*overrides):
        return compose_config(
            f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", "+ensemble=schema",
            "resources.one_process=true", *overrides,
        )  # fmt: skip

    return compose


@pytest.fixture
def trained(alone, tmp_path):
    """A run of one step and its checkpoint."""
    moves = ("actor_rollout_ref.actor.optim.lr_warmup_steps=0", "actor_rollout_ref.actor.entropy_coeff=1")
    live = alone("runner=single_turn", "credit=own", *moves)
    live.step()
    live.wait(live.trainer.save())
    return live, tmp_path / "global_step_1"


def timeless(result):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in result["rows"]]


def of(result, name):
    return next(row for row in result["rows"] if row["name"] == name)


def test_the_command_of_the_readme(trained, cold_assets, tmp_path, capsys, monkeypatch):
    _, folder = trained
    (command,) = re.findall(r"^marl (ensemble .*)$", DOC, re.MULTILINE)
    words = shlex.split(command.replace("outputs/quickstart/latest/global_step_105", str(folder)))
    own = [f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["marl", *words, *own])
    assert cli() == 0
    shown = capsys.readouterr().out
    written = json.loads((tmp_path / "ensembles" / "global_step_1.json").read_text())
    assert (written["tasks"], written["samples"], written["checkpoint"]) == (8, 1, str(folder))
    rows = [row["name"].split(" (")[0] for row in written["rows"]]
    assert rows == NAMES and all(f"  {row['name']} " in shown for row in written["rows"])
    for row in written["rows"]:
        assert 0 <= row["accuracy"] <= 1 and row["tokens"] <= row["forward_tokens"] and row["seconds"] > 0
        assert f"{row['accuracy']:.3f}" in next(
            line for line in shown.splitlines() if line.startswith(f"  {row['name']} ")
        )


def test_the_agents_and_their_vote_are_what_validation_says_to_the_last_bit(trained, composed):
    live, folder = trained
    collection = live.wait(live.trainer.controller.collect(live.trainer.validation, 3, 1, validate=True))
    episodes = live.wait(live.trainer.controller.score(collection.episodes, 1))
    setup = prepare(composed(f"ensemble.checkpoint={folder}", "ensemble.samples=3"))
    ensemble, first = Ensemble(setup), Ensemble(prepare(composed("ensemble.samples=3")))
    for k, name in enumerate(("alice", "carol")):
        expected = [(turn.response_ids, turn.log_probs) for e in episodes for turn in e.turns if turn.agent == name]
        assert [(answer.token_ids, answer.log_probs) for answer in ensemble._alone(k)[0]] == expected
        assert [answer.log_probs for answer in first._alone(k)[0]] != [log_probs for _, log_probs in expected]
    result = run(composed(f"ensemble.checkpoint={folder}", "ensemble.samples=3"))
    assert of(result, "vote")["accuracy"] == sum(e.scored.value >= 1 for e in episodes) / 24
    right = [turn.correct for e in episodes for turn in e.turns]
    assert of(result, "mean of agents")["accuracy"] == pytest.approx(sum(right) / 48, abs=1e-12)
    assert result["samples"] == 3 and of(result, "alice")["standard_error"] is not None


def test_a_vote_is_the_single_turns_and_its_ties_are_broken_alike(composed):
    """alice is right, carol never: who is heard is the episode's seed to say, for each sample of each task."""
    ensemble = Ensemble(prepare(composed("ensemble.samples=3")))
    turns: dict = {"alice": [], "carol": []}
    expected = [[0.0] * 3 for _ in range(8)]
    for n, play in enumerate(ensemble.plays):
        for name, answer in (("alice", play.task.ground_truth), ("carol", "99")):
            turns[name].append(Turn(name, 1, [], f"#### {answer}", score=Score(float(name == "alice"), answer)))
        drawn = random.Random(derive_seed(0, "validate", f"val/{n // 3}", n % 3))
        expected[n // 3][n % 3] = float(majority([play.task.ground_truth, "99"], drawn) != "99")
    way = ensemble._vote([Way("alice", tokens=3, seconds=1), Way("carol", tokens=4, seconds=2)], list(turns.values()))
    assert way.correct_TS == expected and 0 < sum(map(sum, expected)) < 24
    assert (way.tokens, way.seconds) == (7, 3), "it costs what all of them cost"


@pytest.mark.slow
def test_agents_act_with_the_policies_that_they_have_exchanged(trained, composed):
    """As at the validation of the checkpoint's step."""
    _, folder = trained
    state = json.loads((folder / "trainer.json").read_text())
    cory = ("learner=cory", "runner=pioneer_observer", "credit=auto", "learner.exchange_every=2")
    for step, names in ((1, ["alice", "carol"]), (2, ["alice", "carol"]), (3, ["carol", "alice"])):
        (folder / "trainer.json").write_text(json.dumps(state | {"step": step}))
        assert Ensemble(prepare(composed(*cory, f"ensemble.checkpoint={folder}"))).names == names
    assert Ensemble(prepare(composed(*cory))).names == ["alice", "carol"]


@pytest.mark.slow
def test_it_is_the_same_again_and_in_other_batches(composed):
    first = timeless(run(composed()))
    assert timeless(run(composed())) == first
    assert timeless(run(composed("actor_rollout_ref.rollout.max_num_seqs=5"))) == first
    assert timeless(run(composed("seed=1"))) != first


def test_weights_tasks_modes_roles_and_one_policy_for_all(composed):
    greedy = "actor_rollout_ref.rollout.val_kwargs.do_sample=false"
    result = run(composed(greedy, "ensemble.weights=[1,0]", "ensemble.tasks=5", "ensemble.modes=[hidden,distribution]"))
    assert result["tasks"] == 5 and [row["name"] for row in result["rows"]][4:] == ["distribution", "hidden"]
    for mode in ("distribution", "hidden"):
        assert of(result, mode)["accuracy"] == of(result, "alice")["accuracy"]
        assert of(result, mode)["tokens"] == of(result, "alice")["tokens"]
        assert of(result, mode)["forward_tokens"] == 2 * of(result, "alice")["forward_tokens"]
    ensemble = Ensemble(
        prepare(composed("agents.alice.policy=both", "agents.carol.policy=both", "agents.carol.role=how many ?"))
    )
    assert len(ensemble.policies) == 1 and ensemble.policy_of[0] is ensemble.policy_of[1]
    (mine, yours), tokenizer = ensemble.plays[0].prompts, ensemble.policy_of[0].tokenizer
    assert len(mine) + 3 == len(yours) and tokenizer.decode(yours[-4:-1]) == "how many ?"


def test_an_agents_own_limits_count(composed):
    ensemble = Ensemble(prepare(composed("agents.alice.max_tokens=1", "agents.carol.stop=['5']")))
    assert all(len(answer.token_ids) == 1 for answer in ensemble._alone(0)[0])
    assert any(len(answer.token_ids) > 1 for answer in ensemble._alone(1)[0])
    assert ensemble.sampling_together["max_tokens"] == 3 and ensemble.sampling_together["stop"] == ("5",)


@pytest.fixture
def other_model(cold_assets, tmp_path):
    """A model beside the embedded one, with another tokenizer or another size."""

    def make(words=(), hidden=64):
        folder = tmp_path / "other"
        tokenizer = AutoTokenizer.from_pretrained(cold_assets / "model")
        tokenizer.add_tokens(list(words))
        model = build_model(tokenizer, 0)
        if hidden != 64:
            changed = model.config
            changed.hidden_size = hidden
            model = AutoModelForCausalLM.from_config(changed)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return f"+policies.carol.model.path={folder}"

    return make


@pytest.mark.slow
def test_what_is_impossible_is_a_dash_and_its_reason_unless_it_was_asked_for(composed, other_model, capsys):
    other = other_model(hidden=32)
    result = run(composed(other))
    assert "hidden states of policies 'alice' and 'carol' have 64 and 32" in of(result, "hidden")["reason"]
    assert "accuracy" in of(result, "distribution") and "accuracy" not in of(result, "hidden")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  hidden")]
    assert line.split()[1:8] == ["-"] * 7 and "expected one size" in line
    with pytest.raises(ConfigError, match=r"ensemble.modes=\[hidden\]: the hidden states"):
        run(composed(other, "ensemble.modes=[hidden]"))
    assert "accuracy" in of(run(composed(other, "ensemble.modes=[vote]")), "vote")


def test_another_tokenizer_leaves_the_vote(composed, other_model):
    result = run(composed(other_model(words=["moon"])))
    assert all(
        "different tokenizers, of 144 and 145 tokens, 144 of" in of(result, m)["reason"]
        for m in ("distribution", "hidden")
    )
    assert "accuracy" in of(result, "vote")


def test_attention_that_ours_does_not_compute_is_refused(composed, cold_assets, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(cold_assets / "model")
    capped = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=64, head_dim=16,
    )  # fmt: skip
    Gemma2ForCausalLM(capped).save_pretrained(tmp_path / "capped")
    tokenizer.save_pretrained(tmp_path / "capped")
    with pytest.raises(
        ConfigError,
        match="policy 'carol' cannot answer .* attn_logit_softcapping=50: use vllm or sglang",
    ):
        run(composed(f"+policies.carol.model.path={tmp_path / 'capped'}"))


@pytest.mark.parametrize(
    "overrides,said",
    [
        (["ensemble.checkpoint=/nowhere/global_step_3"], ["/nowhere/global_step_3: ", "expected …/global_step_N"]),
        (["ensemble.samples=0"], ["ensemble.samples=0: expected a whole number at least 1"]),
        (
            ["ensemble.samples=2", "actor_rollout_ref.rollout.val_kwargs.do_sample=false"],
            ["ensemble.samples=2", "greedily", "do_sample=true", "ensemble.samples=1"],
        ),
        (["ensemble.tasks=-1"], ["ensemble.tasks=-1: expected a whole number at least 1"]),
        (["ensemble.modes=[]"], ["ensemble.modes=[]", "vote, distribution, hidden"]),
        (["ensemble.weights=[1]"], ["ensemble.weights=[1.0]", "one number for each of alice, carol"]),
        (["ensemble.weights=[1,-1]"], ["ensemble.weights=[1.0, -1.0]", "at least 0"]),
        (["ensemble.weights=[0,0]"], ["ensemble.weights=[0.0, 0.0]", "one above it"]),
        (["ensemble.device=abacus"], ["ensemble.device=abacus", "expected a device"]),
        (["data.max_prompt_length=12"], ["data.max_prompt_length=12"]),
        (["data.max_response_length=250"], ["data.max_response_length=250", "the model takes 256", "lower it"]),
    ],
)  # fmt: skip
def test_invalid_settings_are_named(composed, overrides, said):
    with pytest.raises(ConfigError) as caught:
        run(composed(*overrides))
    assert all(part in str(caught.value) for part in said), caught.value


def test_a_few_prompts_that_are_too_long_are_named_too(composed):
    """Preflight lets a share of them pass; here each counts."""
    with pytest.raises(
        ConfigError, match=r"data.max_prompt_length=14: agent '\w+' is shown 1\d tokens of task val/\d; raise it"
    ):
        run(composed("data.max_prompt_length=14", "controller.max_error_rate=1.0"))


@pytest.mark.parametrize(
    "words,said",
    [
        (["ensemble.mode=[vote]"], ["unknown key 'ensemble.mode'", "Did you mean 'modes'"]),
        (["ensemble.modes=[votes]"], ["'ensemble.modes", "votes", "vote, distribution, hidden"]),
        (["ensemble.samples=many"], ["'ensemble.samples'", "many"]),
    ],
)
def test_a_wrong_key_on_the_command_line(monkeypatch, capsys, cold_assets, words, said):
    monkeypatch.setattr(
        sys, "argv", ["marl", "ensemble", "--config-name", "quickstart", f"assets={cold_assets}", *words]
    )
    assert cli() == 2
    text = capsys.readouterr().err
    assert text.startswith("configuration error: ") and all(part in text for part in said), text


@pytest.mark.slow
def test_a_checkpoint_that_has_no_weights_or_other_policies_is_named(trained, composed):
    _, folder = trained
    with pytest.raises(ConfigError, match=r"it holds the policies alice, carol, and an agent acts with 'judge'"):
        saved_weights(folder, "judge")
    weights = folder / "carol" / "actor" / "huggingface" / "model.safetensors"
    assert load_tree(folder / "data.safetensors"), "it is a whole checkpoint"
    weights.unlink()
    with pytest.raises(ConfigError, match=r"holds no weights; expected .*hf_model.*save_contents"):
        run(composed(f"ensemble.checkpoint={folder}"))


@pytest.mark.slow
def test_weights_that_lack_some_are_no_model(trained, composed):
    """As adapters that nobody merged: transformers would fill in random numbers."""
    from safetensors.torch import load_file, save_file

    _, folder = trained
    weights = folder / "alice" / "actor" / "huggingface" / "model.safetensors"
    tensors = load_file(weights)
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name}
    save_file(kept, weights, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"policy 'alice' at .* lack 3 parameters, such as model.layers.1.mlp.*merge"):
        run(composed(f"ensemble.checkpoint={folder}"))
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_policy_that_nobody_trained_answers_with_its_own_model(alone, composed, tmp_path):
    """Its weights are in no checkpoint; those of a trained policy must be."""
    untrained = ("agents.carol.trainable=false", "credit=own")
    live, folder = alone("runner=single_turn", *untrained), tmp_path / "global_step_1"
    live.step()
    live.wait(live.trainer.save())
    config = prepare(composed(f"ensemble.checkpoint={folder}", *untrained)).config
    assert weights_of(config, "carol") == own_settings(config, "carol").model.path
    assert weights_of(config, "alice") == str(folder / "alice" / "actor" / "huggingface")
    with pytest.raises(ConfigError, match=r"carol/actor/huggingface holds no weights"):
        weights_of(prepare(composed(f"ensemble.checkpoint={folder}")).config, "carol")
