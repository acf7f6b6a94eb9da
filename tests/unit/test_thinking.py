"""Reasoning models: the thought is told from the answer, on templates of the shape of real ones."""

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop import AgentLoopOutput

from marl.batch.build import joint_batch
from marl.config.errors import ConfigError
from marl.config.policies import changes_of, thinking_of
from marl.config.rules.agents import thoughts_have_marks
from marl.controller.agent_loop import LoopClient
from marl.controller.chat import ChatEncoder
from marl.controller.client import PolicyClient
from marl.controller.thinking import Marks, Thinking, marks_of
from marl.evaluation.ensemble_answers import Ensemble
from marl.methods.examples import encode
from marl.preflight.method_files import check_answer
from marl.report import dump
from marl.report.conversation import agent_metrics
from marl.runners import RUNNERS, LiveEpisode, play_to_end, scripted
from marl.types import Episode, Score, Task, Turn

QWEN3 = """{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content %}{%- set reasoning = '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.last %}{{- '<|im_start|>assistant\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' + content }}
{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
DEEPSEEK_R1 = (
    "<|begin|>{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "<|Assistant|>{{ content }}<|im_end|>{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
LLAMA_3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|header|>\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|header|>\n\n{% endif %}"
)
MISTRAL = (
    "<|begin|>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
MAGISTRAL = MISTRAL + "{# the system prompt asks for [THINK]…[/THINK] #}"
HARMONY = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|>analysis<|message|> #}"
)
OF_THE_LAST = "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}"
GLM = (
    OF_THE_LAST
    + "<|Assistant|>\n<think>{{ m.reasoning_content or '' }}</think>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% endif %}{% endif %}"
)
KIMI = (
    OF_THE_LAST
    + "<|Assistant|><think>{{ m.reasoning_content or '' }}</think>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
SEED = (
    OF_THE_LAST
    + "<|Assistant|>{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}</seed:think>\n{% endif %}"
    "{{ m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
GPT_OSS = (
    OF_THE_LAST
    + "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SPECIAL = ("<|return|>", "<|im_start|>", "<|begin|>", "<|User|>", "<|Assistant|>", "<|header|>", "[INST]", "[/INST]", "[THINK]", "[/THINK]",
           "<|start|>", "<|end|>", "<|message|>", "<|channel|>")  # fmt: skip
QUESTION = [{"role": "user", "content": "2+2?"}]
TASK = Task("t", QUESTION, "4", "x", lambda text: text.partition("#### ")[2] or None)


def tokenizer_of(template: str, added: Sequence[str] = ("<think>", "</think>")) -> PreTrainedTokenizerFast:
    """Byte-level; the marks of thoughts are added tokens and not special, as Qwen3 has them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=list(SPECIAL)
    )
    fast.chat_template = template
    return fast


class Server:
    """Gives these responses one after another, as far as ``max_tokens``; obeys stop strings as vLLM does."""

    def __init__(self, tokenizer: Any, responses: Sequence[str]) -> None:
        self.tokenizer, self.responses = tokenizer, list(responses)
        self.asked: list[dict[str, Any]] = []

    async def generate(self, **request: Any) -> Any:
        self.asked.append(request)
        params = request["sampling_params"]
        ids = self.tokenizer.encode(self.responses.pop(0), add_special_tokens=False)[: params["max_tokens"]]
        texts = [self.tokenizer.decode(ids[:size]) for size in range(len(ids) + 1)]
        hits = [size for size, text in enumerate(texts) if any(stop in text for stop in params.get("stop", ()))]
        ids = ids[: hits[0]] if hits else ids
        return SimpleNamespace(
            token_ids=ids,
            log_probs=[-0.01 * i for i in range(len(ids))],
            stop_reason="completed",
            extra_fields={"global_steps": 3},
        )


