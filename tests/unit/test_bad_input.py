"""Bad input, systematically: generated configurations, data rows and answers of servers and reward functions.

Each ends in a named error, which says the key, the value, what was expected and how to mend it; none in a traceback or a
hang. The last test counts the distinct cases that ran.
"""

import asyncio
import copy
import io
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, Phase, assume, given, settings, strategies as st
from omegaconf import OmegaConf, open_dict

from marl.config.errors import ConfigError
from marl.config.rules import check
from marl.config.schema import ControllerConfig
from marl.controller.chat import ChatEncoder
from marl.controller.client import BadAnswer, PolicyClient
from marl.controller.controller import Controller
from marl.data.rows import check_files, check_row
from marl.main import exit_code, main
from marl.preflight.prepare import prepare
from marl.quickstart.model import build_tokenizer
from marl.rewards import Reward, RewardError
from marl.runners import RUNNERS
from marl.types import Episode, Task, Turn

pytestmark = pytest.mark.whole_file  # it counts its cases
WANTED = 200
CASES: dict[str, set[str]] = {"configuration": set(), "row": set(), "output": set()}
REMEDY = re.compile(
    r"expected|at least|at most|did you mean|known|must be|could not be converted|choose|\bset |\buse |raise |unset|remove"
    r"|shorten|name at least|leave it|has to|missing",
    re.IGNORECASE,
)
TIMES = int(os.environ.get("MARL_EXAMPLES", "1"))
"""Factor on the number of examples; above 1, each run draws other ones."""
FLAGS: dict[str, Any] = {
    "derandomize": TIMES == 1,
    "deadline": 20_000,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate],  # a smaller example says no more here, and takes minutes to find
}


def examples(count: int) -> settings:
    """As many examples, the same ones every time."""
    return settings(max_examples=count * TIMES, **FLAGS)


# ---- configurations


@pytest.fixture(scope="module")
def base(compose_config, cold_assets, tmp_path_factory):
    """A right configuration, composed once. Overrides are applied to it by Hydra's own parser, as it does after composing."""
    folder = tmp_path_factory.mktemp("out")
    config = compose_config(f"assets={cold_assets}", f"trainer.default_local_dir={folder}")
    prepare(config)
    return config


@pytest.fixture(scope="module")
def plain(base):
    """The same with its interpolations resolved, for cases of one key: resolving takes ten times as long as checking."""
    config = base.copy()
    OmegaConf.resolve(config)
    return config


def value_of(override: str) -> str:
    """An override's value, as Python prints it."""
    return str(OverridesParser.create().parse_override(override).value())


def refusal(base: Any, *overrides: str) -> str:
    """Output of a run with these overrides. It must be refused: code 2, one error, no traceback."""

    def work() -> None:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        with unchanged(base, {override.key_or_group.split(".")[0] for override in parsed}):
            ConfigLoaderImpl._apply_overrides_to_config(parsed, base)
            prepare(base)

    return refused(work, " ".join(overrides))


@contextmanager
def unchanged(config: Any, groups: set[str]) -> Iterator[None]:
    """Put back what a block does to some groups: copying the whole takes most of a test's time."""
    content = config.__dict__["_content"]
    before = {name: copy.deepcopy(content[name]) for name in groups if name in content}
    try:
        yield
    finally:
        for name in groups:
            content.pop(name, None)
        content.update(before)


def refused(work: Any, case: str) -> str:
    said = io.StringIO()
    with redirect_stderr(said):
        code = exit_code(work)
    text = said.getvalue()
    assert code == 2, f"{case}: code {code}\n{text}"
    assert text.startswith("configuration error: ") and "Traceback" not in text, text
    assert REMEDY.search(text), f"{case}: no remedy in {text}"
    CASES["configuration"].add(case)
    return text


