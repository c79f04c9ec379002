"""The calls that `attend` and torch's fused attention were."""

import contextlib
import functools
import inspect
import math
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from regard.errors import InputError
from regard.interpret.attention_call import Call
from regard.interpret.tokens import Places, Tokens
from regard.interpret.written_attention import (
    SOFTMAXES,
    Product,
    Softmax,
    after_writes,
    alias,
    is_product,
    product,
)
from regard.layers.attend import attend, observers


def fused_call(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """The call that a scaled_dot_product_attention was."""
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
    heads = query.shape[-3] if query.ndim > 2 else 1
    if enable_gqa:
        key = key.repeat_interleave(heads // key.shape[-3], -3)
        value = value.repeat_interleave(heads // value.shape[-3], -3)
    return attend_call(out, query, key, value, scale=scale, mask=mask, causal=is_causal)


def attend_call(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Call:
    """The call that an `attend` was: q, k, v (…, n, d) as (b, g, n, d)."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale

    def four(x: Tensor) -> Tensor:
        heads = x.shape[-3] if x.ndim > 3 else 1
        return x.reshape(-1, heads, *x.shape[-2:])

    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, v))
    device = q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    return Call(
        q=four(q),
        k=four(k),
        v=four(v),
        out=out,
        to_heads=four,
        scale=scale,
        mask=None if mask is None else mask_of_four(mask, q.shape[:-2]),
        causal=causal,
        merged=q.ndim == 3,
    )


def mask_of_four(mask: Tensor, lead: torch.Size) -> Tensor:
    """A mask that broadcasts to (b, g, n, m), of one that does to (*lead, n, m)."""
    while mask.ndim > len(lead) + 2:
        mask = mask[0]  # a dimension of 1 beyond those of the queries
    if mask.ndim < 3:
        return mask
    if len(lead) == 1:
        return mask.unsqueeze(1)  # b n m -> b 1 n m
    mask = mask[(None,) * (len(lead) + 2 - mask.ndim)]
    if any(size > 1 for size in mask.shape[:-3]):
        mask = mask.expand(*lead[:-1], *mask.shape[-3:])
    return mask.flatten(0, -4)


# torch.nn's own attention modules, whose fast path no function mode may touch.


Report = Callable[[str, Call], None]
Refuse = Callable[[str, InputError], None]
Forward = Callable[..., Any]
_MISSING = object()


class Builtin:
    """Lets nn.MultiheadAttention and nn.TransformerEncoderLayer report what they attend to.

    A module's `forward` is wrapped until `cleanup` closes; it runs with function modes off.
    """

    def __init__(self, report: Report, refuse: Refuse) -> None:
        self.report = report
        self.refuse = refuse
        self._ran: set[nn.Module] = set()

    def wrap(self, module: nn.Module, name: str, cleanup: contextlib.ExitStack) -> None:
        """Wrap `module` if it is one of the two."""
        if isinstance(module, nn.MultiheadAttention):
            _wrap(module, functools.partial(self._multihead, module, name), cleanup)
        elif isinstance(module, nn.TransformerEncoderLayer):
            _wrap(module, functools.partial(self._encoder_layer, module, name), cleanup)

    def _multihead(
        self, module: nn.MultiheadAttention, name: str, forward: Forward, given: dict[str, Any]
    ) -> Any:
        out = forward(**given)
        self._ran.add(module)
        self._report(module, name, out[0], **given)
        return out

    def _report(self, module: nn.MultiheadAttention, name: str, *args: Any, **given: Any) -> None:
        try:
            call = multihead_call(module, name, *args, **given)
        except InputError as error:
            self.refuse(name, error)
        else:
            self.report(name, call)

    def _encoder_layer(
        self, layer: nn.TransformerEncoderLayer, name: str, forward: Forward, given: dict[str, Any]
    ) -> Any:
        """The fast path never calls `self_attn`, so the layer reports for it."""
        self._ran.discard(layer.self_attn)
        out = forward(**given)
        if layer.self_attn not in self._ran:
            with torch.no_grad():
                x = layer.norm1(given["src"]) if layer.norm_first else given["src"]
            masks = {"attn_mask": given["src_mask"]}
            masks["key_padding_mask"] = given["src_key_padding_mask"]
            # The layer's result stands for its attention's: it has no graph, and NaN where that has
            self._report(layer.self_attn, f"{name}.self_attn", out, x, x, x, **masks)
        return out


def _wrap(module: nn.Module, watched: Callable[..., Any], cleanup: contextlib.ExitStack) -> None:
    forward = module.forward
    kept = module.__dict__.get("forward", _MISSING)
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        with torch._C.DisableTorchFunction():
            return watched(forward, bound.arguments)

    def restore() -> None:
        if kept is _MISSING:
            del module.forward
        else:
            module.forward = kept  # type: ignore[method-assign, assignment]

    module.forward = wrapped  # type: ignore[method-assign]
    cleanup.callback(restore)


@torch.no_grad()
def multihead_call(
    module: nn.MultiheadAttention,
    name: str,
    out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **_: Any,
) -> Call:
    """The call that nn.MultiheadAttention made of its arguments."""
    if module.bias_k is not None or module.add_zero_attn or query.is_nested:
        raise InputError(
            f"{name} is an nn.MultiheadAttention with bias_k, add_zero_attn or a nested tensor; "
            "its keys are no tokens of the input and cannot be read. Choose other layers by layers="
        )
    g = module.num_heads

    def tokens_first(x: Tensor) -> Tensor:
        """(b, n, c), whatever the module's own order."""
        x = x.unsqueeze(0 if module.batch_first else 1) if x.ndim == 2 else x
        return x if module.batch_first else x.transpose(0, 1)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(2, (g, -1)).transpose(1, 2)  # b n (g d) -> b g n d

    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (
        heads(linear(tokens_first(x), weight, bias))
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )

    def to_heads(gradient: Tensor) -> Tensor:
        return heads(tokens_first(gradient) @ module.out_proj.weight)

    mask = _additive(attn_mask)
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (-1, g))  # (b g) n m -> b g n m
    padding = _additive(key_padding_mask)
    if padding is not None:
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
        mask = padding if mask is None else mask + padding
    return Call(q=q, k=k, v=v, out=out, to_heads=to_heads, scale=q.shape[-1] ** -0.5, mask=mask)


def _additive(mask: Tensor | None) -> Tensor | None:
    """A mask to add to logits; in torch.nn's boolean ones True forbids."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, -torch.inf)


# Sees every attention a model computes, and says which module computed it.


#: Takes a module's name, its layout of queries and of keys, and the call.
Receive = Callable[[str, Tokens, Tokens, Call], None]

ATTENTION_LIKE = re.compile("attention|attn", re.IGNORECASE)


class Watch(TorchFunctionMode):
    """While entered, hands every attention inside `model` to `receive`, and a reason to `refuse`
    for each that cannot be read.

    Four roads lead to an attention: `regard.attend`, which tells its observers;
    `torch.nn.functional.scaled_dot_product_attention`, and a softmax whose result is multiplied
    with values, which a function mode sees; and torch.nn's own attention modules, whose fast path
    that mode would switch off, so that their `forward` runs outside it and their queries and keys
    are projected once more. A model of our modules and torch's alone is spared the mode, which
    costs at every operation. Nothing the model computes is changed. Module names come from hooks
    common to all modules: the model has none of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        receive: Receive,
        refuse: Refuse,
        *,
        grid: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.receive = receive
        self.refuse = refuse
        self.places = Places(model, grid)
        modules = [(m, name or type(model).__name__) for name, m in model.named_modules()]
        self.names = {m: name for m, name in modules if m is model or not is_plain(m)}
        classes: set[Any] = {type(m) for m, _ in modules}
        self._needs_mode = any(needs_mode(cls) for cls in classes)
        self._like = {m for m in self.names if ATTENTION_LIKE.search(type(m).__name__)}
        self._thread = threading.get_ident()
        self.called = False
        #: Modules that ran and whose class is called attention, by name.
        self.attention_like: dict[str, nn.Module] = {}
        self.windowed: set[str] = set()
        self._stack: list[tuple[str, tuple[int, int] | None]] = []
        self._softmax: Softmax | None = None
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Watch":
        self._cleanup.callback(register_module_forward_pre_hook(self._before).remove)
        after = register_module_forward_hook(self._after, always_call=True)
        self._cleanup.callback(after.remove)
        builtin = Builtin(self._report, self.refuse)
        for module, name in self.names.items():
            builtin.wrap(module, name, self._cleanup)
        observers.append(self._observe)
        self._cleanup.callback(observers.remove, self._observe)
        if self._needs_mode:
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._needs_mode:
            super().__exit__(*error)
        self._cleanup.close()
        self._stack.clear()
        self._softmax = self.places.images = None

    # Module names and grids

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        name = self.names.get(module)
        if name is None or in_backward():
            return
        first = next((a for a in args if isinstance(a, Tensor)), None)
        if not self._stack:
            self.called = True
            self.places.start(first)
        self._stack.append((name, self.places.given(first)))
        if module in self._like:
            self.attention_like[name] = module

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module not in self.names or in_backward() or not self._stack:
            return
        self._stack.pop()
        self.places.returned(module, output)

    # Attention

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._stack or in_backward():
            return out
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._report(self._stack[-1][0], fused_call(out, *args, **kwargs))
        elif func in SOFTMAXES:
            self._softmax = Softmax.of(out, *args, **kwargs)
        elif func is torch.nn.functional.linear:
            self.places.note(out)
        elif self._softmax is not None:
            self._softmax = after_writes(self._softmax, func, args, kwargs)
            if is_product(func):
                found = product(self._softmax, func, args, out)
                if found is not None:
                    self._softmax = None
                    self._report_product(found)
            else:
                self._softmax = alias(self._softmax, func, args, out)
        return out

    def _observe(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Attend, unobserved by this watch and unseen by its mode, and report it."""
        position = observers.index(self._observe)
        observers.pop(position)
        try:
            with torch._C.DisableTorchFunction():
                out = attend(q, k, v, **options)
        finally:
            observers.insert(position, self._observe)
        if self._stack and threading.get_ident() == self._thread and not in_backward():
            self._report(self._stack[-1][0], attend_call(out, q, k, v, scale=options["scale"]))
        return out

    def _report_product(self, found: Product) -> None:
        name = self._stack[-1][0]
        try:
            call = found.call(name)
        except InputError as error:
            self.refuse(name, error)
        else:
            self._report(name, call)

    def _report(self, name: str, call: Call) -> None:
        enclosing = tuple(size for _, size in self._stack)
        with undisturbed(call.v.device.type):
            own = self.places.of_images(call.without_graph())
            if own is None:
                return
            b, _, n, m = own.shape
            images = self.places.images
            if images is not None and b != images.shape[0]:
                self.windowed.add(name)
                return
            queries = self.places.layout(n, enclosing)
            keys = queries if m == n else self.places.layout(m, enclosing)
            self.receive(name, queries, keys, own)


def package(cls: type[nn.Module]) -> str:
    """The top-level package of a module's class."""
    return cls.__module__.partition(".")[0]


@functools.cache
def needs_mode(cls: type[nn.Module]) -> bool:
    """Whether modules of a class may attend by functions that only a mode sees."""
    return package(cls) not in ("torch", "regard") or getattr(cls, "writes_softmax", False)


def is_plain(module: nn.Module) -> bool:
    """Whether a module has no parts and neither attends nor says what the grid is."""
    cls: Any = type(module)
    return not module._modules and is_plain_leaf(cls)


@functools.cache
def is_plain_leaf(cls: type[nn.Module]) -> bool:
    """`is_plain` of modules of a class that have no parts."""
    plain = package(cls) == "torch" or issubclass(cls, (nn.Linear, nn.LayerNorm))
    return plain and not issubclass(cls, nn.Conv2d)


def in_backward() -> bool:
    """Whether autograd runs: a checkpointed forward is then being repeated."""
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def undisturbed(device_type: str) -> Iterator[None]:
    """No gradients, no autocast, no function mode: what is computed within is ours alone."""
    autocast = torch.is_autocast_enabled(device_type)
    with (
        torch.no_grad(),
        torch.autocast(device_type, enabled=False) if autocast else contextlib.nullcontext(),
        torch._C.DisableTorchFunction(),
    ):
        yield