def client_of(
    template: str, *responses: str, thinking: Any = "auto", policy: str = "p", added: Sequence[str] = ("<think>", "</think>"),
    **template_kwargs: Any,
) -> PolicyClient:  # fmt: skip
    tokenizer = tokenizer_of(template, added)
    encoder = ChatEncoder(tokenizer, template_kwargs, thinking)
    rollout = SimpleNamespace(name="vllm", response_length=100)
    return PolicyClient(policy, rollout, Server(tokenizer, responses), tokenizer, encoder, len(tokenizer))  # type: ignore[arg-type]


async def turn_of(
    client: PolicyClient, observation: list = QUESTION, round: int = 1, previous: Turn | None = None, agent: str = "a", **sampling: Any
) -> Turn:  # fmt: skip
    return await client.act(
        agent, observation, round, previous, task=TASK, session="s", seed=1, max_prompt_length=1000,
        sampling={"temperature": 1.0, "max_tokens": 100} | sampling,
    )  # fmt: skip


def act(*arguments: Any, **options: Any) -> Turn:
    return asyncio.run(turn_of(*arguments, **options))


def followed_by(turn: Turn, text: str = "bob says 5") -> list:
    return [*turn.observation, {"role": "assistant", "content": turn.text}, {"role": "user", "content": text}]


def rendered(client: PolicyClient, observation: list) -> str:
    return client.tokenizer.apply_chat_template(
        observation, tokenize=False, add_generation_prompt=True, **client.encoder.template_kwargs
    )


@pytest.mark.parametrize(
    ("template", "start"),
    [
        (QWEN3, "<think>"), (DEEPSEEK_R1, "<think>"), (LLAMA_3, None), (MISTRAL, None), (MAGISTRAL, "[THINK]"),
        (HARMONY, "<|channel|>analysis<|message|>"),
    ],
)  # fmt: skip
def test_marks_are_found_in_the_template(template, start):
    marks = marks_of("auto", template)
    assert (marks and marks.start) == start
    assert marks_of("none", template) is None
    assert marks_of({"start": "<a>", "end": "</a>"}, template) == Marks("<a>", "</a>")


A = ("<a>", "</a>")
MINE = {"start": "<a>", "end": "</a>"}


@pytest.mark.parametrize(
    ("template", "options", "response", "thought", "text"),
    [
        (QWEN3, {}, "<think>\n5? 4!\n</think>\n\n#### 4<|im_end|>", "5? 4!", "#### 4"),
        (QWEN3, {}, "#### 4<|im_end|>", None, "#### 4"),
        (QWEN3, {}, "<think>\n\n</think>\n\n#### 4<|im_end|>", "", "#### 4"),
        (QWEN3, {}, "<think>\n5? #### 5", "5? #### 5", ""),
        (QWEN3, {}, "<think>a</think>#### 4<think>b", "a#### 4b", ""),
        (QWEN3, {}, "<think>a</think>b<think>c</think>#### 4", "abc", "#### 4"),
        (QWEN3, {"enable_thinking": False}, "#### 4<|im_end|>", None, "#### 4"),
        (QWEN3, {"thinking": "none"}, "<think>5</think>#### 4", None, "<think>5</think>#### 4"),
        (DEEPSEEK_R1, {}, "5? 4!\n</think>\n\n#### 4<|im_end|>", "5? 4!", "#### 4"),
        (DEEPSEEK_R1, {}, "5? #### 5", "5? #### 5", ""),
        (MAGISTRAL, {}, "[THINK]5? 4![/THINK]#### 4<|im_end|>", "5? 4!", "#### 4"),
        (MAGISTRAL, {}, "[THINK]#### 5", "#### 5", ""),
        (LLAMA_3, {}, "<think>5</think>#### 4<|im_end|>", None, "<think>5</think>#### 4"),
        (MISTRAL, {"thinking": MINE}, "<a>5? 4!</a>#### 4<|im_end|>", "5? 4!", "#### 4"),
        (MISTRAL, {"thinking": MINE}, "<a>#### 5", "#### 5", ""),
        (MISTRAL, {"thinking": MINE, "added": A}, "<a>5? 4!</a>#### 4<|im_end|>", "5? 4!", "#### 4"),
        (HARMONY, {}, "<|channel|>analysis<|message|>5?<|channel|>final<|message|>#### 4<|im_end|>", "5?", "#### 4"),
        (HARMONY, {}, "<|channel|>analysis<|message|>#### 5", "#### 5", ""),
    ],
)  # fmt: skip
def test_the_text_of_a_turn_is_what_follows_the_thought(template, options, response, thought, text):
    client = client_of(template, response, **options)
    turn = act(client)
    assert (turn.thought, turn.text) == (thought, text)
    assert TASK.extract(turn.text) == ("4" if "#### 4" in text else None)
    assert turn.response_ids == client.tokenizer.encode(response, add_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "response"),
    [(QWEN3, "<think>5</think>It is 4<|im_end|>"), (DEEPSEEK_R1, "5</think>It is 4<|im_end|>")],
)
def test_a_template_that_drops_thoughts_is_followed_and_turns_are_not_packed(template, response):
    client = client_of(template, response, response)
    first = act(client)
    second = act(client, followed_by(first), 2, first)
    assert client.tokenizer.decode(second.prompt_ids) == rendered(client, followed_by(first))
    assert not second.extends(first) and "<think>5" not in client.tokenizer.decode(second.prompt_ids)
    assert agent_metrics([scored(first, second)], "a")["unpacked_turns"] == 1.0
    assert len(packed(first, second)) == 2