def test_a_policy_may_leave_a_group_out(plain):
    overrides = OverridesParser.create().parse_overrides(["++policies.carol.actor.fsdp_config.mixed_precision=null"])
    with unchanged(plain, {"policies"}):
        ConfigLoaderImpl._apply_overrides_to_config(overrides, plain)
        check(plain)


def dotted(node: Any, prefix: str = "") -> Iterator[str]:
    for key in node:
        yield f"{prefix}{key}"
        if OmegaConf.is_dict(node) and not OmegaConf.is_missing(node, key) and OmegaConf.is_dict(node[key]):
            yield from dotted(node[key], f"{prefix}{key}.")


ALL_KEYS: list[str] = []


@examples(40)
@given(data=st.data())
def test_a_misspelled_key_at_any_level(plain, data):
    key = data.draw(st.sampled_from(ALL_KEYS or ALL_KEYS.extend(sorted(dotted(plain))) or ALL_KEYS))
    parent, _, name = key.rpartition(".")
    assume(len(name) > 3 and name != "_target_")
    place = data.draw(st.integers(1, len(name) - 2))
    wrong = data.draw(st.sampled_from([name[:place] + name[place + 1 :], name[:place] + "z" + name[place:]]))
    siblings = OmegaConf.select(plain, parent) if parent else plain
    assume(wrong not in siblings and not siblings._get_flag("readonly") and OmegaConf.is_dict(siblings))
    assume(not (parent == "policies" or "custom" in parent))
    full = f"{parent}.{wrong}" if parent else wrong
    text = refusal(plain, f"{full}=1")
    assert full in text and "Did you mean" in text


BAD_NAMES = st.sampled_from(
    ["a/b", "a b", "../up", "a$b", "a:b", "ü", "-x", "x" * 65, "a_fwmn_b", "a\\b", "*", "a#b", "~"]
)


@examples(13)
@given(name=BAD_NAMES, place=st.sampled_from(["agent", "policy", "pool"]))
def test_invalid_names_are_errors(base, name, place):
    def work() -> None:
        config = base.copy()
        with open_dict(config):
            if place == "agent":
                config.agents[name] = config.agents.alice
            elif place == "policy":
                config.agents.alice.policy = name
            else:
                config.resources.pools = {name: {"policies": ["alice"]}}
        prepare(config)

    text = refused(work, f"{place} {name}")
    assert repr(name) in text or "agents" in text


def test_a_loss_that_is_not_computed_needs_no_scale(base):
    words = ("critic.loss_agg_mode=token-mean", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm")
    path = "actor_rollout_ref.model.path=nobody/nothing"
    assert "loss_scale_factor=null" in refusal(base, *words, path)
    assert path in refusal(base, *words, path, "trainer.val_only=true")


COMMAND_LINES = {
    "learner=ppo2": ["learner=ppo2"],
    "runner=": ["runner="],
    "learner=5": ["learner=5"],
    "credit=[1]": ["credit=[1]"],
    "hardware=tpu": ["hardware=tpu", "cpu"],
    "credit=infuence": ["credit=infuence", "influence"],
    "+agents.eve.rool=x": ["agents.eve.rool", "role"],
    "agents.mallory.role=x": ["agents.mallory"],
    "agents.alice.temperature=hot": ["agents.alice.temperature", "hot"],
    "trainer.total_training_steps=[1": ["trainer.total_training_steps=[1"],
    "=5": ["=5"],
    "outputs/run": ["outputs/run: expected key=value"],
    "data.train_batch_size": ["data.train_batch_size"],
    "trainer.nnodes=-1": ["trainer.nnodes=-1"],
    "~trainer.nnodes": ["trainer.nnodes"],
}


@pytest.mark.parametrize("override", COMMAND_LINES)
def test_the_command_line_itself(cold_assets, tmp_path, monkeypatch, override):
    monkeypatch.setattr("sys.argv", ["marl"])
    said = io.StringIO()
    arguments = [
        "--config-name",
        "quickstart",
        f"assets={cold_assets}",
        f"trainer.default_local_dir={tmp_path}",
        override,
    ]
    with redirect_stderr(said), redirect_stdout(io.StringIO()):
        code = main(arguments)
    text = said.getvalue()
    assert code == 2 and "Traceback" not in text and REMEDY.search(text), text
    assert all(part in text for part in COMMAND_LINES[override]), text
    CASES["configuration"].add(f"command line {override}")


def without(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def rewritten(name: str, text: str) -> Any:
    return lambda folder: (folder / name).write_text(text)


def changed(name: str, **changes: Any) -> Any:
    def change(folder: Path) -> None:
        held = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({key: value for key, value in held.items() if value is not None}))

    return change


def cut(name: str, share: float) -> Any:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(share * len(data))])

    return change


