"""Saved states are read without executing anything, by us and by verl."""

import json
import os
import pickle
import zipfile
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
from torch.multiprocessing import spawn
from transformers import LlamaConfig

from marl.config.errors import ConfigError
from marl.evaluation.export import merge_shards
from marl.preflight.model_checks import check_weights
from marl.utils.pickles import FORCED, foreign_names, read, read_by_verl


def hostile(path, module, name, argument):
    """A state of torch's whose pickle calls ``module.name``, where a dotted name reaches into what the module has imported."""
    text = argument.encode()
    calls = b"c%s\n%s\nX%s%s\x85R." % (module.encode(), name.encode(), len(text).to_bytes(4, "little"), text)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x04" + calls)
        archive.writestr("archive/version", "3\n")


@pytest.mark.parametrize(
    "module,name", [("posix", "system"), ("torch.distributed._shard.api", "torch.os.system"), ("torch", "os.system")]
)
def test_a_function_is_found_and_not_called_also_by_a_dotted_name(tmp_path, module, name):
    path, victim = tmp_path / "model.pt", tmp_path / "victim"
    hostile(path, module, name, f"touch {victim}")
    assert foreign_names(path) == [f"{module}.{name}"]
    with pytest.raises(pickle.UnpicklingError):
        read(path)
    with read_by_verl(), pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=False)
    assert not victim.exists() and FORCED not in os.environ
    torch.load(path, weights_only=False)
    assert victim.exists()  # so the file is as harmful as it looks


@pytest.mark.parametrize("damage", ["hostile", "hostile and old", "cut short", "whole", "beside safetensors"])
def test_weights_in_a_pickle_are_looked_at_before_a_run_starts(tmp_path, damage):
    file, victim = tmp_path / "pytorch_model.bin", tmp_path / "victim"
    torch.save({"weight": torch.ones(2)}, file)
    if damage == "hostile":
        hostile(file, "posix", "system", f"touch {victim}")
    if damage == "hostile and old":
        file.write_bytes(pickle.dumps(os.system))
    if damage == "cut short":
        file.write_bytes(file.read_bytes()[:-200])
    if damage == "beside safetensors":
        file.write_bytes(b"not read")
        save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save(
        SimpleNamespace(lr=1), tmp_path / "training_args.bin"
    )  # as transformers' trainer leaves it, which nobody reads
    found = pytest.raises(
        ConfigError, match=r"^model.path=.*: pytorch_model.bin cannot be read as weights: .*safetensors"
    )
    with nullcontext() if damage in ("whole", "beside safetensors") else found:
        check_weights(SimpleNamespace(path=str(tmp_path)), "model")
    assert not victim.exists()


def save_of_fsdp1(rank, ranks, folder):
    """As verl does: the wrapper is given the mesh."""
    torch.distributed.init_process_group("gloo", f"file://{folder}/met", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    model = FullyShardedDataParallel(torch.nn.Linear(3, 4), device_mesh=mesh, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()):
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, f"{folder}/rank_{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_an_export_merges_no_hostile_shard(tmp_path):
    """verl's merger asks for ``weights_only=False``."""
    actor, victim = tmp_path / "actor", tmp_path / "victim"
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(actor / "huggingface")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    hostile(
        actor / "model_world_size_1_rank_0.pt", "torch.distributed._shard.api", "torch.os.system", f"touch {victim}"
    )
    with pytest.raises(ConfigError, match="cannot be merged.*weights_only"):
        merge_shards(actor, tmp_path / "whole")
    assert not victim.exists()


@pytest.mark.slow
def test_shards_of_fsdp1_are_read_as_others_are(tmp_path):
    spawn(save_of_fsdp1, (2, tmp_path), 2)
    paths = sorted(tmp_path.glob("rank_*.pt"))
    assert len(paths) == 2
    for path in paths:
        assert foreign_names(path) == []
        assert read(path)["model"]["weight"].shape == (4, 3)
