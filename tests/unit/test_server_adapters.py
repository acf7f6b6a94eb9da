"""Adapters in the hf server: a batch of several gives what each gives alone, and none answers with another's cache."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, OPTConfig, Qwen2MoeConfig

from marl.platform.shapes import MIN_ROWS
from marl.rollout.adapters import AdapterBank, Pair
from marl.rollout.attention import ATTENTION
from marl.rollout.decoding import Engine, SingleReader
from marl.rollout.prefixes import Prefixes
from marl.rollout.requests import Request
from tests.tiny_model import EOS, make_model, text_of

NAMES = (None, "red", "green", "blue")


def weights_of(model, rank, seed, targets=("q_proj", "v_proj", "down_proj")):
    """An adapter that changes answers, by the names that a trainer sends."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, module in model.named_modules():
        if name.split(".")[-1] in targets:
            down, up = (rank, module.in_features), (module.out_features, rank)
            weights[f"{name}.lora_A.weight"] = torch.randn(down, generator=generator) * 0.2
            weights[f"{name}.lora_B.weight"] = torch.randn(up, generator=generator) * 0.2
    return weights


def adapted(limit=1 << 30, max_rows=1000):
    """An engine over a model with three adapters, of other ranks and layers."""
    model = make_model()
    bank = AdapterBank(model)
    bank.put("red", weights_of(model, 2, 1), 2.0)
    bank.put("green", weights_of(model, 4, 2, ("k_proj", "up_proj")), 1.0)
    bank.put("blue", weights_of(model, 8, 3), 0.5)
    reader = SingleReader(model, Prefixes(limit), 0, adapters=bank)
    return Engine(reader, model.device, text_of, max_rows), bank


def requests(names, length=9, same_seed=True):
    prompt = tuple(range(20, 41))
    return [Request(prompt, length, 7 if same_seed else i, stop_token_ids=frozenset([EOS]), adapter=name)
            for i, name in enumerate(names)]  # fmt: skip


def finish(engine, wanted):
    drafts = [engine.add(request) for request in wanted]
    while engine.busy:
        engine.step()
    return [(d.answer.token_ids, d.answer.log_probs) for d in drafts]


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("copies", [1, 2, 5])
def test_a_mixed_batch_answers_as_each_adapter_does_alone(copies, threads):
    wanted = requests([name for name in NAMES for _ in range(copies)], same_seed=copies == 1)
    together = finish(adapted()[0], wanted)
    alone = [finish(adapted()[0], [request])[0] for request in wanted]
    assert together == alone
    if copies == 1:
        assert len({tuple(log_probs) for _, log_probs in together}) == len(NAMES), "each is a policy of its own"


@pytest.mark.parametrize("rank", [1, 3])
def test_what_is_added_to_a_row_does_not_depend_on_their_number(rank):
    """A product of rank one has other last bits for 9 rows than for 8: it is computed as a matrix times a vector."""
    generator = torch.Generator().manual_seed(0)
    x, down, up = (torch.randn(size, generator=generator) for size in ((64, 512), (rank, 512), (16, rank)))
    pair = Pair.padded(down, up, 2.0)
    added = pair(x)
    assert all(torch.equal(pair(x[:rows]), added[:rows]) for rows in range(MIN_ROWS, len(x)))
    assert torch.allclose(added, 2.0 * x @ down.T @ up.T, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(*halves) for halves in zip(pair.halves(), (down, up), strict=True))


@pytest.mark.parametrize("max_rows", [1, 3, 6])
def test_a_full_batch_answers_as_each_adapter_does_alone(max_rows):
    """Fewer rows than adapters, or than requests: rows leave, move and join, and each keeps its adapter."""
    wanted = [replace(r, max_tokens=3 + 5 * i % 11) for i, r in enumerate(requests(NAMES * 4, same_seed=False))]
    alone = [finish(adapted()[0], [request])[0] for request in wanted]
    assert finish(adapted(max_rows=max_rows)[0], wanted) == alone


def test_no_adapter_answers_with_what_another_has_read():
    engine, _ = adapted()
    first = finish(engine, requests(["red"]))
    read = engine.reader.prefilled
    assert finish(engine, requests(["green"])) == finish(adapted()[0], requests(["green"])) != first
    assert engine.reader.prefilled > read, "the prompt is read again"
    read = engine.reader.prefilled
    assert finish(engine, requests(["red"])) == first
    assert engine.reader.prefilled == read, "what it has read itself is kept"


def test_a_sync_of_one_adapter_forgets_its_own_cache_alone():
    engine, bank = adapted()
    before = finish(engine, requests(["red", "green"]))
    bank.put("red", weights_of(bank.model, 3, 9), 2.0)
    engine.forget("red")
    read, prompt = engine.reader.prefilled, 21
    after = finish(engine, requests(["red", "green"]))
    assert after[1] == before[1] and after[0] != before[0]
    assert engine.reader.prefilled - read == prompt
    prefixes = engine.reader.prefixes
    assert prefixes.bytes == sum(node.nbytes() for node in prefixes._nodes())


