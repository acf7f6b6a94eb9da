"""Rules about updates: batches, losses, references, precision, determinism; and about files, checkpoints and trackers."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from marl.config.engines import MAX_TEMPERATURE, draws_by_seed, is_strict
from marl.config.errors import ConfigError, ModelMissing
from marl.config.kinds import answers_only
from marl.config.packing import obstacle
from marl.config.policies import (
    changes_of,
    endpoint_policies,
    has_endpoint,
    holds_reference,
    longest_row,
    own_settings,
    policies_by_agent,
    sequence_parallel,
    value_at,
    within,
)
from marl.config.precision import OF_CRITICS, OF_POLICIES, dtype_name
from marl.config.schema import JudgeConfig, LogProbSource, PackTurns, RequestSeeds
from marl.utils.near import did_you_mean
from marl.utils.numbers import POSITIVE

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
STRICT = "determinism=strict"
SEEDS = {"data.seed": "data.shuffle", f"{ACTOR}.data_loader_seed": f"{ACTOR}.shuffle"}
"""Seeds that verl lets be null, each with the key that makes it needed."""
WARNS_ONLY = (f"{ACTOR}.fsdp_config.full_determinism", "critic.fsdp.full_determinism")
STATES = ("model", "optimizer", "extra")
"""States that a policy or a critic goes on from, in verl's words: weights, optimizer, and schedule with random states."""
WHOLE_MODEL = "hf_model"
CHECKPOINTS = (f"{ACTOR}.checkpoint", "critic.checkpoint")
BASELINES = ("solo", "vote", "untrained")
TRACKERS = {"console": None, "file": None, "vemlp_wandb": "volcengine_ml_platform"} | {
    name: name for name in ("tensorboard", "wandb", "mlflow", "swanlab", "clearml", "trackio")
}
"""verl's trackers, and the packages that they need."""


def critic_batches_divide(config: Any) -> None:
    tasks, mini = config.data.train_batch_size, config.critic.ppo_mini_batch_size
    if tasks % mini:
        raise ConfigError(
            f"critic.ppo_mini_batch_size={mini} does not divide data.train_batch_size={tasks}; choose a divisor of {tasks}"
        )
    if not config.critic.use_dynamic_bsz:
        raise ConfigError(
            "critic.use_dynamic_bsz=false: rows are of different lengths and numbers; leave it true, and set the size in "
            "tokens by critic.ppo_max_token_len_per_gpu"
        )


def rejection_has_a_threshold(config: Any) -> None:
    correction = config.algorithm.rollout_correction
    if correction.rollout_rs and correction.rollout_rs_threshold is None:
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_rs={correction.rollout_rs} needs "
            "algorithm.rollout_correction.rollout_rs_threshold, such as 2.0 or '0.5_2.0'"
        )


def log_probs_have_one_source(config: Any) -> None:
    source, correction = LogProbSource.of(config), config.algorithm.rollout_correction
    if correction.bypass_mode and source is LogProbSource.trainer:
        raise ConfigError(
            "controller.old_log_probs=trainer with algorithm.rollout_correction.bypass_mode=True, which takes the servers' "
            "log-probs: set old_log_probs=server (or leave it auto), or bypass_mode=false"
        )
    corrected = [f"{key}={correction[key]}" for key in ("rollout_is", "rollout_rs") if correction[key]]
    if corrected and source is LogProbSource.server and not correction.bypass_mode:
        raise ConfigError(
            f"controller.old_log_probs=server with algorithm.rollout_correction.{corrected[0]}, which corrects for the "
            "difference between servers and trainer: set old_log_probs=trainer (or leave it auto), or bypass_mode=true"
        )


def packing_is_known(config: Any) -> None:
    known = [choice.value for choice in PackTurns]
    value = str(config.controller.pack_turns).lower()
    if value not in known:
        raise ConfigError(
            f"controller.pack_turns={config.controller.pack_turns}: expected one of {', '.join(known)}.{did_you_mean(value, known)}"
        )


