"""The optimizer of an engine on a CPU steps all parameters in one call, unless its settings say how."""

from types import SimpleNamespace

import pytest
import torch
from verl.workers.config.optimizer import FSDPOptimizerConfig

from marl.platform.engine import CPUEngineWithLMHead, CPUEngineWithValueHead
from marl.platform.optimizers import fused, optimizer_of

SETTINGS = {"lr": 0.1, "weight_decay": 0.5, "betas": (0.9, 0.95)}


@pytest.mark.parametrize("engine", [CPUEngineWithLMHead, CPUEngineWithValueHead])
def test_a_fused_step_is_adamws(engine):
    torch.manual_seed(0)
    module = torch.nn.Linear(64, 64)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    built = engine._build_optimizer(SimpleNamespace(optimizer_config=FSDPOptimizerConfig(**SETTINGS)), module)
    assert built.param_groups[0]["fused"]
    gradients = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.grad = gradients[name]
    built.step()
    for name, parameter in module.named_parameters():  # of a first step the bias corrections leave the gradient's sign
        g = gradients[name].double()
        expected = before[name].double() * (1 - 0.1 * 0.5) - 0.1 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [{"fused": False}, {"foreach": True}, {"capturable": True}])
def test_settings_that_say_how_to_step_are_left_alone(own):
    config = FSDPOptimizerConfig(**SETTINGS, override_optimizer_config=own)
    assert fused(config) is config


def test_others_settings_stay_and_an_optimizer_without_a_fused_step_is_left_alone():
    config = FSDPOptimizerConfig(**SETTINGS, override_optimizer_config={"eps": 1.0})
    assert fused(config).override_optimizer_config == {"eps": 1.0, "fused": True}
    assert config.override_optimizer_config == {"eps": 1.0}
    for others in ({"optimizer": "Adamax"}, {"optimizer": "AdamW8bit", "optimizer_impl": "bitsandbytes.optim"}):
        config = FSDPOptimizerConfig(**SETTINGS, **others)
        assert fused(config) is config


def test_parameters_of_another_device_step_as_torch_has_it():
    parameters = [torch.nn.Parameter(torch.empty(3, device="meta"))]
    assert optimizer_of(parameters, FSDPOptimizerConfig(**SETTINGS)).param_groups[0]["fused"] is None
