"""One environment of a tag, built to be looked at before anything starts: that it can be built, and how many tasks it
holds."""

from __future__ import annotations

import inspect
import logging
import math
import operator
import threading
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex, TypeVar

from turnwise.errors import ConfigError, MachineError, PluginError, one_line

log = logging.getLogger(__name__)

T = TypeVar("T")


def number_of_tasks(
    build: Callable[[], Any],  # Any: a stranger's environment
    tag: str,
    name: str,
    options: Mapping[str, object],
    timeout: float,
) -> int | None:
    """How many tasks a data-set environment holds; None for the others.

    `name` and `options` (env_config) are for the message. Raises ConfigError (its constructor or its `num_tasks`
    raised, did not end within `timeout` seconds, or is no number of tasks) PluginError (no such environment) and
    MachineError (its constructor said what this machine lacks). What hangs is left behind on its daemon thread.
    """
    who = f"the environment {name!r}"
    try:
        environment = _within(timeout, build)
    except PluginError:
        raise
    except MachineError as error:
        raise MachineError(f"custom_envs.{tag}: {error}") from error
    except TimeoutError as error:
        raise ConfigError(
            f"custom_envs.{tag}: {who} was not built within reset_timeout = {timeout:g} s. "
            "Fix: raise reset_timeout, or repair the environment."
        ) from error
    except (Exception, SystemExit) as error:  # a stranger's constructor may raise anything
        raise ConfigError(
            f"custom_envs.{tag}: {who} cannot be built with env_config {dict(options)}: "
            f"{type(error).__name__}: {error}. Fix: correct env_config."
        ) from error
    try:
        return _counted(_within(timeout, lambda: _num_tasks(environment)), f"custom_envs.{tag}: num_tasks of {who}")
    except ConfigError:
        raise
    except TimeoutError as error:
        raise ConfigError(
            f"custom_envs.{tag}: num_tasks of {who} was not read within reset_timeout = {timeout:g} s. "
            "Fix: raise reset_timeout, or repair the environment."
        ) from error
    except (Exception, SystemExit) as error:  # a property that opens the data set may raise anything, too
        raise ConfigError(
            f"custom_envs.{tag}: num_tasks of {who} raised {type(error).__name__}: {error}. "
            "Fix: correct env_config, or repair the environment."
        ) from error
    finally:
        _end(environment, tag, timeout)


def _num_tasks(environment: Any) -> Any:  # Any: whatever a stranger wrote there
    # An AttributeError from inside a property is a fault, and looks to `getattr` as if there were none.
    if inspect.getattr_static(environment, "num_tasks", None) is not None:
        return environment.num_tasks
    return getattr(environment, "num_tasks", None)


def _counted(value: Any, what: str) -> int | None:
    """A number of tasks, as Python has it; ConfigError for what is none."""
    if value is None:
        return None
    # numpy's integers count as well; True, which Python takes for 1, does not.
    count = operator.index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else 0
    if count < 1:
        raise ConfigError(f"{what} is {value!r}, no number of tasks. Fix: a whole number above 0, or none at all.")
    return count


def _end(environment: Any, tag: str, timeout: float) -> None:
    """Close it; what its `close` does holds nothing up."""
    try:
        _within(timeout, lambda: _close(environment))
    except TimeoutError:
        log.warning("%s.close did not end within %g s", tag, timeout)
    except (Exception, SystemExit) as error:
        log.warning("%s.close raised %s", tag, one_line(error))


def _close(environment: Any) -> None:
    closing = environment.close() if hasattr(environment, "close") else None
    # Nothing was started that it would have to end.
    if inspect.iscoroutine(closing):
        closing.close()


def _within(timeout: float, call: Callable[[], T]) -> T:
    """The call's result; TimeoutError after `timeout` seconds. Without a limit it runs on this thread, where a
    breakpoint works."""
    if math.isinf(timeout):
        return call()
    # A list, for None is a result too.
    done: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            done.append(call())
        except BaseException as error:  # raised again by whoever waits
            failed.append(error)

    thread = threading.Thread(target=work, name="turnwise-trial", daemon=True)
    thread.start()
    thread.join(timeout)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError
    return done[0]
