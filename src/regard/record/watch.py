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

from regard.layers.attend import attend
from regard.layers.observe import observers
from regard.record.builtin import Builtin
from regard.record.calls import Call, attend_call, fused_call
from regard.record.products import SOFTMAXES, Product, Softmax, alias, is_product, product
from regard.record.tokens import Tokens, find_layout, with_grid

#: Takes a module's name, its layout of queries and of keys, and the call.
Receive = Callable[[str, Tokens, Tokens, Call], None]

ATTENTION_LIKE = re.compile("attention|attn", re.IGNORECASE)


class Watch(TorchFunctionMode):
    """While entered, hands every attention inside `model` to `receive`.

    Four roads lead to an attention: `regard.attend`, which tells its observers;
    `torch.nn.functional.scaled_dot_product_attention`, and a softmax whose result is multiplied
    with values, which a function mode sees; and torch.nn's own attention modules, whose fast path
    that mode would switch off, so that their `forward` runs outside it and their queries and keys
    are projected once more. A model of our modules and torch's alone is spared the mode, which
    costs at every operation. Nothing the model computes is changed. Module names come from hooks
    common to all modules: the model has none of its own.
    """

    def __init__(
        self, model: nn.Module, receive: Receive, *, grid: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.receive = receive
        self.grid = grid
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
        self._seen: dict[tuple[int, int], None] = {}
        self._layouts: dict[Any, Tokens] = {}
        self._images: Tensor | None = None
        self._batch: int | None = None
        self._softmax: Softmax | None = None
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Watch":
        self._cleanup.callback(register_module_forward_pre_hook(self._before).remove)
        after = register_module_forward_hook(self._after, always_call=True)
        self._cleanup.callback(after.remove)
        builtin = Builtin(self._report)
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
        self._softmax = self._images = None

    # Module names and grids

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        name = self.names.get(module)
        if name is None or in_backward():
            return
        first = next((a for a in args if isinstance(a, Tensor)), None)
        given_map = first if first is not None and first.ndim == 4 else None
        if not self._stack:
            self.called = True
            self._seen.clear()
            self._layouts.clear()
            self._images = given_map
            self._batch = None if first is None else first.shape[0]
        elif given_map is not None and self._more_pictures(given_map):
            self._images, self._batch = given_map, given_map.shape[0]
        self._stack.append((name, None if given_map is None else map_size(given_map)))
        if module in self._like:
            self.attention_like[name] = module

    def _more_pictures(self, given: Tensor) -> bool:
        """Whether the model made other views of the pictures (such as mirrored) beside them."""
        before = self._images
        return before is not None and given.shape[1:] == before.shape[1:] and given is not before

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module not in self.names or in_backward() or not self._stack:
            return
        self._stack.pop()
        if isinstance(output, Tensor) and output.ndim == 4:
            size = map_size(output)
            self._seen.pop(size, None)
            self._seen[size] = None  # the latest last

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
        elif self._softmax is not None:
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
        call = found.call(self._batch)
        if call is not None:
            self._report(self._stack[-1][0], call)

    def _report(self, name: str, call: Call) -> None:
        b, _, n, m = call.shape
        if self._images is not None and b != self._images.shape[0]:
            self.windowed.add(name)
            return
        with undisturbed(call.v.device.type):
            queries = self._layout(n)
            keys = queries if m == n else self._layout(m)
            self.receive(name, queries, keys, call.without_graph())

    def _layout(self, count: int) -> Tokens:
        if self.grid is not None:
            return with_grid(count, self.grid, self.model)
        enclosing = tuple(size for _, size in self._stack)
        key = count, enclosing, tuple(self._seen)
        if key not in self._layouts:
            self._layouts[key] = find_layout(count, self.model, self._images, enclosing, self._seen)
        return self._layouts[key]


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


def map_size(x: Tensor) -> tuple[int, int]:
    """(rows, columns) of a map (b, c, h, w)."""
    return x.shape[-2], x.shape[-1]


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
