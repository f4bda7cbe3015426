"""One case for every key that users of other frameworks write: used, translated, named as not applying, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from key_cases import named, translated, unused, value_at

from turnwise.config import Loaded
from turnwise.config.schema import CoefRange, CustomEnv, EnvManagerConfig, ModelArgs, Role, RunConfig, TrainingArgs
from turnwise.contracts.inference import GeneratingArgs
from turnwise.data.normalise import RewardNormalization
from turnwise.errors import ConfigError

Run = Callable[..., Loaded]
VAL = "val_env_manager={num_env_groups: 8, tags: [Lake]}"
TRAIN, INFER = "actor_train", "actor_infer"
BUDGET = {
    phase: [f"{TRAIN}.use_dynamic_batching_in_{phase}=true", f"{TRAIN}.max_tokens_per_microbatch_in_{phase}=512"]
    for phase in ("train", "infer")
}

USED: list[tuple[str, list[str], Any]] = [  # path in the configuration, overrides, value there
    ("exp_name", ["exp_name=x"], "x"),
    ("seed", ["seed=3"], 3),
    ("val_seed", ["val_seed=3"], 3),
    ("logging_dir", ["logging_dir=logs"], "logs"),
    ("output_dir", ["output_dir=out"], "out"),
    ("render_save_dir", ["render_save_dir=gifs"], "gifs"),
    ("rollout_dump_dir", ["rollout_dump_dir=dump"], "dump"),
    ("max_steps", ["max_steps=4"], 4),
    ("save_steps", ["save_steps=4"], 4),
    ("logging_steps", ["logging_steps=4"], 4),
    ("eval_steps", ["eval_steps=4", VAL], 4),
    ("eval_at_end", ["eval_at_end=false"], False),
    ("custom_envs.Lake.samplers", ["custom_envs.Lake.samplers={opponent: random}"], {"opponent": {"use": "random"}}),
    ("max_skipped_updates", ["max_skipped_updates=2"], 2),
    ("trust_remote_code", ["trust_remote_code=true"], True),
    ("resume_from_checkpoint", ["resume_from_checkpoint=true"], True),
    ("resume_from_checkpoint", ["resume_from_checkpoint=runs/x"], "runs/x"),
    ("max_ckpt_to_keep", ["max_ckpt_to_keep=2"], 2),
    ("num_gpus_per_node", ["num_gpus_per_node=8"], 8),
    ("pretrain", ["pretrain={recipe: {layers: 2}}"], {"recipe": {"layers": 2}}),
    ("sequence_length", ["sequence_length=512"], 512),
    ("rollout_batch_size", ["rollout_batch_size=32", "train_env_manager.num_env_groups=8"], 32),
    ("val_batch_size", ["val_batch_size=8", VAL], 8),
    ("async_generation_ratio", ["async_generation_ratio=2", "train_infer_correction=null"], 2),
    ("weight_update", ["weight_update=between_batches"], "between_batches"),
    ("stall_timeout", ["stall_timeout=800"], 800.0),
    ("ppo_epochs", ["ppo_epochs=2"], 2),
    ("gamma", ["gamma=0.9"], 0.9),
    ("lambd", ["lambd=0.9"], 0.9),
    ("init_kl_coef", ["init_kl_coef=0.1"], 0.1),
    ("target_kl", ["target_kl=0.1", "init_kl_coef=0.1"], 0.1),
    ("kl_penalty", ["kl_penalty=k3"], "k3"),
    ("kl_horizon", ["kl_horizon=100"], 100.0),
    ("kl_in_score", ["kl_in_score=true", "init_kl_coef=0.1"], True),
    ("kl_loss_coef", ["kl_loss_coef=0.1"], 0.1),
    ("kl_loss_type", ["kl_loss_type=abs"], "abs"),
    ("add_token_level_kl", ["add_token_level_kl=false"], False),
    ("use_kl_loss", ["use_kl_loss=true", "kl_loss_coef=0.1"], True),
    ("whiten_advantages", ["whiten_advantages=true"], True),
    ("advantage_clip", ["advantage_clip=0.2"], 0.2),
    ("reward_clip", ["reward_clip=5"], 5.0),
    ("entropy_loss_coef", ["entropy_loss_coef=0"], 0.0),
    ("entropy_loss_coef", ["entropy_loss_coef={start: 0.1, end: 0}"], {"start": 0.1, "end": 0.0}),
    ("value_clip", ["value_clip=0.5"], 0.5),
    ("loss_agg_mode", ["loss_agg_mode=seq-mean-token-sum-norm"], "seq-mean-token-sum-norm"),
    ("loss_agg_unit", ["loss_agg_unit=sample"], "sample"),
    ("loss_scale_factor", ["loss_scale_factor=100"], 100.0),
    ("ratio_type", ["ratio_type=segment"], "segment"),
    ("recompute_old_logprobs", ["recompute_old_logprobs=false"], "false"),
    ("recompute_old_logprobs", ["recompute_old_logprobs=true"], "true"),
    ("recompute_old_logprobs", ["recompute_old_logprobs=auto"], "auto"),
    ("reward_normalization.grouping", ["reward_normalization.grouping=batch"], "batch"),
    ("reward_normalization.method", ["reward_normalization.method=mean"], "mean"),
    ("reward_normalization.norm_mean_type", ["reward_normalization.norm_mean_type=group"], "group"),
    ("reward_normalization.norm_std_type", ["reward_normalization.norm_std_type=batch"], "batch"),
    ("reward_normalization.count", ["reward_normalization.count=sample"], "sample"),
    ("train_infer_correction.is_weight", ["train_infer_correction={is_weight: {enabled: true, weight_type: sequence, upper_bound: null}}"],
     {"enabled": True, "weight_type": "sequence", "lower_bound": 0.0, "upper_bound": None}),
    ("train_infer_correction.filters", ["train_infer_correction={filters: [{agg_type: geometric, ratio_enabled: true, ratio_high: 5}]}"],
     [{"enabled": True, "agg_type": "geometric", "ratio_enabled": True, "ratio_low": 0.8, "ratio_high": 5.0,
       "diff_enabled": False, "diff_low": -0.2, "diff_high": 0.2}]),
    ("adv_estimator.use", ["adv_estimator=gigpo"], "gigpo"),
    ("pg_variant.use", ["pg_variant=ppo"], "ppo"),
    ("batch_adjust_mode.use", ["batch_adjust_mode=copy"], "copy"),
    ("pg_variant.pg_clip", ["pg_clip=0.1"], 0.1),
    ("pg_variant.dual_clip_loss", ["dual_clip_loss=true"], True),
    ("adv_estimator.step_reward_gamma", ["adv_estimator=gigpo", "step_reward_gamma=0.5"], 0.5),
    ("adv_estimator.step_reward_weight", ["adv_estimator=gigpo", "step_reward_weight=0.5"], 0.5),
    ("group_filters", ["group_filters=[no_signal]"], [{"use": "no_signal"}]),
    ("track_with", ["track_with=[console]"], [{"use": "console"}]),
    ("max_grad_norm", ["max_grad_norm=0.5"], 0.5),
    ("model_update_buffer_size_mb", ["model_update_buffer_size_mb=64"], 64),
    ("plugins", ["plugins=['no:something']"], ["no:something"]),
    ("model_source.use", ["model_source=hf"], "hf"),
    ("baselines", ["baselines=[random]"], [{"use": "random"}]),
    ("render_episodes", ["render_episodes=0"], 0),
    ("vars", ["vars={a: 1}"], {"a": 1}),
    ("runtime.use", ["runtime=local"], "local"),
    ("runtime_timeout", ["runtime_timeout=60"], 60.0),
    *[(f"{TRAIN}.model_args.dtype", [f"{TRAIN}.model_args.dtype={d}"], d) for d in ("bf16", "fp16", "fp32")],
    (f"{TRAIN}.model_args.attn_implementation", [f"{TRAIN}.model_args.attn_implementation=eager"], "eager"),
    (f"{TRAIN}.model_args.disable_gradient_checkpointing", [f"{TRAIN}.model_args.disable_gradient_checkpointing=true"], True),
    (f"{TRAIN}.model_args.lora_rank", [f"{TRAIN}.model_args.lora_rank=null"], None),
    (f"{TRAIN}.model_args.lora_rank", [f"{TRAIN}.model_args.lora_rank=8"], 8),
    *[(f"{TRAIN}.model_args.lora_sync", [f"{TRAIN}.model_args.lora_rank=8", f"{TRAIN}.model_args.lora_sync={how}"], how)
      for how in ("merged", "adapter")],
    (f"{TRAIN}.model_args.lora_alpha", [f"{TRAIN}.model_args.lora_rank=8", f"{TRAIN}.model_args.lora_alpha=16"], 16),
    *[(f"{TRAIN}.model_args.lora_target", [f"{TRAIN}.model_args.lora_rank=8", f"{TRAIN}.model_args.lora_target={given}"], target)
      for given, target in (("all-linear", "all-linear"), ("[q_proj, v_proj]", ["q_proj", "v_proj"]))],
    *[(f"{TRAIN}.model_args.freeze_module_prefix", [f"{TRAIN}.model_args.freeze_module_prefix={given}"], prefixes)
      for given, prefixes in (("[visual, layers.0]", ["visual", "layers.0"]), ("'visual, lm_head'", ["visual", "lm_head"]), ("null", []))],
    (f"{TRAIN}.training_args.learning_rate", [f"{TRAIN}.training_args.learning_rate=1e-5"], 1e-5),
    (f"{TRAIN}.training_args.weight_decay", [f"{TRAIN}.training_args.weight_decay=0"], 0.0),
    (f"{TRAIN}.training_args.warmup_steps", [f"{TRAIN}.training_args.warmup_steps=2"], 2),
    (f"{TRAIN}.training_args.warmup_ratio", [f"{TRAIN}.training_args.warmup_ratio=0.1"], 0.1),
    (f"{TRAIN}.training_args.lr_scheduler_type", [f"{TRAIN}.training_args.lr_scheduler_type=cosine"], "cosine"),
    (f"{TRAIN}.training_args.lr_scheduler_kwargs", [f"{TRAIN}.training_args.lr_scheduler_kwargs={{min_lr: 1e-7}}"], {"min_lr": 1e-7}),
    (f"{TRAIN}.training_args.per_device_train_batch_size", [f"{TRAIN}.training_args.per_device_train_batch_size=4"], 4),
    (f"{TRAIN}.training_args.gradient_accumulation_steps", [f"{TRAIN}.training_args.gradient_accumulation_steps=2"], 2),
    (f"{TRAIN}.training_args.max_grad_norm", [f"{TRAIN}.training_args.max_grad_norm=2"], 2.0),
    (f"{TRAIN}.strategy_args.strategy_name", [], "trainer"),
    (f"{TRAIN}.strategy_args.strategy_config.stage", [f"{TRAIN}.strategy_args.strategy_config.stage=1"], 1),
    (f"{TRAIN}.strategy_args.strategy_config.stage", [f"{TRAIN}.strategy_args.strategy_config=null"], 0),
    (f"{TRAIN}.device_mapping", [f"{TRAIN}.device_mapping=list(range(0,2))"], [0, 1]),
    (f"{TRAIN}.device_mapping", [f"{TRAIN}.device_mapping=null"], []),
    (f"{TRAIN}.infer_batch_size", [f"{TRAIN}.infer_batch_size=2"], 2),
    (f"{TRAIN}.use_dynamic_batching_in_train", BUDGET["train"], True),
    (f"{TRAIN}.max_tokens_per_microbatch_in_infer", BUDGET["infer"], 512),
    (f"{TRAIN}.use_dynamic_batching_in_infer", BUDGET["infer"], True),
    (f"{TRAIN}.max_tokens_per_microbatch_in_train", BUDGET["train"], 512),
    (f"{TRAIN}.use_sequence_packing", [f"{TRAIN}.use_sequence_packing=true"], True),
    (f"{TRAIN}.system_envs", [f"{TRAIN}.system_envs={{A: '1', B: 2}}"], {"A": "1", "B": "2"}),
    (f"{INFER}.generating_args.max_new_tokens", [f"{INFER}.generating_args.max_new_tokens=16"], 16),
    (f"{INFER}.generating_args.temperature", [f"{INFER}.generating_args.temperature=0.7"], 0.7),
    (f"{INFER}.generating_args.top_p", [f"{INFER}.generating_args.top_p=1"], 1.0),
    (f"{INFER}.generating_args.top_k", [f"{INFER}.generating_args.top_k=100"], 100),
    (f"{INFER}.generating_args.stop_strings", [f"{INFER}.generating_args.stop_strings=['</answer>']"], ["</answer>"]),
    (f"{INFER}.generating_args.include_stop_str_in_output", [f"{INFER}.generating_args.include_stop_str_in_output=false"], False),
    (f"{INFER}.request_timeout", [f"{INFER}.request_timeout=5"], 5.0),
    (f"{INFER}.weight_sync_timeout", [f"{INFER}.weight_sync_timeout=5"], 5.0),
    ("reference.infer_batch_size", ["reference={infer_batch_size: 3}", "kl_loss_coef=0.1"], 3),
    ("critic.infer_batch_size", ["critic={infer_batch_size: 3}", "adv_estimator=gae"], 3),
    ("train_env_manager.num_env_groups", [], 4),
    ("train_env_manager.group_size", [], 4),
    ("train_env_manager.tags", [], ["Lake"]),
    ("train_env_manager.num_groups_partition", ["train_env_manager.num_groups_partition=[4]"], [4]),
    ("train_env_manager.max_env_num_per_worker", ["train_env_manager.max_env_num_per_worker=16"], 16),
    ("train_env_manager.step_timeout", ["train_env_manager.step_timeout=1"], 1.0),
    ("train_env_manager.reset_timeout", ["train_env_manager.reset_timeout=1"], 1.0),
    ("train_env_manager.max_env_retries", ["train_env_manager.max_env_retries=0"], 0),
    ("train_env_manager.max_env_failure_rate", ["train_env_manager.max_env_failure_rate=0.5"], 0.5),
    ("train_env_manager.generating_args.top_k", ["train_env_manager.generating_args={top_k: 3}"], 3),
    ("val_env_manager.num_env_groups", [VAL], 8),
    ("custom_envs.Lake.env_type", [], "lake"),
    ("custom_envs.Lake.env_config", ["custom_envs.Lake.env_config={is_slippery: true}"], {"size": 4, "is_slippery": True}),
    ("custom_envs.Lake.max_tokens_per_step", ["custom_envs.Lake.max_tokens_per_step=16"], 16),
    ("custom_envs.Lake.max_steps", ["custom_envs.Lake.max_steps=7"], 7),
    ("custom_envs.Lake.max_env_step_concurrent", ["custom_envs.Lake.max_env_step_concurrent=2"], 2),
    ("custom_envs.Lake.step", ["custom_envs.Lake.step=inline"], "inline"),
    ("custom_envs.Lake.samplers", ["custom_envs.Lake.samplers={}"], {}),
    ("custom_envs.Lake.env_manager.history_length", ["custom_envs.Lake.env_manager={use: stepwise, history_length: 3}"], 3),
    ("rollout_mock.mode", ["rollout_mock={enable: true, mode: mock, dump_dir: d}"], "mock"),
    ("rollout_mock.dump_dir", ["rollout_mock={enable: true, dump_dir: d}"], "d"),
    ("rollout_mock.enable", ["rollout_mock={enable: true, dump_dir: d}"], True),
]  # fmt: skip

LAKE = "custom_envs.Lake"
MANAGER = "custom_envs.Lake.env_manager"
PACKAGE = "roll.pipeline.agentic.env_manager"
TRANSLATED: list[tuple[str, list[str], str, Any]] = [  # the key, overrides, where its value arrives, the value
    (f"{TRAIN}.model_args.attn_implementation", [f"{TRAIN}.model_args.attn_implementation=fa2"], f"{TRAIN}.model_args.attn_implementation",
     "flash_attention_2"),
    (f"{TRAIN}.flash_attn", [f"{TRAIN}.flash_attn=fa2"], f"{TRAIN}.model_args.attn_implementation", "flash_attention_2"),
    (f"{TRAIN}.model_args.flash_attn", [f"{TRAIN}.model_args.flash_attn=sdpa"], f"{TRAIN}.model_args.attn_implementation", "sdpa"),
    ("max_actions_per_traj", ["max_actions_per_traj=5"], f"{LAKE}.max_steps", 5),
    (f"{LAKE}.max_actions_per_traj", [f"{LAKE}.max_actions_per_traj=5"], f"{LAKE}.max_steps", 5),
    ("response_length", ["prompt_length=100", "response_length=32"], f"{INFER}.generating_args.max_new_tokens", 32),
    ("num_return_sequences_in_group", ["num_return_sequences_in_group=8", "train_env_manager={num_env_groups: 16, group_size: 8}"],
     "rollout_batch_size", 128),
    (f"{INFER}.generating_args.num_return_sequences", [f"{INFER}.generating_args.num_return_sequences=1"], "rollout_batch_size", 16),
    (f"{TRAIN}.strategy_args.strategy_config.tp_size", [f"{TRAIN}.strategy_args.strategy_config.tp_size=1"],
     f"{TRAIN}.strategy_args.strategy_config.tensor_model_parallel_size", 1),
    (f"{TRAIN}.strategy_args.strategy_config.pp_size", [f"{TRAIN}.strategy_args.strategy_config.pp_size=1"],
     f"{TRAIN}.strategy_args.strategy_config.pipeline_model_parallel_size", 1),
    ("checkpoint_config", ["checkpoint_config={type: file_system, output_dir: /data/x}"], "output_dir", "/data/x"),
    (f"{LAKE}.env_manager_cls", [f"{LAKE}.env_manager_cls={PACKAGE}.traj_env_manager.TrajEnvManager"], f"{MANAGER}.use", "trajectory"),
    (f"{LAKE}.env_manager_cls", [f"{LAKE}.env_manager_cls={PACKAGE}.step_env_manager.StepEnvManager"], f"{MANAGER}.use", "stepwise"),
    (f"{LAKE}.env_manager_cls", [f"{LAKE}.env_manager_cls={PACKAGE}.vl_traj_env_manager.VLTrajEnvManager"], f"{MANAGER}.use", "trajectory"),
    (f"{LAKE}.agent_system_template", [f"{LAKE}.agent_system_template=Play well."], f"{MANAGER}.agent_system_template", "Play well."),
    (f"{LAKE}.agent_template", [f"{LAKE}.agent_template='{{observation}}'"], f"{MANAGER}.agent_template", "{observation}"),
    (f"{LAKE}.pre_step_template", [f"{LAKE}.pre_step_template=a"], f"{MANAGER}.pre_step_template", "a"),
    (f"{LAKE}.next_step_template", [f"{LAKE}.next_step_template=a"], f"{MANAGER}.next_step_template", "a"),
    (f"{LAKE}.history_length", [f"{LAKE}.history_length=5", f"{LAKE}.env_manager=stepwise"], f"{MANAGER}.history_length", 5),
    (f"{LAKE}.env_config.action_pattern", [f"{LAKE}.env_config.action_pattern=<a>(.*?)</a>"], f"{MANAGER}.action_pattern", "<a>(.*?)</a>"),
    (f"{LAKE}.env_config.format_penalty", [f"{LAKE}.env_config.format_penalty=-0.1"], f"{MANAGER}.format_penalty", -0.1),
    (f"{LAKE}.env_config.max_steps", [f"{LAKE}.env_config.max_steps=6"], f"{LAKE}.max_steps", 6),
    (f"{LAKE}.use_thread_lock", [f"{LAKE}.use_thread_lock=true"], f"{LAKE}.max_env_step_concurrent", 1),
    ("train_env_manager.format_penalty", ["train_env_manager.format_penalty=-0.2"], f"{MANAGER}.format_penalty", -0.2),
    (f"{TRAIN}.use_remove_padding", [f"{TRAIN}.use_remove_padding=true"], f"{TRAIN}.use_sequence_packing", True),
    ("tracker_kwargs", ["track_with=jsonl", "tracker_kwargs={every: 3}"], "track_with", [{"use": "jsonl", "every": 3, "folder": "logs"}]),
    ("tracker_kwargs", ["track_with=[console, jsonl]", "tracker_kwargs={jsonl: {every: 3}}"], "track_with",
     [{"use": "console"}, {"use": "jsonl", "every": 3, "folder": "logs"}]),
    ("enable_old_logprobs_recompute", ["enable_old_logprobs_recompute=true"], "recompute_old_logprobs", "true"),
    ("rpc_timeout", ["rpc_timeout=60"], "runtime_timeout", 60.0),
    ("system_envs", ["system_envs={A: 1}"], f"{INFER}.system_envs", {"A": "1"}),
    ("reward_normalization.method", ["reward_normalization.method=asym_clip"], "reward_normalization.method", "mean_std"),
    *[("kl_penalty", [f"kl_penalty={old}"], "kl_penalty", new) for old, new in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"))],
    *[("kl_loss_type", [f"kl_loss_type={old}"], "kl_loss_type", new) for old, new in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"))],
    (f"{INFER}.generating_args.do_sample", [f"{INFER}.generating_args.do_sample=true"], f"{INFER}.generating_args.temperature", 0.9),
    (f"{INFER}.generating_args.top_k", [f"{INFER}.generating_args.top_k=-1"], f"{INFER}.generating_args.top_k", 0),
    (f"{TRAIN}.freeze_module_prefix", [f"{TRAIN}.freeze_module_prefix=[visual]"], f"{TRAIN}.model_args.freeze_module_prefix", ["visual"]),
    (f"{TRAIN}.freeze_module_prefix", [f"{TRAIN}.freeze_module_prefix=visual"], f"{TRAIN}.model_args.freeze_module_prefix", ["visual"]),
]  # fmt: skip

NAMED: list[tuple[str, list[str], str]] = [  # the key, overrides, the reason
    ("hydra", ["hydra={run: {dir: .}}"], "Hydra does not run here"),
    ("reward_pretrain", ["reward_pretrain=x"], "there is no reward-model role"),
    ("is_num_return_sequences_expand", ["is_num_return_sequences_expand=true"], "always one request a member"),
    ("data_args", ["data_args={template: qwen2_5, file_name: x}"], "the chat template is the model folder's"),
    (f"{TRAIN}.data_args", [f"{TRAIN}.data_args={{template: qwen2_5}}"], "the chat template is the model folder's"),
    (f"{TRAIN}.worker_cls", [f"{TRAIN}.worker_cls=a.B"], "workers are chosen by strategy_name"),
    (f"{TRAIN}.model_args.model_type", [f"{TRAIN}.model_args.model_type=causal_lm"], "read from its config.json"),
    (f"{TRAIN}.sequence_length_round_in_train", [f"{TRAIN}.sequence_length_round_in_train=64"], "padded to their own longest row"),
    (f"{INFER}.generating_args.num_beams", [f"{INFER}.generating_args.num_beams=1"], "beams have no log-probs to train on"),
    ("model_name", ["model_name=qwen"], "the model is the one of pretrain"),
    ("profiler_timeline", ["profiler_timeline=true"], "profiling is left to the engines' own tools"),
    ("train_env_manager.max_traj_per_env", ["train_env_manager.max_traj_per_env=2"], "num_env_groups × group_size episodes"),
    ("checkpoint_config.output_dir", ["checkpoint_config={output_dir: /data}", "output_dir=out"], "checkpoints go to output_dir 'out'"),
    (f"{LAKE}.history_length", [f"{LAKE}.history_length=5"], "env manager 'trajectory' has no option 'history_length'"),
    ("tracker_kwargs.log_dir", ["track_with=jsonl", "tracker_kwargs={log_dir: x}"], "logger 'jsonl' has no option 'log_dir'"),
    *[(key, [f"{key}=0.1", "pg_variant=vanilla", f"{TRAIN}.training_args.gradient_accumulation_steps=8"], "has no effect with pg_variant 'vanilla'")
      for key in ("pg_clip", "pg_clip_low", "pg_clip_high", "dual_clip_c")],
    *[(key, [f"{key}=0.1"], "has no effect with adv_estimator 'grpo'")
      for key in ("step_reward_gamma", "episode_reward_weight", "step_reward_weight")],
]  # fmt: skip

LATER = "is not supported by this version"
REFUSED: list[tuple[str, list[str], str]] = [  # the key, overrides, the message
    ("train_infer_correction.is_weight.weight_type", ["train_infer_correction={is_weight: {weight_type: turn}}"],
     "'turn' is none of 'token', 'segment'"),
    ("train_infer_correction.is_weights", ["train_infer_correction={is_weights: {}}"], "unknown key 'is_weights'. Did you mean 'is_weight'?"),
    ("rollout_mock", ["rollout_mock.enable=true"], "not where the rollouts are. Fix: rollout_mock: {enable: true, mode: dump, dump_dir: FOLDER}"),
    (f"{TRAIN}.model_args.lora_rank", [f"{TRAIN}.model_args.lora_rank=-1"], "-1: lora_rank must be positive"),
    (f"{TRAIN}.model_args.lora_alpha", [f"{TRAIN}.model_args.lora_rank=8", f"{TRAIN}.model_args.lora_alpha=-1"], "lora_alpha must be positive"),
    (f"{TRAIN}.freeze_module_prefix", [f"{TRAIN}.freeze_module_prefix=[visual]", f"{TRAIN}.model_args.freeze_module_prefix=[model]"],
     "['visual'] here, and ['model'] at $.actor_train.model_args.freeze_module_prefix: the same setting twice"),
    (f"{TRAIN}.ulysses_size", [f"{TRAIN}.ulysses_size=2"], LATER),
    (f"{TRAIN}.model_args.ulysses_size", [f"{TRAIN}.model_args.ulysses_size=2"], LATER),
    ("train_env_manager.group_size_redundancy", ["train_env_manager.group_size_redundancy=1"], LATER),
    ("train_env_manager.group_filter_cls", ["train_env_manager.group_filter_cls=a.B"], "Installed: no_signal. Fix: group_filters: [NAME]"),
    (f"{INFER}.generating_args.num_beams", [f"{INFER}.generating_args.num_beams=4"], "one beam is sampling. Fix: num_beams: 1"),
    (f"{INFER}.generating_args.num_return_sequences", [f"{INFER}.generating_args.num_return_sequences=8"],
     "8 here, and 4 at $.train_env_manager.group_size: the same setting twice"),
    (f"{TRAIN}.model_args.model_type", [f"{TRAIN}.model_args.model_type=trl"], "'trl' is not supported"),
    (f"{LAKE}.env_manager_cls", [f"{LAKE}.env_manager_cls=my.DebateManager"], "Installed: stepwise, trajectory. Fix: env_manager: NAME"),
    ("checkpoint_config", ["checkpoint_config={type: oss}"], "checkpoints of type 'oss' are not supported"),
    ("prompt_length", ["prompt_length=100"], "prompt_length needs response_length beside it"),
    ("prompt_length", ["prompt_length=100", "response_length=32", "sequence_length=256"], "= 132, but sequence_length is 256"),
    ("tracker_kwargs", ["tracker_kwargs={a: 1}"], "tracker_kwargs needs track_with: NAME beside it"),
    ("tracker_kwargs", ["track_with=[console, jsonl]", "tracker_kwargs={every: 1}"], "not clear among console, jsonl"),
    ("kl_penalty", ["kl_penalty=full"], "'full' is none of 'k1', 'abs', 'k2', 'k3'"),
    (f"{LAKE}.env_config.max_steps", [f"{LAKE}.env_config.max_steps=6", f"{LAKE}.max_steps=7"], "6 here, and 7 at $.custom_envs.Lake.max_steps"),
    ("add_token_level_kl", ["add_token_level_kl=true"], "disagrees with init_kl_coef"),
    ("use_kl_loss", ["use_kl_loss=true"], "disagrees with kl_loss_coef"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "overrides", "value"), named(USED))
def test_a_key_that_is_used_reaches_the_configuration(
    run_yaml: Run, key: str, overrides: list[str], value: Any
) -> None:
    loaded = run_yaml("", *overrides)
    found = value_at(loaded, key)
    assert found == value
    assert type(found) is type(value)
    assert not any(f"$.{key}:" in note for note in loaded.notes)


@pytest.mark.parametrize(("key", "overrides", "target", "value"), named(TRANSLATED))
def test_a_key_that_is_translated_arrives_and_is_noted(
    run_yaml: Run, key: str, overrides: list[str], target: str, value: Any
) -> None:
    if key == "response_length":
        overrides = [*overrides, "sequence_length=132"]
    loaded = run_yaml("", *overrides)
    translated(loaded, key, target, value)


@pytest.mark.parametrize(("key", "overrides", "reason"), named(NAMED))
def test_a_key_that_does_not_apply_is_named_with_its_reason(
    run_yaml: Run, key: str, overrides: list[str], reason: str
) -> None:
    unused(run_yaml("", *overrides), key, reason)


@pytest.mark.parametrize(("key", "overrides", "message"), named(REFUSED))
def test_a_value_that_cannot_be_had_is_refused(run_yaml: Run, key: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_yaml("", *overrides)
    assert any(f"$.{key}: " in p and message in p for p in caught.value.problems), caught.value.problems


def test_every_key_of_the_schema_has_a_case() -> None:
    blocks = {
        RunConfig: "{}",
        Role: f"{TRAIN}.{{}} {INFER}.{{}}",
        ModelArgs: f"{TRAIN}.model_args.{{}}",
        TrainingArgs: f"{TRAIN}.training_args.{{}}",
        GeneratingArgs: f"{INFER}.generating_args.{{}}",
        EnvManagerConfig: "train_env_manager.{}",
        CustomEnv: f"{LAKE}.{{}}",
        RewardNormalization: "reward_normalization.{}",
    }
    keys = [case[0] for cases in (USED, REFUSED) for case in cases]
    names = [
        text.format(a.name, a.name).split()
        for cls, text in blocks.items()
        for a in attrs.fields(cls)
        if a.name != "algorithm"
    ]
    assert [n for n in names if not any(key == p or key.startswith(p + ".") for key in keys for p in n)] == []


@pytest.mark.parametrize(
    "override",
    [f"{TRAIN}.freeze_module_prefix=[]", f"{TRAIN}.ulysses_size=1", f"{TRAIN}.model_args.ulysses_size=null",
     "train_env_manager.group_size_redundancy=0",
     "train_env_manager.group_filter_cls=null", "tracker_kwargs={}", "checkpoint_config=null"],
)  # fmt: skip
def test_a_feature_that_is_switched_off_needs_no_word(run_yaml: Run, override: str) -> None:
    loaded = run_yaml("", override)
    assert loaded.warnings == []
    assert loaded.notes == []


def test_prompt_and_response_are_a_sample(run_yaml: Run) -> None:
    text = (
        "max_steps: 1\nrollout_batch_size: 2\npretrain: m\nprompt_length: 100\nresponse_length:"
        " 28\nnum_return_sequences_in_group: 4\nactor_train: {strategy_args: {strategy_name: trainer}}\nactor_infer:"
        " {strategy_args: {strategy_name: sampler}}\ntrain_env_manager: {}\ncustom_envs: {Lake: {env_type: lake}}\n"
    )
    loaded = run_yaml(text, base=False)
    config = loaded.config
    assert (config.sequence_length, config.actor_infer.generating_args.max_new_tokens) == (128, 28)
    assert (
        config.rollout_batch_size,
        config.train_env_manager.num_env_groups,
        config.train_env_manager.group_size,
    ) == (8, 2, 4)
    assert any(
        "rollout_batch_size 2 counted prompts: num_env_groups 2, rollout_batch_size 8 here" in note
        for note in loaded.notes
    )


def test_a_name_that_interpolation_reads_is_left_alone(run_yaml: Run) -> None:
    loaded = run_yaml("model_name: qwen\nexp_name: ${model_name}-lake\n")
    assert loaded.config.exp_name == "qwen-lake"
    assert loaded.config.vars == {"model_name": "qwen"}
    assert loaded.warnings == []


def test_a_range_of_a_coefficient_is_linear_in_progress() -> None:
    assert [CoefRange(1.0, 0.0).at(p) for p in (0.0, 0.25, 1.0)] == [1.0, 0.75, 0.0]