def engines_take_the_temperatures(config: Any) -> None:
    """vLLM refuses a request at a higher one, in the first episode."""
    for agent, policies in policies_by_agent(config.agents).items():
        for policy in (name for name in policies if not has_endpoint(config, name)):
            rollout, key = own_settings(config, policy).rollout, f"{within(config, policy)}{ROLLOUT}"
            given = {
                f"{key}.temperature": rollout.temperature,
                f"{key}.val_kwargs.temperature": rollout.val_kwargs.temperature,
                f"agents.{agent}.temperature": config.agents[agent].temperature,
            }
            highest = MAX_TEMPERATURE.get(rollout.name)
            for name, value in given.items() if highest is not None else ():
                if value is not None and value > highest:
                    raise ConfigError(
                        f"{name}={value:g}: expected at most {highest:g} with {ROLLOUT}.name={rollout.name}; lower it, or use hf"
                    )


def strict_runs_ask_no_endpoint(config: Any) -> None:
    names = endpoint_policies(config) if is_strict(config) else []
    if names:
        raise ConfigError(
            f"policies.{names[0]}.endpoint: {STRICT}, and nobody can promise that a server elsewhere answers the same again; serve "
            "its model here (model.path), or set determinism=null"
        )


def critics_have_the_precision(config: Any) -> None:
    must_agree(config, OF_CRITICS)


def must_agree(config: Any, keys: tuple[str, ...]) -> None:
    """Raise ConfigError for the first of verl's keys that contradicts ``precision``."""
    for key in keys if config.precision is not None else ():
        value = OmegaConf.select(config, key)
        if dtype_name(value) != dtype_name(config.precision):
            raise ConfigError(
                f"{key}={value}: precision={config.precision} sets it, for trainer, critics and servers alike; leave it out, or set "
                "precision=null to choose each of verl's keys"
            )


def models_exist(config: Any) -> None:
    owners = {"actor_rollout_ref": config.actor_rollout_ref} | {
        f"policies.{name}": own for name, own in config.policies.items()
    }
    for owner, part in ((owner, part) for owner in owners for part in ("model", "ref.model")):
        path = value_at(owners[owner], f"{part}.path")
        looks_local = str(path).startswith(("/", "~", ".")) or str(path).count("/") != 1
        if path is not None and looks_local and not (Path(str(path)).expanduser() / "config.json").is_file():
            raise ModelMissing(f"{owner}.{part}.path", str(path))


def one_reward_function_is_named(config: Any) -> None:
    """verl's key, and its older one at the top."""
    keys = ("reward.custom_reward_function", "custom_reward_function")
    nodes = {key: node for key in keys if (node := OmegaConf.select(config, key))}
    for key, node in nodes.items():
        if not node.path and node.name not in (None, "compute_score"):
            raise ConfigError(
                f"{key}.name={node.name}, and {key}.path is null: expected the Python file that defines it, in {key}.path"
            )
    given = {key: str(node.path) for key, node in nodes.items() if node.path}
    if len(set(given.values())) > 1:
        named = " and ".join(f"{key}.path={path}" for key, path in given.items())
        raise ConfigError(f"{named} name two reward functions; unset the second, which is verl's older key")


def own_code_is_there(config: Any) -> None:
    file = config.data.custom_cls.path
    if file is not None and not str(file).startswith("pkg://") and not Path(str(file)).expanduser().is_file():
        raise ConfigError(f"data.custom_cls.path={file}: no such file; expected a Python file, or pkg://module")


def folders_can_be_written(config: Any) -> None:
    if answers_only(config):  # which writes into none of them
        return
    for key in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
        if config.trainer[key] is not None:
            must_be_writable(f"trainer.{key}", config.trainer[key])
    home = os.environ.get("HF_HOME", f"{os.environ.get('XDG_CACHE_HOME', '~/.cache')}/huggingface")
    must_be_writable("HF_DATASETS_CACHE", os.environ.get("HF_DATASETS_CACHE", f"{home}/datasets"))


