"""The cluster: started here or joined, and the places that devices have in it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from attrs import frozen
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from turnwise.errors import MachineError
from turnwise_ray.actors import RECORD_SECONDS, result
from turnwise_ray.config import RayConfig

SEAT = "turnwise_process"
"""The resource of our own cluster: its processes share the machine's cores as the operating system deals them."""
# More than processes can be.
SEATS = 10_000


@frozen
class Seat:
    """The place of one device: a bundle of a placement group, its node (id, address), and the GPU's number there (""
    without one).

    Roles that name the same device share its bundle."""

    group: PlacementGroup
    bundle: int
    node: str
    address: str
    gpu: str


class Cluster:
    """Joins or starts Ray at first use, and leaves or stops it at `close`."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._started = self._ours = False
        self._groups: list[PlacementGroup] = []
        # By device number: roles that name the same number take turns on it.
        self._seats: dict[int | str, Seat] = {}
        self._followers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Connect. Raises MachineError."""
        if self._started:
            return
        if not ray.is_initialized():
            self._thread = _Thread()
            await self._thread.run(
                self._init, self._config.start_timeout, "runtime ray: the cluster did not answer within start_timeout"
            )
            self._ours = True
        self._started = True

    def _init(self) -> None:
        config = self._config
        options: dict[str, Any] = {
            "include_dashboard": False,
            "log_to_driver": config.log_to_driver,
            "logging_level": "ERROR",
        }
        if config.address is None:
            options |= {"address": "local", "resources": {SEAT: SEATS}}
            if config.object_store_mb is not None:
                options["object_store_memory"] = config.object_store_mb * 2**20
        else:
            options["address"] = config.address
        # No telemetry; CUDA_VISIBLE_DEVICES is ours to set.
        for name in (
            "RAY_USAGE_STATS_ENABLED",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
        ):
            os.environ.setdefault(name, "0")
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError, AssertionError) as error:
            what = (
                "no cluster could be started"
                if config.address is None
                else f"no cluster answers at address {config.address!r}"
            )
            fix = (
                "look into /tmp/ray/session_latest/logs"
                if config.address is None
                else "ray start --head there, or remove the address"
            )
            raise MachineError(
                f"runtime ray: {what} ({type(error).__name__}: {' '.join(str(error).split())[:300]}). Fix: {fix}"
            ) from error

    def on_gpus(self, role: str, devices: Sequence[int]) -> bool:
        """Whether the processes of a role get GPUs. Raises MachineError where they should and the cluster has none."""
        device, found = self._config.device, int(ray.cluster_resources().get("GPU", 0))
        if device == "cpu" or (device == "auto" and not devices and not found):
            return False
        if not found:
            need = max(1, len(devices))
            raise MachineError(
                f"{role}: device_mapping needs {need} GPU{'s' if need > 1 else ''}, the cluster has none. "
                "Fix: a cluster with GPUs, or runtime: {use: ray, device: cpu}, where the numbers are processes"
            )
        return True

    async def seats(self, role: str, devices: Sequence[int], *, idle: bool = False) -> list[Seat]:
        """The seats of a role, one per device in their order; without devices, one. New ones are packed on as few nodes
        as hold them.

        `idle`: a process that computes nothing, and gets no GPU unless it names one. Raises MachineError: the cluster
        is too small, or gave no room within start_timeout."""
        await self.start()
        gpus = not (idle and not devices) and self.on_gpus(role, devices)
        # Without a number nobody but this role knows of the place, so it is its own: turns are taken on numbers that
        # all can see.
        keys: list[int | str] = list(devices) or [role]
        new = [key for key in keys if key not in self._seats]
        if new:
            group = await self._reserve(role, [self._bundle(gpus)] * len(new))
            found = await asyncio.gather(*(self._look(role, group, index, gpus) for index in range(len(new))))
            self._seats |= dict(zip(new, found))
        return [self._seats[key] for key in keys]

    async def again(self, role: str, seats: Sequence[Seat]) -> list[Seat]:
        """The same seats, wherever Ray has moved them since (a node may be gone). Raises MachineError."""
        moved = await asyncio.gather(*(self._look(role, seat.group, seat.bundle, bool(seat.gpu)) for seat in seats))
        for key, seat in self._seats.items():
            self._seats[key] = next((m for m in moved if (m.group, m.bundle) == (seat.group, seat.bundle)), seat)
        return list(moved)

    def _bundle(self, gpus: bool) -> dict[str, float]:
        """A bundle's resources; Ray takes none of zero, and no bundle without any."""
        own = SEAT in ray.cluster_resources()
        share = {SEAT: 1.0} if own else {"CPU": self._config.cpus_per_process}
        # Nearly nothing in place of nothing, for a bundle that names no resource.
        return ({"GPU": 1.0} if gpus else {}) | {name: amount for name, amount in share.items() if amount} or {
            "CPU": 0.001
        }

    async def _reserve(self, role: str, bundles: list[dict[str, float]]) -> PlacementGroup:
        total, free = ray.cluster_resources(), ray.available_resources()
        for name in bundles[0]:
            need = sum(bundle[name] for bundle in bundles)
            ours = sum(bundle.get(name, 0) for group in self._groups for bundle in group.bundle_specs)
            if need + ours > total.get(name, 0):
                beside = f" beside {ours:g} of the other roles" if ours else ""
                has = f"the cluster has {total.get(name, 0):g}"
                raise MachineError(f"{role}: {len(bundles)} processes need {need:g} {name}{beside}, {has}. {_FIX}")
        # On few nodes: within a node weights need no relay.
        group = placement_group(bundles, strategy="PACK", name=role)
        try:
            await result(group.ready(), self._config.start_timeout)
        except TimeoutError as error:
            remove_placement_group(group)
            wanted = ", ".join(
                f"{sum(b[n] for b in bundles):g} {n} ({free.get(n, 0):g} free of {total.get(n, 0):g})"
                for n in bundles[0]
            )
            raise MachineError(
                f"{role}: the cluster gave no room for {wanted} within start_timeout = {self._config.start_timeout:g}"
                f" s. {_FIX}"
            ) from error
        self._groups.append(group)
        return group

    async def _look(self, role: str, group: PlacementGroup, bundle: int, gpus: bool) -> Seat:
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        # Which node and GPU a bundle is shows only from within it.
        task = ray.remote(_where).options(num_cpus=0, num_gpus=int(gpus), scheduling_strategy=where, max_retries=1)
        try:
            node, address, gpu = await result(task.remote(), self._config.start_timeout)
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise MachineError(
                f"{role}: its place in the cluster does not answer ({type(error).__name__}). {_FIX}"
            ) from error
        return Seat(group, bundle, node, address, gpu)

    def options(self, seats: Sequence[Seat], environment: Mapping[str, str]) -> dict[str, Any]:
        """Ray's options of an actor on these seats: it sees their GPUs alone, and its environment is set before Python
        begins."""
        gpus = [seat.gpu for seat in seats if seat.gpu]
        variables = {name: value for name, value in os.environ.items() if name.startswith("TURNWISE_")}
        if gpus:
            variables |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        else:
            variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        return {
            "num_cpus": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                seats[0].group, placement_group_bundle_index=seats[0].bundle
            ),
            "runtime_env": {"env_vars": variables | dict(environment)},
        }

    def spread(self) -> dict[str, Any]:
        """Ray's options of an actor without a seat, anywhere."""
        variables = {name: value for name, value in os.environ.items() if name.startswith("TURNWISE_")}
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        own = SEAT in ray.cluster_resources()
        return {
            "num_cpus": 0 if own else self._config.cpus_per_process,
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": variables},
        }

    @staticmethod
    def on_node(node: str) -> dict[str, Any]:
        """Ray's options of an actor on this very node."""
        return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}

    def follow(self, actor: Any, where: str) -> None:
        """Log what a process says before its next answer, until it is gone."""

        async def followed() -> None:
            with contextlib.suppress(ray.exceptions.RayError):
                while True:
                    (await result(actor.said.remote())).log_records(where)
                    await asyncio.sleep(RECORD_SECONDS)

        task = asyncio.get_running_loop().create_task(followed())
        self._followers.add(task)
        task.add_done_callback(self._followers.discard)

    async def close(self) -> None:
        """Give the places back; stop or leave the cluster if it was started or joined here. May be called twice."""
        if not self._started:
            return
        self._started = False
        for task in self._followers:
            task.cancel()
        for group in self._groups:
            # The cluster may be gone.
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                remove_placement_group(group)
        self._groups.clear()
        self._seats.clear()
        if self._ours:
            self._ours = False
            try:
                await self._thread.run(ray.shutdown, 60.0, "runtime ray: the cluster did not stop within 60 s")
            finally:
                self._thread.end()


_FIX = (
    "Fix: a larger cluster, fewer devices, roles that share some (the same numbers in device_mapping), or end what else"
    " runs there (ray status)"
)


def _where() -> tuple[str, str, str]:
    gpus = ray.get_gpu_ids()
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), str(gpus[0]) if gpus else ""


class _Thread:
    """A daemon thread that starts and stops Ray. It lives as long as the cluster: Linux ends a child with the *thread*
    that started it, and Ray asks for that. It is not the event loop's thread: there Ray would take over SIGTERM, which
    means "save and stop" to a run."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="turnwise-ray", daemon=True).start()

    async def run(self, work: Callable[[], Any], timeout: float, late: str) -> None:
        """Run blocking work; what hangs is left behind. Raises MachineError."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._jobs.put((work, done))
        try:
            await asyncio.wait_for(asyncio.wrap_future(done), timeout)
        except TimeoutError as error:
            raise MachineError(f"{late}. Fix: raise start_timeout, or look at the cluster (ray status)") from error

    def end(self) -> None:
        """No more work comes."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            if not done.set_running_or_notify_cancel():
                continue
            try:
                work()
            except BaseException as error:  # handed to whoever waits
                done.set_exception(error)
            else:
                done.set_result(None)
