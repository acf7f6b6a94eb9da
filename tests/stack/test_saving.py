"""A run's folder over several starts: the last weights, metrics that are appended to, and other validation data."""

import json
import os
import random
import sys
import threading
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import init_empty_weights
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import get_fsdp_full_state_dict
from verl.workers.engine.fsdp import transformer_impl

from marl import checkpoint, marl_trainer
from marl.cluster.local import one_process
from marl.cluster.workers import live_state, lora, shard_files, whole_model
from marl.cluster.workers.shard_files import ShardFiles, described_in
from marl.config.errors import ConfigError
from marl.config.identity import identity_of
from marl.main import run
from marl.marl_trainer import MARLTrainer
from marl.utils import folders, manifest
from marl.utils.pickles import read
from marl.utils.trees import copied
from tests.stack.builders import ADAPTED, ADAPTERS
from tests.stack.conftest import SMALL


def logged(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_is_kept_resumed_and_measured_on_other_data(alone, cold_assets, tmp_path, monkeypatch, caplog):
    """One after another: a run without save_freq, the same command again, one more step, and its weights on another file."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "foreign.jsonl"))
    resumed = ("trainer.resume_mode=auto", "trainer.logger=[file]")

    first = alone("trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.logger=[file]")
    record = json.dumps(identity_of(first.trainer.config), default=str)
    (tmp_path / "run.json").write_text(record)  # as `marl.main.run` leaves it
    first.wait(first.trainer.fit())
    assert [folder.name for folder in folders.complete(tmp_path)] == ["global_step_1"]
    assert (tmp_path / "global_step_1" / "alice" / "actor" / "huggingface" / "model.safetensors").is_file()
    assert (tmp_path / "global_step_1" / "run.json").read_text() == record, "a checkpoint knows whose it is"
    assert logged(tmp_path) == [0, 1] and not (tmp_path / "foreign.jsonl").exists()

    again = alone(*resumed, "trainer.total_training_steps=1")
    again.wait(again.trainer.fit())
    assert "nothing to do: already at step 1 of 1" in caplog.text and logged(tmp_path) == [0, 1]

    changed = ("actor_rollout_ref.actor.optim.lr=5e-4", "actor_rollout_ref.actor.optim.weight_decay=0.5")
    further = alone(*resumed, *changed, "trainer.total_training_steps=2", "trainer.val_before_train=false")
    further.wait(further.trainer.fit())
    (group,) = further.trainer.policies["alice"].workers.worker.actor.engine.optimizer.param_groups
    assert group["lr"] == pytest.approx(5e-4 * 2 / 5) and group["weight_decay"] == 0.5, (
        "as they are set now, in warm-up"
    )
    assert logged(tmp_path) == [0, 1, 2] and sorted(further.trainer.history) == [0, 1, 2]
    summary = (tmp_path / "summary.json").read_text()
    assert (tmp_path / "validation" / "2.jsonl").is_file()
    validated = (tmp_path / "validation" / "2.jsonl").read_text()

    other_file = (f"data.val_files={cold_assets}/train.parquet", "data.val_max_samples=4", "trainer.val_only=true")
    other = alone(*resumed, *other_file, "trainer.total_training_steps=2")
    other.wait(other.trainer.fit())
    assert sorted(other.trainer.history) == [2], "numbers of other problems stand apart"
    folder = tmp_path / f"validation_{other.trainer.validation_id}"
    accuracy = json.loads((folder / "summary.json").read_text())["accuracy"]
    assert accuracy["before"] == accuracy["after"] and (folder / "curves.png").is_file()
    assert (tmp_path / "summary.json").read_text() == summary, "the run's own summary stays"
    assert (tmp_path / "validation" / "2.jsonl").read_text() == validated
    assert (tmp_path / "validation" / folder.name / "2.jsonl").is_file()
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{folder.name}/team/vote" in last["data"] and not any(key.startswith("val/") for key in last["data"])


@pytest.mark.slow
def test_a_last_validation_that_failed_is_done_on_resume(alone, tmp_path, monkeypatch):
    one_step = ("trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.logger=[file]")

    async def fail(self):
        raise RuntimeError("the judge is gone")

    first = alone(*one_step)
    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="the judge is gone"):
        broken.setattr(MARLTrainer, "validate", fail)
        first.wait(first.trainer.fit())
    assert [folder.name for folder in folders.complete(tmp_path)] == ["global_step_1"]
    assert logged(tmp_path) == [1] and not (tmp_path / "summary.json").exists()

    again = alone(*one_step, "trainer.resume_mode=auto")
    again.wait(again.trainer.fit())
    assert sorted(again.trainer.history) == [1] and logged(tmp_path) == [1, 1]
    trained, validated = [json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert "timing_s/step" in trained and "val/team/vote" in validated
    sealed = manifest.verify(tmp_path / "global_step_1")["metrics"]
    assert sealed["val/team/vote"] == validated["val/team/vote"] and "timing_s/step" in sealed, "keep_best compares it"
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1


@pytest.mark.slow
def test_a_resumed_run_counts_the_seconds_before_it_and_its_process_once(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(marl_trainer, "process_seconds", lambda: 100.0)
    first = alone()
    first.trainer.earlier_seconds, first.trainer.step_number = 1e6, 1
    first.wait(first.trainer.save())
    again = alone("trainer.resume_mode=auto")
    again.wait(again.trainer.resume())
    again.wait(again.trainer.validate())
    monkeypatch.setattr(marl_trainer, "process_seconds", lambda: 130.0)
    again.trainer.summarise()
    assert json.loads((tmp_path / "summary.json").read_text())["seconds"] == pytest.approx(1e6 + 130, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ADAPTED, ("learner=qmix", "credit=team")], ids=["own", "adapters", "mixer"])
def test_a_checkpoint_holds_its_own_step_though_it_is_written_during_the_next(alone, tmp_path, options):
    """The writer is held until the next step has changed weights, moments, schedules and the mixer."""
    gate, live = threading.Event(), alone(*options)
    live.step()
    shard_files.THREAD.submit(gate.wait)
    live.wait(live.trainer.save(wait=False))
    expected = kept_of(live)
    live.step()
    assert not folders.complete(tmp_path) and not same(kept_of(live), expected)
    gate.set()
    live.wait(live.trainer.saving.flush())
    again = alone(*options, "trainer.resume_mode=auto")
    again.wait(again.trainer.resume())
    assert again.trainer.step_number == 1 and same(kept_of(again), expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("learner=mappo",), ADAPTED], ids=["critic", "adapters"])
def test_a_checkpoint_that_is_written_at_once_is_there_when_the_ranks_return(alone, tmp_path, options):
    live = alone(*options, "trainer.save_in_background=false")
    live.step()
    groups = [*live.trainer.policies.items(), *live.trainer.critics.groups.items()]
    marks = [mark for name, group in groups for mark in live.wait(group.save(tmp_path / "saved" / name, False))]
    assert len(marks) == len(groups) and all(json.loads(mark.read_text())["error"] == "" for mark in marks)
    live.wait(live.trainer.save())
    again = alone(*options, "trainer.resume_mode=auto")
    again.wait(again.trainer.resume())
    assert again.trainer.step_number == 1 and same(kept_of(again), kept_of(live))


@pytest.mark.slow
def test_a_run_that_goes_on_ends_what_killed_saves_began(alone, tmp_path, monkeypatch):
    """Kills before a save has pruned leave one more each, and a disk that they fill would fail the next save; the tracker may name
    an earlier one. Neither a validation nor a rewound run touches them."""
    live = alone("trainer.max_actor_ckpt_to_keep=1")
    monkeypatch.setattr(checkpoint.Kept, "prune", lambda kept, root, whole=None: None)
    for step in range(3):
        live.trainer.step_number = step + 1
        live.wait(live.trainer.save())
    monkeypatch.undo()
    (tmp_path / folders.TRACKER).write_text("1")
    validated = ("trainer.resume_mode=auto", "trainer.val_only=true")
    rewound = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_2")
    for options, left, newest in (
        (validated, [1, 2, 3], "1"), (rewound, [1, 2, 3], "1"), (("trainer.resume_mode=auto",), [3], "3"),
    ):  # fmt: skip
        again = alone("trainer.max_actor_ckpt_to_keep=1", *options)
        again.wait(again.trainer.resume())
        assert [step for step, _ in folders.named(tmp_path)] == left
        assert (tmp_path / folders.TRACKER).read_text() == newest


def kept_of(live):
    """Copies of what a step changes."""
    engines = [group.workers.worker.actor.engine for group in live.trainer.policies.values()]
    engines += [group.workers.worker.engine for group in live.trainer.critics.groups.values()]
    weights = [[p.to_local().detach().clone() for p in engine.module.parameters()] for engine in engines]
    parts = [
        [engine.adapter_state(name) for name in engine.adapters]
        if hasattr(engine, "adapters")
        else [engine.optimizer.state_dict(), engine.lr_scheduler.state_dict()]
        for engine in engines
    ]
    return copied([weights, parts, live.trainer.learner.state_dict(), live.trainer.tasks.state_dict()])


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(*(getattr(tensor, "_local_tensor", tensor) for tensor in (one, other)))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return all(map(same, one, other)) and len(one) == len(other) if isinstance(one, list | tuple) else one == other


def of_the_process():
    """Settings that every thread computes by."""
    module = torch.nn.Module
    functions = (module.register_parameter, module.register_buffer, torch.empty, torch.zeros, torch.ones, torch.full)
    return torch.get_default_dtype(), functions, warnings.showwarning, list(warnings.filters), os.getcwd()


@pytest.fixture
def changes():
    """Changes of the process, seen at any call of the thread that looked."""
    before, seen = of_the_process(), []

    def watch(frame, event, argument):
        if of_the_process() != before:
            seen.append(frame.f_code.co_qualname)

    return SimpleNamespace(watch=watch, seen=seen)


def test_writing_a_model_changes_nothing_that_a_step_computes_by(tmp_path, tiny_model, changes):
    """It is done beside the next step: no draw, no dtype, no method of torch's, and not its configuration."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), model.config.to_dict()
    shell = whole_model.shell_of(model.config, tmp_path, False, torch.bfloat16)
    job = partial(whole_model.write_into, shell, tmp_path, dict(model.state_dict()))
    sys.setprofile(changes.watch)
    try:
        job()
    finally:
        sys.setprofile(None)
    assert changes.seen == [] and model.config.to_dict() == before[3]
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))


