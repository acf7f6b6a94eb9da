"""Refusals before a run starts: rule, wrong input, message. Every rule between keys is broken here at least once."""

import copy
import re

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from marl.config.errors import ConfigError, explain
from marl.config.keys import check_keys
from marl.config.rules import POLICY_RULES, RULES
from marl.config.values import NUMBERS, check_values
from marl.preflight.prepare import prepare

DRO = "actor_rollout_ref.actor.policy_loss.loss_mode=dro"
SAVED = "actor_rollout_ref.actor.checkpoint.save_contents"
BAD = {
    "+policies.bob.thinking=none": ["policies.bob", "alice, carol"],
    "+policies.alice.pool=x": ["unknown key 'policies.alice.pool'"],
    "+policies.alice.rollout.name=vllm": ["policies.alice", "does not run on a CPU"],
    "actor_rollout_ref.rollout.name=foo": ["rollout.name=foo does not run on a CPU", "use hf"],
    "actor_rollout_ref.rollout.name=vllm": ["does not run on a CPU", "hf"],
    DRO: [f"{DRO} with", "dro_beta=None", "set it, as in +actor_rollout_ref"],
    f"{DRO} +actor_rollout_ref.actor.policy_loss.dro_beta=0": ["dro_beta=0", "above 0"],
    "+policies.alice.actor.policy_loss.loss_mode=dro": ["policies.alice: ", "dro_beta=None"],
    "actor_rollout_ref.actor.ppo_mini_batch_size=5": ["train_batch_size=32", "32 % 5 = 2", "Choose a divisor"],
    "actor_rollout_ref.actor.ppo_mini_batch_size=0": ["ppo_mini_batch_size=0"],
    "actor_rollout_ref.actor.use_dynamic_bsz=false": ["use_dynamic_bsz", "ppo_max_token_len_per_gpu"],
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40": ["40 + 3 = 43"],
    "hardware=gpu actor_rollout_ref.rollout.name=trtllm": ["rollout.name=trtllm", "hf, sglang, vllm"],
    "hardware=gpu actor_rollout_ref.rollout.checkpoint_engine.backend=nccl": ["backend=nccl", "expected one of naive"],
    "hardware=gpu actor_rollout_ref.rollout.temperature=2.5": ["rollout.temperature=2.5", "expected at most 2"],
    "hardware=gpu agents.alice.temperature=2.1": ["agents.alice.temperature=2.1", "expected at most 2"],
    "hardware=gpu actor_rollout_ref.rollout.name=sglang controller.request_seeds=always": ["SGLang ignores the seeds"],
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2": ["1 ranks", "1 % 2 = 1"],
    "trainer.n_gpus_per_node=0": ["at least 1"],
    "resources.max_restarts=-1": ["resources.max_restarts=-1", "expected a whole number"],
    "actor_rollout_ref.actor.strategy=fsdp": ["does not run on a CPU", "fsdp2"],
    "critic.enable=true": ["critic.enable=True", "leave it null"],
    "critic.level=turns": ["critic.level=turns", "turn, token", "Did you mean 'turn'"],
    "critic.ppo_mini_batch_size=5": ["critic.ppo_mini_batch_size=5", "divisor of 32"],
    "credit=team learner=qmix critic.level=token": ["critic.level=token", "set critic.level=turn"],
    "credit=team learner=vdn critic.ppo_epochs=2": ["critic.ppo_epochs=2", "learner.mixer_epochs"],
    "credit=team learner=vdn learner.target_update_every=0": ["learner.target_update_every=0", "at least 1"],
    "learner=qmix": ["credit=influence", "credit=team alone"],
    "critic.use_dynamic_bsz=false": ["critic.use_dynamic_bsz", "ppo_max_token_len_per_gpu"],
    "agents.alice.policy=central": ["central"],
    "agents.alice.policy=a agents.alice.policy_by_round=[b]": ["agents.alice.policy=a", "both name its policy"],
    "agents.alice.policy_by_round=[alice,later] +policies.later.rollout.temperature=0.5": [
        "{'alice': 1.0, 'later': 0.5}",
        "set agents.alice.temperature",
    ],
    "agents.alice.policy_by_round=[a/b]": ["agents.alice.policy_by_round=['a/b']", "letters"],
    "runner=summary runner.summariser=alica": ["runner.summariser=alica", "Did you mean 'alice'"],
    "runner=critique +agents.bob={} +agents.eve={}": ["runner=critique", "2 to 3 agents", "names 4"],
    "runner=debate_graph runner.start=begin": ["runner.start", "'begin'", "discuss"],
    "runner=router runner.menu='{workrs}'": ["runner.menu", "'workrs'"],
    "runner=single_turn learner.train_rounds=[2]": ["learner.train_rounds=[2]", "runner=single_turn ends in round 1"],
    "runner=tree runner.num_branches=0": ["runner.num_branches=0", "at least 1"],
    "runner=tree runner.num_branches=1": ["runner.num_branches=1", "without siblings", "runner.train=path"],
    "critic.forward_micro_batch_size=abc": [
        "critic.forward_micro_batch_size=abc: it has no effect",
        "critic.ppo_max_token_len_per_gpu",
    ],
    "controller.thinking=atuo": ["controller.thinking=atuo", "Did you mean 'auto'"],
    "+policies.alice.thinking={start:a}": ["policies.alice.thinking={'start': 'a'}", "two different texts"],
    "judge.no_answer_score=inf": ["judge.no_answer_score=inf", "finite"],
    "algorithm.adv_estimator=gae": ["adv_estimator=gae", "learner=grpo", "ippo"],
    "learner=magrpo credit=team algorithm.adv_estimator=rloo": ["adv_estimator=rloo", "learner=magrpo", "grpo"],
    "algorithm.adv_estimator=rlo": ["adv_estimator=rlo", "Did you mean 'rloo'"],
    "controller.pack_turns=true actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum": [
        "seq-mean-token-sum",
        "token-mean",
    ],
    "controller.pack_turns=true actor_rollout_ref.actor.policy_loss.loss_mode=gspo": [
        "loss_mode=gspo",
        "pack_turns=false",
    ],
    "controller.pack_turns=true learner=mappo critic.level=token": ["critic.level=turn"],
    "controller.old_log_probs=server learner=happo": ["controller.old_log_probs=server", "learner=happo", "auto"],
    "algorithm.rollout_correction.bypass_mode=true learner=happo": ["bypass_mode=true with learner=happo"],
    "controller.pack_turns=true algorithm.rollout_correction={bypass_mode:true,rollout_is:token,rollout_is_batch_normalize:true}": [
        "rollout_is_batch_normalize=true",
        "pack_turns=false",
    ],
    "controller.pack_turns=true actor_rollout_ref.actor.policy_loss.loss_mode=sapo": ["loss_mode=sapo", "sequences"],
    "controller.pack_turns=true learner=ippo critic.level=token critic.loss_agg_mode=seq-mean-token-mean": [
        "critic.loss_agg_mode=seq-mean-token-mean",
        "pack_turns=false",
    ],
    "controller.pack_turns=atuo": ["controller.pack_turns=atuo", "Did you mean 'auto'"],
    "baseline=sole": ["baseline=sole", "Did you mean 'solo'"],
    "baseline=null": ["baseline=None", "solo, vote, untrained", "[] for none"],
    "baseline=5": ["baseline=5", "expected a list"],
    f"{SAVED}=[modle,optimizer,extra]": [f"{SAVED}=['modle', 'optimizer', 'extra']", "Did you mean 'model'"],
    f"{SAVED}=all": [f"{SAVED}=all", "expected a list"],
    f"{SAVED}=[optimizer,extra]": [f"{SAVED}=['optimizer', 'extra']", "no weights", "trainer.save_final=false"],
    f"+policies.carol{SAVED.removeprefix('actor_rollout_ref')}=[extra]": ["policies.carol: ", "no weights"],
    "actor_rollout_ref.actor.checkpoint.load_contents=[weights]": [
        "load_contents=['weights']",
        "weights is nothing to save",
    ],
    "critic.checkpoint.save_contents=[hf_model]": ["critic.checkpoint.save_contents=['hf_model']", "no weights"],
    "trainer.ref_update_freq=5": ["ref_update_freq=5", "use_kl_loss=true"],
    "actor_rollout_ref.model.lora_rank=4": ["lora_rank=4", "lora.merge=true"],
    "trainer.ref_update_freq=-1": ["ref_update_freq=-1"],
    "actor_rollout_ref.ref.model.path=/nowhere/ref": ["actor_rollout_ref.ref.model.path=/nowhere/ref"],
    "actor_rollout_ref.ref.model.path=org/name actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora.merge=true": [
        "ref.model.path=org/name",
        "unset",
    ],
    "algorithm.rollout_correction.rollout_is=tokens": ["rollout_is=tokens", "Did you mean 'token'"],
    "algorithm.rollout_correction.rollout_is=sequence controller.pack_turns=true": [
        "rollout_is=sequence",
        "pack_turns",
    ],
    "algorithm.kl_ctrl.type=foo": ["algorithm.kl_ctrl.type=foo", "adaptive"],
    "critic.optim.lr=-1": ["critic.optim.lr=-1"],
    "actor_rollout_ref.actor.optim.lr=1000": ["actor.optim.lr=1000: expected", "at most 1"],
    "critic.optim.lr=10": ["critic.optim.lr=10: expected", "at most 1"],
    "judge.failure_score=1e300": ["judge.failure_score=1e+300: expected", "at most 1e+15"],
    "critic.ppo_epochs=-3": ["critic.ppo_epochs=-3"],
    "trainer.critic_warmup=5": ["trainer.critic_warmup=5", "learner=grpo"],
    "agents.alice.policy=a_critic": ["a_critic"],
    "algorithm.rollout_correction.rollout_rs=token_k1": ["rollout_rs=token_k1", "rollout_rs_threshold"],
    "resources.one_process=true trainer.n_gpus_per_node=2": ["one rank", "n_gpus_per_node=2"],
    "resources.pools={p:{gpus:2}}": ["resources.pools.p: it has no members", "leave it out"],
    "actor_rollout_ref.rollout.name=vllm resources.weight_check=digest": ["rollout.name=vllm"],
    "resources.one_process=true controller.num_workers=2": ["controller.num_workers=2", "one_process=false"],
    "controller.num_workers=-1": ["controller.num_workers=-1", "at least 0"],
    "actor_rollout_ref.rollout.n=1": ["rollout.n=1", "at least 2"],
    "actor_rollout_ref.model.path=/nowhere/model": ["/nowhere/model", "config.json"],
    "data.train_files=/nowhere/train.parquet": ["data.train_files=/nowhere/train.parquet", "no such file"],
    "data.val_files=/nowhere/test.parquet": ["data.val_files"],
    "trainer.resume_mode=atuo": ["resume_mode=atuo", "Did you mean 'auto'"],
    "trainer.resume_mode=resume_path": ["resume_from_path=None"],
    "actor_rollout_ref.model.trust_remote_code=null": ["model.trust_remote_code=None", "expected true or false"],
    "trusted_targets=os": ["trusted_targets=os", "expected a list"],
    "+trainer.hook._target_=os.system": ["trainer.hook._target_=os.system", "trusted_targets=[os]"],
    "trainer.resume_changes=seed": ["resume_changes=seed", "expected a list"],
    "trainer.total_training_steps=-3": ["-3", "at least 0"],
    "+policies.alice.model.paht=x": ["policies.alice.model.paht", "Did you mean 'path'"],
    "+policies.alice.actor.ppo_mini_batch_size=64": ["policies.alice", "32 % 64"],
    "+policies.alice.rollout.n=2": ["policies.alice.rollout.n=2", "same episodes"],
    "+policies.alice.model.path=/nowhere": ["policies.alice", "/nowhere"],
    "agents.alice.temperature=0": ["agents.alice.temperature=0", "1e-05 at least"],
    "actor_rollout_ref.rollout.temperature=0": ["rollout.temperature=0"],
    "learner.train_rounds=[3]": ["learner.train_rounds=[3]", "ends in round 2"],
    "learner.train_rounds=[]": ["learner.train_rounds=[]"],
    "judge.processes=-1": ["judge.processes=-1", "at least 1", "in the driver"],
    "judge.timeout_s=0": ["judge.timeout_s=0", "above 0"],
    "judge.timeout_s=nan": ["judge.timeout_s=nan", "above 0"],
    "runner=debate_graph runner.edges.0.limit=0": ["runner.edges[0].limit=0", "at least 1"],
    "reward.custom_reward_function.name=mine": ["reward.custom_reward_function.name=mine", "path is null"],
    "reward.custom_reward_function.path=/nowhere/r.py": [
        "reward.custom_reward_function.path=/nowhere/r.py",
        "No such file",
    ],
    "custom_reward_function.path=/nowhere/r.py": ["custom_reward_function.path=/nowhere/r.py", "compute_score("],
    "+policies.alice.actor=5": ["policies.alice", "actor=5", "group"],
    "agents.alice.policy=a/b": ["agents.alice.policy=a/b", "letters"],
    "agents.alice.max_tokens=4": ["agents.alice.max_tokens=4", "data.max_response_length=3"],
    "actor_rollout_ref.rollout.max_model_len=42": ["max_model_len=42", "40 + 3"],
    "runner.peer_template='{agnt}'": ["runner.peer_template", "'agnt'"],
    "runner.foresee_request='{peer}?'": ["runner.foresee_request='{peer}?'", "no field 'peer'", "{agent}"],
    "runner=single_turn runner.instruction_template='{instruct}{question}'": [
        "runner.instruction_template",
        "no field 'instruct'",
        "{instruction}, {question}",
    ],
    "runner.foreseen_template='{answer}'": ["runner.foreseen_template", "no field 'answer'", "{agent}, {text}"],
    "method=rft method.peers_weight=1 method.peers_request='{peer}?'": [
        "method.peers_request='{peer}?'",
        "no field 'peer'",
    ],
    "data.columns=question": ["data.columns=question", "expected {prompt: <column>"],
    "data.val_share=1": ["data.val_share=1", "at most 0.9"],
    "trainer.logger=[clearml]": ["clearml is not installed", "the package clearml: install it"],
    "trainer.log_val_generations=-1": ["log_val_generations=-1"],
    "trainer.logger=[fiel]": ["'fiel'", "Did you mean 'file'"],
    "trainer.default_local_dir=/dev/null/x": ["trainer.default_local_dir=/dev/null/x", "is not a folder"],
    "custom_reward_function.path=1e400": ["custom_reward_function.path=inf", "expected text"],
    "custom_reward_function.path=[a]": ["custom_reward_function.path=['a']", "expected text"],
    "actor_rollout_ref.rollout.temperature=1e-300": ["rollout.temperature=1e-300", "at least 1e-05"],
    "agents.alice.temperature=1e-7": ["agents.alice.temperature=1e-07", "1e-05 at least", "trainable=false"],
    "data.custom_cls.path=/nowhere.py": ["data.custom_cls.path=/nowhere.py", "no such file"],
    "trainer.nnodes=65": ["trainer.nnodes=65", "at most 64"],
    "actor_rollout_ref.actor.optim.betas=[0.9]": ["betas=[0.9]", "two numbers"],
    "agents.alice.agent_loop=tool_agnet": [
        "agents.alice.agent_loop=tool_agnet",
        "Did you mean 'tool_agent'",
        "@register",
    ],
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent": [
        "default_agent_loop=tool_agent",
        "use agents.<name>.agent_loop",
    ],
    "actor_rollout_ref.rollout.multi_turn.function_tool_path=/nowhere.py": ["/nowhere.py", "agents.<name>.agent_loop"],
    "agents.alice.agent_loop=tool_agent actor_rollout_ref.rollout.multi_turn.function_tool_path=/nowhere.py": [
        "function_tool_path=/nowhere.py",
        "@function_tool",
    ],
    "agents.alice.agent_loop=tool_agent actor_rollout_ref.rollout.agent.agent_loop_config_path=/nowhere.yaml": [
        "agent_loop_config_path=/nowhere.yaml",
        "name and _target_",
    ],
    "agents.alice.agent_loop=tool_agent actor_rollout_ref.rollout.multi_turn.format=hermse": ["Did you mean 'hermes'"],
    "judge.overlong_penalty=0.5": ["overlong_penalty=0.5", "with judge.overlong_buffer=0"],
    "judge.overlong_buffer=2 credit=team credit.of=answer": ["overlong_buffer=2", "credit=team credit.of=answer"],
    "judge.overlong_buffer=2 credit=team credit.of=answer credit.alpha0=0.5": [
        "overlong_buffer=2",
        "credit=team credit.of=answer",
    ],
    "judge.overlong_buffer=2 credit=shapley": ["overlong_buffer=2", "credit=shapley", "such as own"],
    "judge.overlong_buffer=2 credit=replay": ["overlong_buffer=2", "credit=replay"],
    "judge.overlong_buffer=2 runner=game": [
        "judge.overlong_buffer=2",
        "runner=game",
        "set it to 0",
    ],
    "controller.log_prob_check_rows=0": ["controller.log_prob_check_rows=0", "at least 1"],
    "controller.log_prob_gap_bound=-1": ["controller.log_prob_gap_bound=-1", "at least 0"],
    "controller.old_log_probs=trainer algorithm.rollout_correction.bypass_mode=true": [
        "controller.old_log_probs=trainer",
        "bypass_mode=True",
        "old_log_probs=server",
    ],
    "controller.old_log_probs=server algorithm.rollout_correction.rollout_is=token": [
        "controller.old_log_probs=server",
        "rollout_is=token",
        "old_log_probs=trainer",
        "bypass_mode=true",
    ],
    "algorithm.rollout_correction.bypass_mode=true actor_rollout_ref.actor.policy_loss.loss_mode=gspo": [
        "algorithm.rollout_correction.bypass_mode=True",
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "vanilla",
    ],
    "algorithm.rollout_correction.bypass_mode=true +policies.alice.actor.policy_loss.loss_mode=gspo": [
        "policies.alice",
        "loss_mode=gspo",
    ],
    "critic.optim.betas=[2,3]": ["critic.optim.betas=[2, 3]", "two numbers"],
    "critic.optim.weight_decay=often": ["critic.optim.weight_decay=often"],
    "critic.fsdp.param_offload=often": ["critic.fsdp.param_offload=often", "true or false"],
    "critic.fsdp.model_dtype=fp8": ["critic.fsdp.model_dtype=fp8", "bf16"],
    "+critic.fsdp.mixed_precision={param_dtype:fp8}": ["critic.fsdp.mixed_precision.param_dtype=fp8", "bf16"],
    "determinism=strickt": ["determinism=strickt", "Did you mean 'strict'"],
    "determinism=strict hardware=gpu actor_rollout_ref.rollout.name=vllm": [
        "rollout.name=vllm",
        "full_determinism=true",
    ],
    "determinism=strict +actor_rollout_ref.rollout.custom.exact=false": ["custom.exact=false", "leave it out"],
    "determinism=strict controller.request_seeds=never": ["request_seeds=never", "set auto or always"],
    "determinism=strict data.seed=null": ["data.seed=null", "data.shuffle=true"],
    "determinism=strict actor_rollout_ref.actor.fsdp_config.full_determinism=true": ["fails where it warns"],
    "precision=fp8": ["precision=fp8", "fp32, bf16, null"],
    "precision=bf16 actor_rollout_ref.rollout.dtype=float32": [
        "rollout.dtype=float32",
        "precision=bf16",
        "precision=null",
    ],
    "precision=bf16 critic.fsdp.mixed_precision.param_dtype=fp32": ["param_dtype=fp32", "precision=null"],
    "agents={}": ["agents"],
    "agents.alice.stop=['']": ["agents.alice.stop", "remove"],
    "agents.alice.policy=Both agents.carol.policy=both": ["'Both'", "'both'"],
    "agents.alice.trainable=false agents.carol.trainable=false": ["trainable"],
    "runner.peer_template='{agnt} said {text}'": ["runner.peer_template", "'agnt'"],
    "runner.peer_template='{agent said'": ["runner.peer_template", "{agent said"],
    "runner.peer_template='{text:>9999999999}'": ["runner.peer_template", "{text:>9999999999} is no plain field"],
    "runner.peer_template='{agent.__class__}'": ["runner.peer_template", "{agent.__class__} is no plain field"],
    "runner.peer_template='{}'": ["runner.peer_template", "{}"],
    "trainer.logger=file": ["trainer.logger=file", "expected a list"],
    "trainer.logger=null": ["trainer.logger=None"],
    "trainer.rollout_data_dir=/dev/null/x": ["trainer.rollout_data_dir=/dev/null/x", "is not a folder"],
    "trainer.nnodes=4096": ["trainer.nnodes=4096", "at most 64"],
    "trainer.device=tpu": ["trainer.device=tpu", "cuda"],
    "trainer.resume_mode=5": ["trainer.resume_mode=5"],
    "trainer.resume_mode=resume_path trainer.resume_from_path=/nowhere": ["trainer.resume_from_path=/nowhere"],
    "reward.custom_reward_function.path=/nowhere.py": ["reward.custom_reward_function.path=/nowhere.py"],
    "actor_rollout_ref.actor.optim.betas=[0.9,1.5]": ["betas=[0.9, 1.5]"],
    "actor_rollout_ref.actor.optim.betas=0.9": ["betas=0.9"],
    "actor_rollout_ref.actor.policy_loss.loss_mode=vanila": ["loss_mode=vanila", "Did you mean 'vanilla'"],
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp8": ["param_dtype=fp8", "bf16"],
    "actor_rollout_ref.rollout.name=vlm": ["rollout.name=vlm"],
    "actor_rollout_ref.rollout.expert_parallel_size=3": ["expert_parallel_size"],
    "actor_rollout_ref.actor.strategy=megatron": ["strategy=megatron"],
    "data.train_files=null": ["data.train_files=None"],
    "data.train_files=[]": ["data.train_files=[]"],
    "data.train_files=5": ["data.train_files=5"],
    "data.val_files=[1,2]": ["data.val_files=[1, 2]"],
    "data.train_files=/etc/hostname": ["data.train_files=/etc/hostname", ".parquet"],
    "data.train_files=/tmp": ["data.train_files=/tmp"],
    "data.prompt_key=promt": ["no column 'promt'", "Did you mean 'prompt'"],
    "learner.train_rounds=[0]": ["learner.train_rounds=[0]"],
    "learner.train_rounds=[1,7]": ["learner.train_rounds=[1, 7]"],
    "+policies.alice=5": ["policies.alice=5"],
    "+policies.alice.rollout.temperature=0": ["policies.alice"],
    "+policies.alice.actor.optim.learning_rate=1": ["policies.alice.actor.optim.learning_rate"],
    "+policies.alice.actor.policy_loss.loss_mode=x": ["policies.alice", "loss_mode=x"],
    "critic.loss_agg_mode=token-mean actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm": [
        "actor_rollout_ref.actor.loss_scale_factor=null",
        "data.max_response_length",
    ],
    "+policies.alice.actor.loss_agg_mode=seq-mean-token-sum-norm": ["policies.alice.actor.loss_scale_factor=null"],
    "actor_rollout_ref.model.path=.": ["actor_rollout_ref.model.path=."],
    "actor_rollout_ref.model.path=nobody/nothing": ["actor_rollout_ref.model.path=nobody/nothing"],
    "actor_rollout_ref.model.tokenizer_path=/nowhere": ["actor_rollout_ref.model.tokenizer_path=/nowhere"],
    "actor_rollout_ref.model.custom_chat_template='{% broken'": ["custom_chat_template"],
    "actor_rollout_ref.model.custom_chat_template='always the same'": ["custom_chat_template"],
    "trainer.experiment_name='${nowhere}'": ["trainer.experiment_name", "nowhere"],
    "seed='${oc.env:NOT_SET_ANYWHERE}'": ["seed", "NOT_SET_ANYWHERE"],
    "+policies.alice.actor.optim.lr.x=5": ["policies.alice", "lr={'x': 5}", "finite number"],
    "data.custom_cls=true": ["data.custom_cls=True", "expected a group"],
    "data.shuffle=perhaps": ["data.shuffle=perhaps", "true or false"],
    "data.prompt_key=null": ["data.prompt_key=None", "expected text"],
    "trainer.default_local_dir=null": ["trainer.default_local_dir=None", "expected text"],
}


