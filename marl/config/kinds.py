"""Kinds of policies that this run serves: adapters on a shared base, servers alone, and those with a trainer of their own. Pure."""

from typing import Any

from marl.config.placement import pool_of
from marl.config.policies import hosted_policies, shares_base, trained_policies


def adapter_policies(config: Any) -> list[str]:
    """Policies that are adapters on the base model of their pool: under ``sharing=lora``, all of a pool in which one is trained."""
    if not shares_base(config):
        return []
    pools = {pool_of(config, name) for name in trained_policies(config.agents)}
    return [name for name in hosted_policies(config) if pool_of(config, name) in pools]


def answers_only(config: Any) -> bool:
    """True if nobody is trained: trained agents are evaluated or served (:mod:`marl.evaluation.team`)."""
    return bool(config.get("answers_only", False))


def frozen_policies(config: Any) -> list[str]:
    """Policies that are servers alone: all their agents are ``trainable=false``, and no base beside them is trained. An adapter
    that is not trained costs less than a server."""
    others = {*trained_policies(config.agents), *adapter_policies(config)}
    return [name for name in hosted_policies(config) if name not in others]
