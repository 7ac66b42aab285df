"""The configuration tree, and every rule of its validation with the arithmetic that its message must show."""

import dataclasses
from collections import Counter

import pytest

from megatron_logra.config import Config, ConfigError, build_config, iterate_settings
from megatron_logra.config_layout import ModelSizes, validate_model_parallel
from megatron_logra.config_validation import (
    _RANGES,
    validate_config,
    validate_paths,
)

REQUIRED = {"hf_checkpoint": "model", "train_data": "train.jsonl"}


def config_of(**values: object) -> Config:
    return build_config(REQUIRED | values)


def problems_of(world_size: int = 1, **values: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        validate_config(config_of(**values), world_size=world_size)
    return caught.value.problems


def test_leaf_names_are_unique_and_flags_are_words():
    names = Counter(spec.name for spec in iterate_settings())
    assert max(names.values()) == 1
    assert all(name.replace("_", "").isalnum() and name == name.lower() for name in names)


def test_every_setting_has_help_and_every_fraction_a_range():
    floats = {spec.name for spec in iterate_settings() if spec.kind is float}
    assert floats <= {name for name, _ in _RANGES}, "a number without a listed range would have to be at least 1"
    assert {name for name, _ in _RANGES} <= {spec.name for spec in iterate_settings()}
    assert all(spec.help for spec in iterate_settings())


def test_defaults_are_of_the_type_that_is_enforced():
    for spec in iterate_settings():
        if not spec.required:
            assert spec.convert(spec.default) == spec.default, spec.name


def test_defaults_are_valid_on_one_rank_and_on_many():
    for world_size in (1, 2, 8, 64):
        validate_config(config_of(), world_size=world_size)


def test_tree_is_frozen():
    config = config_of()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.seq_length = 3  # type: ignore[misc]


def test_build_config_collects_unknown_missing_and_wrong_types():
    with pytest.raises(ConfigError) as caught:
        build_config({"train_data": "x", "seq_lenght": 1, "bf16": 1, "kl_control": "on", "seed": True})
    unknown, *rest = caught.value.problems
    assert unknown == "unknown setting 'seq_lenght'; did you mean seq_length?"
    assert any(problem.startswith("hf_checkpoint is required: give --hf-checkpoint") for problem in rest)
    assert "bf16: expected true or false, got the integer 1" in rest
    assert "kl_control: expected one of predicted, off, got the text 'on'" in rest
    assert "seed: expected an integer, got the boolean True" in rest
    assert str(caught.value).startswith("5 problems in the configuration:\n  - unknown setting")


def test_explicit_names_are_those_given_and_do_not_count_for_equality():
    config = config_of(seq_length=1024)
    assert config.explicit == {"hf_checkpoint", "train_data", "seq_length"}
    assert config == config_of()


def test_derived_sizes():
    config = config_of(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=3,
        grpo_prompts_per_step=6,
        grpo_group_size=4,
        grpo_iterations=2,
        global_batch_size=12,
        micro_batch_size=3,
        make_vocab_size_divisible_by=64,
        seq_length=100,
        rollout_max_new_tokens=30,
    )
    assert config.model_parallel_size == 6
    assert config.data_parallel_size(12) == 2
    assert config.num_microbatches(12) == 2  # 12 / (3 x 2)
    assert config.updates_per_step == 4  # 24 / 12 updates in each of 2 passes
    assert config.max_prompt_tokens == 70
    assert [config.padded_vocab_size(size) for size in (128, 129, 49152)] == [128, 256, 49152]
    assert config_of().global_batch_size == 64
    assert (config_of().logra_master, config_of(bf16=True).logra_master) == ("fp32", "split")
    assert config_of(bf16=True, logra_master="fp32").logra_master == "fp32"


def test_model_overrides_are_those_given():
    config = config_of(num_layers=3, untie_embeddings_and_output_weights=False, seq_length=7)
    assert config.model_overrides() == {"num_layers": 3, "untie_embeddings_and_output_weights": False}


@pytest.mark.parametrize(
    ("world_size", "values", "expected"),
    [
        (
            6,
            {"tensor_model_parallel_size": 4},
            (
                "world size 6 is not divisible by tensor_model_parallel_size 4 x pipeline_model_parallel_size 1 = 4: "
                "6 % 4 = 2; start a multiple of 4 processes"
            ),
        ),
        (0, {}, "world size 0 is out of range"),
        (
            2,
            {"micro_batch_size": 3, "rollout_temperature": 1.0},
            (
                "global_batch_size 64 (= grpo_prompts_per_step 8 x grpo_group_size 8) is not divisible by "
                "micro_batch_size 3 x data-parallel size 2 = 6: 64 % 6 = 4"
            ),
        ),
        (
            4,
            {"global_batch_size": 2},
            "global_batch_size 2 is not divisible by micro_batch_size 1 x data-parallel size 4 = 4: 2 % 4 = 2",
        ),
        (
            1,
            {"global_batch_size": 48},
            (
                "grpo_prompts_per_step 8 x grpo_group_size 8 = 64 responses is not divisible by global_batch_size 48: "
                "64 % 48 = 16; set --global-batch-size to a divisor of 64"
            ),
        ),
        (
            3,
            {
                "tensor_model_parallel_size": 3,
                "sequence_parallel": True,
                "seq_length": 512,
                "micro_batch_size": 1,
            },
            "seq_length 512 cannot be split over tensor_model_parallel_size 3 with sequence_parallel: 512 % 3 = 2",
        ),
        (1, {"sequence_parallel": True}, "sequence_parallel has no effect with tensor_model_parallel_size 1"),
        (1, {"seq_length": 256}, "leaves no room for a prompt in seq_length 256: 256 - 256 = 0 tokens"),
        (1, {"max_position_embeddings": 512}, "seq_length 1024 is more than max_position_embeddings 512"),
        (1, {"recompute_method": "uniform"}, "recompute_method uniform has no effect without recompute_gran"),
        (
            1,
            {"recompute_num_layers": 2},
            "recompute_num_layers 2 has no effect without recompute_granularity",
        ),
        (
            1,
            {"recompute_granularity": "full", "recompute_num_layers": 1},
            "recompute_granularity full needs recompute_method: give for example --recompute-method uniform",
        ),
        (1, {"logra_master": "split"}, "logra_master split needs bf16"),
        (1, {"kl_budget": 1e-5}, "kl_budget_final 2e-05 is more than kl_budget 1e-05"),
        (
            1,
            {"kl_control": "off", "kl_budget": 1e-3},
            "kl_budget 0.001 has no effect with kl_control off: give --kl-control predicted, or leave out",
        ),
        (1, {"kl_control": "off", "kl_estimator": "jvp"}, "kl_estimator jvp has no effect"),
        (1, {"kl_control": "off", "kl_alpha_max": 2.0}, "kl_alpha_max 2.0 has no effect with kl_control off"),
        (1, {"kl_schedule": "constant", "kl_schedule_steps": 9}, "kl_schedule_steps 9 has no effect with kl_schedule"),
        (1, {"kl_fisher_draws": 9}, "kl_fisher_draws 9 has no effect with kl_estimator auto"),
        (
            1,
            {"kl_estimator": "fisher", "logra_rule": "lr", "lr": 1e-6, "weight_decay": 0.1},
            "kl_estimator fisher takes no weight_decay",
        ),
        (1, {"optimizer": "adam"}, "optimizer adam needs lr"),
        (1, {"optimizer": "adam", "lr": 1e-6, "logra_rank": 8}, "logra_rank 8 has no effect with optimizer adam"),
        (1, {"optimizer": "adam", "lr": 1e-6, "sync": "factors"}, "sync factors cannot describe a dense update"),
        (1, {"optimizer": "adam", "lr": 1e-6, "kl_control": "predicted"}, "kl_control predicted needs optimizer logra"),
        (1, {"logra_train_non_targets": True}, "logra_train_non_targets needs lr"),
        (1, {"logra_rule": "sgd"}, "logra_rule sgd needs lr"),
        (1, {"lr": 1e-6}, "lr 1e-06 has no effect with logra_rule paper"),
        (1, {"logra_rule": "lr", "lr": 1e-6, "logra_update_ratio": 1e-4}, "logra_update_ratio 0.0001 has no effect"),
        (
            1,
            {"logra_rule": "lr", "lr": 1e-6, "min_lr": 1e-7},
            "min_lr 1e-07 has no effect with lr_decay_style constant",
        ),
        (1, {"logra_rule": "lr", "lr": 1e-6, "adam_beta1": 0.8}, "adam_beta1 0.8 has no effect with optimizer logra"),
        (
            1,
            {"logra_rule": "lr", "lr": 1e-6, "lr_decay_style": "linear", "lr_warmup_iters": 9, "lr_decay_iters": 5},
            "lr_decay_iters 5 is not after lr_warmup_iters 9",
        ),
        (1, {"use_distributed_optimizer": True}, "use_distributed_optimizer True has no effect with float32 weights"),
        (3, {"context_parallel_size": 2}, "world size 3 is not divisible by"),
        (4, {"expert_model_parallel_size": 8}, "world size 4 is not divisible by pipeline_model_parallel_size 1 x"),
        (2, {"context_parallel_size": 2, "seq_length": 1022}, "1022 % 4 = 2"),
        (1, {"num_layers_per_virtual_pipeline_stage": 2}, "num_layers_per_virtual_pipeline_stage 2 has no effect"),
        (
            2,
            {
                "pipeline_model_parallel_size": 2,
                "num_layers_per_virtual_pipeline_stage": 2,
                "decoder_first_pipeline_num_layers": 3,
            },
            "num_layers_per_virtual_pipeline_stage needs stages with equally many layers",
        ),
        (
            1,
            {"recompute_granularity": "selective", "recompute_num_layers": 1},
            "recompute_num_layers 1 has no effect with",
        ),
        (1, {"recompute_modules": ("mlp",)}, "recompute_modules mlp has no effect without"),
        (
            1,
            {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
            "recompute_modules names 'layernorm'",
        ),
        (
            1,
            {"kl_budget": 0.01, "kl_budget_final": 0.01, "kl_schedule_steps": 5},
            "kl_schedule_steps 5 has no effect with kl_budget_final = kl_budget",
        ),
        (
            1,
            {"kl_mismatch_weight": 0, "kl_budget_floor": 0.5},
            "kl_budget_floor 0.5 has no effect with kl_mismatch_weight 0",
        ),
        (
            4,
            {"global_batch_size": 4, "kl_probe_responses": 2},
            "kl_probe_responses 2 is more than the responses of a data-parallel rank in one update, 4 // 4 = 1",
        ),
        (1, {"save_interval": 5}, "save_interval 5 has no effect with no save: give --save a folder"),
        (1, {"eval_interval": 5}, "eval_interval 5 has no effect with no eval_data"),
        (1, {"eval_samples": 5}, "eval_samples 5 has no effect with no eval_data"),
        (1, {"wandb_exp_name": "x"}, "wandb_exp_name x has no effect with no wandb_project"),
        (1, {"wandb_save_dir": "x"}, "wandb_save_dir x has no effect with no wandb_project"),
        (1, {"prompt_key": "q", "answer_key": "q"}, "prompt_key and answer_key are both 'q'"),
        (1, {"reward": "exact"}, "reward 'exact' is not of the form module:function"),
        (1, {"reward": "my/file:exact"}, "reward 'my/file:exact' is not of the form module:function"),
        (1, {"rollout_stop": ["a", ""]}, "rollout_stop contains an empty text"),
        (1, {"rollout_stop": ["a", "a"]}, "contains the same text twice"),
        (1, {"hf_checkpoint": ""}, "hf_checkpoint is an empty text: give --hf-checkpoint a value"),
        (1, {"logra_rank": 0}, "logra_rank 0 is out of range: set --logra-rank to a value at least 1 and at"),
        (
            1,
            {"kl_budget": -1e-4},
            "kl_budget -0.0001 is out of range: set --kl-budget to a value greater than 0",
        ),
        (1, {"kl_budget": float("nan")}, "kl_budget nan is out of range: set --kl-budget to a finite value"),
        (1, {"rollout_top_p": 1.5}, "rollout_top_p 1.5 is out of range"),
        (1, {"rollout_top_k": -1}, "rollout_top_k -1 is out of range: set --rollout-top-k to a value at least 0"),
        (1, {"rollout_temperature": 0}, "at 0 all responses of a group would be the same"),
        (1, {"grpo_group_size": 1}, "the advantage in a group of one is always 0"),
        (1, {"logra_beta2": 1.0}, "set --logra-beta2 to a value at least 0 and less than 1"),
        (1, {"train_iters": 0}, "set --train-iters to a value at least 1"),
        (1, {"tensor_model_parallel_size": 0}, "set --tensor-model-parallel-size to a value at least 1"),
        (1, {"global_batch_size": -1}, "set --global-batch-size to a value at least 1"),
        (1, {"seed": -1}, "set --seed to a value at least 0"),
    ],
)
def test_rule(world_size, values, expected):
    matching = [problem for problem in problems_of(world_size, **values) if expected in problem]
    assert len(matching) == 1


def test_all_problems_come_in_one_error():
    problems = problems_of(6, tensor_model_parallel_size=4, logra_rank=0, save_interval=3, reward="x")
    assert len(problems) == 4


@pytest.mark.parametrize(
    ("world_size", "values"),
    [
        (1, {"sequence_parallel": False}),
        (1, {"save": "out", "save_interval": 1000, "train_iters": 2}),
        (1, {"kl_control": "off"}),
        (8, {"global_batch_size": 8}),
        (1, {"kl_budget": 0.02, "kl_budget_final": 0.02}),
        (
            6,
            {
                "tensor_model_parallel_size": 3,
                "sequence_parallel": True,
                "seq_length": 768,
                "rollout_max_new_tokens": 12,
            },
        ),
        (1, {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}),
        (1, {"bf16": True, "logra_master": "split", "rollout_stop": ["\n", "###"]}),
    ],
)
def test_accepted(world_size, values):
    validate_config(config_of(**values), world_size=world_size)


SHAPE = {"num_attention_heads": 28, "num_query_groups": 4, "num_layers": 28, "ffn_hidden_size": 18944}
MOE = {"num_experts": 4, "moe_ffn_hidden_size": 24}


def test_model_parallel_names_the_arithmetic_of_everything_that_cannot_be_split():
    config = config_of(tensor_model_parallel_size=8, pipeline_model_parallel_size=3)
    with pytest.raises(ConfigError) as caught:
        validate_model_parallel(config, ModelSizes(**SHAPE | {"num_query_groups": 3}))
    heads, groups, layers = caught.value.problems
    assert heads.startswith(
        "28 attention heads cannot be split over tensor_model_parallel_size 8: 28 % 8 = 4; "
        "set --tensor-model-parallel-size to a divisor of 28 (1, 2, 4, 7, 14, 28)"
    )
    assert groups.startswith("3 query groups (key/value heads) cannot be split over tensor_model_parallel_size 8, ")
    assert "3 % 8 = 3, 8 % 3 = 2" in groups
    assert layers.startswith("28 layers cannot be split over pipeline_model_parallel_size 3: 28 % 3 = 1")


def test_model_parallel_checks_mlp_sequence_positions_and_recomputation():
    config = config_of(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=7,
        sequence_parallel=True,
        seq_length=1025,
        recompute_num_layers=5,
    )
    with pytest.raises(ConfigError) as caught:
        sizes = ModelSizes(**SHAPE | {"ffn_hidden_size": 101, "max_position_embeddings": 1000})
        validate_model_parallel(config, sizes)
    mlp, recompute, sequence, positions = caught.value.problems
    assert "101 columns of ffn_hidden_size cannot be split over tensor_model_parallel_size 2: 101 % 2 = 1" in mlp
    assert "1025 % 2 = 1" in sequence
    assert "recompute_num_layers 5 is more than the 4 layers of a pipeline stage" in recompute
    assert "seq_length 1025 is more than the 1000 positions" in positions


def test_model_parallel_accepts_what_divides():
    config = config_of(tensor_model_parallel_size=4, pipeline_model_parallel_size=7)
    validate_model_parallel(config, ModelSizes(**SHAPE, max_position_embeddings=32768))
    # More ranks than KV heads, a multiple of them.
    validate_model_parallel(config_of(tensor_model_parallel_size=28), ModelSizes(**SHAPE | {"ffn_hidden_size": 28}))


@pytest.mark.parametrize(
    ("values", "sizes", "problem"),
    [
        ({"expert_model_parallel_size": 2}, {}, "expert_model_parallel_size 2 has no effect: the model has no experts"),
        (
            {"expert_model_parallel_size": 3},
            MOE,
            "4 experts cannot be split over expert_model_parallel_size 3: 4 % 3 = 1",
        ),
        ({"expert_tensor_parallel_size": 5}, MOE, "24 columns of an expert cannot be split over"),
        ({"tensor_model_parallel_size": 2}, MOE, "with a mixture of experts needs sequence_parallel"),
        (
            {"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 2},
            {},
            "28 layers less 2 in the first and last pipeline stage leaves 26 for 3 other stages",
        ),
        (
            {"pipeline_model_parallel_size": 7, "num_layers_per_virtual_pipeline_stage": 4},
            {},
            "must divide the 28 // 7 = 4 layers of a pipeline stage into at least 2 chunks",
        ),
    ],
)
def test_model_parallel_rules(values: dict[str, object], sizes: dict[str, int], problem: str):
    with pytest.raises(ConfigError) as caught:
        validate_model_parallel(config_of(**values), ModelSizes(**SHAPE | sizes))
    assert any(problem in found for found in caught.value.problems), caught.value.problems


def test_paths_that_are_missing_or_of_the_wrong_kind(tmp_path):
    file = tmp_path / "file.jsonl"
    file.write_text("{}\n")
    other = tmp_path / "other"
    other.write_text("")
    validate_paths(config_of(hf_checkpoint=str(tmp_path), train_data=str(file), save=str(tmp_path / "new")))
    config = config_of(
        hf_checkpoint=str(file), train_data=str(tmp_path), eval_data=str(tmp_path / "none"), save=str(other)
    )
    with pytest.raises(ConfigError) as caught:
        validate_paths(config)
    checkpoint, train, evaluation, save = caught.value.problems
    assert checkpoint.endswith("is not a folder: give --hf-checkpoint an existing folder")
    assert train.endswith("is not a file: give --train-data an existing .jsonl or .parquet file")
    assert evaluation.endswith("does not exist: give --eval-data an existing .jsonl or .parquet file")
    assert save.startswith("save") and "is a file" in save


def test_the_source_checkpoint_is_not_overwritten(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "alias").symlink_to(tmp_path)
    paths = {"hf_checkpoint": str(tmp_path), "train_data": str(tmp_path / "train.jsonl")}
    with pytest.raises(ConfigError, match=r"is the folder of hf_checkpoint, which it would overwrite"):
        validate_paths(config_of(**paths, save=str(tmp_path / "alias")))
