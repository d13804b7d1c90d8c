"""Float32 master weights behind a head that computes in another precision."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class MasterWeights:
    """What the optimiser sees: `named`, a float32 tensor for every parameter.

    A float32 parameter is its own master. Any other gets a float32 copy that takes its gradients (`collect_gradients`, after
    every backward) and is rounded back into it (`publish`, after the optimiser's step), so that updates smaller than the
    parameter's rounding step, and gradients of many backward passes, add up instead of being lost.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self.named = {name: p if p.dtype is torch.float32 else p.detach().float() for name, p in parameters.items()}
        self._copies = [(self.named[name], p) for name, p in parameters.items() if p is not self.named[name]]

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        for tensor in (*self.named.values(), *self._parameters.values()):
            tensor.grad = None

    def collect_gradients(self) -> None:
        """Add every gradient to its master's, in float32."""
        for master, parameter in self._copies:
            if parameter.grad is not None:
                wide = parameter.grad.float()
                master.grad = wide if master.grad is None else master.grad.add_(wide)
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """The masters' gradients, to be changed in place; zeros where none arrived."""
        gradients: list[Tensor] = []
        for master in self.named.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            gradients.append(master.grad)
        return gradients

    @torch.no_grad()
    def publish(self) -> None:
        """Round every master into its parameter."""
        for master, parameter in self._copies:
            parameter.copy_(master)

    @torch.no_grad()
    def load(self, stored: Mapping[str, Tensor]) -> None:
        """Set masters and parameters to `stored`. Raises KeyError naming a tensor that is missing or has another shape."""
        for name, master in self.named.items():
            if name not in stored or stored[name].shape != master.shape:
                raise KeyError(name)
        for name, master in self.named.items():
            master.copy_(stored[name])
        self.publish()