def must_be_writable(key: str, given: str) -> None:
    wanted = Path(given).expanduser().absolute()
    there = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        reason = "is not a folder" if not there.is_dir() else "cannot be written"
        raise ConfigError(f"{key}={given}: {there} {reason}; set {key} to a folder that can be made")


def overlong_penalties_have_a_buffer(config: Any) -> None:
    price = config.judge.overlong_penalty
    if not config.judge.overlong_buffer and price != JudgeConfig.overlong_penalty:
        raise ConfigError(
            f"judge.overlong_penalty={price:g}: with judge.overlong_buffer=0 it has no effect; set "
            "judge.overlong_buffer to the number of tokens before the limit in which length costs, or leave it out"
        )


def resuming_has_a_path(config: Any) -> None:
    path = config.trainer.resume_from_path
    if config.trainer.resume_mode == "resume_path" and (path is None or not Path(path).expanduser().is_dir()):
        raise ConfigError(f"trainer.resume_from_path={path}: no such folder; expected …/global_step_N")


def baselines_are_known(config: Any) -> None:
    names = [config.baseline] if isinstance(config.baseline, str) else config.baseline
    if not hasattr(names, "__iter__"):
        raise ConfigError(f"baseline={names}: expected a list of {', '.join(BASELINES)}; [] for none")
    for name in names:
        if name not in BASELINES:
            raise ConfigError(
                f"baseline={name}: no such baseline; known: {', '.join(BASELINES)}.{did_you_mean(str(name), BASELINES)}"
            )


def trackers_are_installed(config: Any) -> None:
    """Each is imported at the first step."""
    for name in config.trainer.logger:
        if name not in TRACKERS:
            raise ConfigError(
                f"trainer.logger={list(config.trainer.logger)}: unknown {name!r}; expected {', '.join(TRACKERS)}."
                f"{did_you_mean(str(name), TRACKERS)}"
            )
        found = find_spec(TRACKERS[name] or "marl")
        if found is None or found.origin is None:  # a folder of this name, as offline runs of W&B leave one
            raise ConfigError(
                f"trainer.logger={list(config.trainer.logger)}: {name} is not installed; expected the package {TRACKERS[name]}: "
                "install it, or leave this tracker out"
            )


def mini_batches_divide(config: Any) -> None:
    tasks, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if tasks % mini:
        raise ConfigError(
            f"data.train_batch_size={tasks} does not divide into mini-batches of {ACTOR}.ppo_mini_batch_size={mini} tasks: "
            f"{tasks} % {mini} = {tasks % mini}; every mini-batch holds ppo_mini_batch_size x "
            f"rollout.n={config.actor_rollout_ref.rollout.n} episodes. Choose a divisor of {tasks}"
        )


def micro_batches_hold_a_row(config: Any) -> None:
    """verl's engines on GPUs refuse a longer row in the step that brings it."""
    own, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    if not own.actor.use_dynamic_bsz:
        raise ConfigError(
            f"{ACTOR}.use_dynamic_bsz=false: agents speak a different number of times, so rows do not "
            f"divide into micro-batches of a fixed size. Leave it true, and set the size in tokens by {ACTOR}.ppo_max_token_len_per_gpu"
        )
    longest = longest_row(rollout)
    for key, budget, ranks in token_budgets(own, holds_reference(config, own)):
        if budget * ranks < longest:
            raise ConfigError(
                f"actor_rollout_ref.{key}={budget} cannot hold one row of "
                f"data.max_prompt_length + data.max_response_length = {rollout.prompt_length} + {rollout.response_length} = "
                f"{longest} tokens{f' on {ranks} ranks' if ranks > 1 else ''}; raise it to at least {-(-longest // ranks)}"
            )


