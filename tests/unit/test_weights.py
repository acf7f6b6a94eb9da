"""Weights reach another process unchanged, and are not copied on their way."""

import pickle

import pytest
import torch

from marl.rollout.weights import Weights

TENSORS = {
    "whole": torch.randn(64, 32),
    "half": torch.randn(3, 5, 7).to(torch.bfloat16),
    "turned": torch.randn(6, 8).t(),
    "strided": torch.randn(10, 4)[::2, 1],
    "number": torch.tensor(3, dtype=torch.long),
    "trained": torch.nn.Parameter(torch.randn(2, 2)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_with_its_values_type_and_shape(name):
    arrived = pickle.loads(pickle.dumps(Weights({name: TENSORS[name]}), protocol=5))
    assert type(arrived) is dict and list(arrived) == [name]
    assert arrived[name].dtype == TENSORS[name].dtype and arrived[name].shape == TENSORS[name].shape
    assert torch.equal(arrived[name], TENSORS[name])


def test_weights_travel_beside_the_pickle_and_are_shared():
    weight, buffers = torch.randn(256, 256), []
    said = pickle.dumps(Weights(weight=weight), protocol=5, buffer_callback=buffers.append)
    assert len(said) < 1024 and sum(len(buffer.raw()) for buffer in buffers) == weight.nbytes
    arrived = pickle.loads(said, buffers=buffers)["weight"]
    assert arrived.data_ptr() == weight.data_ptr()
