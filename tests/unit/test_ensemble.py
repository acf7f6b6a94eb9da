"""One common answer of several agents: literal numbers, and what a direct computation without cache and padding gives."""

import builtins
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from marl.commands import ensemble
from marl.config.errors import ConfigError
from marl.report.ensemble_table import Way, best_agent, mean_and_error, mean_of_agents, numbers, table
from marl.rollout.decoding import ATTENTION, Request, decode
from marl.rollout.joint_decoding import READERS, check_together, decode_jointly, mean_distribution, weighted_mean
from tests.tiny_model import shapes_read

MODES = sorted(READERS)
EOS = 7
WORDS = 120


def text_of(ids):
    return " ".join(map(str, ids))


def random_model(seed, hidden=64, vocabulary=WORDS, tied=False):
    torch.manual_seed(seed)
    config = Qwen2Config(
        attn_implementation=ATTENTION, vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, max_position_embeddings=256,
        tie_word_embeddings=tied, eos_token_id=EOS,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.3 if "embed" in name or "head" in name else 0.15)
    return model


@pytest.fixture(scope="module")
def models():
    return random_model(0), random_model(1)


def prompts(count, seed=0, longest=30):
    """Tasks of very different lengths, all in one bucket."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(10, WORDS) for _ in range(rng.randint(3, longest))) for _ in range(count)]


def requests(count, **options):
    defaults = {"max_tokens": 12, "temperature": 0.0, "stop_token_ids": frozenset([EOS])}
    return [Request((), seed=seed, **(defaults | options)) for seed in range(count)]


def plain(answers):
    return [(answer.token_ids, answer.log_probs, answer.stop_reason) for answer in answers]


def tokens(answers):
    return [answer.token_ids for answer in answers]


# ---- literal numbers


def test_the_mean_of_two_distributions_is_not_the_one_of_their_logits():
    one, other = [0.90, 0.09, 0.01], [0.01, 0.29, 0.70]
    logits = torch.tensor([[one], [other]]).log() + 5.0  # a shift of all logits is nothing
    mean = mean_distribution(logits, torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(mean.exp(), torch.tensor([[0.455, 0.19, 0.355]], dtype=torch.float64))
    weighted = mean_distribution(logits, torch.tensor([3.0, 1.0]))
    torch.testing.assert_close(weighted.exp(), torch.tensor([[0.6775, 0.14, 0.1825]], dtype=torch.float64))
    assert logits.mean(0).argmax() == 1 and mean.argmax() == 0


def test_the_mean_of_states_is_weighted():
    states = torch.tensor([[[1.0, 0.0, 4.0]], [[3.0, 2.0, 0.0]]])
    assert weighted_mean(states, torch.tensor([1.0, 1.0])).tolist() == [[2.0, 1.0, 2.0]]
    assert weighted_mean(states, torch.tensor([3.0, 1.0])).tolist() == [[1.5, 0.5, 3.0]]


def bigrams(table):
    """A Llama that says ``table[last token]`` and nothing else: its layers add nothing, its states are unit vectors."""
    size = len(table)
    model = LlamaForCausalLM(
        LlamaConfig(
            attn_implementation=ATTENTION, vocab_size=size, hidden_size=size, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, intermediate_size=8, max_position_embeddings=128, tie_word_embeddings=False,
            rms_norm_eps=0.0, eos_token_id=None, pad_token_id=None, bos_token_id=None,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.norm.weight.fill_(1 / math.sqrt(size))  # the norm makes sqrt(size) of 1
        model.lm_head.weight.copy_(torch.tensor(table).log().T)
    return model


ONE = [[0.90, 0.08, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25], [0.10, 0.10, 0.10, 0.70], [0.25, 0.25, 0.25, 0.25]]
OTHER = [[0.01, 0.28, 0.70, 0.01], [0.40, 0.20, 0.20, 0.20], [0.25, 0.25, 0.25, 0.25], [0.10, 0.60, 0.15, 0.15]]


def test_a_pair_of_models_made_by_hand_answers_by_the_mean_of_its_distributions():
    pair, ask = [bigrams(ONE), bigrams(OTHER)], requests(1, max_tokens=2, stop_token_ids=frozenset())
    # both read a 0: (.455 .18 .355 .01); then both read that answer's 0: the same
    (answer,) = decode_jointly("distribution", pair, [[(3, 0)], [(2, 2, 0)]], ask, 0, text_of)
    assert answer.token_ids == [0, 0] and math.exp(answer.log_probs[0]) == pytest.approx(0.455, abs=1e-6)
    # one reads a 2, the other a 3: (.10 .35 .125 .425); then both read a 3: (.175 .425 .20 .20)
    (answer,) = decode_jointly("distribution", pair, [[(0, 2)], [(3,)]], ask, 0, text_of)
    assert answer.token_ids == [3, 1]
    assert [math.exp(p) for p in answer.log_probs] == pytest.approx([0.425, 0.425], abs=1e-6)
    # three parts to one: (.10 .225 .1125 .5625)
    (answer,) = decode_jointly("distribution", pair, [[(0, 2)], [(3,)]], ask, 0, text_of, [3.0, 1.0])
    assert math.exp(answer.log_probs[0]) == pytest.approx(0.5625, abs=1e-6)


def test_a_pair_of_models_made_by_hand_answers_by_the_mean_of_its_states():
    pair, ask = [bigrams(ONE), bigrams(OTHER)], requests(1, max_tokens=1, stop_token_ids=frozenset())
    # one reads a 2, the other a 3: the mean state is half of each, and each head says half of log p(.|2) + log p(.|3)
    (answer,) = decode_jointly("hidden", pair, [[(0, 2)], [(3,)]], ask, 0, text_of)
    rows = (ONE[2], ONE[3], OTHER[2], OTHER[3])
    scores = [math.prod(row[v] for row in rows) ** 0.25 for v in range(4)]  # means of four logs
    assert answer.token_ids == [scores.index(max(scores))] == [3]
    assert math.exp(answer.log_probs[0]) == pytest.approx(max(scores) / sum(scores), abs=1e-6)
    # one model for both: its own head alone
    (answer,) = decode_jointly("hidden", [pair[0]] * 2, [[(0, 2)], [(0,)]], ask, 0, text_of)
    scores = [math.sqrt(ONE[2][v] * ONE[0][v]) for v in range(4)]
    assert answer.token_ids == [0] and math.exp(answer.log_probs[0]) == pytest.approx(scores[0] / sum(scores), abs=1e-6)


# ---- a direct computation


@torch.no_grad()
def direct(mode, models, agents_prompts, length, weights):
    """Greedy: every model reads its whole sequence again for each token, one sequence at a time."""
    ids, log_probs = [], []
    while len(ids) < length and ids[-1:] != [EOS]:
        sequences = [torch.tensor([[*prompt, *ids]]) for prompt in agents_prompts]
        pairs = list(zip(models, sequences, weights, strict=True))
        if mode == "distribution":
            p = sum(w * model(input_ids=seq).logits[0, -1].softmax(-1) for model, seq, w in pairs) / sum(weights)
        else:
            state = sum(w * model.model(input_ids=seq).last_hidden_state[0, -1] for model, seq, w in pairs)
            p = sum(w * model.lm_head(state / sum(weights)) for model, _, w in pairs) / sum(weights)
            p = p.softmax(-1)
        ids.append(int(p.argmax()))
        log_probs.append(float(p.log()[ids[-1]]))
    return ids, log_probs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "which,weights", [((0, 1), (1, 1)), ((0, 1), (1, 3)), ((0, 0, 1), (1, 2, 3)), ((0, 1, 0), (1, 2, 5))]
)
def test_cached_and_padded_is_direct(models, mode, which, weights):
    team, count = [models[i] for i in which], 9
    asked = [prompts(count, seed=10 + k) for k in range(len(team))]
    answers = decode_jointly(mode, team, asked, requests(count), 0, text_of, weights)
    for n, answer in enumerate(answers):
        ids, log_probs = direct(mode, team, [prompt[n] for prompt in asked], 12, weights)
        assert answer.token_ids == ids
        torch.testing.assert_close(torch.tensor(answer.log_probs), torch.tensor(log_probs), atol=2e-5, rtol=0)
    assert len({tuple(answer.token_ids) for answer in answers}) == count, "they say something"


# ---- copies, weights, batches


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copies", [1, 2, 3, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_copies_of_one_agent_are_that_agent(models, mode, copies, temperature):
    asked, ask = prompts(13), requests(13, temperature=temperature)
    alone = decode(models[0], [Request(p, 12, r.seed, temperature, stop_token_ids=frozenset([EOS])) for p, r in zip(asked, ask, strict=True)], 0, text_of)  # fmt: skip
    together = decode_jointly(mode, [models[0]] * copies, [asked] * copies, ask, 0, text_of)
    assert tokens(together) == tokens(alone)
    for one, other in zip(alone, together, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-6)
    if mode == "hidden":
        assert plain(together) == plain(alone), "bit for bit"


@pytest.mark.parametrize("mode", MODES)
def test_copies_of_the_weights_are_the_agent_too(models, mode):
    asked, ask = prompts(6), requests(6)
    twins = [models[0], random_model(0)]
    alone = decode_jointly(mode, [models[0]], [asked], ask, 0, text_of)
    assert tokens(decode_jointly(mode, twins, [asked, asked], ask, 0, text_of)) == tokens(alone)


@pytest.mark.parametrize("mode", MODES)
def test_all_the_weight_on_one_agent_is_that_agent(models, mode):
    asked, ask = [prompts(7), prompts(7, seed=1)], requests(7)
    for k, weights in enumerate(([1.0, 0.0], [0.0, 1.0])):
        alone = decode_jointly(mode, [models[k]], [asked[k]], ask, 0, text_of)
        assert plain(decode_jointly(mode, models, asked, ask, 0, text_of, weights)) == plain(alone)
    both = tokens(decode_jointly(mode, models, asked, ask, 0, text_of))
    assert both != tokens(alone), "and both together say something else"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", [(0, 1), (0, 0), (0, 1, 0)])
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_an_answer_does_not_depend_on_the_tasks_beside_it(models, mode, which, threads):
    team, count = [models[i] for i in which], 11
    asked = [prompts(count, seed=20 + k) for k in range(len(team))]
    lengths = [2, 12, 2, 5, 2, 2, 12, 5, 2, 2, 5]  # rows leave in halves: eleven, five, two
    ask = [
        replace(one, max_tokens=length) for one, length in zip(requests(count, temperature=1.0), lengths, strict=True)
    ]
    together = plain(decode_jointly(mode, team, asked, ask, 0, text_of))
    for n in range(count):
        alone = decode_jointly(mode, team, [[prompt[n]] for prompt in asked], [ask[n]], 0, text_of)
        assert plain(alone) == [together[n]], "token for token and bit for bit"


@pytest.mark.parametrize("mode", MODES)
def test_agents_of_one_model_share_its_batch(models, mode):
    asked = [prompts(6), prompts(6, seed=1), prompts(6, seed=2)]
    with shapes_read(models[0]) as seen:
        decode_jointly(mode, [models[0]] * 3, asked, requests(6, max_tokens=2, stop_token_ids=frozenset()), 0, text_of)
    assert sum(rows for rows, _ in seen[:-1]) == 18 and seen[-1] == (20, 1)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_has_its_head_again(tied):
    model = random_model(3, tied=tied)
    head = model.get_output_embeddings()
    decode_jointly("hidden", [model], [prompts(2)], requests(2), 0, text_of)
    assert model.get_output_embeddings() is head and model.lm_head is head
    with pytest.raises(RuntimeError):
        decode_jointly("hidden", [model, random_model(1, hidden=32)], [prompts(2)] * 2, requests(2), 0, text_of)
    assert model.get_output_embeddings() is head, "after an error too"


def test_vocabularies_that_are_padded_to_other_sizes_share_their_words(models):
    wide = random_model(4, vocabulary=WORDS + 40)
    for mode in MODES:
        answers = decode_jointly(mode, [models[0], wide], [prompts(4)] * 2, requests(4, temperature=1.0), 0, text_of)
        assert all(token < WORDS for answer in answers for token in answer.token_ids)


# ---- what is impossible


def tokenizer(*words):
    return SimpleNamespace(get_vocab=lambda: {word: i for i, word in enumerate(words)})


def test_one_tokenizer_by_its_words_not_by_its_path(models):
    same = {"a": tokenizer("x", "y", "z"), "b": tokenizer("x", "y", "z")}
    for mode in MODES:
        check_together(mode, dict(zip("ab", models, strict=True)), same)
        with pytest.raises(ConfigError) as caught:
            check_together(mode, dict(zip("ab", models, strict=True)), same | {"b": tokenizer("x", "z", "y", "w")})
        said = str(caught.value)
        assert (
            f"ensemble.modes=[{mode}]" in said and "'a' and 'b'" in said and "3 and 4 tokens, 1 of them equal" in said
        )
        assert "expected one vocabulary" in said and "Use ensemble.modes=[vote]" in said


def test_states_of_one_size_and_a_head_that_says_all(models):
    vocabularies = {"a": tokenizer("x"), "b": tokenizer("x")}
    small = random_model(1, hidden=32)
    check_together("distribution", {"a": models[0], "b": small}, vocabularies)
    with pytest.raises(
        ConfigError, match=r"ensemble.modes=\[hidden\].*'a' and 'b' have 64 and 32 numbers; expected one size"
    ):
        check_together("hidden", {"a": models[0], "b": small}, vocabularies)
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 4, "intermediate_size": 64, "eos_token_id": EOS}
    capped = Gemma2ForCausalLM(Gemma2Config(**sizes, final_logit_softcapping=3.0)).eval()
    with pytest.raises(ConfigError, match=r"policy 'b' changes what its head says.*use ensemble.modes=\[vote"):
        check_together("hidden", {"a": models[0], "b": capped}, vocabularies)
    scaled = GraniteForCausalLM(GraniteConfig(**sizes, logits_scaling=2.0, attn_implementation=ATTENTION)).eval()
    check_together("hidden", {"a": models[0], "b": scaled}, vocabularies)  # a scale is as good before the head
    (alone,) = decode(scaled, [Request(prompts(1)[0], 12, 0)], 0, text_of)
    (joint,) = decode_jointly("hidden", [scaled], [prompts(1)], [Request((), 12, 0)], 0, text_of)
    assert joint.token_ids == alone.token_ids and joint.log_probs == pytest.approx(alone.log_probs, abs=1e-6)


# ---- the table


def test_errors_are_of_tasks_not_of_samples():
    assert mean_and_error([1.0, 0.0, 1.0, 1.0]) == (0.75, pytest.approx(0.25))  # sqrt(.75 / 3 / 4)
    assert mean_and_error([0.5, 0.5]) == (0.5, 0.0) and mean_and_error([1.0]) == (1.0, None)
    twice = Way("a", [[1, 1], [0, 0], [1, 1], [1, 1]])
    assert numbers(twice, twice)["standard_error"] == pytest.approx(0.25), "a second sample is no new task"


def test_the_rows_of_the_table():
    alice = Way("alice", [[1.0], [0.0], [1.0], [0.0]], 10, 100, 1.0)
    carol = Way("carol", [[1.0], [1.0], [1.0], [0.0]], 20, 200, 3.0)
    mean = mean_of_agents([alice, carol])
    assert mean.correct_TS == [[1.0], [0.5], [1.0], [0.0]] and (mean.tokens, mean.forward_tokens, mean.seconds) == (
        15,
        150,
        2,
    )
    assert (
        best_agent([alice, carol]).name == "best (carol)" and best_agent([alice, alice]).correct_TS == alice.correct_TS
    )
    row = numbers(carol, mean)
    assert (row["accuracy"], row["gain"], row["tokens"]) == (0.75, 0.125, 20) and row["gain_error"] == pytest.approx(
        0.125
    )
    shown = table([numbers(alice, mean), row, numbers(Way("hidden", reason="sizes differ"), mean)]).splitlines()
    assert shown[0].split()[0] == "accuracy" and shown[1].split() == [
        "alice",
        "0.500",
        "0.289",
        "-0.125",
        "0.125",
        "10",
        "100",
        "1.00",
    ]
    assert shown[3].split() == ["hidden", *["-"] * 7, "sizes", "differ"]


@pytest.mark.parametrize("verbose", [False, True])
def test_libraries_are_quiet_unless_verbose_is_set(monkeypatch, verbose):
    printed, during = builtins.print, []

    def prepare(config):
        during.append(builtins.print)
        raise ConfigError("seen")

    monkeypatch.setattr(ensemble, "prepare", prepare)
    with pytest.raises(ConfigError, match="seen"):
        ensemble.run(SimpleNamespace(verbose=verbose))
    assert (during == [printed]) == verbose and builtins.print is printed
