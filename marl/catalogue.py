"""Everything that can be named on a command line, with its keys and papers: read from the registries, the schema and the YAML
files. Loads no model."""

import ast
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from marl.config.errors import ConfigError
from marl.config.external import VARIABLE
from marl.utils.near import did_you_mean

CONFIGS = Path(__file__).parent / "configs"
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


@dataclass(frozen=True)
class Key:
    name: str
    type: str
    default: str
    doc: str


@dataclass(frozen=True)
class Entry:
    """Something that a command line can name."""

    kind: str
    name: str
    text: str
    """Its description; the first paragraph sums it up."""
    keys: tuple[Key, ...] = ()
    use: str = ""
    """Words that choose it."""
    file: str = ""

    @property
    def summary(self) -> str:
        first = self.text.partition("\n\n")[0]
        sentence = re.split(r"(?<=[^.\s]{3}\.)\s", " ".join(first.split()), maxsplit=1)[0]
        return sentence.rstrip(".:")

    @property
    def papers(self) -> list[str]:
        return list(dict.fromkeys(ARXIV.findall(self.text)))

    def as_json(self) -> dict[str, Any]:
        keys = [vars(key) for key in self.keys]
        return {**vars(self), "keys": keys, "summary": self.summary, "papers": self.papers}


def learners() -> Iterator[Entry]:
    from marl.learners import LEARNERS

    yield from registered("learner", "learner", LEARNERS)
    yield from presets("learner")


def runners() -> Iterator[Entry]:
    from marl.runners import RUNNERS

    yield from registered("runner", "runner", RUNNERS)
    yield from presets("runner")


def credits() -> Iterator[Entry]:
    from marl.learners import CREDITS

    yield Entry("credit", "auto", "The default of the runner or the learner.", use="credit=auto")
    yield from registered("credit", "credit", CREDITS)
    yield from presets("credit")


def methods() -> Iterator[Entry]:
    from marl.methods import METHODS

    yield from registered("method", "method", METHODS)
    yield from presets("method")


def worlds() -> Iterator[Entry]:
    from marl.envs import ENVIRONMENTS, GAMES

    yield from registered("world", "runner=multi_turn runner.environment", ENVIRONMENTS)
    yield from registered("world", "runner=game +runner.game.name", GAMES)


def rewards() -> Iterator[Entry]:
    from marl.rewards.rules import DATA, NAMED

    scored = {
        "gsm8k": "GSM8K's rule", "embedded": "equality of the whole answer", "verl": "verl's own function",
        "math": "mathematical equality of the boxed or stated answer",
    }  # fmt: skip
    for kind, prefixes in DATA.items():
        yield Entry(
            "reward", kind, f"{scored[kind]}, for the data sources {', '.join(prefixes)}", use="data_source of a row"
        )
    yield Entry("reward", "own", "Mathematical equality, by math-verify, for every other data source")
    yield Entry(
        "reward",
        "custom",
        "A function of yours: compute_score(data_source, solution_str, ground_truth, extra_info) -> number or dict",
        use="reward.custom_reward_function.path=reward.py reward.custom_reward_function.name=compute_score",
    )
    for name, find in NAMED.items():
        text = f"Finds a text's answer: {inspect.getdoc(find) or ''}"
        yield Entry(
            "reward", name if name != "math" else "math answers", text, use=f"+judge.extractors={{mine: {name}}}"
        )


def engines() -> Iterator[Entry]:
    from marl.config.engines import ENGINES

    texts = {
        "hf": "Transformers in this project's own server: on CPUs, and bit by bit reproducible",
        "vllm": "vLLM's server, on GPUs (hardware=gpu) or CPUs (hardware=cpu_vllm)",
        "sglang": "SGLang's server, on GPUs",
    }
    for name in ENGINES:
        yield Entry("engine", name, texts[name], use=f"actor_rollout_ref.rollout.name={name}")
    yield Entry("engine", "endpoint", "A server elsewhere, asked over HTTP", use="policies.<name>.endpoint.base_url=…")
    for file in sorted((CONFIGS / "hardware").glob("*.yaml")):
        yield Entry("engine", f"hardware={file.stem}", comment_of(file), use=f"hardware={file.stem}", file=shown(file))


def settings() -> Iterator[Entry]:
    from marl.config import schema

    for key, config in {
        "agents": schema.AgentConfig,
        "resources": schema.ResourcesConfig,
        "controller": schema.ControllerConfig,
        "judge": schema.JudgeConfig,
        "ensemble": schema.EnsembleConfig,
    }.items():
        place = "agents.<name>" if key == "agents" else key
        yield Entry("setting", key, inspect.getdoc(config) or "", tuple(keys_of(config)), f"{place}.<key>=…")


