"""The options of the runtime `ray`."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen, validators

from turnwise.contracts.runtime import RuntimeCapabilities
from turnwise.devices import visible_gpus


@frozen
class RayConfig:
    """`address` None: a cluster of our own on this machine, stopped with the run; else that of a running one ("auto",
    "host:port").

    `device`: what the numbers of `device_mapping` are. `auto` and `gpu`: GPUs of the cluster; `cpu`: as many processes
    without one. With `auto` a role without `device_mapping` runs without a GPU where the cluster has none.
    `start_timeout`: seconds for the cluster, for a place in it and for a process to come up. `env_workers`: processes
    that play episodes (0: the driver plays them). `max_restarts`: how often a sampling engine or an environment worker
    is replaced. `env_worker_timeout`: seconds for which an environment worker may answer nothing. `cpus_per_process`:
    CPUs that a process reserves on a cluster that is not our own. `log_to_driver`: what processes print appears here,
    with their names. `object_store_mb`: size of our own cluster's object store (None: Ray's choice).
    """

    address: str | None = None
    device: Literal["auto", "cpu", "gpu"] = "auto"
    start_timeout: float = field(default=300.0, validator=validators.gt(0))
    env_workers: int = field(default=0, validator=validators.ge(0))
    env_worker_timeout: float = field(default=600.0, validator=validators.gt(0))
    max_restarts: int = field(default=3, validator=validators.ge(0))
    cpus_per_process: float = field(default=1.0, validator=validators.ge(0))
    log_to_driver: bool = True
    object_store_mb: int | None = field(default=None, validator=validators.optional(validators.ge(80)))

    @property
    def capabilities(self) -> RuntimeCapabilities:
        """Numbers of `device_mapping` are GPUs of this machine, but not on CPU processes, nor where the cluster is
        elsewhere. A role without them gets one GPU, with `auto` only where there are any (unknown of a cluster that
        runs already)."""
        return RuntimeCapabilities(
            gpus=self.device != "cpu",
            counts_devices=self.device != "cpu" and self.address is None,
            least_devices=int(
                self.device == "gpu" or (self.device == "auto" and self.address is None and visible_gpus() > 0)
            ),
        )
