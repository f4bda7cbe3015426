"""docs/configuration.md, made from the schema: every key with its type, default and meaning."""

from __future__ import annotations

import inspect
import json
from typing import Any

import attrs

from turnwise.config import schema
from turnwise.config.convert import plain
from turnwise.contracts.inference import GeneratingArgs
from turnwise.data.normalise import RewardNormalization
from turnwise.data.ranges import RANGE, Range

BLOCKS: tuple[tuple[str, type], ...] = (
    ("The run", schema.RunConfig),
    ("actor_train, actor_infer, reference, critic", schema.Role),
    ("model_args", schema.ModelArgs),
    ("training_args", schema.TrainingArgs),
    ("generating_args", GeneratingArgs),
    ("train_env_manager, val_env_manager", schema.EnvManagerConfig),
    ("custom_envs.TAG", schema.CustomEnv),
    ("reward_normalization", RewardNormalization),
    ("entropy_loss_coef as a range", schema.CoefRange),
    ("train_infer_correction", schema.TrainInferCorrection),
    ("train_infer_correction.is_weight", schema.ImportanceWeight),
    ("train_infer_correction.filters", schema.CorrectionFilter),
    ("rollout_mock", schema.RolloutMock),
)

INTRO = """# Configuration

Generated from `turnwise.config.schema`. `turnwise check FILE` reports every mistake of a file at once, with its line.

- Types are strict: `"8"` is no number, `true` is no number. `1e-6` is one.
- `${a.b}` reads another key, `${oc.env:NAME}` the environment, `${now:%Y-%m-%d}` the date. `key=value` on the command line overrides.
- What `${oc.env:NAME}` gave is used, and never written: metrics, loggers and checkpoints get the reference.
- A list, and a choice with another `use:`, take the place of what an included file or an earlier override holds; other mappings are
  merged.
- A configuration holds 10,000 values at most (aliases and `${…}` written out), 64 blocks inside each other, in 100 files of 512 KiB.
- `defaults: [../config/envs@_here_]` merges another file under this one.
- **choice**: an implementation by name (`adv_estimator: grpo`), or a mapping with its options (`adv_estimator: {use: grpo, …}`). The options are
  in the README of its plugin; those of `adv_estimator`, `pg_variant`, `batch_adjust_mode` and `group_filters` may stand at the top level too.
- `device_mapping` takes `[0, 1]` and `list(range(0,4))`.
"""


def reference() -> str:
    """The text of docs/configuration.md."""
    return INTRO + "".join(_block(title, cls) for title, cls in BLOCKS)


def _block(title: str, cls: Any) -> str:
    fields = [a for a in attrs.fields(cls) if a.init and not (cls is schema.RunConfig and a.name == "algorithm")]
    documented = any("doc" in a.metadata for a in fields)
    head = "| key | type | default |" + (" |" if documented else "")
    rows = [head, "|---" * (4 if documented else 3) + "|"]
    for a in fields:
        doc = f" {_cell(a.metadata.get('doc', ''))} |" if documented else ""
        rows.append(f"| `{a.name}` | {_type(_annotation(cls, a.name))}{_range(a)} | {_default(a.default)} |{doc}")
    about = " ".join((cls.__doc__ or "").split())
    return f"\n## {title}\n\n{about}\n\n" + "\n".join(rows) + "\n"


def _annotation(cls: type, name: str) -> str:
    """The type as it is written: once a configuration was converted in this process, attrs holds classes in place of
    the words."""
    found = (inspect.get_annotations(base).get(name) for base in cls.__mro__)
    return str(next(text for text in found if text is not None))


def _range(attribute: Any) -> str:
    bounds = attribute.metadata.get(RANGE)
    return f", {bounds.words}" if isinstance(bounds, Range) else ""


def _type(text: str) -> str:
    # The longer first, of which the shorter are parts.
    for python, words in (
        ("tuple[Choice, ...]", "list of choices"),
        ("tuple[str, ...]", "list of texts"),
        ("tuple[int, ...]", "list of whole numbers"),
        ("Mapping[str, CustomEnv]", "mapping of custom_envs.TAG"),
        ("Mapping[str, Any]", "mapping"),
        ("Mapping[str, str]", "mapping of texts"),
        ("tuple[CorrectionFilter, ...]", "list of blocks"),
        ("TrainInferCorrection", "block"),
        ("ImportanceWeight", "block"),
        ("Choice", "choice"),
        ("GeneratingArgs", "generating_args"),
        ("ModelArgs", "model_args"),
        ("TrainingArgs", "training_args"),
        ("EnvManagerConfig", "block"),
        ("RewardNormalization", "reward_normalization"),
        ("RolloutMock", "block"),
        ("CoefRange", "{start, end}"),
        ("Role", "role"),
        ("None", "null"),
    ):
        text = text.replace(python, words)
    return _cell(
        text.removeprefix("Literal[").removesuffix("]").replace('"', "`") if text.startswith("Literal[") else text
    )


def _default(default: Any) -> str:
    if default is attrs.NOTHING:
        return "**required**"
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        default = default.factory()
        if attrs.has(type(default)) and not isinstance(default, schema.Choice):
            return "its defaults"
    value = plain(default)
    names = [c["use"] for c in value] if isinstance(value, list) and value and isinstance(value[0], dict) else value
    shown = names["use"] if isinstance(names, dict) and "use" in names else names
    return f"`{json.dumps(shown, ensure_ascii=False)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