@pytest.fixture
def shard_file(tiny_model, tmp_path):
    """The writer of the files of a rank that is alone, on a CPU, and the live model."""
    with one_process():
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters())
        contents = OmegaConf.create({"save_contents": ["model", "hf_model"], "load_contents": ["model"]})
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        yield ShardFiles(FSDPCheckpointManager(model, optimizer, None, tokenizer, contents)), model


@pytest.mark.parametrize("beside", [True, False])
def test_a_write_beside_the_next_step_has_what_was_there_before(shard_file, tmp_path, beside):
    files, model = shard_file
    files.beside, weight = beside, model.get_output_embeddings().weight.to_local()
    before = weight.detach().clone()
    files.save_checkpoint(str(tmp_path))
    files.release()
    with torch.no_grad():
        weight += 1.0
    for job in files.taken():
        job()
    saved = read(tmp_path / "model_world_size_1_rank_0.pt")["lm_head.weight"].to_local()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface", dtype=torch.float32).lm_head.weight
    assert torch.equal(saved, before if beside else before + 1) and torch.equal(whole, saved)


def test_a_save_writes_nothing_in_its_call_but_the_first(shard_file, tmp_path):
    files, _ = shard_file
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        files.save_checkpoint(str(folder))
        written = [*folder.rglob("*")]
        for job in files.taken():
            job()
    assert not written and described_in(tmp_path / "second") == described_in(tmp_path / "first") != {}