JUDGE = "agents.carol.trainable=false credit=own +policies.carol.endpoint={base_url:'http://localhost:1/v1',model:m"
"""A policy that a server elsewhere answers for, to be closed with a brace."""
GPU = "hardware=gpu actor_rollout_ref.rollout"
BAD |= {
    "sharing=grups": ["sharing=grups", "Did you mean 'groups'"],
    "sharing=individual agents.carol.policy=alice": ["alice and carol", "agents.carol.policy"],
    "sharing=shared agents.alice.policy=one agents.carol.policy=two": ["one, two", "unset", "sharing=groups"],
    "sharing=groups agents.alice.policy=one": ["agent carol", "set agents.carol.policy"],
    "sharing=lora actor_rollout_ref.model.lora.merge=true": ["lora.merge=true", "sharing=individual"],
    "sharing=lora actor_rollout_ref.actor.strategy=fsdp": ["strategy=fsdp", "use fsdp2"],
    "sharing=lora +policies.alice.model.path=other": ["policies.alice.model.path=other", "alice and carol", "pool"],
    f"{GPU}.disaggregation.enabled=true": ["disaggregation.enabled=True: it has no effect; remove it"],
    f"{GPU}.name=sglang controller.request_seeds=always": ["request_seeds=always", "deterministic"],
    "agents.carol.trainable=false credit=own +policies.carol.model.lora_adapter_path=x": [
        "lora_adapter_path=x",
        "merge",
    ],
    f"{JUDGE},modle:x}}": ["policies.carol.endpoint.modle", "Did you mean 'model'"],
    f"{JUDGE},timeout_s:0}}": ["endpoint.timeout_s=0.0", "above 0"],
    f"{JUDGE.replace('http://', '')}}}": ["base_url=localhost:1/v1", "expected an address"],
    f"{JUDGE},api_key_env:UNSET_JUDGE_KEY}}": ["api_key_env=UNSET_JUDGE_KEY", "not set"],
    f"{JUDGE}}} agents.carol.trainable=true": ["agent 'carol'", "set agents.carol.trainable=false"],
    f"determinism=strict {JUDGE}}}": ["policies.carol.endpoint", "determinism=null"],
    f"{JUDGE}}} +policies.carol.rollout.dtype=float32": ["policies.carol.rollout.dtype has no effect"],
}


