"""One environment of a tag, built to be looked at before anything starts: that it can be built, and how many tasks it
holds."""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from turnwise.errors import ConfigError, PluginError, one_line

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

    `name` and `options` (env_config) are for the message. Raises ConfigError (its constructor raised, or did not end
    within `timeout` seconds) and PluginError (no such environment). What hangs is left behind on its daemon thread.
    """
    try:
        environment = _within(timeout, build)
    except PluginError:
        raise
    except TimeoutError as error:
        raise ConfigError(
            f"custom_envs.{tag}: the environment {name!r} was not built within reset_timeout = {timeout:g} s. "
            "Fix: raise reset_timeout, or repair the environment."
        ) from error
    except (Exception, SystemExit) as error:  # a stranger's constructor may raise anything
        raise ConfigError(
            f"custom_envs.{tag}: the environment {name!r} cannot be built with env_config {dict(options)}: "
            f"{type(error).__name__}: {error}. Fix: correct env_config."
        ) from error
    count = getattr(environment, "num_tasks", None)
    try:
        _within(timeout, lambda: _close(environment))
    except TimeoutError:
        log.warning("%s.close did not end within %g s", tag, timeout)
    except (Exception, SystemExit) as error:
        log.warning("%s.close raised %s", tag, one_line(error))
    return count


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
