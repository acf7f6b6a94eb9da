"""Losses of methods: every number is worked out by hand, every derivative is compared with autograd's."""

import asyncio
import math
import re
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from marl.cluster.workers import critic_worker, policy_loss
from marl.cluster.workers.policy_loss import linear_loss
from marl.methods import losses
from marl.methods.losses import PreferenceLoss, preference_loss, preference_slope
from tests.method_rows import method, rows_of, two_pairs

SIGMOID, IPO, HINGE = PreferenceLoss.sigmoid, PreferenceLoss.ipo, PreferenceLoss.hinge


def test_log_ratios_sum_the_trained_tokens_of_every_pair_and_side():
    expected = torch.tensor([[-0.5, 0.3], [0.4, -0.6]]).double()
    torch.testing.assert_close(losses.log_ratios(two_pairs()), expected, atol=1e-6, rtol=0)


def test_sides_may_have_several_rows_in_any_order():
    rows = two_pairs()
    order = torch.tensor([3, 1, 0, 2])
    shuffled = TensorDict(
        {key: torch.nested.as_nested_tensor([value.unbind()[i] for i in order], layout=torch.jagged) if value.is_nested else value[order]
         for key, value in rows.items()}, batch_size=[4],
    )  # fmt: skip
    torch.testing.assert_close(losses.log_ratios(shuffled), losses.log_ratios(rows))
    split = rows_of([[-1.0], [-0.5], [-0.7]], [[1], [1], [1]], [7, 7, 7], [0, 0, 1])
    torch.testing.assert_close(losses.log_ratios(split), torch.tensor([[-1.5, -0.7]]).double())


def test_without_a_reference_the_ratios_are_the_log_probs():
    rows = two_pairs()
    del rows["ref_log_prob"]
    torch.testing.assert_close(losses.log_ratios(rows), torch.tensor([[-1.5, -0.7], [-1.6, -2.0]]).double())


@pytest.mark.parametrize(
    ("kind", "margin", "beta", "smoothing", "loss", "slope"),
    [
        # log 2, and half of beta; sigmoid(ln 3) = 3/4
        (SIGMOID, 0.0, 0.1, 0.0, math.log(2), -0.05),
        (SIGMOID, math.log(3) / 0.5, 0.5, 0.0, math.log(4 / 3), -0.125),
        (SIGMOID, -math.log(3) / 0.5, 0.5, 0.0, math.log(4), -0.375),
        # .9 log(4/3) + .1 log 4, and .5 (.1 * 3/4 - .9 * 1/4) = -.075
        (SIGMOID, math.log(3) / 0.5, 0.5, 0.1, 0.9 * math.log(4 / 3) + 0.1 * math.log(4), -0.075),
        # (2 - 1 / .5)^2 = 0; (3 - 2)^2 = 1, 2 * 1; (-1 - 2)^2 = 9, 2 * -3
        (IPO, 2.0, 0.25, 0.0, 0.0, 0.0),
        (IPO, 3.0, 0.25, 0.0, 1.0, 2.0),
        (IPO, -1.0, 0.25, 0.0, 9.0, -6.0),
        # 1 - .5 * 1 = .5; beyond 1 / beta nothing
        (HINGE, 1.0, 0.5, 0.0, 0.5, -0.5),
        (HINGE, 2.5, 0.5, 0.0, 0.0, 0.0),
        (HINGE, -2.0, 0.5, 0.0, 2.0, -0.5),
    ],
)
def test_preference_losses_by_hand(kind, margin, beta, smoothing, loss, slope):
    margin_P = torch.tensor([margin], dtype=torch.float64)
    assert float(preference_loss(kind, margin_P, beta, smoothing)) == pytest.approx(loss, abs=1e-9)
    assert float(preference_slope(kind, margin_P, beta, smoothing)) == pytest.approx(slope, abs=1e-9)


@pytest.mark.parametrize("kind", list(PreferenceLoss))
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_slopes_are_the_derivatives(kind, smoothing):
    margin_P = torch.linspace(-7.9, 8.3, 19).double().requires_grad_()
    preference_loss(kind, margin_P, 0.3, smoothing).sum().backward()
    torch.testing.assert_close(preference_slope(kind, margin_P.detach(), 0.3, smoothing), margin_P.grad)