BAD |= {
    "method=spin method.source=rows": ["method.source=rows", "from play"],
    "method=sft learner=mappo": ["learner=mappo with method=sft", "leave learner=grpo"],
    "method=dpo method.loss=ipo method.label_smoothing=0.1": ["label_smoothing=0.1", "method.loss=sigmoid"],
    "method=sft": ["no column 'messages' or 'answer'", "method.*_key"],
    "method=hybrid": ["method.files=[]", "parquet or jsonl"],
    "method=hybrid method.files=[${data.train_files}] learner=mappo trainer.critic_warmup=2": [
        "trainer.critic_warmup=2",
        "train no critic",
        "method=sft",
    ],
    "method=hybrid method.files=[${data.train_files}] learner=cory runner=pioneer_observer credit=auto": [
        "learner=cory",
        "exchange policies",
        "learner.exchange_every=0",
    ],
}


BAD_METHODS = {
    "method=sft actor_rollout_ref.actor.use_kl_loss=true": ["with method=sft", "no KL penalty"],
    "method=sft actor_rollout_ref.actor.ppo_mini_batch_size=16": ["ppo_mini_batch_size=16", "data.train_batch_size"],
    "method=rft judge.overlong_buffer=2": ["judge.overlong_buffer=2", "method=rft", "set it to 0"],
    "method=dpo method.compare_by=team judge.overlong_buffer=2": ["judge.overlong_buffer=2", "method=dpo"],
    "method=rft actor_rollout_ref.actor.ppo_epochs=2": ["ppo_epochs=2", "method.epochs=2"],
    "method=rft baseline=[solo]": ["baseline=['solo'] with method=rft", "method=rl"],
    "method=rft learner=cory": ["learner=cory with method=rft", "leave learner=grpo"],
    "method=dpo method.source=play actor_rollout_ref.rollout.n=1": ["rollout.n=1", "no contrast"],
    "method=dpo method.reference=false trainer.ref_update_freq=2": ["no reference to renew", "dpo, spin"],
    "method=madpo method.source=play actor_rollout_ref.rollout.n=1": ["rollout.n=1", "no contrast"],
    "method=madpo method.compare_by=own": ["compare_by=own with method=madpo", "method=dpo"],
    "method=madpo method.pairs_per_task=0": ["method.pairs_per_task=0", "whole number"],
    "method=sft method.from_agent=alice": ["method.from_agent=alice with method.source=rows", "method.source=episodes"],
    "method=sft method.target=team_answer": ["method.target=team_answer with method.source=rows", "leave it out"],
    "method=hybrid method.files=[${data.train_files}] method.target=team_answer": [
        "method.target=team_answer with method.imitates=rows",
        "leave it out",
    ],
    "method=rft method.target=team_answer method.from_agent=alice": ["nobody's turn", "leave one of them out"],
    "method=rft method.from_agent=[alice]": ["method.from_agent=['alice']", "a map of names"],
    "method=rft method.from_agent={alise:carol}": ["'alise' is no trained agent", "Did you mean 'alice'"],
    "method=rft method.from_agent={alice:carl}": [
        "names 'carl', who does not speak in this run",
        "Did you mean 'carol'",
    ],
    "method=sft method.peers_weight=0.5": ["method.peers_weight=0.5 with method.source=rows", "method.source=episodes"],
    "method=hybrid method.imitates=episodes method.files=[${data.train_files}] method.peers_weight=1 runner.foresee=true "
    "runner.foresee_request=who": ["runner.foresee_request='who'", "set both to the same text"],
    "method=world_model method.peers_weight=0": ["method.peers_weight=0", "above 0"],
    "method=world_model method.source=rows": ["method.source=rows", "from episodes or play"],
    "method=dpo method.beta=0": ["method.beta=0", "above 0"],
    "method=spin sharing=lora": ["method=spin", "lora_rank=0"],
    "method=spin actor_rollout_ref.ref.fsdp_config.model_dtype=bf16": [
        "ref.fsdp_config.model_dtype=bfloat16",
        "in float32",
        "set it to that of actor",
    ],
    "method=spin": [
        "train.parquet: 64 rows cannot be used:\n  row 0: ",
        "extra_info.answer is None",
        "reward_model.ground_truth",
    ],
    "method=spin method.reference=false": ["method.reference=false", "leave it true"],
    "method=sft method.answer_key=reward_model.ground_truth data.max_prompt_length=1": [
        "data.train_files: an example of agent 'alice' has",
        "allow 4",
        "leave it out",
    ],
    "method=dpo": ["no column 'chosen'", "method.*_key"],
    "method=sft method.source=episodes": ["train.parquet", "expected a dump", "method.source=rows"],
    "method=hybrid method.files=[none.jsonl]": ["method.files=none.jsonl", "no such file"],
    "method=hybrid method.sft_steps=120": ["method.sft_steps=120", "method=sft"],
    "method=hybrid method.imitates=play": ["method.imitates=play", "rows or episodes"],
}