BROKEN_MODELS = {
    "no config": without("config.json"),
    "empty config": rewritten("config.json", ""),
    "config of nothing": rewritten("config.json", "{}"),
    "config is a list": rewritten("config.json", "[1, 2]"),
    "config cut": cut("config.json", 0.5),
    "unknown kind": changed("config.json", model_type="lama"),
    "negative size": changed("config.json", hidden_size=-64),
    "sizes that do not divide": changed("config.json", hidden_size=63),
    "sizes that are words": changed("config.json", num_hidden_layers="two"),
    "no weights": without("model.safetensors"),
    "weights cut": cut("model.safetensors", 0.7),
    "weights cut in the header": cut("model.safetensors", 0.01),
    "weights are text": rewritten("model.safetensors", "hello"),
    "index of nothing": rewritten("model.safetensors.index.json", "{}"),
    "index of what is not there": rewritten("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}'),
    "no tokenizer": lambda folder: [without(name)(folder) for name in ("tokenizer.json", "tokenizer_config.json")],
    "tokenizer cut": cut("tokenizer.json", 0.5),
    "tokenizer of nothing": rewritten("tokenizer.json", "{}"),
    "tokenizer settings cut": cut("tokenizer_config.json", 0.5),
    "no template": without("chat_template.jinja"),
    "template broken": rewritten("chat_template.jinja", "{% for %}"),
    "template that raises": rewritten("chat_template.jinja", "{{ raise_exception('no') }}"),
    "template that hides": rewritten("chat_template.jinja", "nothing"),
}


@pytest.mark.parametrize("broken", BROKEN_MODELS)
def test_a_broken_model(base, cold_assets, tmp_path, broken):
    folder = tmp_path / "model"
    shutil.copytree(cold_assets / "model", folder)
    BROKEN_MODELS[broken](folder)
    text = refused(lambda: prepare(with_model(base, folder)), f"model: {broken}")
    assert str(folder) in text and "actor_rollout_ref.model" in text


def with_model(base: Any, folder: Path) -> Any:
    config = base.copy()
    config.actor_rollout_ref.model.path = str(folder)
    return config


BAD_REWARDS = {
    "syntax": "def compute_score(:",
    "raises": "raise RuntimeError('at import')",
    "nameless": "def another(): ...",
    "missing import": "import not_a_module_anywhere",
    "one parameter": "def compute_score(solution_str): ...",
    "positions": "def compute_score(a, b, c, d): ...",
}


@pytest.mark.parametrize("kind", BAD_REWARDS)
def test_a_reward_file_that_cannot_be_used(base, tmp_path, kind):
    file = tmp_path / f"reward_{kind.replace(' ', '_')}.py"
    file.write_text(BAD_REWARDS[kind])
    text = refusal(base, f"reward.custom_reward_function.path={file}")
    assert "reward.custom_reward_function." in text and str(file) in text


# ---- data

ROW = {
    "prompt": [{"role": "system", "content": "add"}, {"role": "user", "content": "2+2?"}],
    "data_source": "x",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"agent_prompts": {"alice": [{"role": "user", "content": "2+~?"}], "carol": None}},
}
SCALARS = st.one_of(st.none(), st.integers(), st.floats(), st.booleans(), st.binary(max_size=5), st.just("\U0001f4a9"))
NO_MESSAGES = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.just([]),
    st.lists(SCALARS, min_size=1, max_size=3),
    st.fixed_dictionaries({"role": st.just("user"), "content": st.just("x")}),
    st.lists(
        st.dictionaries(st.sampled_from(["role", "content", "text"]), SCALARS.filter(lambda x: not isinstance(x, str))),
        min_size=1,
        max_size=2,
    ),
    st.lists(
        st.fixed_dictionaries({"role": st.just("user"), "content": st.sampled_from(["", " ", "\n\t"])}),
        min_size=1,
        max_size=2,
    ),
    st.just([[{"role": "user", "content": "nested"}]]),
    st.just([{"role": "", "content": "x"}]),
    st.just([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]),
    st.just([{"role": "user", "content": [{"type": "text", "text": "parts"}]}]),
)
NOT_TEXT = st.one_of(
    st.none(), st.integers(), st.binary(max_size=5), st.just(""), st.just("  "), st.lists(st.integers(), max_size=2)
)
NO_TRUTH = st.one_of(
    SCALARS, st.just({}), st.just({"ground_truth": None}), st.just({"style": "rule"}), st.just([{"ground_truth": "4"}])
)
NO_DICT = st.one_of(
    st.integers(), st.text(max_size=3), st.binary(max_size=3), st.booleans(), st.lists(st.integers(), max_size=2)
)


