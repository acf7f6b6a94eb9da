"""Rules about mini-batches, micro-batches and packed turns."""

from collections.abc import Iterator
from typing import Any

from marl.config.errors import ConfigError
from marl.config.packing import obstacle
from marl.config.policies import holds_reference, longest_row, sequence_parallel
from marl.config.schema import LogProbSource, PackTurns
from marl.utils.numbers import POSITIVE
from marl.utils.registry import did_you_mean


def mini_batches_divide(config: Any) -> None:
    tasks, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini < 1 or tasks % mini:
        raise ConfigError(
            f"data.train_batch_size={tasks} does not divide into mini-batches of "
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} tasks: {tasks} % {mini} = {tasks % mini if mini > 0 else tasks}; "
            f"every mini-batch holds ppo_mini_batch_size x rollout.n={config.actor_rollout_ref.rollout.n} episodes. "
            f"Choose a divisor of {tasks}"
        )


def micro_batches_are_by_tokens(config: Any) -> None:
    if not config.actor_rollout_ref.actor.use_dynamic_bsz:
        raise ConfigError(
            "actor_rollout_ref.actor.use_dynamic_bsz=false: agents speak a different number of times, so rows do not "
            "divide into micro-batches of a fixed size. Leave it true, and set the size in tokens by "
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
        )
    own, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    longest = longest_row(rollout)
    for key, budget, ranks in token_budgets(own, holds_reference(config, own)):
        if budget * ranks < longest:
            raise ConfigError(
                f"actor_rollout_ref.{key}={budget} cannot hold one row of "
                f"data.max_prompt_length + data.max_response_length = {rollout.prompt_length} + {rollout.response_length} = "
                f"{longest} tokens{f' on {ranks} ranks' if ranks > 1 else ''}; raise it to at least {-(-longest // ranks)}"
            )


def token_budgets(own: Any, has_reference: bool) -> Iterator[tuple[str, int, int]]:
    """Keys of a policy's micro-batches, the tokens of each a rank, and the ranks that split a sequence. verl's engines on GPUs
    refuse a longer row in the step that brings it."""
    yield "actor.ppo_max_token_len_per_gpu", own.actor.ppo_max_token_len_per_gpu, sequence_parallel(own.actor)
    yield (
        "rollout.log_prob_max_token_len_per_gpu",
        own.rollout.log_prob_max_token_len_per_gpu,
        sequence_parallel(own.actor),
    )
    if has_reference:
        yield "ref.log_prob_max_token_len_per_gpu", own.ref.log_prob_max_token_len_per_gpu, sequence_parallel(own.ref)


def critic_batches_divide(config: Any) -> None:
    tasks, mini = config.data.train_batch_size, config.critic.ppo_mini_batch_size
    if mini < 1 or tasks % mini:
        raise ConfigError(
            f"critic.ppo_mini_batch_size={mini} does not divide data.train_batch_size={tasks}; choose a divisor of {tasks}"
        )
    if not config.critic.use_dynamic_bsz:
        raise ConfigError(
            "critic.use_dynamic_bsz=false: rows are of different lengths and numbers; leave it true, and set the size in "
            "tokens by critic.ppo_max_token_len_per_gpu"
        )


def corrections_are_whole(config: Any) -> None:
    correction = config.algorithm.rollout_correction
    if correction.rollout_rs and correction.rollout_rs_threshold is None:
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_rs={correction.rollout_rs} needs "
            "algorithm.rollout_correction.rollout_rs_threshold, such as 2.0 or '0.5_2.0'"
        )
    if correction.rollout_is not in (None, "token", "sequence"):
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is={correction.rollout_is}: expected token, sequence or null."
            f"{did_you_mean(str(correction.rollout_is), ('token', 'sequence'))}"
        )


def dro_has_its_coefficient(config: Any) -> None:
    key, loss = "actor_rollout_ref.actor.policy_loss", config.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "dro" and not POSITIVE.takes(beta := loss.get("dro_beta")):
        raise ConfigError(
            f"{key}.loss_mode=dro with {key}.dro_beta={beta}: {POSITIVE}; set it, as in +{key}.dro_beta=0.1"
        )


def bypassing_replaces_no_loss(config: Any) -> None:
    bypass, loss = config.algorithm.rollout_correction.bypass_mode, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if bypass and loss not in ("vanilla", "bypass_mode"):
        raise ConfigError(
            f"algorithm.rollout_correction.bypass_mode={bypass}: its own loss would replace "
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}; set loss_mode=vanilla, or bypass_mode=false"
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
    try:
        PackTurns.of(config)
    except ValueError:
        value = config.controller.pack_turns
        raise ConfigError(
            f"controller.pack_turns={value}: expected one of {', '.join(known)}.{did_you_mean(str(value), known)}"
        ) from None


def packed_turns_are_weighed_by_token(config: Any) -> None:
    found = obstacle(config.algorithm, config.actor_rollout_ref)
    if found and PackTurns.of(config) is PackTurns.true:
        raise ConfigError(f"controller.pack_turns=true with {found}")


def a_conversation_fits_the_server(config: Any) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.max_model_len is not None and rollout.max_model_len < longest_row(rollout):
        raise ConfigError(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len}: expected at least "
            f"data.max_prompt_length + data.max_response_length = {rollout.prompt_length} + {rollout.response_length}; "
            "raise it, or set null"
        )


def adam_betas_valid(config: Any) -> None:
    groups = {"actor_rollout_ref.actor": config.actor_rollout_ref.actor, "critic": config.critic}
    for key, group in groups.items():
        betas = group.optim.betas
        two = hasattr(betas, "__len__") and not isinstance(betas, str) and len(betas) == 2
        if not two or not all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"{key}.optim.betas={betas}: expected two numbers, at least 0 and below 1, as in [0.9,0.95]"
            )


RULES = (
    mini_batches_divide,
    micro_batches_are_by_tokens,
    critic_batches_divide,
    corrections_are_whole,
    dro_has_its_coefficient,
    bypassing_replaces_no_loss,
    log_probs_have_one_source,
    packing_is_known,
    packed_turns_are_weighed_by_token,
    a_conversation_fits_the_server,
    adam_betas_valid,
)