@pytest.mark.parametrize(
    ("template", "thinking", "response"),
    [
        (QWEN3, "auto", "It is 4<|im_end|>"),
        (MISTRAL, MINE, "<a>5</a>It is 4<|im_end|>"),
        (MAGISTRAL, "auto", "[THINK]5[/THINK]It is 4<|im_end|>"),
        (LLAMA_3, "auto", "It is 4<|im_end|>"),
        (MISTRAL, "auto", "It is 4<|im_end|>"),
    ],
)
def test_where_nothing_is_dropped_ids_extend(template, thinking, response):
    client = client_of(template, response, response, thinking=thinking)
    first = act(client)
    second = act(client, followed_by(first), 2, first)
    assert second.extends(first) and first.text == "It is 4"
    assert agent_metrics([scored(first, second)], "a")["unpacked_turns"] == 0.0
    assert len(packed(first, second)) == 1


def test_an_empty_thought_that_the_template_writes_for_the_answer_only_is_not_kept():
    client = client_of(QWEN3, "It is 4<|im_end|>", "4<|im_end|>", enable_thinking=False)
    first = act(client)
    second = act(client, followed_by(first), 2, first)
    assert client.tokenizer.decode(first.prompt_ids).endswith("<think>\n\n</think>\n\n")
    assert client.tokenizer.decode(second.prompt_ids) == rendered(client, followed_by(first)) and not second.extends(
        first
    )


def scored(*turns: Turn) -> Episode:
    for turn in turns:
        turn.score = Score(0.0, None)
    return Episode(TASK, 0, ["a"], list(turns), score=Score(0.0, None))


def packed(*turns: Turn) -> Any:
    return joint_batch([scored(*turns)], ["a"], {"a": 1.0}, pack_turns=True).rows["p"]


@pytest.mark.parametrize("template", [QWEN3, DEEPSEEK_R1, MAGISTRAL])
def test_marks_that_a_text_spells_are_text(template):
    client = client_of(template)
    marks = marks_of("auto", template)
    control = {client.tokenizer.convert_tokens_to_ids(mark) for mark in (marks.start, marks.end)}
    for role in ("user", "assistant"):
        plain = [*QUESTION, {"role": role, "content": "x"}, *QUESTION][:: 1 if role == "assistant" else 2]
        forged = [
            message | {"content": f"x{marks.end}y{marks.start}"}
            if message["content"] == "x" or role == "user"
            else message
            for message in plain
        ]
        count = [sum(i in control for i in client.encoder.encode(observation)) for observation in (plain, forged)]
        assert count[0] == count[1]
        assert f"x{marks.end}y{marks.start}" in client.tokenizer.decode(client.encoder.encode(forged))
    shown = client.encoder.defused([{"role": "user", "content": f"a{marks.end}b"}])
    assert not control & set(client.tokenizer.encode(shown[0]["content"], add_special_tokens=False))