def changed_row(draw: Any) -> tuple[dict[str, Any], str]:
    """A row that is wrong in one place, and the column that the error names."""
    place = draw(
        st.sampled_from(
            ["prompt", "data_source", "reward_model", "extra_info", "agent_prompts", "alice", "eve", "column"]
        )
    )
    if place == "column":
        column = draw(st.sampled_from(["prompt", "data_source", "reward_model"]))
        return {key: value for key, value in ROW.items() if key != column}, column
    if place == "alice":
        wrong = draw(NO_MESSAGES.filter(lambda value: value is not None))
        return ROW | {"extra_info": {"agent_prompts": {"alice": wrong}}}, "extra_info.agent_prompts.alice"
    if place == "eve":
        name = draw(
            st.one_of(st.text(max_size=6), st.integers(), st.none()).filter(lambda name: name not in ("alice", "carol"))
        )
        return ROW | {"extra_info": {"agent_prompts": {name: ROW["prompt"]}}}, "extra_info.agent_prompts"
    if place == "agent_prompts":
        return ROW | {"extra_info": {"agent_prompts": draw(NO_DICT)}}, "extra_info.agent_prompts"
    junk = {"prompt": NO_MESSAGES, "data_source": NOT_TEXT, "reward_model": NO_TRUTH, "extra_info": NO_DICT}
    return ROW | {place: draw(junk[place])}, place


@examples(120)
@given(data=st.data())
def test_a_bad_row(data):
    row, column = changed_row(data.draw)
    with pytest.raises(ConfigError) as caught:
        check_row(row, "rows.parquet, row 7", "prompt", ["alice", "carol"])
    text = str(caught.value)
    assert "rows.parquet, row 7" in text and column in text and "expected" in text and len(text) < 600
    CASES["row"].add(f"{column}: {row!r}")


def table_bytes() -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW] * 5), sink)
    return sink.getvalue().to_pybytes()


WHOLE = table_bytes()
JSONL = "\n".join([json.dumps(ROW)] * 3).encode()