@pytest.mark.slow
def test_an_optimizers_step_and_everybody_who_writes_shards_release_them_first(alone, tmp_path, monkeypatch):
    """A policy's and a critic's step, a reference and a target that are exchanged, a checkpoint that is loaded."""
    live = alone("trainer.ref_update_freq=1", "actor_rollout_ref.actor.use_kl_loss=true", "learner=mappo")
    live.step()
    group = live.trainer.policies["alice"]
    worker, critic = group.workers.worker, next(iter(live.trainer.critics.groups.values())).workers.worker
    files = worker.actor.engine.checkpoint_manager
    with monkeypatch.context() as patch:
        patch.setattr(transformer_impl, "load_fsdp_model_to_gpu", None)  # a CPU's weights are where they are read
        live.wait(group.save(tmp_path / "saved", False))

    def held_until(change, files=files):
        files.beside = True
        files.save_checkpoint(str(tmp_path / "other"))
        jobs, states = files.taken(), [state() for state in files.live]
        assert jobs and any(state.is_live for state in states)
        change()
        return not files.live and not any(state.is_live for state in states)

    optimizer = worker.actor.engine.optimizer
    assert held_until(optimizer.step)
    assert held_until(worker.exchange_reference)
    assert held_until(lambda: worker.load_checkpoint(str(tmp_path / "saved")))
    assert held_until(critic.renew_target, critic.engine.checkpoint_manager)
    assert held_until(critic._exchange_target, critic.engine.checkpoint_manager)
    assert held_until(critic.engine.optimizer.step, critic.engine.checkpoint_manager)


