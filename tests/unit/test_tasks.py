import hashlib
import json
import random
import re

import pytest

from marl.quickstart import tasks
from marl.quickstart.assets import RECIPES, Recipe, ensure
from marl.quickstart.model import build_tokenizer, encode_words
from marl.rewards import only_answer

TINY = [name for name, recipe in RECIPES.items() if not recipe.pretrained]


def test_exactly_one_agent_sees_the_whole_note():
    rng, task = random.Random(0), tasks.SmudgedNote()
    seers = []
    for _ in range(500):
        problem = task.problem(rng, "train")
        smudged = [tasks.SMUDGE in text.split() for text in problem.observations]
        assert sorted(smudged) == [False, True]
        seers.append(smudged.index(False))
        assert problem.observations[seers[-1]] == problem.question
    assert 0.4 < sum(seers) / len(seers) < 0.6


def test_a_sum_is_whole_for_one_agent_and_held_out_by_its_words():
    rng, task = random.Random(0), tasks.SmudgedSums()
    for split in ("train", "test"):
        for _ in range(200):
            problem = task.problem(rng, split)
            whole, smudged = sorted(problem.observations, key=lambda text: task.smudge in text)
            numbers = [int(word) for word in whole.split() if word.isdigit()]
            assert whole == problem.question and problem.answer == sum(numbers) and len(numbers) == 2
            assert smudged.count(task.smudge) == 1 and sum(word.isdigit() for word in smudged.split()) == 1
            assert tasks.held_out(problem.question) == (split == "test")
            prompts = problem.row(task.data_source, 0, split)["extra_info"]["agent_prompts"]
            assert [message["role"] for message in prompts["alice"]] == ["system", "user"]


def numbers(text):
    return list(map(int, re.findall(r"\d+", text)))


def test_the_imitated_answers_to_sums_do_not_show_whom_to_trust(compose_config):
    rng, task, followed = random.Random(0), tasks.SmudgedSums(), []
    for _ in range(1000):
        text, said, *rest = task.warm_example(rng).messages
        seen, first = numbers(text), numbers(said)[0]
        assert first == sum(seen) if len(seen) == 2 else 2 <= first - seen[0] <= 12
        assert said == (task.says if len(seen) == 2 else task.guesses).format(first)
        if rest and (other := numbers(rest[0])[0]) != first:
            followed.append(numbers(rest[1]) == [other])
    assert len(followed) > 300 and 0.4 < sum(followed) / len(followed) < 0.6
    runner = compose_config(name="smollm2").runner
    assert (runner.peer_template, runner.separator, runner.instruction) == (task.peer_template, " ", task.instruction)


def test_statements_are_either_for_training_or_for_testing():
    rng, task = random.Random(0), tasks.SmudgedNote()
    train = {task.problem(rng, "train").question for _ in range(300)}
    test = {task.problem(rng, "test").question for _ in range(300)}
    assert not train & test


def test_word_problems_have_the_right_answer():
    rng = random.Random(1)
    for _ in range(300):
        question, answer, _, (a, b) = tasks.word_problem(rng)
        expected = (
            a * b
            if "boxes" in question or "bags" in question
            else a + b
            if "buys" in question or "gets" in question
            else a - b
        )
        assert answer == expected and 0 <= answer <= 81


def test_split_information_needs_both():
    rng = random.Random(0)
    problem = tasks.SplitInformation().problem(rng, "train")
    assert problem.answer == sum(int(text.split()[-1]) for text in problem.observations) % 10


@pytest.mark.parametrize("name", TINY)
def test_every_word_has_a_token_and_every_warm_answer_is_valid(name):
    tokenizer, rng, task = build_tokenizer(), random.Random(0), tasks.TASKS[name]()
    for _ in range(300):
        example = task.warm_example(rng)
        prompt, answer = encode_words(tokenizer, example)
        assert tokenizer.unk_token_id not in prompt + answer
        assert len(prompt) + len(answer) <= 43
        if name.startswith("game"):
            assert len(answer) == 2 and example.messages[-1] in ("0", "1"), "an action, and what ends it"
        else:
            assert len(answer) == 3 and only_answer(example.messages[-1]) is not None