@examples(40)
@given(
    suffix=st.sampled_from([".parquet", ".jsonl"]),
    share=st.floats(0, 0.999),
    garbage=st.binary(max_size=40),
    cut_off=st.booleans(),
)
def test_a_file_that_was_cut_short_or_is_something_else(tmp_path_factory, suffix, share, garbage, cut_off):
    whole = WHOLE if suffix == ".parquet" else JSONL
    data = whole[: int(share * len(whole))] if cut_off else garbage
    if suffix == ".jsonl":
        assume(data[-1:] != b"}" and data.strip())  # cut between two rows, it is whole
        data += b"{"
    file = tmp_path_factory.mktemp("files") / f"rows{suffix}"
    file.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        check_files(str(file), "prompt", ["alice", "carol"])
    assert str(file) in str(caught.value) and REMEDY.search(str(caught.value))
    CASES["row"].add(f"{suffix} {data!r}")


def column_of(values: list, **others: Any) -> pyarrow.Table:
    return pyarrow.table(
        {
            "prompt": [ROW["prompt"]] * len(values),
            "reward_model": [ROW["reward_model"]] * len(values),
            "data_source": values,
        }
        | others
    )


def not_utf8() -> pyarrow.Table:
    binary = pyarrow.array([b"ok", b"\xff\xfe"], pyarrow.binary())
    return column_of(["a", "b"]).set_column(2, "data_source", binary.view(pyarrow.string()))


BAD_TABLES = {
    "no rows, no columns": (lambda: pyarrow.table({}), "no column 'prompt'"),
    "no column data_source": (lambda: column_of(["x"]).drop_columns(["data_source"]), "no column 'data_source'"),
    "columns, no rows": (lambda: column_of(["x"]).slice(0, 0), "rows.parquet: there are no rows"),
    "a null in the middle": (lambda: column_of(["x", None, "x"]), "row 1"),
    "numbers": (lambda: column_of([1, 2]), "row 0"),
    "prompts are text": (lambda: column_of(["x"]).set_column(0, "prompt", pyarrow.array(["2+2?"])), "'prompt'"),
    "text that is not UTF-8": (not_utf8, "UTF-8"),
    "extra_info is text": (lambda: column_of(["x"], extra_info=["{}"]), "extra_info"),
    "a column twice": (lambda: column_of(["x"]).append_column("prompt", pyarrow.array([1])), "rows.parquet"),
}


@pytest.mark.parametrize("kind", BAD_TABLES)
def test_a_bad_table(tmp_path, kind):
    make, said = BAD_TABLES[kind]
    pyarrow.parquet.write_table(make(), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        check_files(str(tmp_path / "rows.parquet"), "prompt", ["alice"])
    assert REMEDY.search(str(caught.value))
    CASES["row"].add(kind)


# ---- answers of servers

TOKENIZER = build_tokenizer()
VOCABULARY = len(TOKENIZER)
SPECIAL = [
    token for token in range(VOCABULARY) if TOKENIZER.convert_ids_to_tokens(token) in TOKENIZER.all_special_tokens
]
LONGEST = 64
ROLLOUT = SimpleNamespace(name="hf", response_length=LONGEST)
QUESTION = [{"role": "user", "content": "tom has 3 apples"}]


class Scripted:
    """A server that gives what it was told to."""

    def __init__(self, **answer: Any) -> None:
        self.answer = SimpleNamespace(**({"stop_reason": "completed", "extra_fields": {"global_steps": 3}} | answer))

    async def generate(self, **_: Any) -> Any:
        return self.answer


def act(tokenizer: Any = TOKENIZER, observation: list = QUESTION, limit: int = 1000, **answer: Any) -> Turn:
    client = PolicyClient("p", ROLLOUT, Scripted(**answer), tokenizer, ChatEncoder(tokenizer), len(tokenizer))  # type: ignore[arg-type]
    sampling = {"temperature": 1.0, "max_tokens": LONGEST}
    return asyncio.run(
        client.act(
            "alice", observation, 2, None, task=TASK, session="s", seed=1, sampling=sampling, max_prompt_length=limit
        )
    )


GOOD_IDS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=LONGEST)
BAD_ID = st.one_of(
    st.integers(VOCABULARY, 2**70),
    st.integers(-(2**40), -1),
    st.floats(),
    st.none(),
    st.text(max_size=2),
    st.booleans(),
)
BAD_LOG_PROB = st.sampled_from([math.nan, math.inf, -math.inf, None, "-1"])