def test_gradients_of_a_pair_raise_the_chosen_and_lower_the_rejected():
    """Two pairs, beta .5, sigmoid: slopes -.5 sigmoid(.4) and -.5 sigmoid(-.5), halved by the mean; no untrained token."""
    gradients = method("dpo", beta=0.5).gradients(two_pairs())
    first, second = (0.25 / (1 + math.exp(x)) for x in (-0.4, 0.5))
    expected = [-first, -first, 0.0, first, -second, -second, second]
    torch.testing.assert_close(gradients.values(), torch.tensor(expected))


def test_measures_of_pairs():
    """beta .5; margins -.8 and 1: one of two is right; rewards .5 (-.5 + .4) / 2 and .5 (.3 - .6) / 2."""
    found = method("dpo", beta=0.5).measure(two_pairs())
    loss = (math.log(1 + math.exp(0.4)) + math.log(1 + math.exp(-0.5))) / 2
    expected = {
        "loss": loss,
        "preference_accuracy": 0.5,
        "preference_margin": 0.05,
        "chosen_reward": -0.025,
        "rejected_reward": -0.075,
    }
    assert found == pytest.approx(expected, abs=1e-7)


def test_as_beta_vanishes_the_loss_is_log_2_and_the_gradient_half_of_beta_times_the_difference():
    beta = 1e-6
    tiny = method("dpo", beta=beta)
    assert tiny.measure(two_pairs())["loss"] == pytest.approx(math.log(2), abs=1e-5)
    signs = torch.tensor([1, 1, 0, -1, 1, 1, -1.0])
    torch.testing.assert_close(tiny.gradients(two_pairs()).values() / (beta / 2), -signs / 2, atol=1e-5, rtol=0)


def test_spin_has_dpos_loss():
    one, other = method("spin", beta=0.3), method("dpo", beta=0.3)
    assert one.measure(two_pairs()) == other.measure(two_pairs())
    assert torch.equal(one.gradients(two_pairs()).values(), other.gradients(two_pairs()).values())


def test_likelihood_is_a_mean_over_tokens_not_rows():
    """Trained log-probs -1, -.5, -.7, -.6, -1, -2: the mean is -5.8 / 6."""
    sft, rows = method("sft"), two_pairs()
    assert sft.measure(rows) == pytest.approx({"loss": 5.8 / 6, "perplexity": math.exp(5.8 / 6)}, rel=1e-6)
    expected = torch.tensor([-1, -1, 0, -1, -1, -1, -1]) / 6
    torch.testing.assert_close(sft.gradients(rows).values(), expected)


class Workers:
    """Placeholder for a policy's workers: log-probs that a step changes."""

    def __init__(self):
        self.calls, self.shift = [], 0.0

    async def compute_log_prob(self, rows):
        self.calls.append("log_probs")
        column = torch.nested.nested_tensor_from_jagged(
            rows["base"].values() + self.shift, offsets=rows["base"].offsets()
        )
        return TensorDict({"log_probs": column}, batch_size=[len(rows)])

    async def compute_ref_log_prob(self, rows):
        self.calls.append("reference")
        return TensorDict({"log_probs": rows["base"]}, batch_size=[len(rows)])

    async def descend(self, rows, last):
        self.calls.append("last" if last else "step")
        self.gradients = rows["gradients"].values().clone()
        self.shift += 1.0
        return {"loss": -1.0, "grad_norm": 1.0}


def descended(rows, dp_size):
    """Gradient of the linear loss by the log-probs of some rows."""
    log_probs = rows["log_probs"].values().clone().requires_grad_()
    ragged = torch.nested.nested_tensor_from_jagged(log_probs, offsets=rows["log_probs"].offsets())
    loss, _ = linear_loss({"log_probs": ragged}, rows | {"dp_size": dp_size})
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return gradient


