"""The ops' short path: functions of their schemas' arguments by position, as a tuple, and of the last one, the group's name.

Each function returns None for a call that it cannot take, because of a mode, a subclass or an argument of another type.
Such a call goes through torch.ops, which reads schema and arguments itself. A compiler must not see these functions.
:class:`Op` chooses the right path. ``recorded`` does not belong to an op: see `gradients.recorded`.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch.compiler import is_dynamo_compiling

from overlap_torch._ops import dtensor
from overlap_torch._ops.group import Group, group_name

try:
    from overlap_torch._eager import function_of, recorded
except ImportError:  # built for another Python
    function_of = None

    def recorded(outputs: Any, keeps_gradients: bool) -> Any:
        """Stands in where `_eager` is not built: the outputs keep their Python node."""
        return outputs


def is_seen(*tensors: torch.Tensor) -> bool:
    """True if a mode, a subclass, a compiler or a profiler has to see a call of these as an operator."""
    return bool(
        any([type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors])
        or is_dynamo_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd._profiler_enabled()
    )


def short_path(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The op's function of a tuple, which is all its schema's arguments except the last, and of that."""
    if function_of is None:
        return lambda *arguments: None
    return function_of(op._schema.name, op._schema.overload_name)


# Called after each call that is not traced, with its op, group, arguments and results: see overlap_torch._tune.first_calls.
behind_calls: Callable[..., None] | None = None


class Op:
    """An operator whose last parameter is the group. A call takes the short path if that takes the arguments."""

    def __init__(self, overload: torch._ops.OpOverload) -> None:
        self.overload, self.short = overload, short_path(overload)
        arguments = overload._schema.arguments
        self.positional = sum(not argument.kwarg_only for argument in arguments)
        self.keywords = [argument.name for argument in arguments[self.positional :]]

    def call(self, group: Group, *arguments: Any) -> Any:
        """``arguments``: all of the schema's, in its order, except the group."""
        name = group if type(group) is str else group_name(group)
        if is_dynamo_compiling():
            return self._by_torch(*arguments, name)
        results = self.short(arguments, name)
        if results is None:
            dtensor.make_ops_known()
            _check_types(self.overload, arguments)
            results = self._by_torch(*arguments, name)
        if behind_calls is not None:
            behind_calls(self.overload, name, arguments, results)
        return results

    def _by_torch(self, *arguments: Any) -> Any:
        keywords = dict(zip(self.keywords, arguments[self.positional :], strict=True))
        return self.overload(*arguments[: self.positional], **keywords)


# Types of a schema, by a part of their names, in this order: what they take, in words and as classes.
_KINDS = {
    "Tensor": ("tensor", torch.Tensor),
    "int": ("number", (SupportsIndex, torch.dtype)),  # dtypes are numbers in a schema
    "bool": ("bool", bool),
    "str": ("string", str),
    "float": ("number", numbers.Real),
}


def _check_types(op: torch._ops.OpOverload, values: tuple[Any, ...]) -> None:
    """Raises TypeError for a value that the operator's schema does not take."""
    for argument, value in zip(op._schema.arguments, values, strict=False):
        kind = str(argument.type)
        listed, optional = kind.startswith("List"), "Optional" in kind
        each = value if listed and isinstance(value, (list, tuple)) else [value]
        wanted, types = next(known for name, known in _KINDS.items() if name in kind)
        right = all(isinstance(one, types) or (one is None and optional) for one in each)
        if not right or listed != (each is value):
            wanted += " or None" if optional else ""
            given = type(value).__name__
            if each is value:
                given += f" with {', '.join(dict.fromkeys(type(one).__name__ for one in each))}"
            raise TypeError(
                f"{op._schema.name.partition('::')[2]}: {argument.name} must be a {'list, each a ' if listed else ''}{wanted}, "
                f"but it is a {given}"
            )
