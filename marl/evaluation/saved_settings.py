"""The settings that a saved run brings to the command that opens it. Its ``run.json`` may be a stranger's, so this is an allow-list:
every other key has its default, unless the command line names it. Pure."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from marl.config.errors import ConfigError
from marl.config.identity import leaves

OWN = r"(actor_rollout_ref|policies\.[^.]+)"
ALLOWED = {
    r"seed|precision|determinism": "numbers and words that the rules check",
    r"agents\.[^.]+(\..+)?": "typed: names, texts and sampling",
    r"runner\..+": "typed by the runner, which this process has imported: counts, words, and templates that are filled with texts",
    r"policies\.[^.]+\.(pool|precision|thinking(\..+)?)": "names and words that the rules check",
    OWN + r"\.rollout\.(name|dtype|quantization|(val_kwargs\.)?(temperature|top_k|top_p|do_sample|n)|max_model_len"
    r"|prompt_length|response_length|ignore_eos|agent\.default_agent_loop|multi_turn\.(enable|format|max_\w+|tool_response_\w+))": (
        "a registered engine, loop or parser by its name, sampling and lengths"
    ),
    OWN + r"\.rollout\.(\w+_parallel_size|max_num_\w+|gpu_memory_utilization|enforce_eager|free_cache_engine"
    r"|enable_(chunked_prefill|prefix_caching|sleep_mode))": "sizes and switches of servers",
    OWN + r"\.model\.custom_chat_template": "rendered in Jinja's sandbox, as the checkpoint's own template",
    OWN + r"\.model\.override_config\.attn_implementation": "one of NARROWED; another word names a kernel to download",
    r"data\.(train|val)_files": "rows, which are read as data from files of this machine",
    r"data\.(max_\w+_length|\w+_max_samples|prompt_key|reward_fn_key|seed|validation_shuffle|truncation|filter_overlong_prompts)": (
        "numbers, and names of columns"
    ),
    r"data\.apply_chat_template_kwargs(\..+)?": "variables of a template, rendered in Jinja's sandbox",
    r"judge\.(answer_rule|right_at|no_answer_score|truncated_score|failure_score|timeout_s)"
    r"|controller\.(thinking(\..+)?|request_seeds|episode_timeout_s|max_\w+|min_sample_share)": "numbers and words that the rules check",
    r"judge\.extractors\..+": "a rule of this package by its name; a file of one's own is code",
    r"trainer\.(device|nnodes|n_gpus_per_node)|resources\.(placement|weight_check|pools(\..+)?|\w*timeout_s)": (
        "sizes and deadlines"
    ),
}
"""Patterns of keys, each with the reason why its value can do no harm."""
NARROWED = {
    r".*\.attn_implementation": r"eager|sdpa|flash_attention_2",
    r"judge\.extractors\..+": r"\w+",
}
"""Patterns of the values of those that could name something to execute."""
TRAINS = re.compile(
    r"(model_engine|actor_rollout_ref\.(actor|ref|hybrid_engine|nccl_timeout)|policies\.[^.]+\.(actor|ref)|critic|algorithm|method"
    r"|learner|credit|distillation|transfer_queue|global_profiler|trainer|controller\.\w+|judge\.(?!extractors)\w+|baseline|ensemble|sharing|task"
    r"|assets|verbose|answers_only|resources\.\w+|data\.(columns|val_share|shuffle|\w*batch_size)"
    rf"|{OWN}\.(model\.(path|lora\w*|target_modules|exclude_modules|enable_\w+|use_\w+|mtp)|rollout\.(log_prob\w*|trace|prometheus"
    r"|profiler|calculate_log_probs|load_format)))(\..+)?"
)
"""Keys that nobody answers with, and that are left out without a word."""
REWARD = re.compile(r"(reward\.)?custom_reward_function\..+")


def is_allowed(key: str, value: Any) -> bool:
    """True for a setting that is taken from a run."""
    narrowed = [values for keys, values in NARROWED.items() if re.fullmatch(keys, key)]
    return any(re.fullmatch(keys, key) for keys in ALLOWED) and all(re.fullmatch(v, str(value)) for v in narrowed)


def allowed(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings of a run that hold for the command that opens it."""
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            kept |= {key: inner} if (inner := allowed(value, f"{prefix}{key}.")) else {}
        elif is_allowed(f"{prefix}{key}", value):
            kept[key] = value
    return kept


def must_be_resolved(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value that OmegaConf would replace, as by the value of an environment variable."""
    for key, value in leaves(settings):
        if "${" in f"{key} {value}" or value == "???":
            raise ConfigError(f"{key}={value!r:.80}: expected a plain value, as a run writes it into run.json")


def left_out(saved: Mapping[str, Any], words: Iterable[str], defaults: Mapping[str, Any]) -> list[str]:
    """The run's settings that would change an answer and are not taken, as ``key=value`` for a command line."""
    standard = dict(leaves(defaults))
    found = {key: value for key, value in leaves(saved) if not (is_allowed(key, value) or TRAINS.fullmatch(key))}
    return [
        word_of(key, value, new=key not in standard)
        for key, value in found.items()
        if value != standard.get(key, None if value else value) and not is_named(key, words)
    ]


def is_named(key: str, words: Iterable[str]) -> bool:
    """True if the command line sets a key, or a group that it is in."""
    named = (word.partition("=")[0].lstrip("+") for word in words)
    return any(key == word or key.startswith(f"{word}.") for word in named)


def word_of(key: str, value: Any, new: bool = False) -> str:
    """A setting as a word of the command line; nothing in it reaches a terminal as it is."""
    text = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return shlex.quote(f"{'+' * new}{key}={text}")


def must_be_scored_as_in_training(path: Any, saved: Mapping[str, Any], words: Iterable[str]) -> None:
    """Raise ConfigError where a run's reward is code that nobody has named: other rules would give other numbers."""
    reward = {key: value for key, value in leaves(saved) if REWARD.fullmatch(key) and value not in (None, "", {})}
    for key, value in reward.items():
        if key.endswith(".path") and not is_named(key, words):
            rest = [word_of(other, setting, "kwargs." in other) for other, setting in reward.items() if other != key]
            raise ConfigError(
                f"{key}={value} of {path}: code of the run's, which is executed only where you name it; add "
                f"{' '.join([word_of(key, value), *rest])}, or {key}=null for the rules of this package"
            )
