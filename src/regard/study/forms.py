"""The forms that a study compares: those of QK norm, none, and none with a soft cap."""

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.layers.qk_norm import FORMS as NORMS
from regard.layers.transformer import Attention
from regard.models.create import create

#: In the order in which they are shown: without, the control, with.
FORMS = ("none", "cap", *NORMS)

NAMES = {
    "none": "no QK norm",
    "cap": "soft cap",
    "unit": "unit norm",
    "rms": "RMS norm",
    "layer": "layer norm",
}

#: Largest absolute logit under the soft cap; that of Gemma 2 (arXiv 2408.00118).
CAP = 50.0


def soft_cap(logits: Tensor, cap: float = CAP) -> Tensor:
    """cap · tanh(logits / cap): within (-cap, cap), nearly the identity far inside."""
    return cap * torch.tanh(logits / cap)


class CappedAttention(Attention):
    """Attention without QK norm whose logits pass through `soft_cap`.

    The control of a study: it bounds the logits as QK norm does, and normalises nothing. It
    writes its softmax out, all n × n of it, and is meant for small models only.
    """

    writes_softmax = True  # which a recorder must look for; our other attention calls `attend`

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries_keys_values(x)
        logits = soft_cap(self.scale * torch.matmul(q, k.mT))  # b g n d, b g m d -> b g n m
        heads = torch.matmul(torch.softmax(logits, dim=-1), v)
        return self.out(heads.transpose(1, 2).flatten(2))  # b g n d -> b n (g d)


def check_form(form: str) -> None:
    """Refuse what is no form."""
    if form not in FORMS:
        raise InputError(f"there is no form {form!r} of QK norm; forms are {', '.join(FORMS)}")


def build(form: str, arguments: dict[str, object], seed: int) -> nn.Module:
    """The model of `create(**arguments)` in one form, its weights drawn from `seed`.

    With one seed all forms start from the same weights: norms draw nothing.
    """
    check_form(form)
    torch.manual_seed(seed)
    model = create(**{**arguments, "qk_norm": form if form in NORMS else None})  # type: ignore[arg-type]
    if form == "cap":
        for module in model.modules():
            if type(module) is Attention:
                module.__class__ = CappedAttention
    return model