def token_budgets(own: Any, has_reference: bool) -> Iterator[tuple[str, int, int]]:
    """Keys of a policy's micro-batches, the tokens of each a rank, and the ranks that split a sequence."""
    ranks = sequence_parallel(own.actor)
    yield "actor.ppo_max_token_len_per_gpu", own.actor.ppo_max_token_len_per_gpu, ranks
    yield "rollout.log_prob_max_token_len_per_gpu", own.rollout.log_prob_max_token_len_per_gpu, ranks
    if has_reference:
        yield "ref.log_prob_max_token_len_per_gpu", own.ref.log_prob_max_token_len_per_gpu, sequence_parallel(own.ref)


def dro_has_its_coefficient(config: Any) -> None:
    key, loss = f"{ACTOR}.policy_loss", config.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "dro" and not POSITIVE.takes(beta := loss.get("dro_beta")):
        raise ConfigError(
            f"{key}.loss_mode=dro with {key}.dro_beta={beta}: {POSITIVE}; set it, as in +{key}.dro_beta=0.1"
        )


def bypassing_replaces_no_loss(config: Any) -> None:
    bypass, loss = config.algorithm.rollout_correction.bypass_mode, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if bypass and loss not in ("vanilla", "bypass_mode"):
        raise ConfigError(
            f"algorithm.rollout_correction.bypass_mode={bypass}: its own loss would replace "
            f"{ACTOR}.policy_loss.loss_mode={loss}; set loss_mode=vanilla, or bypass_mode=false"
        )


def packed_turns_are_weighed_by_token(config: Any) -> None:
    found = obstacle(config.algorithm, config.actor_rollout_ref)
    if found and PackTurns.of(config) is PackTurns.true:
        raise ConfigError(f"controller.pack_turns=true with {found}")


def a_conversation_fits_the_server(config: Any) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.max_model_len is not None and rollout.max_model_len < longest_row(rollout):
        raise ConfigError(
            f"{ROLLOUT}.max_model_len={rollout.max_model_len}: expected at least "
            f"data.max_prompt_length + data.max_response_length = {rollout.prompt_length} + {rollout.response_length}; "
            "raise it, or set null"
        )


def adam_betas_are_two(config: Any) -> None:
    for key, group in {ACTOR: config.actor_rollout_ref.actor, "critic": config.critic}.items():
        betas = group.optim.betas
        if len(betas) != 2 or not all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"{key}.optim.betas={betas}: expected two numbers, at least 0 and below 1, as in [0.9,0.95]"
            )


def references_are_the_policys(config: Any) -> None:
    freq, model = config.trainer.ref_update_freq, config.actor_rollout_ref.model
    compares = OmegaConf.select(config, "method.reference")
    if freq > 0 and not (config.algorithm.use_kl_in_reward or kl_in_any_loss(config) or compares):
        raise ConfigError(
            f"trainer.ref_update_freq={freq}: there is no reference to renew; set {ACTOR}.use_kl_loss=true or "
            "algorithm.use_kl_in_reward=true, or use a method that compares with one (dpo, spin)"
        )
    if freq > 0 and model.lora_rank:
        raise ConfigError(
            f"trainer.ref_update_freq={freq}: with actor_rollout_ref.model.lora_rank={model.lora_rank} "
            "the reference is the policy without its adapters, which never changes; set it to 0"
        )
    path = config.actor_rollout_ref.ref.model.get("path")
    if model.lora_rank and path:
        raise ConfigError(
            f"actor_rollout_ref.ref.model.path={path}: with actor_rollout_ref.model.lora_rank={model.lora_rank} the reference is "
            "the policy without its adapters; unset it"
        )


def kl_in_any_loss(config: Any) -> bool:
    losses = [(changes_of(config.policies, name).get("actor") or {}).get("use_kl_loss") for name in config.policies]
    return bool(config.actor_rollout_ref.actor.use_kl_loss or any(losses))


