"""Texts that meet: ids of the parts are those of the whole, for tokenizers that put a space before what they encode."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from marl.controller.chat import ChatEncoder
from marl.controller.encoding import TextEncoder
from marl.types import Turn

LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
BARE = "{% for m in messages %}{{ m.content }} {{ m.role }} {% endfor %}"
CHAT = [
    {"role": "user", "content": "hi hi"},
    {"role": "assistant", "content": "a hi"},
    {"role": "user", "content": "hi (said bob)"},
]
PREFIXES = ("first", "always", "legacy", "byte level")


def sentencepiece(prefix: str, template: str) -> PreTrainedTokenizerFast:
    """Merges of ``▁hi``, as SentencePiece models have them; ``legacy`` is Llama 2's normalizer."""
    letters = [chr(code) for code in range(33, 127)]
    space = "Ġ" if prefix == "byte level" else "▁"
    names = ["<unk>", "<s>", "</s>", space, "Ċ", *letters, "hi", f"{space}hi"]
    vocabulary = {name: index for index, name in enumerate(names)}
    merges = [("h", "i"), (space, "hi")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    if prefix == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif prefix == "byte level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("template", [LLAMA_2, MISTRAL, ZEPHYR, BARE], ids=["llama 2", "mistral", "zephyr", "bare"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_ids_of_the_parts_are_those_of_the_rendered_conversation(prefix, template, length):
    tokenizer = sentencepiece(prefix, template)
    rendered = tokenizer.apply_chat_template(CHAT[:length], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.convert_ids_to_tokens(tokenizer.encode(rendered, add_special_tokens=False))
    parts = tokenizer.convert_ids_to_tokens(ChatEncoder(tokenizer).encode(CHAT[:length]))
    assert parts == whole


def test_the_tokenizers_of_these_tests_do_put_a_space_before_a_text():
    for prefix in PREFIXES:
        tokenizer = sentencepiece(prefix, LLAMA_2)
        assert tokenizer.tokenize("hi")[0] in ("▁hi", "Ġhi")
        assert tokenizer.convert_ids_to_tokens(TextEncoder(tokenizer).text("hi", inside=True)) == ["hi"]


@pytest.mark.parametrize(("prefix", "expected"), [("first", "hi"), ("always", "▁hi"), ("legacy", "▁hi")])
def test_a_text_after_a_special_token_is_encoded_as_the_tokenizer_does(prefix, expected):
    tokenizer = sentencepiece(prefix, "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}")
    tokens = tokenizer.convert_ids_to_tokens(ChatEncoder(tokenizer).encode(CHAT[:1]))
    assert tokens == ["<s>", expected, "▁hi", "</s>"]


@pytest.mark.parametrize("template", [LLAMA_2, MISTRAL], ids=["llama 2", "mistral"])
@pytest.mark.parametrize("ended", [True, False])
def test_an_answer_is_closed_once(template, ended):
    """Templates put a space before the end token of an answer; the model has put the token itself."""
    tokenizer = sentencepiece("always", template)
    encoder = ChatEncoder(tokenizer)
    turn = Turn("a", 1, CHAT[:1], "a hi", prompt_ids=encoder.encode(CHAT[:1]))
    turn.response_ids = [*tokenizer.encode("a hi", add_special_tokens=False), *[tokenizer.eos_token_id] * ended]
    ids = encoder.encode(CHAT, turn)
    assert ids[: len(turn.prompt_ids + turn.response_ids)] == turn.prompt_ids + turn.response_ids
    after = tokenizer.convert_ids_to_tokens(ids[len(turn.prompt_ids) :])
    assert after.count("</s>") == 1 and after[: after.index("</s>")] in (["▁", "a", "▁hi"], ["▁", "a", "▁hi", "▁"])


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_text_spells_no_special_token(prefix):
    tokenizer = sentencepiece(prefix, LLAMA_2)
    texts = TextEncoder(tokenizer)
    for inside in (True, False):
        ids = texts.text("hi</s><s>[INST]", inside)
        assert not set(ids) & {tokenizer.eos_token_id, tokenizer.bos_token_id}
