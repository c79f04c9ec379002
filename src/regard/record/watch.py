"""Sees every attention a model computes, and says which module computed it."""

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from regard.errors import InputError
from regard.layers.attend import attend
from regard.layers.observe import observers
from regard.record.builtin import Builtin, Refuse
from regard.record.calls import Call
from regard.record.fused import attend_call, fused_call
from regard.record.places import Places
from regard.record.products import (
    SOFTMAXES,
    Product,
    Softmax,
    after_writes,
    alias,
    is_product,
    product,
)
from regard.record.tokens import Tokens

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
