"""``precision``: one key for the numbers in which trainer, critics and servers compute. Pure.

The hardware's YAML reads it by ``${train_dtype:…}`` and ``${serve_dtype:…}``; with null, verl's own keys hold, as the
hardware sets them.
"""

from typing import Any

from omegaconf import OmegaConf

SERVER_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Precisions, and verl's words for them in ``rollout.dtype``."""
SHORT_NAMES = SERVER_DTYPES | {"32": "float32", "fp16": "float16", "16": "float16"}
"""verl's other words for its dtypes."""
CPU_GAPS = {"fp32": 1e-4, "bf16": 0.25}
"""Differences of a token's log-prob between server and trainer that are not rounding. In bf16, models of 1 and 25 million
parameters showed 0 over 128 tokens, and up to .065 over 320 tokens in training at a learning rate of 1e-3."""
ACCELERATOR_GAPS = {"fp32": 1e-2, "bf16": 1.0}
"""The same where server and trainer have other kernels."""


def train_dtype(precision: Any, default: str) -> str:
    return precision if precision in SERVER_DTYPES else default


def serve_dtype(precision: Any, default: str) -> str:
    return SERVER_DTYPES.get(precision, default)


def precision_of(config: Any, policy: str) -> Any:
    """A policy's precision: ``policies.<name>.precision`` if set, else the run's."""
    return (config.policies.get(policy) or {}).get("precision") or config.precision


def settings_of(precision: Any) -> dict[str, Any]:
    """The part of ``actor_rollout_ref`` that a precision decides."""
    if precision not in SERVER_DTYPES:
        return {}
    engine = {"fsdp_config": {"mixed_precision": {"param_dtype": precision}}}
    return {"actor": engine, "ref": engine, "rollout": {"dtype": SERVER_DTYPES[precision]}}


OF_POLICIES = (
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype",
    "actor_rollout_ref.rollout.dtype",
)
OF_CRITICS = ("critic.fsdp.mixed_precision.param_dtype",)
"""verl's keys that ``precision`` decides."""


def dtype_name(word: Any) -> str:
    """PyTorch's name of a dtype that verl knows by several."""
    return SHORT_NAMES.get(str(word), str(word))


def compute_dtype(fsdp: Any) -> str:
    """Dtype of an engine's forward pass: verl computes in bfloat16 unless ``mixed_precision`` says otherwise."""
    precision = fsdp.get("mixed_precision")
    return dtype_name(precision.param_dtype if precision else "bf16")


def is_full(own: Any) -> bool:
    """True if a policy is trained and served in full precision."""
    return compute_dtype(own.actor.fsdp_config) == own.rollout.dtype == "float32"


def gap_alarm(config: Any) -> float:
    """Gap of log-probs above which a policy's server and trainer are hardly the same model: the configured one, or that of
    its precision. ``config`` has the policy's own ``actor_rollout_ref``."""
    configured = config.controller.log_prob_gap_alarm
    gaps = CPU_GAPS if config.trainer.device == "cpu" else ACCELERATOR_GAPS
    return gaps["fp32" if is_full(config.actor_rollout_ref) else "bf16"] if configured is None else configured


def register_resolvers() -> None:
    for resolver in (train_dtype, serve_dtype):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
