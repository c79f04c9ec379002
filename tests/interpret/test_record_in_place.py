"""What is recorded of a softmax is its own result, whatever is written over it afterwards."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.errors import InputError
from regard.interpret.record import record

KINDS = ("weights", "mean", "received", "entropy", "largest_logit")


def dropout_in_place(a, s):
    return nn.functional.dropout(a, 0.5, True, inplace=True)


def doubled(a, s):
    a.mul_(2)
    return a


def doubled_by_operator(a, s):
    a *= 2
    return a


def set_by_index(a, s):
    a[..., 0] = 0
    return a


def through_a_view(a, s):
    a.view(-1).zero_()
    return a


def by_out(a, s):
    torch.mul(a, 3, out=a)
    return a


def logits_zeroed(a, s):
    s.zero_()
    return a


def logits_overwritten_through_a_view(a, s):
    s.mT.copy_(torch.randn(s.mT.shape))
    return a


ON_WEIGHTS = (
    dropout_in_place,
    doubled,
    doubled_by_operator,
    set_by_index,
    through_a_view,
    by_out,
)
ON_LOGITS = (logits_zeroed, logits_overwritten_through_a_view)


class Written(nn.Module):
    """softmax(x xᵀ) x, with `change` between the softmax and the product."""

    def __init__(self, change, merged=False):
        super().__init__()
        self.change = change
        self.merged = merged

    def forward(self, x):
        x = x[:, :, 0].flatten(0, 1) if self.merged else x
        s = x @ x.mT
        a = s.softmax(-1)
        return self.change(a, s) @ x


def by_hand(x):
    """Weights (…, n, n) and logits in float64."""
    logits = np.asarray(x, np.float64) @ np.asarray(x, np.float64).swapaxes(-1, -2)
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True), logits


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("change", ON_WEIGHTS + ON_LOGITS)
def test_changes_in_place_do_not_reach_the_recording(change, inference):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 4)
    model = Written(change)
    weights, logits = by_hand(x)
    entropy = -(weights * np.log(weights)).sum(-1)
    largest = logits.max((-1, -2))
    with torch.inference_mode(inference), record(model, keep=KINDS) as seen:
        model(x)
    found = seen["Written"]
    np.testing.assert_allclose(found.weights, weights, atol=1e-6)
    np.testing.assert_allclose(found.mean, weights.mean(1), atol=1e-6)
    np.testing.assert_allclose(found.received, weights.mean(2), atol=1e-6)
    np.testing.assert_allclose(found.entropy, entropy, atol=1e-5)
    if change in ON_LOGITS:
        assert found.largest_logit.isnan().all()
    else:
        np.testing.assert_allclose(found.largest_logit, largest, atol=1e-5)
    with torch.inference_mode(inference), record(model, queries=[4, 0], images=1) as chosen:
        model(x)
    np.testing.assert_allclose(chosen["Written"].weights, weights[:1, :, [4, 0]], atol=1e-6)


def test_dropout_in_place_as_a_module_and_heads_merged_into_the_batch():
    class Merged(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5, inplace=True)

        def forward(self, x):
            x = x.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1)  # b n (g d) -> (b g) n d
            return torch.bmm(self.drop(torch.bmm(x, x.mT).softmax(-1)), x)

    x = torch.randn(3, 5, 8)
    model = Merged().train()
    with torch.no_grad(), record(model, keep=("weights", "entropy")) as seen:
        model(x)
    weights, _ = by_hand(x.unflatten(2, (2, -1)).transpose(1, 2))
    np.testing.assert_allclose(seen["Merged"].weights, weights, atol=1e-6)
    entropy = -(weights * np.log(weights)).sum(-1)
    np.testing.assert_allclose(seen["Merged"].entropy, entropy, atol=1e-5)


def test_a_softmax_written_over_its_own_logits():
    class Over(nn.Module):
        def forward(self, x):
            s = x @ x.mT
            return torch.softmax(s, -1, out=s) @ x

    x = torch.randn(2, 3, 5, 4)
    model = Over()
    with record(model, keep=KINDS) as seen:
        model(x)
    weights, _ = by_hand(x)
    np.testing.assert_allclose(seen["Over"].weights, weights, atol=1e-6)
    entropy = -(weights * np.log(weights)).sum(-1)
    np.testing.assert_allclose(seen["Over"].entropy, entropy, atol=1e-5)
    assert seen["Over"].largest_logit.isnan().all()


def test_weights_and_logits_both_written_over_are_refused_where_they_are_wanted():
    def both(a, s):
        s.zero_()
        return a.mul_(2)

    model = nn.Sequential(Written(both), Written(lambda a, s: a))
    x = torch.randn(2, 3, 5, 4)
    with pytest.raises(InputError, match="0 writes over both its logits"), record(model):
        model(x)
    with record(model, layers=-1) as seen:
        out = model(x)
    assert list(seen) == ["1"]
    assert torch.equal(out, model(x))
    np.testing.assert_allclose(seen["1"].weights, by_hand(model[0](x))[0], atol=1e-6)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_logit_that_overflowed_is_told(value):
    class Written(nn.Module):
        def forward(self, x):
            s = (x @ x.mT).clone()
            s[0, 0, 0, 0] = value
            return s.softmax(-1) @ x

    model = Written()
    with record(model, keep="largest_logit") as seen:
        model(torch.randn(2, 1, 4, 4))
    found = seen["Written"].largest_logit
    assert found[0, 0] == torch.inf if value == torch.inf else found[0, 0].isnan()
    assert found[1].isfinite().all()


def test_writes_over_other_tensors_are_none_of_these():
    class Written(nn.Module):
        def forward(self, x):
            a = (x @ x.mT).softmax(-1)
            x.clone().relu_()
            return a @ x

    model, x = Written(), torch.randn(2, 1, 4, 4)
    with torch.inference_mode(), record(model) as seen:
        model(x)
    torch.testing.assert_close(seen["Written"].weights, (x @ x.mT).softmax(-1))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode(), record(model) as seen:
        model(torch.randn(2, 1, 4, 4))
    assert seen["Written"].weights.shape == (2, 1, 4, 4)