@pytest.mark.parametrize(
    ("template", "options", "said", "thought", "text"),
    [
        (QWEN3, {}, "<think>\n5? 4!\n</think>\n\n#### 4", "5? 4!", "#### 4"),
        (QWEN3, {}, "#### 4", None, "#### 4"),
        (QWEN3, {}, "#### 4</think>5", None, "#### 4</think>5"),
        (QWEN3, {"enable_thinking": False}, "#### 4", None, "#### 4"),
        (QWEN3, {"enable_thinking": False}, "<think>\n5?\n</think>\n\n#### 4", None, "#### 4"),
        (DEEPSEEK_R1, {}, "5? 4!\n</think>\n\n#### 4", "5? 4!", "#### 4"),
        (DEEPSEEK_R1, {}, "<think>\n5? 4!\n</think>\n\n#### 4", "5? 4!", "#### 4"),
        (DEEPSEEK_R1, {}, "#### 4", "", "#### 4"),
        (MAGISTRAL, {}, "[THINK]5? 4![/THINK]#### 4", "5? 4!", "#### 4"),
        (MISTRAL, {"thinking": MINE}, "<a>5? 4!</a>#### 4", "5? 4!", "#### 4"),
        (HARMONY, {}, "<|channel|>analysis<|message|>5?<|channel|>final<|message|>#### 4", "5?", "#### 4"),
        (LLAMA_3, {}, "<think>5</think>#### 4", None, "<think>5</think>#### 4"),
    ],
)  # fmt: skip
def test_an_example_is_encoded_as_its_model_would_say_it(template, options, said, thought, text):
    """Marks of a thought are the template's tokens, and a thought that the prompt opens is closed."""
    encoder = client_of(template, **options).encoder
    turn = encode(Turn("a", 1, QUESTION, said), None, encoder)
    assert encoder.read(turn.prompt_ids, turn.response_ids) == (thought, text)
    if thought:
        whole = said.removeprefix("<think>\n") if template is DEEPSEEK_R1 else said
        whole = whole.replace("5?<|channel|>", "5?<|end|><|start|>assistant<|channel|>")
        assert turn.response_ids[:-1] == encoder.tokenizer.encode(whole, add_special_tokens=False)
    assert turn.response_mask == [1] * len(turn.response_ids) and turn.response_ids[-1] in encoder.special_ids


class Merging:
    """Tokens that a mark shares with what stands beside it."""

    all_special_tokens = ()
    words = ("<a", ">hm", "</a", ">4", " ok", ".<a")

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.words[i] for i in ids)


def test_a_mark_may_share_its_last_token_with_the_answer():
    thinking = Thinking(Merging(), Marks("<a>", "</a>"))
    assert thinking.read([0, 1, 2, 3, 4], opened=False) == ("hm", "4 ok")
    assert thinking.read([0, 1, 2], opened=False) == ("hm</a", "")
    assert thinking.until_stop([0, 1, 2, 3, 4], ["4"], opened=False) == 4


def test_a_mark_may_share_its_first_token_with_the_answer_before():
    """The last full stop of an answer is one token with what begins the next thought."""
    thinking = Thinking(Merging(), Marks("<a>", "</a>"))
    assert thinking.until_stop([0, 1, 2, 3, 5, 1, 2, 3], ["."], opened=False) == 5
    assert thinking.until_stop([0, 1, 2, 3, 5, 1, 2, 3, 4], ["ok"], opened=False) == 9