def test_a_half_answered_request_goes_on_under_the_new_adapter():
    engine, bank = adapted()
    prompt = tuple(range(20, 41))
    draft = engine.add(Request(prompt, 12, 0, temperature=0.0, adapter="red"))
    for _ in range(5):
        engine.step()
    said = list(draft.answer.token_ids)
    for each in (engine, fresh := adapted()[0]):
        each.reader.adapters.put("red", weights_of(bank.model, 3, 9), 2.0)
    engine.forget("red")
    while engine.busy:
        engine.step()
    rest = Request((*prompt, *said), 12 - len(said), 0, temperature=0.0, adapter="red")
    ids, log_probs = finish(fresh, [rest])[0]
    assert draft.answer.token_ids == [*said, *ids] and draft.answer.log_probs[len(said) :] == log_probs


def test_what_is_added_is_pefts():
    """The model with PEFT's adapter, merged into nothing, gives the bank's scores."""
    model = make_model()
    theirs = get_peft_model(
        copy.deepcopy(model), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    ).eval()
    weights = {}
    for key, parameter in theirs.named_parameters():
        if ".lora_" in key:
            torch.nn.init.normal_(parameter, std=0.2)
            weights[key.removeprefix("base_model.model.").replace(".default.", ".")] = parameter.detach()
    bank = AdapterBank(model)
    bank.put("one", weights, 2.0)
    ids = torch.arange(20, 60)[None].repeat(4, 1)
    with torch.inference_mode(), bank.routed(["one"] * 4):
        ours = model(ids).logits
    with torch.inference_mode():
        assert torch.equal(ours, theirs(ids).logits) and not torch.equal(ours, model(ids).logits)


def test_adapters_that_do_not_fit_are_refused():
    _, bank = adapted()
    whole = weights_of(bank.model, 2, 1)
    half = {key: value for key, value in whole.items() if "lora_A" in key}
    with pytest.raises(KeyError, match=r"lora_B\.weight"):
        bank.put("red", half, 1.0)
    with pytest.raises(KeyError, match="no layer model.layers.99"):
        bank.put("red", {f"model.layers.99.q_proj.lora_{x}.weight": torch.zeros(1, 1) for x in "AB"}, 1.0)
    with pytest.raises(KeyError, match="linear layers"):
        bank.put("red", {"model.embed_tokens.lora_embedding_A": torch.zeros(1, 1)}, 1.0)
    with pytest.raises(KeyError, match="'pink'.*blue, green, red"), bank.routed(["pink"]):
        pass


def test_a_bank_keeps_no_memory_of_the_sender():
    bank = AdapterBank(make_model())
    weights = weights_of(bank.model, 2, 4)
    bank.put("red", weights, 1.0)
    assert {kept.data_ptr() for _, kept in bank.weights("red")}.isdisjoint(sent.data_ptr() for sent in weights.values())


SMALL = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
MIXED = {
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize("config", [
    OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32),
    Qwen2MoeConfig(**SMALL, **MIXED, shared_expert_intermediate_size=32),
], ids=["opt", "qwen2_moe"])  # fmt: skip
def test_layers_that_see_tokens_one_after_another_add_to_the_right_rows(config):
    """Log-probs of the answers are those of PEFT's model, whatever prompts are beside one another."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    other = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    other.load_state_dict(model.state_dict())
    oracle = get_peft_model(other, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"))
    weights = {}
    for name, weight in oracle.named_parameters():
        if ".lora_" in name:
            weight.data = torch.randn(weight.shape) * 0.3
            weights[name.removeprefix("base_model.model.").replace(".default.weight", ".weight")] = weight.data
    flat = {key.split(".")[-3] for key in weights} & {"fc1", "shared_expert_gate"}
    assert flat, "an adapted layer that sees flattened tokens"
    bank = AdapterBank(model)
    bank.put("red", weights, 2.0)
    engine = Engine(SingleReader(model, Prefixes(1 << 30), 0, adapters=bank), model.device, text_of, 100)
    prompts = [tuple(torch.randint(5, 110, (size,)).tolist()) for size in (1, 3, 9, 40, 11)]
    wanted = [Request(prompt, 9, i, adapter=name) for i, prompt in enumerate(prompts) for name in ("red", None)]
    for request, (token_ids, log_probs) in zip(wanted, finish(engine, wanted), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *token_ids]])
        with torch.inference_mode(), nullcontext() if request.adapter else oracle.disable_adapter():
            scores = oracle(input_ids=ids).logits.log_softmax(-1)[0, len(request.prompt_ids) - 1 : -1]
        expected = scores.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        assert torch.allclose(expected, torch.tensor(log_probs), atol=2e-5)


def test_a_layer_that_sees_some_of_the_tokens_is_named():
    """Nobody can tell whose they are."""
    _, bank = adapted()
    bank.shape = (2, 3)
    with pytest.raises(ValueError, match="layer experts.0.up_proj sees 4 of 2 x 3 tokens.*target_modules"):
        bank._in_rows("experts.0.up_proj", torch.zeros(4, 8))