@pytest.fixture(scope="module")
def bad(compose_config, cold_assets):
    """Each bad configuration, composed once."""
    composed = {}

    def bad(override):
        if override not in composed:
            words = [] if override == "agents={}" else re.split(r" (?=[+a-z_.0-9]+=)", override)
            composed[override] = compose_config(f"assets={cold_assets}", *words)
        return composed[override]

    return bad


def refusal(bad, override):
    with pytest.raises((ConfigError, HydraException, OmegaConfBaseException)) as caught:
        config = bad(override)
        check_keys(config)
        prepare(config)
    return explain(caught.value)


@pytest.mark.parametrize("override", [override for override in BAD if override != "agents={}"])
def test_wrong_input_is_refused_with_a_remedy(bad, override):
    said = refusal(bad, override)
    assert all(part in said for part in BAD[override]), said


@pytest.mark.slow
@pytest.mark.parametrize("override", BAD_METHODS)
def test_methods_name_the_remedy(bad, override):
    said = refusal(bad, override)
    assert all(part in said for part in BAD_METHODS[override]), said


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_out_of_its_range_is_refused(bad, key):
    config = copy.deepcopy(bad("seed=0"))
    OmegaConf.resolve(config)
    if OmegaConf.select(config, key, default=...) is ...:
        pytest.skip("another learner's")
    for value in ("abc", True, float("nan"), NUMBERS[key].low - 1.5):
        OmegaConf.update(config, key, value)
        if not NUMBERS[key].takes(value):
            with pytest.raises(ConfigError, match=rf"{re.escape(key)}=.*: expected"):
                check_values(config)


@pytest.mark.parametrize(
    "key,value",
    [
        ("agents.alice.stop", "[[x]]"),
        ("agents.alice.policy_by_round", "[{a:1}]"),
        ("learner.train_rounds", "[[x]]"),
        ("learner.group_by", "[[x]]"),
    ],
)
def test_a_list_of_plain_values_holds_no_list_and_no_group(bad, key, value):
    with pytest.raises(ConfigError, match=rf"{key}=\[.*: expected a list of plain values, as in {key}=\[a,b\]"):
        prepare(bad(f"{key}={value}"))


def test_every_rule_was_broken(bad):
    """A rule that no configuration above breaks is a rule without a test."""
    rules = {*RULES, *POLICY_RULES}
    for override in BAD:
        try:
            config = copy.deepcopy(bad(override))
            if override == "agents={}":
                with open_dict(config):
                    config.agents = {}
            OmegaConf.resolve(config)
            check_values(config)
        except (ConfigError, HydraException, OmegaConfBaseException):
            continue
        for rule in list(rules):
            try:
                rule(config)
            except ConfigError:
                rules.discard(rule)
    assert [f"{rule.__module__}.{rule.__name__}" for rule in rules] == []
