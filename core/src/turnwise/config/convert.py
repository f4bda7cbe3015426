"""Strict conversion of plain data to attrs classes by cattrs (no coercion, no unknown key, every mistake with its
path), and back."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Literal, Union, get_args, get_origin

import attrs
from cattrs import ClassValidationError, Converter, ForbiddenExtraKeysError, IterableValidationError
from cattrs.cols import homogenous_tuple_structure_factory, list_structure_factory, mapping_structure_factory
from cattrs.errors import AttributeValidationNote, IterableValidationNote, StructureHandlerNotFoundError
from cattrs.gen import make_dict_structure_fn

from turnwise.config.problems import Data, Path
from turnwise.config.schema import ROLES, Choice, RunConfig
from turnwise.errors import did_you_mean, listed, one_line
from turnwise.importing import StrangerError, guarded

Problem = tuple[Path, str]
"""A path inside the converted value, and what is wrong there."""


class WrongTypeError(ValueError):
    """A value of another type than the key's."""

    def __init__(self, value: Any, needed: str, fix: str = "") -> None:  # Any: what a file held
        super().__init__(f"{value!r} is {_kind(value)}, {needed} is needed.{fix or _fix(value, needed)}")


# Any: a class of a configuration, and what a file held for it
def structure(cls: Any, value: Any) -> tuple[Any, list[Problem]]:
    """`value` as `cls`, and no problem; or None and every problem."""
    try:
        # A plugin's config class runs its own validators in here: whatever they raise has to end as a problem in the
        # report.
        with guarded():
            return _CONVERTER.structure(value, cls), []
    except StrangerError as failure:  # cattrs groups them; what a plugin's own validator raises is among them
        return None, _problems(failure.error, ())


