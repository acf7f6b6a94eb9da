"""Keys that nothing reads: Hydra's ``+`` and a YAML file may add any key to an untyped group, even a typo. Pure."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from marl.config.errors import ConfigError, hint_for, listing, plain
from marl.utils.registry import did_you_mean

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""In C where it is built: OmegaConf's takes .3 s for verl's file."""
TYPED = ("agents", "resources", "controller", "runner", "learner", "credit", "method", "ensemble", "policies")
"""Groups that are typed, or have a rule of their own."""

READ: Mapping[str, tuple[str, ...]] = {
    "data": ("cache_dir", "chat_template_func", "need_tools_kwargs", "filter_prompts", "sampler", "datagen"),
    "reward.custom_reward_function": ("reward_kwargs",),
    "custom_reward_function": ("reward_kwargs",),
}
"""Keys that are read where they are given, and that no default names."""

OPEN = (
    "ray_kwargs.ray_init",
    "actor_rollout_ref.rollout.engine_kwargs",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy",
    "critic.fsdp.wrap_policy",
    "global_profiler.global_tool_config",
)
"""Groups whose keys are another library's arguments. So are those that are empty or null by default."""


@cache
def known_keys() -> Mapping[str, Any]:
    """verl's configuration with its defaults, and ours over it, without what is typed. verl is found and not imported."""
    verl = find_spec("verl")
    assert verl is not None and verl.origin is not None
    theirs = Path(verl.origin).parent.joinpath("trainer/config/_generated_ppo_trainer.yaml").read_text()
    ours = files("marl.configs").joinpath("marl.yaml").read_text()
    trees = (yaml.load(text, Loader=LOADER) for text in (theirs, ours))
    return plain(OmegaConf.merge(*trees, {"model_engine": None}))


def check_typed(config: Any) -> None:
    """Raise ConfigError for the first key of a typed group that its dataclass does not have."""
    for group in TYPED:
        if group in config:
            check_fields(config[group], group)


def check_fields(node: Any, key: str) -> None:
    if not OmegaConf.is_dict(node):
        return
    kind = OmegaConf.get_type(node)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(node)
    for name in node:
        if name not in names:
            raise ConfigError(
                f"unknown key '{key}.{name}' (={node[name]}): it has no effect.{did_you_mean(str(name), names)}{listing(names)} "
                "Use one of them, or remove it"
            )
        check_fields(node[name], f"{key}.{name}")


FieldsOf = Callable[[str], Collection[str]]
"""The fields of the dataclass that a ``_target_`` names."""


def check_known(config: Mapping[str, Any], known: Mapping[str, Any], fields_of: FieldsOf) -> None:
    """Raise ConfigError for the first key of a plain configuration that is not ``known``, with the nearest that is."""
    for key in config:
        near = did_you_mean(key, [*known, *TYPED])
        if key not in known and key not in TYPED and near:
            raise ConfigError(
                f"unknown key '{key}': it has no effect.{near} Use that key, or a name that resembles it less"
            )
    own_data = bool(config["data"]["custom_cls"]["path"])  # a data set of the user's reads keys of its own
    for key, nodes in groups(config, known):
        if key == "data" and own_data:
            continue
        node, default = nodes
        allowed = {*default, *READ.get(key, ()), *(fields_of(default["_target_"]) if "_target_" in default else ())}
        for name in node:
            if name not in allowed:
                hint = hint_for(name, key, known) or did_you_mean(name, allowed)
                raise ConfigError(
                    f"unknown key '{key}.{name}' (={node[name]}): it has no effect.{hint} Use a key of '{key}' as --cfg job "
                    "shows them, or remove it; your own keys belong at the top level of the configuration"
                )


def groups(
    config: Mapping[str, Any], known: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, tuple[Mapping[str, Any], Mapping[str, Any]]]]:
    """Every group whose keys are known, by its dotted name: as it is, and as it is by default."""
    for name, node in config.items():
        key, default = f"{prefix}{name}", known.get(name)
        if key in OPEN or not isinstance(node, Mapping) or not isinstance(default, Mapping) or not default:
            continue
        yield key, (node, default)
        yield from groups(node, default, f"{key}.")