@pytest.mark.slow
def test_merged_adapters_release_the_weights_first(alone, tmp_path):
    """Merging changes them in place, and is undone before anybody could see it."""
    live = alone("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=true")
    engine = next(iter(live.trainer.policies.values())).workers.worker.actor.engine
    engine.checkpoint_manager.save_checkpoint(str(tmp_path / "other"))
    jobs, states = engine.checkpoint_manager.taken(), [state() for state in engine.checkpoint_manager.live]
    assert jobs and any(state.is_live for state in states)
    assert list(lora.merged_parameters(engine))
    assert not any(state.is_live for state in states)


def test_gathered_weights_that_are_copies_are_not_copied_again(shard_file, tmp_path, monkeypatch):
    """As on several ranks."""
    files, model = shard_file
    monkeypatch.setattr(files, "world_size", 2)
    gathered = {name: weight.clone() for name, weight in get_fsdp_full_state_dict(model).items()}
    monkeypatch.setattr(files, "_whole_model", lambda _: dict(gathered))
    files.save_checkpoint(str(tmp_path))
    files.release()
    *_, written, live = files.taken()[-1].args
    assert written and all(weight is gathered[name] for name, weight in written.items()) and live.state == {}


def test_a_rank_that_is_alone_has_the_weights_that_several_gather(shard_file):
    files, model = shard_file
    own, gathered = files._whole_model(model.state_dict()), get_fsdp_full_state_dict(model)
    assert gathered and own.keys() == gathered.keys()
    assert all(type(own[name]) is type(weight) and torch.equal(own[name], weight) for name, weight in gathered.items())


@pytest.mark.parametrize("when", ["at the next update", "at once, as on a GPU"])
def test_a_weight_of_a_rank_that_is_alone_is_copied_once(shard_file, tmp_path, monkeypatch, when):
    files, _ = shard_file
    if when != "at the next update":
        monkeypatch.setattr(live_state, "SMALL", 1 << 40)
    files.save_checkpoint(str(tmp_path))
    shard, whole = (state() for state in files.live)
    assert shard.is_live == whole.is_live == (when == "at the next update")
    files.release()
    copies = {name: weight.to_local().data_ptr() for name, weight in shard.state.items()}
    assert whole.state and {name: weight.data_ptr() for name, weight in whole.state.items()}.items() <= copies.items()


def test_a_shard_that_changes_without_a_release_is_an_error_of_the_save(shard_file, tmp_path):
    files, model = shard_file
    files.optimizer = torch.optim.AdamW(model.parameters())
    files.save_checkpoint(str(tmp_path))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    files.optimizer.step()
    with pytest.raises(RuntimeError, match="changed while a checkpoint was reading them"):
        files.taken()[0]()


def test_states_live_as_long_as_the_jobs_that_write_them(shard_file, tmp_path):
    files, _ = shard_file
    for number in range(3):
        files.save_checkpoint(str(tmp_path / str(number)))
        assert len(files.live) == 2 and all(state() for state in files.live)
        shard_files._write(tmp_path / str(number), 0, files.taken())
        assert not any(state() for state in files.live)
    files.save_checkpoint(str(tmp_path / "full"))
    jobs = files.taken()
    shard_files.write(tmp_path / "full", 0, [lambda: (tmp_path / "absent" / "file").read_bytes(), *jobs])
    del jobs
    shard_files.THREAD.submit(int).result()
    assert not any(state() for state in files.live), "a save that failed holds nothing"


def test_tied_weights_of_a_shard_are_both_parts(shard_file, tmp_path):
    """The copy that a whole model takes is a plain tensor; FSDP reads back a DTensor."""
    files, model = shard_file
    model.lm_head.weight = model.get_input_embeddings().weight
    files.save_checkpoint(str(tmp_path))
    files.taken()[0]()
    saved = read(tmp_path / "model_world_size_1_rank_0.pt")
    tied = [saved[name] for name in ("lm_head.weight", "model.embed_tokens.weight")]
    assert all(isinstance(weight, DTensor) for weight in tied)
    one, other = (weight.to_local() for weight in tied)
    assert torch.equal(one, other) and one.data_ptr() == other.data_ptr(), "written once"


