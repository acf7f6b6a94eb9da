import pytest

from marl.utils.metrics import NotFinite, must_be_finite


@pytest.mark.parametrize("key,value", [("loss", float("nan")), ("grad_norm", float("inf"))])
def test_a_nonfinite_number_is_named_with_its_owner(key, value):
    must_be_finite("policy", {"alice": {"loss": 1.0, "grad_norm": 2.0}, "bob": {}}, 7)
    with pytest.raises(NotFinite, match=f"critic 'central', step 7: {key} is {value}.*optim.lr"):
        must_be_finite("critic", {"central": {"loss": 1.0, key: value}}, 7)
