"""Requests that are no use are refused, and layers that cannot be read only where wanted."""

import pytest
import torch
from torch import nn

from regard.errors import InputError
from regard.interpret.record import record
from regard.interpret.relevance import class_relevance
from regard.models.registry import create


class Two(nn.Module):
    """An attention that cannot be read, then one that can."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.b = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.a(x, x, x)[0]
        return self.b(x, x, x)[0]


@pytest.mark.parametrize("options", [{"add_zero_attn": True}, {"add_bias_kv": True}])
def test_layers_that_cannot_be_read_are_refused_where_they_are_wanted(options):
    model, x = Two(**options), torch.randn(2, 5, 8)
    for layers in (None, "a", 0, -2, ["b", "a"]):
        with (
            pytest.raises(InputError, match=r"a is an nn\.Multi.*Choose other layers by layers="),
            record(model, layers=layers),
        ):
            model(x)
    for layers in ("b", 1, -1):
        with record(model, layers=layers) as seen:
            out = model(x)
        assert torch.equal(out, model(x))
        assert list(seen) == ["b"]
        y = model.a(x, x, x)[0]
        own = model.b(y, y, y, average_attn_weights=False)[1]
        torch.testing.assert_close(seen["b"].weights, own.detach())


def test_relevance_refuses_an_attention_that_cannot_be_read():
    class Classifier(Two):
        def forward(self, images):
            return super().forward(images.flatten(2).mT).mean(1)

    model = Classifier(add_zero_attn=True)
    with pytest.raises(InputError, match=r"a is an nn\.MultiheadAttention with bias_k"):
        class_relevance(model, torch.randn(2, 8, 3, 3), 1)


def small():
    return create("simple-vit-nano/4", num_classes=3, image_size=8)


@pytest.mark.parametrize(
    "classes",
    ["cat", ["cat", "dog"], [0, 1, 2], [0], torch.tensor([1]), torch.zeros(2, 2).long(),
     1.5, True, [True, False], 3, -1, [0, 3], object()],
)  # fmt: skip
def test_odd_classes_are_refused(classes):
    needed = "(?s)classes=.*: give an integer from 0 to 2, or one for each of 2 images"
    with pytest.raises(InputError, match=needed):
        class_relevance(small(), torch.zeros(2, 3, 8, 8), classes)


@pytest.mark.parametrize("classes", [2, [2, 0], torch.tensor([2, 0]), torch.tensor(1)])
def test_classes_for_all_or_for_each_image(classes):
    found = class_relevance(small(), torch.zeros(2, 3, 8, 8), classes)
    assert torch.equal(found.classes, torch.as_tensor(classes).expand(2))


@pytest.mark.parametrize("options", [
    {"queries": [True]}, {"queries": [(0, False)]}, {"layers": {0: 1}},
    {"layers": {"blocks": True}}, {"layers": [True]}, {"layers": True},
])  # fmt: skip
def test_truth_values_and_mappings_are_no_queries_and_no_layers(options):
    name = next(iter(options))
    with pytest.raises(InputError, match=f"{name}.*give"), record(small(), **options):
        pass


@pytest.mark.parametrize("keep", ["entropy", ("received", "entropy"), ["largest_logit"]])
def test_queries_without_anything_that_has_rows_are_refused(keep):
    message = "queries choose rows of 'weights' or 'mean', and keep has neither: "
    with pytest.raises(InputError, match=message), record(small(), queries=[0], keep=keep):
        pass