def test_every_checkpoint_has_the_same_files_beside_its_weights(shard_file, tmp_path):
    """verl writes them once, and the model's shell is built once."""
    files, _ = shard_file
    seen = []
    for name in ("first", "second", "third"):
        files.save_checkpoint(str(tmp_path / name))
        for job in files.taken():
            job()
        paths = [path for path in (tmp_path / name).rglob("*") if path.is_file() and path.suffix != ".pt"]
        seen.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in paths})
    whole = {f"huggingface/{name}" for name in ("config.json", "tokenizer.json", "model.safetensors")}
    assert whole | {"fsdp_config.json"} <= set(seen[0])
    assert seen[1] == seen[0] and seen[2] == seen[0]


CRITIC = ("learner=mappo", "critic.checkpoint.save_contents=[model,optimizer,extra,hf_model]")


@pytest.mark.slow
@pytest.mark.parametrize("options", [CRITIC, ADAPTED, ADAPTERS], ids=["critic", "adapters", "lora"])
def test_no_part_of_a_checkpoint_that_is_written_beside_a_step_changes_the_process(alone, tmp_path, options, changes):
    live, gate = alone(*options), threading.Event()
    shard_files.THREAD.submit(gate.wait)
    shard_files.THREAD.submit(sys.setprofile, changes.watch)
    live.wait(live.trainer.save(wait=False))
    gate.set()
    live.wait(live.trainer.saving.flush())
    shard_files.THREAD.submit(sys.setprofile, None).result()
    assert changes.seen == []
    models = list((tmp_path / "global_step_0").rglob("huggingface/model.safetensors"))
    assert len(models) == len(live.trainer.policies) + len(live.trainer.critics.groups)


@pytest.mark.slow
def test_the_error_of_a_save_ends_the_run_at_the_next_one(alone, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    live = alone("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.val_before_train=false")
    monkeypatch.setattr(shard_files.torch, "save", full)
    with pytest.raises(OSError, match="alice.*No space left on device"):
        live.wait(live.trainer.fit())
    assert live.trainer.step_number == 2 and not folders.named(tmp_path) and not list(tmp_path.glob(".tmp_*"))


SAVED, READ = (f"actor_rollout_ref.actor.checkpoint.{name}_contents" for name in ("save", "load"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "contents,said",
    [
        ((f"{SAVED}=[model,extra]",), r"load_contents=\['model', 'extra'\]: alice/actor of .*global_step_1.* without its optimizer"),
        ((f"{SAVED}=[extra,optimizer,hf_model]",), r"alice/actor of .*global_step_1 would go on without its model"),
        ((f"{SAVED}=[model,extra]", f"{READ}=[model,optimizer,extra]"), r"global_step_1 holds no optimizer of alice/actor.*model.path"),
    ],
)  # fmt: skip
def test_a_run_does_not_go_on_without_its_optimizer_or_its_weights(
    compose_config, cold_assets, tmp_path, contents, said
):
    """It would go on with those that it began with. Another run is not refused, and a validation needs the weights alone."""
    keys = [f"assets={cold_assets}", f"trainer.default_local_dir={tmp_path}", "resources.one_process=true", *SMALL[:3]]
    keys += ["trainer.save_freq=1", "trainer.test_freq=-1", "trainer.val_before_train=false", "learner=grpo"]
    run(compose_config(*keys, *contents, "trainer.total_training_steps=1"))
    with pytest.raises(ConfigError, match=said):
        run(compose_config(*keys, *contents, "trainer.total_training_steps=2"))
    if contents[0] == f"{SAVED}=[model,extra]":
        weights = (f"{READ}=[model]", f"trainer.resume_changes=[{READ}]")
        run(compose_config(*keys, contents[0], *weights, "trainer.val_only=true"))


@pytest.mark.slow
def test_a_rebuilt_run_does_not_go_on_without_its_optimizer(alone):
    """After a fault, from a checkpoint that it has saved itself."""
    live = alone(f"{SAVED}=[model,extra]", "trainer.resume_mode=auto")
    live.step()
    live.wait(live.trainer.save())
    with pytest.raises(ConfigError, match=r"global_step_1 would go on without its optimizer"):
        live.wait(live.trainer.resume())


def test_a_merged_model_is_written_once_while_another_is_built(alone, tmp_path):
    """Building a model's shell changes, for the whole process, how modules take their weights: nothing is tied beside it."""
    worker = alone("sharing=lora").trainer.policies["alice"].workers.worker
    jobs = worker._exports_of_whole_model("alice", tmp_path / "huggingface")
    with init_empty_weights():
        for job in jobs:
            job()
    names = set(load_file(tmp_path / "huggingface" / "model.safetensors"))
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