def describe(annotation: Any) -> str:  # Any: an annotation is no class of its own
    """A type in words, for a message."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(a) for a in args))
    if _is_list(annotation):
        return f"a list ({describe(args[0])} each)" if args and args[0] is not Any else "a list"
    return "a mapping"


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    FilePath: "a path",
    Any: "any value",
    Choice: "a name, or a mapping with `use:` and options",
}


def _kind(value: Any) -> str:
    if value is None:
        return "empty (null)"
    kinds = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a mapping",
    }
    return kinds.get(type(value), f"a {type(value).__name__}")


def _fix(value: Any, needed: str) -> str:
    if value is None:
        return " Fix: write a value, or remove the key for its default"
    if isinstance(value, str) and ("number" in needed or "true" in needed):
        return " Fix: write it without quotes (from the environment: ${oc.decode:${oc.env:NAME}})"
    if needed.startswith("text"):
        return " Fix: put it in quotes"
    if needed.startswith("a list") and not isinstance(value, Mapping | list | tuple):
        return f" Fix: [{value}]"
    return f" Fix: write {needed}"


def _int(value: Any, _: Any = None) -> int:
    # `type(…) is`, not isinstance: True is an int to Python, and a switch written where a number belongs is a slip.
    if type(value) is not int:
        raise WrongTypeError(value, describe(int))
    return value


def _float(value: Any, _: Any = None) -> float:
    if type(value) not in (int, float):
        raise WrongTypeError(value, describe(float))
    # YAML has `.nan`, which passes every comparison with a range, and `.inf`, from which nothing can be computed.
    try:
        number = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(
            f"{number} is not finite, a finite number is needed. Fix: write one, or remove the key for its default"
        )
    return number


def _bool(value: Any, _: Any = None) -> bool:
    if type(value) is not bool:
        raise WrongTypeError(value, describe(bool))
    return value


def _str(value: Any, _: Any = None) -> str:
    if type(value) is not str:
        raise WrongTypeError(value, describe(str))
    return value


def _choice(value: Any, _: Any = None) -> Choice:
    if not isinstance(value, Choice):
        raise WrongTypeError(value, describe(Choice))
    return value


def _is_list(annotation: Any) -> bool:
    origin = get_origin(annotation) or annotation
    return (
        isinstance(origin, type)
        and issubclass(origin, Sequence | set | frozenset)
        and not issubclass(origin, str | bytes)
    )


def _is_mapping(annotation: Any) -> bool:
    origin = get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _list_factory(annotation: Any, converter: Converter) -> Any:
    origin, args = get_origin(annotation) or annotation, get_args(annotation)
    # tuple[X, Y] has a length and a type for each place; tuple[X, ...] is a list of one type.
    fixed = origin is tuple and bool(args) and args[-1] is not Ellipsis
    if origin is tuple and not fixed:
        inner = homogenous_tuple_structure_factory(annotation, converter)
    elif fixed:
        inner = lambda value, _: tuple(converter.structure(v, a) for v, a in zip(value, args, strict=True))  # noqa: E731
    else:
        rows = list_structure_factory(list[args[0]] if args else list, converter)  # type: ignore[misc, valid-type]
        inner = lambda value, _: (origin if origin in (set, frozenset) else list)(rows(value, list))  # type: ignore[operator, union-attr]  # noqa: E731

    def hook(value: Any, _: Any = None) -> Any:
        if not isinstance(value, list | tuple):
            raise WrongTypeError(value, describe(annotation))
        if fixed and len(value) != len(args):
            raise WrongTypeError(value, f"a list of {len(args)}")
        return inner(value, annotation)

    return hook


def _mapping_factory(annotation: Any, converter: Converter) -> Any:
    args = get_args(annotation) or (Any, Any)
    inner = mapping_structure_factory(dict[args], converter)  # type: ignore[misc, valid-type]

    def hook(value: Any, _: Any = None) -> Any:
        if not isinstance(value, Mapping):
            raise WrongTypeError(value, describe(annotation))
        return inner(value, dict)

    return hook


def _class_factory(cls: Any, converter: Converter) -> Any:
    # detailed_validation collects every mistake instead of ending at the first.
    inner = make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True)

    def hook(value: Any, _: Any = None) -> Any:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise WrongTypeError(value, describe(cls))
        # YAML has keys that are numbers; names of options are text.
        return inner({str(k): v for k, v in value.items()}, cls)

    return hook


def _literal_factory(annotation: Any, _: Converter) -> Any:
    known = get_args(annotation)

    def hook(value: Any, _: Any = None) -> Any:
        # 1 == True and 0 == False in Python, so the type has to agree too.
        if not any(value == name and type(value) is type(name) for name in known):
            hint = did_you_mean(value, [k for k in known if isinstance(k, str)]) if isinstance(value, str) else ""
            raise ValueError(f"{value!r} is none of {', '.join(map(repr, known))}.{hint} Fix: choose one of them")
        return value

    return hook


def _union_factory(annotation: Any, converter: Converter) -> Any:
    """The member whose shape the value has: there is at most one of each shape in the schema's and the plugins'
    unions."""
    members = get_args(annotation)

    def hook(value: Any, _: Any = None) -> Any:
        # A whole number stays one where both are allowed.
        for member in sorted(members, key=lambda m: m is float):
            if _fits(value, member):
                return None if member is type(None) else converter.structure(value, member)
        # Text that fits no member is rather a misspelt name than a value of another type, and the Literal suggests
        # names.
        literal = [m for m in members if get_origin(m) is Literal]
        if literal and isinstance(value, str):
            return converter.structure(value, literal[0])
        raise WrongTypeError(value, describe(annotation))

    return hook


def _fits(value: Any, member: Any) -> bool:
    origin = get_origin(member) or member
    if member is Any:
        return True
    if origin is Literal:
        return any(value == name and type(value) is type(name) for name in get_args(member))
    if _is_list(member):
        return isinstance(value, list | tuple)
    if member is float:
        return type(value) in (int, float)
    if member is FilePath:
        return isinstance(value, str)
    if member in (int, bool, str, type(None)):
        return type(value) is member
    if _is_mapping(member):
        return isinstance(value, Mapping)
    return isinstance(value, Mapping) or (isinstance(origin, type) and isinstance(value, origin))


def _converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=True)
    for kind, hook in ((int, _int), (float, _float), (bool, _bool), (str, _str), (Choice, _choice)):
        converter.register_structure_hook(kind, hook)
    converter.register_structure_hook(FilePath, lambda value, _: FilePath(_str(value)))
    for predicate, factory in (
        (lambda t: attrs.has(t) and t is not Choice, _class_factory),
        (_is_list, _list_factory),
        (_is_mapping, _mapping_factory),
        (lambda t: get_origin(t) is Literal, _literal_factory),
        (_is_union, _union_factory),
    ):
        converter.register_structure_hook_factory(predicate, factory)
    return converter


def _problems(error: BaseException, path: Path) -> list[Problem]:
    """Flatten cattrs' tree of errors: one problem per leaf, with the path that the notes spell."""
    if isinstance(error, ClassValidationError | IterableValidationError):
        return [p for sub in error.exceptions for p in _problems(sub, path + (_step(sub) or _blamed(sub, error.cl)))]
    if isinstance(error, ForbiddenExtraKeysError):
        known = [a.name for a in attrs.fields(error.cl) if a.init]
        return [((*path, key), unknown_key(key, known)) for key in sorted(error.extra_fields)]
    # cattrs raises a bare KeyError for a missing key; one that a validator raised names something else.
    if isinstance(error, KeyError) and error.args and path and error.args[0] == path[-1]:
        return [(path, "this key is required. Fix: write it")]
    if isinstance(error, StructureHandlerNotFoundError):
        return [
            (
                path,
                (
                    f"a plugin's option has the type {error.type_!r}, which YAML cannot express. Fix: report it to the"
                    " plugin's author"
                ),
            )
        ]
    if isinstance(error, ValueError | TypeError) and error.args:
        # Without the name of the exception's class, which says nothing to the author of a YAML file.
        text = one_line(error).partition(": ")[2].rstrip(". ")
        return [(path, text if "Fix: " in text else f"{text}. Fix: correct the value")]
    return [(path, f"its check ended by {one_line(error)}. Fix: correct the value, or repair the plugin")]