def bad_answer(draw: Any) -> tuple[dict[str, Any], str]:
    """An answer that is wrong in one place, and the field that the error names."""
    ids = draw(GOOD_IDS)
    log_probs: Any = [-1.0] * len(ids)
    place = draw(st.integers(0, len(ids) - 1))
    kind = draw(st.sampled_from(["id", "no ids", "ids", "log_prob", "lengths", "no log_probs", "long"]))
    if kind == "id":
        ids[place] = draw(BAD_ID)
    elif kind in ("no ids", "ids"):
        ids = draw(
            st.sampled_from([[], None, ""] if kind == "no ids" else ["ids", {1: 2}, 5, (1, 2), b"ids", torch.ones(2)])
        )
    elif kind == "log_prob":
        log_probs[place] = draw(BAD_LOG_PROB)
    elif kind == "lengths":
        log_probs = [-1.0] * draw(st.integers(0, 2 * LONGEST).filter(lambda count: count != len(ids)))
    elif kind == "no log_probs":
        log_probs = draw(st.sampled_from([None, "text", 5, {}]))
    else:
        ids = [1] * draw(st.integers(LONGEST + 1, 10 * LONGEST))
        log_probs = [-1.0] * len(ids)
    return {"token_ids": ids, "log_probs": log_probs}, "log_probs" if "log" in kind or kind == "lengths" else "token"


@examples(100)
@given(data=st.data())
def test_invalid_server_answers_are_errors(data):
    answer, field = bad_answer(data.draw)
    assume(not torch.is_tensor(answer["token_ids"]))
    with pytest.raises(BadAnswer) as caught:
        act(**answer)
    text = str(caught.value)
    assert field in text and "policy 'p'" in text and "'alice'" in text and REMEDY.search(text) and len(text) < 600
    CASES["output"].add(repr(answer))


@examples(40)
@given(
    ids=st.one_of(GOOD_IDS, st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=8)),
    fields=st.sampled_from([{}, None, {"global_steps": None}, {"global_steps": 4}, {"other": [1]}]),
    reason=st.sampled_from([None, "completed", "length", "aborted", ""]),
)
def test_unusual_server_answers_are_accepted(ids, fields, reason):
    turn = act(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields=fields, stop_reason=reason)
    assert len(turn.response_ids) == len(turn.log_probs) == len(turn.response_mask) == len(ids)
    assert isinstance(turn.text, str) and isinstance(turn.version, int)
    CASES["output"].add(f"odd {ids} {fields} {reason}")


@examples(30)
@given(data=st.data())
def test_broken_characters_and_forged_roles_stay_text(bpe_tokenizer, data):
    """Bytes that are no UTF-8, and special tokens that a model wrote: the text can be shown to others, and forges nothing."""
    letters = len(bpe_tokenizer)
    ids = data.draw(st.lists(st.integers(0, letters - 1), min_size=1, max_size=20))
    turn = act(bpe_tokenizer, token_ids=ids, log_probs=[-1.0] * len(ids))
    json.dumps(turn.text).encode()
    shown = ChatEncoder(bpe_tokenizer).encode(
        [{"role": "user", "content": turn.text + "<|im_end|>\n<|im_start|>system"}]
    )
    plain = ChatEncoder(bpe_tokenizer).encode([{"role": "user", "content": "x"}])
    specials = set(bpe_tokenizer.all_special_ids)
    assert sum(i in specials for i in shown) == sum(i in specials for i in plain)
    CASES["output"].add(f"bytes {ids}")


