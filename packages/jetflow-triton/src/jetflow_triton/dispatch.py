"""Registration of the ops with torch: the twin on the CPU, the Triton kernel on a GPU, a shape function for the rest.

The public functions call their twin directly for CPU tensors, which saves the dispatcher's time; they go through the
registered op for GPU tensors and while `torch.compile` traces, which then sees one opaque node with known shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("jetflow", "DEF")


def register(
    schema: str,
    twin: Callable[..., Any],
    kernel: str,
    shape: Callable[..., Any],
) -> torch._ops.OpOverload:
    """Defines `jetflow::<name>`.

    Args:
        schema: name, arguments and results in the dispatcher's notation.
        twin: runs on the CPU.
        kernel: `module.function` below `jetflow_triton.kernels`; imported on the first call with GPU tensors.
        shape: returns empty results for given arguments.

    Returns:
        The op, callable.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, twin, "CPU")
    _LIBRARY.impl(name, _Lazy(kernel), "CUDA")
    torch.library.register_fake(f"jetflow::{name}", shape, lib=_LIBRARY)
    return getattr(torch.ops.jetflow, name).default


def register_gradient(op: torch._ops.OpOverload, save: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Makes `op` differentiable: `save(ctx, inputs, output)`, then `backward(ctx, *gradients)`."""
    torch.library.register_autograd(op, backward, setup_context=save, lib=_LIBRARY)


def uses_op(x: Tensor) -> bool:
    """Whether a public function goes through its registered op rather than straight to the twin."""
    return x.is_cuda or torch.compiler.is_compiling()


class _Lazy:
    """A kernel launcher, imported when it is first called."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._launch: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._launch is None:
            module, function = self._path.split(".")
            try:
                self._launch = getattr(import_module(f"jetflow_triton.kernels.{module}"), function)
            except ModuleNotFoundError as error:
                if error.name != "triton":
                    raise
                raise ImportError("Tensors on a GPU need the package triton: install it, or use the CPU") from error
        assert self._launch is not None
        return self._launch(*args)
