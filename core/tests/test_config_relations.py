"""What must hold between keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config import Loaded
from turnwise.config.defaults import add_defaults
from turnwise.config.problems import Report, Sources
from turnwise.errors import ConfigError
from turnwise.planning.assembly import train_context

Run = Callable[..., Loaded]
VAL = "val_env_manager: {num_env_groups: 8, group_size: 1, tags: [Lake]}\n"
CRITIC = "critic: {training_args: {per_device_train_batch_size: 16}}\n"


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("", ["rollout_batch_size=20"], "$.rollout_batch_size: 20 is not num_env_groups 4 × group_size 4 = 16 of train_env_manager. "
                                        "Fix: rollout_batch_size: 16, or num_env_groups: 5"),
        (VAL, ["val_batch_size=9"], "$.val_batch_size: 9 is not num_env_groups 8 × group_size 1 = 8 of val_env_manager"),
        ("", ["train_env_manager.tags=[Lak]"], "$.train_env_manager.tags[0]: 'Lak' is no tag of custom_envs. Did you mean 'Lake'?"),
        ("", ["train_env_manager.tags=[Lake, Lake]"], "'Lake' is named twice"),
        ("", ["track_with=[jsonl, console, jsonl]"], "$.track_with[2]: 'jsonl' is named twice. Fix: keep one"),
        ("", ["train_env_manager.num_groups_partition=[3]"], "[3] adds up to 3, num_env_groups is 4"),
        ("", ["train_env_manager.num_groups_partition=[2, 2]"], "[2, 2] for 1 tags"),
        ("", ["actor_train.device_mapping=[0, 1, 2, 3]", "actor_train.strategy_args.strategy_config.tensor_model_parallel_size=3"],
         "$.actor_train.device_mapping: 4 devices are not divisible by tensor_model_parallel_size 3"),
        ("", ["adv_estimator=gae"], "adv_estimator 'gae' needs the values of a critic"),
        ("", ["actor_infer.generating_args.temperature=0"], "$.actor_infer.generating_args.temperature: training samples at temperature 0"),
        ("", ["train_env_manager.generating_args={temperature: 0}"], "$.train_env_manager.generating_args.temperature: training samples"),
        ("", ["actor_infer.generating_args.max_new_tokens=256"], "max_new_tokens 256 leaves no room for a prompt in sequence_length 256"),
        (VAL, ["val_env_manager.generating_args={max_new_tokens: 999}"], "$.val_env_manager.generating_args.max_new_tokens: max_new_tokens 999"),
        ("", ["actor_infer.generating_args.top_p=0"], "$.actor_infer.generating_args.top_p: 0.0: top_p must be above 0 and at most 1"),
        ("", ["actor_infer.generating_args.top_p=1.1"], "top_p must be above 0"),
        ("", ["actor_infer.generating_args.temperature=-1"], "-1.0: temperature must be at least 0"),
        ("", ["ppo_epochs=0"], "$.ppo_epochs: 0: ppo_epochs must be positive"),
        ("", ["max_steps=0"], "$.max_steps: 0: max_steps must be positive"),
        ("", ["seed=9223372036854775808"], "$.seed: 9223372036854775808: seed must be at least 0 and below 2^63. Fix:"),
        ("", ["save_steps=-1"], "$.save_steps: -1: save_steps must be at least 0"),
        ("", ["gamma=1.5"], "$.gamma: 1.5: gamma must be between 0 and 1"),
        ("", ["train_env_manager.max_env_failure_rate=1"], "1.0: max_env_failure_rate must be at least 0 and below 1"),
        ("", ["actor_train.training_args.learning_rate=.inf"], "learning_rate: inf is not finite, a finite number is needed. Fix: "),
        ("", ["custom_envs.Lake.max_steps=0"], "$.custom_envs.Lake.max_steps: 0: max_steps must be positive"),
        ("", ["eval_steps=5"], "$.eval_steps: 5: there is nothing to evaluate on. Fix: add val_env_manager, or eval_steps: 0"),
        ("", ["actor_train.training_args.warmup_steps=11"], "11 is more than max_steps 10 (both count pipeline steps)"),
        ("", ["use_kl_loss=true"], "$.use_kl_loss: true disagrees with kl_loss_coef 0.0, which alone switches the term on. "
                                   "Fix: kl_loss_coef above 0, or use_kl_loss: false"),
        ("", ["add_token_level_kl=false", "init_kl_coef=0.1"], "false disagrees with init_kl_coef 0.1"),
        ("", ["actor_train.use_dynamic_batching_in_train=true"], "$.actor_train.use_dynamic_batching_in_train: needs a token budget"),
        ("", ["actor_train.use_dynamic_batching_in_infer=true", "actor_train.max_tokens_per_microbatch_in_infer=100"],
         "100 cannot hold one sample of sequence_length 256"),
        ("", ["actor_train.use_sequence_packing=true", "actor_train.max_tokens_per_microbatch_in_train=100"],
         "$.actor_train.max_tokens_per_microbatch_in_train: 100 cannot hold one sample of sequence_length 256"),
        ("", ["actor_train.device_mapping=[0, 0]", "actor_train.training_args.gradient_accumulation_steps=1"], "names a device twice"),
        ("", ["train_infer_correction={is_weight: {enabled: true, lower_bound: 2}}"],
         "$.train_infer_correction.is_weight.lower_bound: 2.0 is above upper_bound 1.2"),
        ("", ["train_infer_correction={filters: [{}, {ratio_enabled: true, ratio_low: 3}]}"],
         "$.train_infer_correction.filters[1].ratio_low: 3.0 is above ratio_high 1.2: no token would train"),
        ("", ["train_infer_correction={filters: [{diff_enabled: true}]}", "recompute_old_logprobs=false"],
         "$.recompute_old_logprobs: false: then old log-probs are the sampler's, and train_infer_correction has nothing to compare them with"),
        ("", ["train_infer_correction={is_weight: {enabled: true}}", "pg_variant=dppo"],
         "$.train_infer_correction.is_weight.enabled: true beside pg_variant 'dppo', whose own ratio is that to the sampler"),
        ("", ["entropy_loss_coef=.inf"], "$.entropy_loss_coef: inf is not finite"),
        ("  Second: {env_type: lake}\n", ["train_env_manager.tags=[]"], "$.train_env_manager.tags: names no environment. "
                                                                         "Fix: list tags of custom_envs: [Lake, Second]"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(
    run_yaml: Run, text: str, overrides: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_yaml(text, *overrides)
    found = caught.value.problems
    assert any(expected in line for line in found), found


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (VAL, ["val_env_manager.group_size=2"], "$.val_env_manager.group_size: the 2 members of a group play the same: "
                                                "val_env_manager.group_size 2 with generating_args.temperature 0"),
        ("", ["rollout_batch_size=8", "train_env_manager={num_env_groups: 8, group_size: 1}"],
         "$.train_env_manager.group_size: group_size 1 leaves 'grpo' no other trajectory to compare with"),
        ("", ["pg_variant=vanilla"], "'vanilla' has no ratio to the old policy, and a step makes about 2 updates"),
        ("", ["custom_envs.Lake.max_tokens_per_step=64"], "64 has no effect: max_new_tokens is 32"),
        ("", ["actor_train.training_args.warmup_steps=2", "actor_train.training_args.warmup_ratio=0.1"], "has no effect beside warmup_steps 2"),
        ("", ["train_infer_correction={filters: [{agg_type: segment}]}"],
         "$.train_infer_correction.filters[0]: has no effect: neither ratio_enabled"),
        ("", ["ratio_type=segment", "pg_variant=dppo"], "$.ratio_type: has no effect: pg_variant 'dppo' does not use the ratio that it chooses"),
        ("", ["actor_infer.use_sequence_packing=true"], "$.actor_infer.use_sequence_packing: has no effect: the backend cuts its own batches"),
        ("", ["actor_train.model_args.lora_alpha=8"], "$.actor_train.model_args.lora_alpha: has no effect: lora_rank is null"),
        ("", ["actor_train.model_args.lora_target=q_proj"], "$.actor_train.model_args.lora_target: has no effect: lora_rank is null"),
        ("", ["actor_train.model_args.lora_sync=adapter"],
         "$.actor_train.model_args.lora_sync: has no effect: lora_rank is null, which trains the whole model"),
        ("", ["actor_infer.model_args.lora_sync=adapter"], "$.actor_infer.model_args.lora_sync: has no effect: only actor_train sends weights"),
        ("", ["value_clip=0.1"], "$.value_clip: has no effect: there is no critic"),
        ("", ["loss_scale_factor=10"], "$.loss_scale_factor: has no effect: loss_agg_mode is token-mean"),
        ("", ["dual_clip_c=3"], "$.dual_clip_c: has no effect: dual_clip_loss is false"),
        ("", ["gamma=0.9"], "$.gamma: has no effect: adv_estimator 'grpo' discounts no tokens"),
        ("", ["gamma=0.9", "adv_estimator=step"],
         "$.gamma: has no effect: adv_estimator 'step' discounts no tokens"),
        ("", ["target_kl=0.1"], "$.target_kl: has no effect: init_kl_coef is 0"),
        ("", ["kl_in_score=true"], "$.kl_in_score: has no effect: init_kl_coef is 0"),
        ("", ["actor_train.max_tokens_per_microbatch_in_train=512"],
         "has no effect without use_dynamic_batching_in_train: true or use_sequence_packing: true"),
        (CRITIC, [], "$.critic: is not loaded: adv_estimator 'grpo' needs no values"),
        ("reference: {}\n", [], "$.reference: is not loaded: neither init_kl_coef nor kl_loss_coef is positive"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_warnings(run_yaml: Run, text: str, overrides: list[str], expected: str) -> None:
    assert [expected in w for w in run_yaml(text, *overrides).warnings] == [True]


def test_a_group_of_one_is_fine_where_nothing_is_compared(run_yaml: Run) -> None:
    one = ["rollout_batch_size=8", "train_env_manager={num_env_groups: 8, group_size: 1}"]
    assert run_yaml("", *one, "reward_normalization={grouping: batch, method: mean}").warnings == []
    assert run_yaml(CRITIC.replace("16", "8"), *one, "adv_estimator=gae").warnings == []


def test_roles_that_nothing_needs_are_not_loaded(run_yaml: Run) -> None:
    config = run_yaml(CRITIC + "reference: {}\n").config
    assert config.critic is None
    assert config.reference is None


def test_a_reference_that_is_needed_is_like_the_actor(run_yaml: Run) -> None:
    loaded = run_yaml("kl_loss_coef: 0.1\n", "actor_train.model_args={dtype: fp32}")
    reference, actor = loaded.config.reference, loaded.config.actor_train
    assert reference is not None
    assert (reference.strategy_args, reference.model_args) == (actor.strategy_args, actor.model_args)
    assert any("$.reference: not given, but a KL coefficient is positive" in note for note in loaded.notes)


def test_a_critic_takes_the_actors_strategy_and_its_own_sizes(run_yaml: Run) -> None:
    critic = run_yaml(CRITIC, "adv_estimator=gae").config.critic
    assert critic is not None
    assert critic.strategy_args is not None
    assert critic.strategy_args.name == "trainer"
    assert critic.training_args.per_device_train_batch_size == 16


def test_packed_rows_have_a_token_budget_of_a_sequence_unless_told(run_yaml: Run) -> None:
    for overrides, expected in (
        ([], (None, None)),
        (["use_sequence_packing=true"], (256, 256)),
        (["use_sequence_packing=true", "use_dynamic_batching_in_train=true"], (256, 256)),
        (["use_sequence_packing=true", "max_tokens_per_microbatch_in_infer=512"], (256, 512)),
        (["use_dynamic_batching_in_train=true", "max_tokens_per_microbatch_in_train=512"], (512, None)),
    ):
        loaded = run_yaml("", *(f"actor_train.{override}" for override in overrides))
        assert loaded.warnings == []
        context = train_context(loaded.config, loaded.config.actor_train, "actor_train", Path("model"))
        assert (context.max_tokens_per_microbatch_in_train, context.max_tokens_per_microbatch_in_infer) == expected
        assert context.use_sequence_packing == ("use_sequence_packing=true" in overrides)


def test_evaluation_samples_like_training_but_greedily(run_yaml: Run) -> None:
    val = run_yaml(VAL).config.val_env_manager
    assert val is not None
    assert val.generating_args is not None
    assert (val.generating_args.temperature, val.generating_args.top_p, val.generating_args.max_new_tokens) == (
        0.0,
        0.95,
        32,
    )
    own = run_yaml(VAL, "val_env_manager.generating_args={temperature: 0.6}").config.val_env_manager
    assert own is not None
    assert own.generating_args is not None
    assert (own.generating_args.temperature, own.generating_args.top_p) == (0.6, 0.95)


def test_training_samples_as_actor_infer_says_unless_told(run_yaml: Run) -> None:
    assert run_yaml().config.train_env_manager.generating_args is None
    args = run_yaml("", "train_env_manager.generating_args={top_k: 5}").config.train_env_manager.generating_args
    assert args is not None
    assert (args.top_k, args.temperature) == (5, 0.9)


def test_val_batch_size_defaults_to_what_is_played(run_yaml: Run) -> None:
    assert run_yaml(VAL).config.val_batch_size == 8
    assert run_yaml().config.val_batch_size is None


def test_the_only_environment_needs_no_tag(run_yaml: Run) -> None:
    assert run_yaml("", "train_env_manager.tags=[]").config.train_env_manager.tags == ("Lake",)


def test_relations_are_told_together_with_other_mistakes(run_yaml: Run) -> None:
    with pytest.raises(ConfigError) as caught:
        run_yaml("", "rollout_batch_size=20", "sede=3", "pg_variant=pppo")
    assert len(caught.value.problems) == 3


@given(st.integers(1, 40), st.integers(1, 7))
def test_groups_are_split_evenly_over_tags(groups: int, tags: int) -> None:
    names = [f"T{i}" for i in range(tags)]
    data = {"train_env_manager": {"num_env_groups": groups, "tags": names}, "custom_envs": {n: {} for n in names}}
    add_defaults(data, Report(Sources("x")))
    parts = data["train_env_manager"]["num_groups_partition"]
    assert sum(parts) == groups
    assert max(parts) - min(parts) <= 1
    assert parts == sorted(parts, reverse=True)


def test_a_default_that_does_not_fit_is_blamed_on_the_key_that_was_written(run_yaml: Run, base_yaml: str) -> None:
    text = base_yaml.replace("sequence_length: 256", "sequence_length: 100").replace(
        "  generating_args: {max_new_tokens: 32, temperature: 0.9, top_p: 0.95}\n", ""
    )
    with pytest.raises(ConfigError, match=r"^run\.yaml:4: \$\.sequence_length: max_new_tokens 128 leaves no room"):
        run_yaml(text, base=False)