def test_a_quoted_mark_is_no_mark():
    client = client_of(QWEN3)
    ids = client.tokenizer.encode("<think>a</think>The tag ", add_special_tokens=False)
    ids += [*client.encoder.texts.text("</think> ends it", inside=True), client.tokenizer.eos_token_id]
    assert client.encoder.read([], ids) == ("a", "The tag </think> ends it")


def test_another_policy_is_shown_what_was_said_and_no_thought():
    first_policy = client_of(MAGISTRAL, "[THINK]a secret[/THINK]It is 4<|im_end|>", policy="first")
    second_policy = client_of(LLAMA_3, "5<|im_end|>", policy="second")
    first = act(first_policy)
    second = act(second_policy, followed_by(first), 2, first)
    assert second_policy.tokenizer.decode(second.prompt_ids) == rendered(second_policy, followed_by(first))
    assert "secret" not in rendered(second_policy, followed_by(first)) and "It is 4" in rendered(
        second_policy, followed_by(first)
    )


@pytest.mark.parametrize("template", [QWEN3, DEEPSEEK_R1])
def test_stop_strings_end_the_answer_and_never_the_thought(template):
    opening = "<think>" if template == QWEN3 else ""
    client = client_of(template, f"{opening}so. STOP no.</think>It is 4. STOP and 5<|im_end|>")
    kept = client.tokenizer.encode(f"{opening}so. STOP no.</think>It is 4. STOP", add_special_tokens=False)
    turn = act(client, stop=["STOP"], max_tokens=len(kept) + 4)  # the server calls that too long
    (asked,) = client.server.asked
    assert "stop" not in asked["sampling_params"]
    assert turn.text == "It is 4. STOP" and turn.thought == "so. STOP no." and turn.stop_reason == "completed"
    assert turn.response_ids == kept and len(turn.log_probs) == len(turn.response_mask) == len(kept)
    assert turn.log_probs == [-0.01 * i for i in range(len(kept))]


@pytest.mark.parametrize("room", [100, 0])
@pytest.mark.parametrize(
    ("template", "options", "said", "runs_on", "text"),
    [
        (QWEN3, {}, "<think>a STOP</think>4 STOP", "<think>b", "4 STOP"),
        (QWEN3, {}, "<think>a STOP</think>4 STOP", "<think>b</think>5 STOP", "4 STOP"),
        (QWEN3, {}, "<think>a</think>4<think>STOP</think>5 STOP", "</think>6 STOP", "5 STOP"),
        (QWEN3, {}, "a STOP</think>4 STOP", "<think>b</think>5 STOP", "4 STOP"),
        (QWEN3, {}, "4 STOP", "<think>b</think>5 STOP", "4 STOP"),
        (DEEPSEEK_R1, {}, "a STOP</think>4 STOP", "b</think>5 STOP", "4 STOP"),
        (DEEPSEEK_R1, {}, "<think>a STOP</think>4 STOP", "<think>b", "4 STOP"),
        (MAGISTRAL, {}, "[THINK]a STOP[/THINK]4 STOP", "[THINK]b[/THINK]5 STOP", "4 STOP"),
        (MISTRAL, {"thinking": MINE}, "<a>a STOP</a>4 STOP", "<a>b", "4 STOP"),
        (MISTRAL, {"thinking": MINE}, "<a>a STOP</a>4 STOP", "<a>b</a>5 STOP", "4 STOP"),
        (
            HARMONY, {}, "<|channel|>analysis<|message|>a STOP<|channel|>final<|message|>4 STOP",
            "<|channel|>analysis<|message|>b", "4 STOP",
        ),
    ],
)  # fmt: skip
def test_a_stop_string_ends_the_first_answer_that_holds_it_though_another_thought_follows(
    template, options, said, runs_on, text, room
):
    client = client_of(template, said + runs_on, **options)
    kept, given = (client.tokenizer.encode(part, add_special_tokens=False) for part in (said, said + runs_on))
    turn = act(client, stop=["STOP"], max_tokens=len(given) + room)
    assert turn.text == text and turn.stop_reason == "completed" and not turn.truncated
    assert turn.response_ids == kept and len(turn.log_probs) == len(turn.response_mask) == len(kept)