KINDS: dict[str, Callable[[], Iterable[Entry]]] = {
    "learners": learners,
    "runners": runners,
    "credits": credits,
    "methods": methods,
    "worlds": worlds,
    "rewards": rewards,
    "engines": engines,
    "settings": settings,
}


def entries(kind: str) -> list[Entry]:
    """All of a kind. Raises ConfigError for an unknown one, with the nearest."""
    kind = {"environments": "worlds"}.get(kind, kind)
    if kind not in KINDS:
        raise ConfigError(
            f"{kind}: there is no such kind; expected one of {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}"
        )
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        import_module(name)  # registers a user's own
    return sorted(KINDS[kind](), key=lambda entry: entry.kind)


def named(kind: str, name: str) -> Entry:
    """The one of this name. Raises ConfigError for an unknown one, with the nearest."""
    known = {entry.name: entry for entry in entries(kind)}
    if name not in known:
        raise ConfigError(f"{kind} {name}: there is none; known: {', '.join(known)}.{did_you_mean(name, known)}")
    return known[name]


def registered(kind: str, use: str, registry: Any) -> Iterator[Entry]:
    classes = {name: registry.get(name) for name in registry.names()}
    modules = [cls.__module__ for cls in classes.values()]
    for name, cls in classes.items():
        own = cls.__doc__ if "__doc__" in vars(cls) else None
        whole = inspect.getdoc(inspect.getmodule(cls)) or ""
        if own and (modules.count(cls.__module__) > 1 or not describes(whole, name)):
            whole = ""
        text = "\n\n".join(inspect.cleandoc(part) for part in (whole, own) if part)
        yield Entry(kind, name, text, tuple(keys_of(cls.Config)), f"{use}={name}", shown(Path(inspect.getfile(cls))))


def describes(text: str, name: str) -> bool:
    """True if a file's description is about its only class: its first words name it."""
    return re.sub(r"\W|_", "", text).lower().startswith(name.replace("_", ""))


def presets(group: str) -> Iterator[Entry]:
    """The YAML files of a group: settings on top of a registered class."""
    for file in sorted((CONFIGS / group).glob("*.yaml")):
        yield Entry(group, file.stem, comment_of(file), use=f"{group}={file.stem}", file=shown(file))


def comment_of(file: Path) -> str:
    """The comment at the top of a YAML file, without Hydra's own."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines += [] if line.startswith("# @package") else [line.lstrip("# ")]
    return " ".join(lines)


def shown(file: Path) -> str:
    root = Path(__file__).parents[1]
    return str(file.relative_to(root)) if file.is_relative_to(root) else str(file)


def keys_of(config: type) -> Iterator[Key]:
    """The keys of a typed group, with the text below each field."""
    docs: dict[str, str] = {}
    for cls in reversed(config.__mro__[:-1]):
        docs |= field_docs(cls)
    for option in fields(config):  # type: ignore[arg-type]
        if option.name != "name":
            text = docs.get(option.name, "") or choices_of(option.type)
            yield Key(option.name, type_name(option.type), default_of(option), text)


def choices_of(kind: Any) -> str:
    """The texts of an option's choices, where they have any."""
    docs = field_docs(kind) if isinstance(kind, type) and issubclass(kind, Enum) else {}
    return (
        "; ".join(f"{choice.value}: {docs[choice.name].rstrip('.')}" for choice in kind if choice.name in docs)
        if docs
        else ""
    )


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Texts below the fields of a class, read from its file; the last line of the text before the next field."""
    try:
        tree = ast.parse(Path(inspect.getfile(cls)).read_text(encoding="utf-8"))
    except (OSError, TypeError):  # made at run time
        return {}
    body: list[ast.stmt] = tree.body
    for name in cls.__qualname__.split("."):
        found = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
        if not found:
            return {}
        body = found[0].body
    return {
        target.id: " ".join(str(after.value.value).split())
        for before, after in pairwise(body)
        if isinstance(before, ast.AnnAssign | ast.Assign)
        and isinstance(target := before.target if isinstance(before, ast.AnnAssign) else before.targets[0], ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


def type_name(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(str(choice.value) for choice in kind)
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


def default_of(option: Any) -> str:
    if option.default_factory is not MISSING:
        return json.dumps(option.default_factory(), default=str)
    if option.default is MISSING:
        return "required"
    value = option.default.value if isinstance(option.default, Enum) else option.default
    return (
        value
        if isinstance(value, str) and value.startswith("${")
        else json.dumps(value, default=str, ensure_ascii=False)
    )
