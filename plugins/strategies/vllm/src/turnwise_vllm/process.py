"""One vLLM server as a process of ours, in this interpreter."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from turnwise.contracts.inference import InferenceContext
from turnwise.ports import free_port
from turnwise_serving.process import ServerProcess, visible
from turnwise_vllm.arguments import cpu_build, engine_arguments, environment
from turnwise_vllm.config import VllmConfig
from turnwise_vllm.guard import KEY
from turnwise_vllm.memory import MEMORY


class Server(ServerProcess):
    """A running server process, on a free port of the loopback interface."""

    engine = "vLLM"
    memory = MEMORY
    error = re.compile(r"Error: ")
    # The server's own error after that of its engine.
    pointer = re.compile(r"See root cause above")
    # pydantic's, with the reason on the next line.
    headline = re.compile(r"validation error")
    # One, because each process of vLLM repeats it.
    shown = 1

    def __init__(self, config: VllmConfig, context: InferenceContext) -> None:
        """Start it, without waiting until it answers."""
        port, cpu = free_port(), cpu_build()
        super().__init__(port)
        self.start(
            server_command(engine_arguments(config, context, cpu), port),
            server_environment(config, context, cpu, self.key),
        )


def server_environment(config: VllmConfig, context: InferenceContext, cpu: bool, key: str) -> dict[str, str]:
    """The server's environment: this process's, with what the engine needs, the routes of weights and pauses, the key,
    and the role's devices."""
    variables = {**os.environ, **environment(config, cpu), "VLLM_SERVER_DEV_MODE": "1", KEY: key}
    if context.lora is not None:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.python_path:
        variables["PYTHONPATH"] = os.pathsep.join([*config.python_path, *filter(None, [os.environ.get("PYTHONPATH")])])
    # The server finds its devices by the environment; in this process `device_ids` says them.
    if context.devices and not cpu:
        variables["CUDA_VISIBLE_DEVICES"] = visible(context.devices)
    return variables


def server_command(arguments: Mapping[str, Any], port: int) -> list[str]:
    """The command line of vLLM's server with these engine arguments."""
    command = [
        sys.executable,
        "-m",
        "turnwise_vllm.serve",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enable-scale-out",
    ]
    command += ["--middleware", "turnwise_vllm.guard.Guard"]
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            # vLLM's command line has a --no-… form of every switch.
            command.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, (dict, list)):
            command += [option, json.dumps(value)]
        elif value is not None:
            command += [option, str(value)]
    return command