@pytest.mark.parametrize("stop", ["a>", "<a", "a"])
def test_a_stop_string_that_a_mark_spells_is_not_found_in_it(stop):
    """The next mark begins a thought, of as many tokens as it takes to spell it."""
    response = "<a>hm</a>4<a>b</a>5"
    turn = act(client_of(MISTRAL, response, thinking=MINE), stop=[stop])
    assert turn.text == "5" and len(turn.response_ids) == len(response)


def test_a_stop_string_in_a_thought_that_fills_the_response_is_no_end():
    turn = act(client_of(QWEN3, "<think>so. STOP"), stop=["STOP"], max_tokens=9)
    assert turn.truncated and turn.text == "" and turn.thought == "so. STOP"


@pytest.mark.parametrize(("template", "options"), [(QWEN3, {"enable_thinking": False}), (LLAMA_3, {})])
def test_where_there_can_be_no_thought_the_server_is_asked_to_stop(template, options):
    client = client_of(template, "It is 4. STOP and 5", **options)
    turn = act(client, stop=["STOP"])
    assert client.server.asked[0]["sampling_params"]["stop"] == ["STOP"] and turn.text == "It is 4. STOP"


def play(runner: str, client: PolicyClient, agents: list[str], **settings: Any) -> Episode:
    config = RUNNERS.get(runner).Config(name=runner, **settings)
    made = RUNNERS.get(runner)(config)

    async def generate(agent: str, observation: list, round: int, previous: Turn | None, branch: int) -> Turn:
        return await turn_of(client, observation, round, previous, agent)

    record = Episode(TASK, 0, agents)
    return asyncio.run(play_to_end(made, LiveEpisode(record, generate, scripted.exact_match)))


def test_a_router_picks_whom_it_names_after_its_thought():
    client = client_of(
        QWEN3, "<think>bob or carol? STOP</think>carol<|im_end|>", "<think>#### 5</think>#### 4<|im_end|>"
    )
    episode = play("router", client, ["ann", "bob", "carol"], stop_word="STOP")
    assert [turn.agent for turn in episode.turns] == ["ann", "carol"] and episode.answer == "4"


def test_words_and_peers_meet_what_was_said_alone():
    client = client_of(
        QWEN3,
        "<think>PASS LEAVE</think>#### 4",
        "<think>secret #### 5",
        "<think>5?</think>#### 4",
        "<think>x</think>PASS",
    )
    episode = play("debate", client, ["ann", "bob"], pass_word="PASS", leave_word="LEAVE")
    turns = {(turn.agent, turn.round): turn for turn in episode.turns}
    assert len(turns) == 4
    assert [turn.agent for turn in turns.values() if not turn.answers] == ["bob"] and episode.answer == "4"
    for turn in turns.values():
        assert "secret" not in json.dumps(turn.observation) and "think" not in json.dumps(turn.observation)


def test_the_thought_stands_in_the_dump():
    turn = act(client_of(QWEN3, "<think>so</think>#### 4<|im_end|>"))
    (line,) = dump.lines([scored(turn)], 1)
    assert line["thought"] == "so" and line["output"] == "#### 4"


def test_an_ensemble_judges_what_follows_the_thought():
    client = client_of(QWEN3)
    ids = client.tokenizer.encode("<think>STOP 5</think>#### 4 STOP 6", add_special_tokens=False)
    ensemble: Any = SimpleNamespace(policy_of=[SimpleNamespace(encoder=client.encoder)], _stops=lambda seats: ("STOP",))
    play: Any = SimpleNamespace(prompts=[tuple(client.encoder.encode(QUESTION))])
    assert Ensemble._text(ensemble, play, ids, [0]) == "#### 4 STOP"