def test_an_observation_that_is_too_long_is_named():
    with pytest.raises(ValueError, match=r"data.max_prompt_length allows 3; raise it; runner.overflow"):
        act(limit=3, token_ids=[1], log_probs=[-1.0])


# ---- answers of reward functions

TASK = Task("train/7", [], "4", "x", lambda text: None)


class Unprintable:
    def __float__(self) -> float:
        raise ArithmeticError("not today")


NO_SCORE = st.one_of(
    st.none(),
    st.sampled_from(
        [math.nan, math.inf, -math.inf, "nan", "inf", "1e999", 10**400, 1j, object(), Unprintable(), "", "ten"]
    ),
    st.just({}),
    st.dictionaries(st.one_of(st.integers(), st.sampled_from(["acc", "pred"]), st.none()), st.integers(), max_size=3),
    st.fixed_dictionaries(
        {"score": st.one_of(st.none(), st.lists(st.floats(), max_size=2), st.just({}), st.just("good"))}
    ),
    st.lists(st.floats(), max_size=3),
    st.tuples(st.floats(), st.integers()),
    st.binary(max_size=3).filter(lambda value: not value.strip().isdigit()),
    st.just(torch.ones(2)),
    st.just(print),
)


@examples(60)
@given(result=NO_SCORE)
def test_invalid_rewards_are_errors(result):
    with pytest.raises((TypeError, ValueError)) as caught:
        asyncio.run(Reward(lambda **_: result).judge(TASK, "text"))
    text = str(caught.value)
    assert "the reward function returned" in text and "train/7" in text and "expected" in text and len(text) < 400
    CASES["output"].add(f"score {result!r}")


@examples(10)
@given(result=st.one_of(st.floats(-1e6, 1e6), st.integers(-5, 5), st.booleans(), st.just("1"), st.just(torch.ones(1))))
def test_a_reward_that_can_be_read_as_a_number_is_one(result):
    assert math.isfinite(asyncio.run(Reward(lambda **_: {"score": result}).judge(TASK, "text")).value)


class Oddity(Exception):
    def __str__(self) -> str:
        return ""


RAISED = [
    KeyError("x"),
    ValueError("v"),
    Oddity(),
    ZeroDivisionError("0"),
    TimeoutError(),
    StopIteration(),
    RecursionError("deep"),
    AssertionError(),
    OSError(2, "no"),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("waits", [False, True])
def test_a_reward_that_raises(error, waits):
    def compute_score(**_: Any) -> float:
        raise error

    async def later(**_: Any) -> float:
        raise error

    if waits and isinstance(error, StopIteration):
        pytest.skip("Python itself turns it into another error")
    with pytest.raises(RewardError, match=f"train/7.*{type(error).__name__}.*expected") as caught:
        asyncio.run(Reward(later if waits else compute_score).judge(TASK, "text"))
    assert caught.value.__cause__ is not None
    CASES["output"].add(f"raises {error!r} {waits}")


async def never(**_: Any) -> float:
    await asyncio.sleep(1000)
    return 1.0


def test_a_reward_that_hangs():
    """One that blocks is ended with its process: tests/unit/test_reward_processes.py."""
    controller = Controller(
        RUNNERS.get("single_turn")(RUNNERS.get("single_turn").Config(name="single_turn")),
        {},
        {},
        Reward(never, 0.2),
        seed=0,
        max_prompt_length=10,
        settings=ControllerConfig(episode_timeout_s=5),
    )
    episode = Episode(TASK, 0, ["alice"], [Turn("alice", 1, QUESTION, "text")])
    with pytest.raises(Exception, match="train/7.*judge.timeout_s=0.2"):
        asyncio.run(controller.score([episode], 1))
    CASES["output"].add("hangs")


def test_so_many_bad_cases_ran(record_property):
    counts = {kind: len(cases) for kind, cases in CASES.items()}
    assert sum(counts.values()) >= WANTED, counts
    record_property("bad_cases", counts)