def test_ranks_that_share_a_batch_descend_the_whole_batchs_loss(monkeypatch):
    """Two ranks have half of the rows each; verl takes the mean of their gradients."""
    monkeypatch.setattr(policy_loss, "of_responses", lambda values, data: values)
    whole = {key: list(two_pairs()[key].unbind()) for key in ("log_probs", "response_mask")}
    whole["gradients"] = list(method("dpo").gradients(two_pairs()).unbind())

    def rows(part):
        return {key: torch.nested.as_nested_tensor(own[part], layout=torch.jagged) for key, own in whole.items()}

    halves = [descended(rows(part), dp_size=2) for part in (slice(0, 2), slice(2, 4))]
    alone = descended(rows(slice(0, 4)), dp_size=1)
    assert alone.abs().sum() > 0
    torch.testing.assert_close(torch.cat(halves) / 2, alone)


def test_what_is_not_trained_may_be_infinite():
    """A log-prob of -inf, as of a token that a tool wrote, times a mask of 0 would be NaN in the loss, its metrics and its gradient."""
    plain, marked = two_pairs(), two_pairs()
    outside = marked["response_mask"].values() == 0
    assert outside.any()
    marked["log_probs"].values()[outside] = -torch.inf
    assert torch.equal(losses.log_ratios(marked), losses.log_ratios(plain))
    assert losses.mean_loss(marked) == losses.mean_loss(plain)


def test_a_linear_loss_is_of_what_its_mask_reads(monkeypatch):
    """2 * -1 + 3 * -.5, of two ranks' mean: -7; the third position is masked out. The same with values of a critic."""
    monkeypatch.setattr(policy_loss, "of_responses", lambda values, data: values)
    monkeypatch.setattr(critic_worker, "read_values", lambda values, data: values)
    read = torch.tensor([-1.0, -0.5, -torch.inf], requires_grad=True)
    given = torch.nested.nested_tensor_from_jagged(read, offsets=torch.tensor([0, 3]))
    mask, gradients = (
        torch.nested.as_nested_tensor([torch.tensor(x)], layout=torch.jagged) for x in ([1, 1, 0], [2.0, 3.0, 5.0])
    )
    data = {"response_mask": mask, "value_mask": mask, "gradients": gradients, "dp_size": 2}
    for function, key in ((linear_loss, "log_probs"), (critic_worker.linear_loss, "values")):
        loss, _ = function({key: given}, data)
        assert loss.item() == -7.0 and torch.autograd.grad(loss, read)[0].tolist() == [4.0, 6.0, 0.0]


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("sft", ["step", "last"]),
        ("dpo", ["reference", "log_probs", "step", "log_probs", "last"]),
    ],
)
def test_every_pass_has_derivatives_of_its_own_weights(name, calls):
    rows, workers = two_pairs(), Workers()
    rows["base"] = rows["log_probs"]
    found = asyncio.run(method(name, epochs=2).update({"a": rows}, {"a": workers}))
    assert workers.calls == calls
    assert found["a"]["trained_tokens"] == 6 and found["a"]["grad_norm"] == 1
    if name == "dpo":
        # all log-ratios were 0, then 1 for every token: the margin is 2 - 1 and 2 - 1
        assert found["a"]["preference_margin"] == pytest.approx(0.1)
        assert found["a"]["loss"] == pytest.approx(math.log(1 + math.exp(-0.1)))


def test_the_documents_own_method_is_one_class():
    """Each token counts by its probability: -e^-1 / 6, … and 0 is plain SFT."""
    (code,) = re.findall(r"```python\n(.*?)```", Path("docs/methods.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(code.replace('@register_method("weighted_sft")\n', ""), names)  # no option for other tests
    own, rows = names["WeightedSFT"], two_pairs()
    expected = [
        -math.exp(x) / 6 * on for x, on in zip((-1, -0.5, -9, -0.7, -0.6, -1, -2), (1, 1, 0, 1, 1, 1, 1), strict=True)
    ]
    torch.testing.assert_close(own(own.Config(name="own")).gradients(rows).values(), torch.tensor(expected))
    plain = own(own.Config(name="own", share=0.0)).gradients(rows).values()
    torch.testing.assert_close(plain, method("sft").gradients(rows).values())