def strict_draws_have_seeds(config: Any) -> None:
    if not is_strict(config):
        return
    rollout = config.actor_rollout_ref.rollout
    if not draws_by_seed(rollout):
        raise ConfigError(
            f"{ROLLOUT}.name={rollout.name}: {STRICT} needs answers that depend on seed and prompt alone, and these depend on the "
            f"requests beside them; set {ROLLOUT}.full_determinism=true, for SGLang +{ROLLOUT}.engine_kwargs.sglang."
            "enable_deterministic_inference=true, use hf, or determinism=null"
        )
    if (rollout.get("custom") or {}).get("exact", True) is False:
        raise ConfigError(
            f"{ROLLOUT}.custom.exact=false: {STRICT} needs answers that do not depend on what was read before; leave it out"
        )
    if RequestSeeds.of(config) is RequestSeeds.never:
        raise ConfigError(f"controller.request_seeds=never: {STRICT} needs the seeds of requests; set auto or always")
    for key, needed_by in SEEDS.items():
        if OmegaConf.select(config, key) is None and OmegaConf.select(config, needed_by):
            raise ConfigError(f"{key}=null: {STRICT} and {needed_by}=true need a seed; set a number from 0 on")
    for key in WARNS_ONLY:  # lets operations without a deterministic form pass with a warning
        if OmegaConf.select(config, key):
            raise ConfigError(f"{key}=true: {STRICT} sets all that it sets, and fails where it warns; leave it out")


def sglang_hears_the_seeds(config: Any) -> None:
    rollout = config.actor_rollout_ref.rollout
    if RequestSeeds.of(config) is RequestSeeds.always and rollout.name == "sglang" and not draws_by_seed(rollout):
        raise ConfigError(
            f"controller.request_seeds=always: SGLang ignores the seeds of requests; set +{ROLLOUT}.engine_kwargs.sglang."
            "enable_deterministic_inference=true, or request_seeds=auto"
        )


def policies_have_the_precision(config: Any) -> None:
    must_agree(config, OF_POLICIES)


def checkpoints_hold_weights(config: Any) -> None:
    """verl asks whether each of its words is in the list: a misspelt one would leave a state out."""
    contents = (*STATES, WHOLE_MODEL)
    for key in (f"{group}.{name}" for group in CHECKPOINTS for name in ("save_contents", "load_contents")):
        listed = value_at(config, key)
        if isinstance(listed, str) or not hasattr(listed, "__iter__") or hasattr(listed, "keys"):
            raise ConfigError(f"{key}={listed}: expected a list of {', '.join(contents)}")
        for word in listed:
            if word not in contents:
                raise ConfigError(
                    f"{key}={listed}: {word} is nothing to save; expected a list of {', '.join(contents)}."
                    f"{did_you_mean(str(word), contents)}"
                )
    trainer = config.trainer
    saves = not trainer.val_only and (trainer.save_freq > 0 or trainer.save_final)
    for key in (f"{group}.save_contents" for group in CHECKPOINTS if saves):
        listed = value_at(config, key)
        if "model" not in listed and (WHOLE_MODEL not in listed or key.startswith("critic")):
            raise ConfigError(
                f"{key}={listed}: checkpoints would hold no weights; add model, or save none (trainer.save_freq=-1, "
                "trainer.save_final=false)"
            )


RULES = (
    rejection_has_a_threshold,
    log_probs_have_one_source,
    packing_is_known,
    engines_take_the_temperatures,
    strict_runs_ask_no_endpoint,
    critics_have_the_precision,
    models_exist,
    one_reward_function_is_named,
    folders_can_be_written,
    own_code_is_there,
    overlong_penalties_have_a_buffer,
    resuming_has_a_path,
    baselines_are_known,
    trackers_are_installed,
)
POLICY_RULES = (
    mini_batches_divide,
    critic_batches_divide,
    micro_batches_hold_a_row,
    dro_has_its_coefficient,
    bypassing_replaces_no_loss,
    packed_turns_are_weighed_by_token,
    a_conversation_fits_the_server,
    adam_betas_are_two,
    references_are_the_policys,
    strict_draws_have_seeds,
    sglang_hears_the_seeds,
    policies_have_the_precision,
    checkpoints_hold_weights,
)
"""Rules that every policy's own settings have to keep, too."""
