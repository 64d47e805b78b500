"""The ops' short path: functions of their schemas' parameters by position.

Each function returns None for a call that it cannot take, because of a mode, a subclass or an argument of another type.
Such a call goes through torch.ops, which reads schema and arguments itself. A compiler must not see these functions.
:func:`call` chooses the right path. ``recorded`` does not belong to an op: see `gradients.recorded`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    """The op's function of all its schema's arguments by position."""
    if function_of is None:
        return lambda *arguments: None
    return function_of(op._schema.name, op._schema.overload_name)


# Called after each call that is not traced, with its op, group, arguments and results: see overlap_torch._tune.first_calls.
behind_calls: Callable[..., None] | None = None


def call(
    short: Callable[..., Any],
    op: torch._ops.OpOverload,
    group: Group,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """Calls ``op``, by its short path if that takes the arguments.

    ``keywords``: all keyword parameters of the schema, in its order, except the group.
    """
    name = group if type(group) is str else group_name(group)
    if is_dynamo_compiling():
        return op(*arguments, **keywords, group=name)
    results = short(*arguments, *keywords.values(), name)
    if results is None:
        dtensor.make_ops_known()
        _check_types(op, (*arguments, *keywords.values()))
        results = op(*arguments, **keywords, group=name)
    if behind_calls is not None:
        behind_calls(op, name, (*arguments, *keywords.values()), results)
    return results


def _check_types(op: torch._ops.OpOverload, values: tuple[Any, ...]) -> None:
    """Raises TypeError for a value that the operator's schema does not take."""
    for argument, value in zip(op._schema.arguments, values, strict=False):
        kind = str(argument.type)
        listed, optional = kind.startswith("List"), "Optional" in kind
        each = value if listed and isinstance(value, (list, tuple)) else [value]
        if "Tensor" in kind:
            right = all(isinstance(one, torch.Tensor) or (one is None and optional) for one in each)
        elif kind in ("int", "List[int]"):
            # Dtypes are numbers in a schema.
            right = all(hasattr(one, "__index__") or isinstance(one, torch.dtype) for one in each)
        else:
            continue
        if not right or listed != (each is value):
            wanted = ("tensor" if "Tensor" in kind else "number") + (" or None" if optional else "")
            given = type(value).__name__
            if each is value:
                given += f" with {', '.join(dict.fromkeys(type(one).__name__ for one in each))}"
            raise TypeError(
                f"{op._schema.name.partition('::')[2]}: {argument.name} must be a {'list, each a ' if listed else ''}{wanted}, "
                f"but it is a {given}"
            )