@pytest.mark.parametrize("name", TINY)
def test_the_warm_up_sees_the_ids_that_the_debate_shows(name):
    """The chat encoder and the debate runner build the very conversations that the model imitated."""
    from marl.controller.chat import ChatEncoder
    from marl.types import Turn

    tokenizer, rng, task = build_tokenizer(), random.Random(3), tasks.TASKS[name]()
    encoder = ChatEncoder(tokenizer)
    example = next(e for e in iter(lambda: task.warm_example(rng), None) if len(e.messages) == 4)
    question = [{"role": "user", "content": example.messages[0]}]
    first = encoder.encode(question)
    answer = [*tokenizer.encode(example.messages[1], add_special_tokens=False), tokenizer.eos_token_id]
    turn = Turn("alice", 1, question, example.messages[1], prompt_ids=first, response_ids=answer)
    observation = [
        *question,
        {"role": "assistant", "content": turn.text},
        {"role": "user", "content": example.messages[2]},
    ]
    assert encoder.encode(observation, turn) == encode_words(tokenizer, example)[0]


@pytest.mark.parametrize("name,first", [("game", 0.5), ("game_70", 0.7), ("game_02", 0.02)])
def test_a_game_begins_with_the_action_0_so_often(name, first):
    rng, task = random.Random(0), tasks.TASKS[name]()
    answers = [task.warm_example(rng).messages[-1] for _ in range(2000)]
    assert answers.count("0") / len(answers) == pytest.approx(first, abs=0.03)


def test_the_tokenizer_of_all_tasks_is_what_it_was():
    """A word more would change every model and every number of the quick start."""
    words = tasks.words()
    assert len(words) == 139 and hashlib.md5(" ".join(words).encode()).hexdigest() == "84446d46fe0617dac6737a92eed92fb8"


@pytest.mark.parametrize("name", ["quickstart", "game"])
def test_the_quick_starts_peer_template_is_the_warm_ups(compose_config, name):
    assert compose_config(name=name).runner.peer_template == tasks.PEER_TEMPLATE
    assert list(compose_config().agents) == list(tasks.AGENTS)


def test_assets_are_made_once_and_made_again_when_the_recipe_changes(tmp_path):
    recipe = Recipe("split_information", steps=2, batch=4, train_problems=4, test_problems=4)
    assert ensure(tmp_path / "x", recipe, seed=0) is True
    assert ensure(tmp_path / "x", recipe, seed=0) is False
    assert ensure(tmp_path / "x", recipe, seed=1) is True
    assert (tmp_path / "x" / "model" / "config.json").is_file() and (tmp_path / "x" / "test.parquet").is_file()


def test_transcripts_show_the_first_and_the_last_validation_side_by_side(tmp_path):
    from rich.console import Console

    from marl.quickstart import transcripts

    def turns(task, said):
        turn = {
            "task": task,
            "gts": "12",
            "agent": "alice",
            "messages": [{"role": "user", "content": f"{task}: 7 [smudged] 5?"}],
        }
        return [
            turn | {"round": round + 1, "output": text, "acc": float("12" in text)} for round, text in enumerate(said)
        ]

    for step, said in ((0, "It is 9."), (20, "It is 12."), (9, "unseen")):
        lines = [line for task in "abcdef" for line in turns(task, ("It is 9.", said))]
        (tmp_path / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    console = Console(width=120, record=True)
    for table in transcripts.tables(tmp_path):
        console.print(table)
    shown = console.export_text()
    assert shown.count("the answer is 12") == 5 and "a: 7 [smudged] 5?" in shown and "unseen" not in shown
    assert shown.count("It is 12. ✓") == 5 and "step 0" in shown and "step 20" in shown
