"""A bridge that plays any Gymnasium environment of discrete actions as text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from turnwise.errors import ConfigError, EnvironmentFailure, MachineError
from turnwise_gymnasium.observations import field_texts, is_discrete, is_image, key_of, text_of

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class GymnasiumBridge:
    """The environment `gymnasium`; its options are described in the README.

    An action that is none of `action_names` does not reach the environment: the observation stays and the reward is
    `invalid_penalty`. Raises ConfigError (unknown id, actions that are not discrete, wrong names or placeholders) or
    MachineError (a package is missing).
    """

    def __init__(
        self,
        env_id: str,
        template: str = "{observation}\nActions: {actions}",
        action_names: Sequence[str | int] | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        invalid_penalty: float = -0.1,
        success_reward: float | None = None,
    ) -> None:
        self._where = f"the Gymnasium environment {env_id!r}"
        for option, value, kind, wanted in (
            ("env_id", env_id, str, "text"),
            ("template", template, str, "text"),
            ("env_kwargs", env_kwargs or {}, Mapping, "a mapping"),
            ("action_names", () if action_names is None else action_names, list | tuple, "a list"),
        ):
            if not isinstance(value, kind):
                raise ConfigError(f"{option} is {value!r}, {self._where}. Fix: {wanted}.")
        self._template = template
        self._invalid_penalty = _finite("invalid_penalty", invalid_penalty, self._where)
        if self._invalid_penalty > 0:
            raise ConfigError(
                f"invalid_penalty is {invalid_penalty!r}, {self._where}; it is added to the reward. Fix: a number of at"
                " most 0."
            )
        self._success_reward = (
            None if success_reward is None else _finite("success_reward", success_reward, self._where)
        )
        self._env = _make(env_id, dict(env_kwargs or {}), self._where)
        space = self._env.action_space
        try:
            self._names = self._checked_names(action_names)
        except ConfigError:
            # Nobody closes a bridge whose making failed.
            self._env.close()
            raise
        # A Discrete space may begin at another number than 0.
        self._actions = {name.lower(): int(space.start) + i for i, name in enumerate(self._names)}
        self._image = is_image(self._env.observation_space)
        self._keyed = is_discrete(self._env.observation_space)
        self._observation: Any = None
        self._return = 0.0
        self._started = self._terminated = self._truncated = self._closed = False

    def _checked_names(self, action_names: Sequence[str | int] | None) -> tuple[str, ...]:
        """The names of the actions. Raises ConfigError for an environment that the bridge cannot play with these
        options."""
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ConfigError(
                f"the actions are {space}, {self._where}; the bridge plays Discrete actions only. Fix: choose another"
                " environment or wrap it."
            )
        known = ["observation", "actions", *(_fields(self._env.observation_space))]
        for name in _PLACEHOLDER.findall(self._template):
            if name not in known:
                named = ", ".join(f"{{{one}}}" for one in known)
                raise ConfigError(f"template has the placeholder {{{name}}}, {self._where}. Fix: {named} are known.")
        return _names(action_names, space, self._where)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment with the seed and options."""
        self._observation, _ = self._env.reset(seed=None if seed is None else int(seed), options=options)
        self._return, self._started, self._terminated, self._truncated = 0.0, True, False, False
        return self._show(), self._info()

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Play the action of this name, in any case, white space around it ignored.

        Raises EnvironmentFailure before the first reset. After the end every step returns the final observation with
        reward 0.
        """
        if not self._started:
            raise EnvironmentFailure(f"step was called before reset, {self._where}. Fix: call reset first.")
        index = self._actions.get(action.strip().lower())
        reward = 0.0
        if not (self._terminated or self._truncated):
            if index is None:
                reward = self._invalid_penalty
            else:
                self._observation, gained, terminated, truncated, _ = self._env.step(index)
                reward, self._terminated, self._truncated = float(gained), bool(terminated), bool(truncated)
                self._return += reward
        info = self._info()
        info["metrics"] = {"invalid": float(index is None)}
        return self._show(), reward, self._terminated, self._truncated, info

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"actions": list(self._names)}
        if self._keyed:
            info["state_key"] = key_of(self._observation)
        if self._success_reward is not None:
            info["success"] = self._terminated and self._return >= self._success_reward
        return info

    def _show(self) -> Any:
        """The template filled in: a string, or content parts around the picture where the observation is one."""
        known = {"actions": ", ".join(self._names)}
        if not self._image:
            known = {**field_texts(self._observation), **known, "observation": text_of(self._observation)}
            # Not str.format: what stands in other braces is text.
            return _PLACEHOLDER.sub(lambda match: known[match[1]], self._template)
        parts: list[dict[str, Any]] = []
        for i, text in enumerate(self._template.split("{observation}")):
            if i:
                # A copy: the environment may draw its next picture into the same array.
                parts.append({"type": "image", "image": np.array(self._observation, np.uint8)})
            if text.strip():
                parts.append({"type": "text", "text": text.replace("{actions}", known["actions"])})
        return parts

    def render(self) -> Any:
        """The environment's own picture or text if `env_kwargs` holds a `render_mode` that gives one, else the
        observation.

        Raises EnvironmentFailure before the first reset.
        """
        if not self._started:
            raise EnvironmentFailure(f"render was called before reset, {self._where}. Fix: call reset first.")
        if self._env.render_mode in ("rgb_array", "ansi"):
            return self._env.render()
        return np.array(self._observation, np.uint8) if self._image else text_of(self._observation)

    def close(self) -> None:
        """Close the environment; may be called twice."""
        if not self._closed:
            # Before the call: a close that raises is not tried again.
            self._closed = True
            self._env.close()


def _make(env_id: str, env_kwargs: dict[str, Any], where: str) -> Any:
    try:
        return gymnasium.make(env_id, disable_env_checker=True, **env_kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise MachineError(f"{where} needs a package that is missing here: {error} Fix: install it") from error
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(
            f"{where} cannot be made: {error} Fix: env_id, or module:EnvId to import the module that registers it."
        ) from error
    except TypeError as error:
        raise ConfigError(
            f"{where} does not take env_kwargs {sorted(env_kwargs)}: {error}. Fix: correct or remove them"
        ) from error


def _fields(space: Any) -> list[str]:
    """The names of a dictionary's fields."""
    return list(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else []


def _names(given: Sequence[str | int] | None, space: Any, where: str) -> tuple[str, ...]:
    if given is None:
        return tuple(str(int(space.start) + i) for i in range(int(space.n)))
    for name in given:
        if isinstance(name, bool) or not isinstance(name, str | int) or not str(name).strip():
            raise ConfigError(
                f"action_names holds {name!r}, {where}. Fix: text (YAML reads an unquoted yes, no, on, off as true or"
                " false: quote it)."
            )
    names = tuple(str(name).strip() for name in given)
    if len(names) != space.n:
        raise ConfigError(
            f"action_names has {len(names)} names, {where}, which has {space.n} actions. Fix: one name an action, in"
            " its order."
        )
    if len({name.lower() for name in names}) < len(names):
        raise ConfigError(
            f"action_names {list(names)} are not all different, {where}; upper and lower case count as the same. Fix:"
            " rename them."
        )
    return names


def _finite(name: str, value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} is {value!r}, {where}. Fix: a finite number.")
    return float(value)