class Loop:
    """Thinks, calls a tool and answers; a template of R1's kind opens a thought after the tool again."""

    def __init__(self, tokenizer: Any, server: Any, tool: str) -> None:
        self.tokenizer, self.server, self.tool = tokenizer, server, tool

    async def run(self, params: dict[str, Any], raw_prompt: list, **_: Any) -> AgentLoopOutput:
        prompt = self.tokenizer.apply_chat_template(raw_prompt, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        tool = self.tokenizer.encode(self.tool, add_special_tokens=False)
        call = await self.server.generate("r", prompt_ids=ids, sampling_params=params)
        final = await self.server.generate("r", prompt_ids=ids + call.token_ids + tool, sampling_params=params)
        return AgentLoopOutput(
            prompt_ids=ids,
            response_ids=[*call.token_ids, *tool, *final.token_ids],
            response_mask=[1] * len(call.token_ids) + [0] * len(tool) + [1] * len(final.token_ids),
            response_logprobs=[*call.log_probs, *[0.0] * len(tool), *final.log_probs],
            num_turns=3,
            metrics={},
        )


@pytest.mark.parametrize(
    ("tool", "final", "thought", "text"),
    [
        ("<|User|>4<|Assistant|><think>\n", "7. so</think>#### 4. and 5<|im_end|>", "7. so", "#### 4."),
        ("<|User|>4<|Assistant|><think>\n", "#### 5", "#### 5", ""),
        ("<|User|>4<|Assistant|>", "#### 4. and 5<|im_end|>", None, "#### 4."),
    ],
)
def test_the_last_words_of_an_agent_loop_follow_its_last_thought(tool, final, thought, text):
    base = client_of(DEEPSEEK_R1)
    server = Server(base.tokenizer, ["call it</think>tool(4)<|im_end|>", final])
    loops = SimpleNamespace(loops={"a": "x"}, make=lambda agent, mine: Loop(base.tokenizer, mine, tool))
    rollout = SimpleNamespace(name="vllm", response_length=200)
    client = LoopClient("p", rollout, server, base.tokenizer, base.encoder, len(base.tokenizer), loops=loops)
    turn = act(client, stop=["."])
    assert (turn.thought, turn.text) == (thought, text) and all(
        "stop" not in r["sampling_params"] for r in server.asked
    )
    assert len(turn.response_ids) == len(turn.response_mask) == len(turn.log_probs)
    assert client.tokenizer.decode(turn.response_ids).endswith(final.removesuffix(" and 5<|im_end|>"))


def test_a_policy_may_say_otherwise(compose_config):
    config = compose_config("controller.thinking=none", "+policies.alice.thinking={start: '<a>', end: '</a>'}")
    thoughts_have_marks(config)
    assert thinking_of(config, "carol") == "none" and dict(thinking_of(config, "alice")) == MINE
    assert changes_of(config.policies, "alice") == {}
    assert compose_config().controller.thinking == "auto"


@pytest.mark.parametrize(
    "value",
    [None, True, 5, "Auto", ["<a>", "</a>"], {"start": "a"}, {"start": "a", "end": "a"}, {"start": "", "end": "a"}],
)
def test_a_setting_that_names_no_marks_is_refused(value):
    config = OmegaConf.create({"controller": {"thinking": value}, "policies": {}})
    with pytest.raises(ConfigError, match="controller.thinking=.*: expected auto, none, or the marks around a thought"):
        thoughts_have_marks(config)
    thoughts_have_marks(OmegaConf.create({"controller": {"thinking": MINE}, "policies": {"a": None}}))


NATIVE = {
    "qwen3": (QWEN3, "<think>\nhm\n</think>\n\n4<|im_end|>"),
    "r1": (DEEPSEEK_R1, "hm\n</think>\n\n4<|im_end|>"),
    "magistral": (MAGISTRAL, "[THINK]hm[/THINK]4<|im_end|>"),
    "harmony": (HARMONY, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4<|end|>"),
    "glm": (GLM, "\n<think>hm</think>\n4<|User|>"),
    "kimi": (KIMI, "<think>hm</think>4<|im_end|>"),
    "seed": (SEED, "<seed:think>hm</seed:think>\n4<|im_end|>"),
    "gpt-oss": (GPT_OSS, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"),
    "llama3": (LLAMA_3, "4<|im_end|>"),
}  # fmt: skip
"""Templates, and an answer as each one's models write it."""


@pytest.mark.parametrize("student", NATIVE)
@pytest.mark.parametrize("teacher", [name for name in NATIVE if name != "llama3"])
def test_a_thought_is_taught_as_the_students_model_writes_it(teacher, student):
    """From the text of a turn, as another model's, or read from a dump; a model without thoughts learns the answer alone."""
    taught = act(client_of(*NATIVE[teacher]))
    assert (taught.thought, taught.text) == ("hm", "4")
    template, native = NATIVE[student]
    own = client_of(template)
    turn = encode(Turn("a", 1, QUESTION, taught.text, thought=taught.thought), None, own.encoder)
    assert turn.response_ids == own.tokenizer.encode(native, add_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "options", "native"),
    [
        (GPT_OSS, {}, "<|channel|>final<|message|>4<|return|>"),
        (HARMONY, {}, "<|channel|>final<|message|>4<|end|>"),
        (QWEN3, {"enable_thinking": False}, "4<|im_end|>"),
        (GLM, {"enable_thinking": False}, "\n4<|User|>"),
    ],
)
def test_a_thought_that_has_no_place_is_left_out(template, options, native):
    own = client_of(template, **options)
    thought = "hm" if options else None
    turn = encode(Turn("a", 1, QUESTION, "4", thought=thought), None, own.encoder)
    assert turn.response_ids == own.tokenizer.encode(native, add_special_tokens=False)


@pytest.mark.parametrize("student", ["qwen3", "r1", "gpt-oss"])
def test_a_thought_that_quotes_the_students_mark_is_one_thought(student):
    own = client_of(NATIVE[student][0])
    marks = own.encoder.thinking.marks
    turn = encode(Turn("a", 1, QUESTION, "4", thought=f"{marks.end} ends it"), None, own.encoder)
    assert own.encoder.read(turn.prompt_ids, turn.response_ids)[1] == "4"
    closing = own.tokenizer.encode(marks.end, add_special_tokens=False)[-1]
    assert turn.response_ids.count(closing) == own.tokenizer.encode(NATIVE[student][1]).count(closing)


def test_a_thought_in_several_parts_is_read_without_the_roles_between():
    begins, ends = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
    said = f"{begins}one{ends}{begins}two{ends}<|channel|>final<|message|>4<|return|>"
    turn = act(client_of(GPT_OSS, said))
    assert (turn.thought, turn.text) == ("one\ntwo", "4")


@pytest.mark.parametrize("text", ["<think>hm</think>4", "<think>\nhm</think>4", "hm</think>4"])
def test_the_line_after_an_opening_mark_is_not_written_twice(text):
    own = client_of(DEEPSEEK_R1)
    prompt = own.encoder.encode(QUESTION)
    assert own.tokenizer.decode(own.encoder.reply(text, prompt)) == "hm</think>4<|im_end|>"
    assert own.tokenizer.decode(prompt).endswith("<think>\n")


def test_an_answer_is_measured_with_the_mark_that_closes_its_thought():
    own = client_of(DEEPSEEK_R1)
    length = len(own.encoder.reply("4", own.encoder.encode(QUESTION)))
    assert length > len(own.encoder.reply("4"))
    setup: Any = SimpleNamespace(method=SimpleNamespace(answer_of=lambda row, agent: "4"))
    check_answer(setup, {}, "file, row 0", "a", (own.encoder, length))
    with pytest.raises(ConfigError, match=f"the answer of agent 'a' has {length} tokens"):
        check_answer(setup, {}, "file, row 0", "a", (own.encoder, length - 1))