def unknown_key(key: str, known: Sequence[str]) -> str:
    """The message for a key that nobody knows."""
    # A longer list would hide the suggestion before it.
    few = f" Known: {listed(known)}." if len(known) <= 16 else ""
    return f"unknown key {key!r}.{did_you_mean(key, known)}{few} Fix: correct or remove it"


def _blamed(error: BaseException, cls: Any) -> Path:
    """The option that a validator's message begins with, as in `that_option must be positive`."""
    first = (
        re.match(r"\W*(\w+)", str(error.args[0]))
        if error.args and not isinstance(error, ForbiddenExtraKeysError)
        else None
    )
    return (first[1],) if first and attrs.has(cls) and first[1] in (a.name for a in attrs.fields(cls)) else ()


def _step(error: BaseException) -> Path:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return (note.name,)
        if isinstance(note, IterableValidationNote):
            return (note.index,)
    return ()


def to_plain(config: RunConfig) -> Data:
    """The resolved configuration as dicts, lists, numbers, text and null, with every default and every option of the
    plugins.

    A choice is `{"use": name, **options}`, a role's strategy_args `{"strategy_name": name, "strategy_config":
    options}`."""
    whole = plain(config)
    assert isinstance(whole, dict)
    for role in ROLES:
        args = whole[role] and whole[role]["strategy_args"]
        if args:
            whole[role]["strategy_args"] = {"strategy_name": args.pop("use"), "strategy_config": args}
    return whole


def plain(value: Any) -> Any:  # Any: YAML's data
    """Any part of a configuration as plain data."""
    if isinstance(value, Choice):
        options = plain(value.config) if attrs.has(type(value.config)) else {}
        return {"use": value.name, **{str(k): plain(v) for k, v in value.options.items()}, **options}
    if attrs.has(type(value)):
        return {a.name: plain(getattr(value, a.name)) for a in attrs.fields(type(value)) if a.init}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, FilePath) else value


_CONVERTER = _converter()
