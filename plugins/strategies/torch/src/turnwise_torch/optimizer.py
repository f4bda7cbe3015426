"""AdamW on fp32 master weights: what is accumulated, clipped and stepped is fp32, whatever the model computes in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

STATE = ("exp_avg", "exp_avg_sq", "step")


class MasterAdamW:
    """AdamW (Loshchilov & Hutter 2019) over the trainable parameters of a model.

    A parameter of 32 or 64 bits is its own master, also one that is sharded over ranks (a DTensor). For a 16-bit one an
    fp32 copy is kept:
    `accumulate` adds each micro-batch's gradient to the copy's in fp32, `step` moves the copy and rounds it into the
    parameter. Parameters of one dimension (norms, biases) are not decayed.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        betas: tuple[float, ...],
        eps: float,
        weight_decay: float,
        masters: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`masters`: fp32 starting values by name, for parameters that were loaded with fewer bits than their file
        has."""
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.dtype.itemsize >= 4:
                self.masters[name] = parameter
            else:
                start = parameter if masters is None else masters[name]
                self.masters[name] = start.detach().to(parameter.device, torch.float32, copy=True).requires_grad_()
        decayed = [m for m in self.masters.values() if m.ndim > 1]
        others = [m for m in self.masters.values() if m.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        # The rate comes with every step: schedules belong to the pipeline.
        self._adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=(betas[0], betas[1]), eps=eps)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Take the gradients of one micro-batch off the 16-bit parameters."""
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if parameter is master or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    def clip(self, max_norm: float) -> float:
        """The norm of all gradients, which are then scaled down to `max_norm` (0: never). May be NaN or infinite."""
        # A limit of infinity scales nothing and still gives the norm.
        norm = nn.utils.clip_grad_norm_(list(self.masters.values()), max_norm or float("inf"))
        # Of sharded gradients the norm is a DTensor of partial sums.
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self, lr: float) -> None:
        """One update at this learning rate, rounded into the model; gradients are cleared."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.clear()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Copy the masters into the 16-bit parameters."""
        for name, master in self.masters.items():
            if self.parameters[name] is not master:
                self.parameters[name].copy_(master)

    def clear(self) -> None:
        """Drop all gradients."""
        for name, master in self.masters.items():
            master.grad = None
            self.parameters[name].grad = None

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name (`master/…`, `exp_avg/…`, `exp_avg_sq/…`, `step/…`); moments exist after the
        first step."""
        out = {f"master/{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            out |= {f"{key}/{name}": value for key, value in self._adamw.state.get(master, {}).items()}
        return out

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Undo `state`, masters in place; the moments' tensors are taken over. A missing master is a KeyError, another
        shape a RuntimeError."""
        for name, master in self.masters.items():
            master.copy_(state[f"master/{name}"])
            # torch keeps the step count on the CPU, wherever the parameter is.
            moments = {key: state[f"{key}/{name}"] for key in STATE if f"{key}/{name}" in state}
            self._adamw.state[master] = {
                key: value if key == "step" else value.to(master.device) for key, value in moments.items()
            }
        self.clear()
        self.round()

    @torch.no_grad()
    def move(self, device: torch.device) -> None:
        """Take 16-bit models' masters and all moments to `device` (the model moves its own parameters)."""
        for name, master in self.masters.items():
            if self.parameters[name] is not master:
                # The tensor stays the same object, for the optimizer's state is keyed by it.
                master.data = master.data.to(device)
            moments = self._adamw.state.get(master, {})
            moments |= {key: value.to(device) for key, value in moments.items() if key != "step"}
