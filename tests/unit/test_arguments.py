"""Command line, YAML file and resolved configuration, and the console script that leads to them."""

import subprocess
import sys

import pytest
import yaml

from megatron_logra import cli
from megatron_logra.arguments import parse_arguments, resolved_yaml
from megatron_logra.config import ConfigError, build_config, iterate_settings
from megatron_logra.config_validation import validate_config

REQUIRED = ["--hf-checkpoint", "model", "--train-data", "train.jsonl"]


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def error_of(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_arguments([*REQUIRED, *arguments])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_flags_of_every_type():
    config = parse_arguments(
        [*REQUIRED, "--seq-length", "64", "--kl-budget=0.02", "--logra-update-ratio", "1", "--bf16"]
        + [
            "--no-apply-chat-template",
            "--kl-control",
            "off",
            "--rollout-stop",
            "###",
            "\n",
            "--rotary-base",
            "1e6",
        ]
        + ["--no-untie-embeddings-and-output-weights"]
    )
    assert (config.model.seq_length, config.kl.kl_budget, config.training.bf16) == (64, 0.02, True)
    assert type(config.optimizer.logra_update_ratio) is float
    assert config.data.apply_chat_template is False
    assert config.kl.kl_control == "off"
    assert config.rollout.rollout_stop == ("###", "\n")
    assert config.model.rotary_base == 1e6
    assert config.model.untie_embeddings_and_output_weights is False
    assert {"bf16", "kl_control", "hf_checkpoint"} <= config.explicit
    assert "seed" not in config.explicit


def test_every_setting_has_a_flag_that_reaches_it():
    samples = {int: "7", float: "0.125", str: "text", bool: None, tuple: "text"}
    for spec in iterate_settings():
        text = spec.choices[-1] if spec.choices else samples[spec.kind]
        arguments = [] if spec.required else [*REQUIRED]
        if spec.required:
            arguments += [a for pair in (REQUIRED[:2], REQUIRED[2:]) if pair[0] != spec.flag for a in pair]
        config = parse_arguments(arguments + [spec.flag] + ([] if text is None else [text]))
        expected = {int: 7, float: 0.125, str: text, bool: True, tuple: ("text",)}[spec.kind]
        assert config.flat()[spec.name] == expected, spec.name
        assert spec.name in config.explicit


def test_flags_win_over_yaml_and_yaml_over_defaults(yaml_file):
    path = yaml_file("seq-length: 128\nkl_budget: 1e-3\nhf_checkpoint: a\ntrain_data: b\nseed: 1234\n")
    config = parse_arguments(["--config", path, "--seq-length", "256"])
    assert (config.model.seq_length, config.kl.kl_budget, config.model.hf_checkpoint) == (256, 1e-3, "a")
    assert config.explicit == {"seq_length", "kl_budget", "hf_checkpoint", "train_data"}


@pytest.mark.parametrize("number", ["-1", "-1e-4", "-.5", "-2.5E+3"])
def test_negative_numbers_are_values_and_not_flags(number):
    assert parse_arguments([*REQUIRED, "--kl-budget", number]).kl.kl_budget == float(number)


def test_unknown_flags_name_the_closest_one(capsys):
    error = error_of(capsys, "--tensor-parallel-size", "2", "--seq_length=4")
    assert "unknown flag --tensor-parallel-size; did you mean --tensor-model-parallel-size?" in error
    assert "unknown flag --seq_length; did you mean --seq-length?" in error
    assert len(error.splitlines()) == 2


def test_misuse_ends_with_status_2(capsys):
    assert "unexpected value 'stray'" in error_of(capsys, "--bf16", "stray")
    assert "invalid int value: '1.5'" in error_of(capsys, "--seq-length", "1.5")
    assert "invalid choice: 'maybe'" in error_of(capsys, "--kl-control", "maybe")
    assert "expected one argument" in error_of(capsys, "--seed")
    assert "--seed given more than once" in error_of(capsys, "--seed", "1", "--seed=1")
    assert "--bf16 and --no-bf16 given more than once" in error_of(capsys, "--bf16", "--no-bf16")
    assert "unknown flag --seq-len" in error_of(capsys, "--seq-len", "4"), "prefixes are not flags"


def test_missing_required_settings_are_all_named():
    with pytest.raises(ConfigError) as caught:
        parse_arguments([])
    assert [problem.split(" is required")[0] for problem in caught.value.problems] == [
        "hf_checkpoint",
        "train_data",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("seq_length: '1024'", "key 'seq_length': expected an integer, got the text '1024'"),
        ("seq_length: 1024.0", "key 'seq_length': expected an integer, got the number 1024.0"),
        ("seq_length: null", "key 'seq_length': expected an integer, got null"),
        ("seq_length: 0100", "key 'seq_length': expected an integer, got the text '0100'"),
        ("bf16: yes", "key 'bf16': expected true or false, got the text 'yes'"),
        ("seed: true", "key 'seed': expected an integer, got the boolean True"),
        ("kl-budget: small", "key 'kl-budget': expected a number, got the text 'small'"),
        ("kl_control: false", "key 'kl_control': expected one of predicted, off, got the boolean False"),
        ("save: 3", "key 'save': expected a text or null, got the integer 3"),
        ("rollout_stop: x", "key 'rollout_stop': expected a list of texts, got the text 'x'"),
        ("rollout_stop: [1]", "key 'rollout_stop': expected a list of texts, got the list [1]"),
        ("seed: {a: 1}", "key 'seed': expected an integer, got the dict {'a': 1}"),
        (
            "seed: !!python/name:os.system x",
            "key 'seed': expected an integer: could not determine a constructor",
        ),
        ("logra_rnk: 4", "key 'logra_rnk' is unknown; did you mean logra_rank?"),
        ("model: {seq_length: 3}", "key 'model' is unknown; settings are not grouped by section"),
        ("eval-data: x\neval_data: y", "line 3: key 'eval_data' is given more than once"),
    ],
)
def test_bad_yaml_names_file_line_key_value_and_type(yaml_file, line, expected):
    path = yaml_file(f"hf_checkpoint: a\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        parse_arguments(["--config", path, "--train-data", "x"])
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}, line ")
    assert expected in problem


def test_all_problems_of_a_file_come_in_one_error(yaml_file):
    with pytest.raises(ConfigError) as caught:
        parse_arguments([*REQUIRED, "--config", yaml_file("seed: x\nbatch: 1\nbf16: 1\n")])
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(("text", "expected"), [("a: [", "not YAML"), ("- 1", "expected 'key: value' lines")])
def test_files_that_are_not_settings(yaml_file, text, expected):
    with pytest.raises(ConfigError, match=expected):
        parse_arguments([*REQUIRED, "--config", yaml_file(text)])


def test_missing_and_empty_files(yaml_file, tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        parse_arguments([*REQUIRED, "--config", str(tmp_path / "none.yaml")])
    assert parse_arguments([*REQUIRED, "--config", yaml_file("# nothing\n")]) == parse_arguments(REQUIRED)


def test_yaml_takes_off_for_a_text_and_exponents_for_numbers(yaml_file):
    path = yaml_file("kl_control: off\nlogra_eps: 1e-8\nlogra_update_ratio: 1\nwandb_project: 2026-12-01\nsave:\n")
    config = parse_arguments([*REQUIRED, "--config", path])
    assert (config.kl.kl_control, config.optimizer.logra_eps) == ("off", 1e-8)
    assert type(config.optimizer.logra_update_ratio) is float
    assert (config.logging.wandb_project, config.checkpoint.save) == ("2026-12-01", None)


HARD_TEXTS = (
    "off",
    "1e-4",
    "012",
    "null",
    "",
    " x: # y ",
    "a\nb\t\"'\\",
    "\u00e9\U0001f600\u2028\x7f",
    "~",
    "- a",
)


def test_resolved_yaml_reads_back_to_an_equal_configuration(yaml_file):
    config = build_config(
        {
            "hf_checkpoint": "a b: #c",
            "train_data": "off",
            "rollout_stop": HARD_TEXTS,
            "system_prompt": HARD_TEXTS[6],
        }
        | {"kl_budget": 1 / 3, "logra_eps": 1e-30, "bf16": True, "eval_samples": 5, "rotary_base": 1e6}
    )
    text = resolved_yaml(config)
    again = parse_arguments(["--config", yaml_file(text)])
    assert again == config
    assert resolved_yaml(again) == text
    assert list(yaml.safe_load(text)) == list(config.flat()), "every setting is written"


def test_resolved_yaml_tells_what_derived_settings_resolve_to():
    lines = resolved_yaml(parse_arguments([*REQUIRED, "--bf16"])).splitlines()
    assert "global_batch_size: null  # resolves to 64" in lines
    assert "logra_master: null  # resolves to split" in lines


def test_defaults_listed_in_a_file_are_not_settings_without_effect(yaml_file):
    """A resolved file lists the budget also of a run without KL control, and must stay usable."""
    text = resolved_yaml(parse_arguments([*REQUIRED, "--kl-control", "off"]))
    validate_config(parse_arguments(["--config", yaml_file(text)]), world_size=1)
    with pytest.raises(ConfigError, match="kl_budget 0.0002 has no effect with kl_control off"):
        config = parse_arguments(["--config", yaml_file(text), "--kl-budget", "2e-4"])
        validate_config(config, world_size=1)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)


HELP = """
import sys
from megatron_logra.{module} import {function}
try:
    {function}(["--help"])
except SystemExit as stop:
    assert stop.code == 0
heavy = {{"torch", "numpy", "transformers", "megatron"}} & set(sys.modules)  # what makes a start take seconds
assert not heavy, heavy
"""


def test_help_is_complete_and_imports_nothing_slow():
    code = HELP.format(module="arguments", function="parse_arguments")
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    for spec in iterate_settings():
        assert spec.flag in words
    assert "--no-sequence-parallel" in words
    assert "longest prompt plus response (unit: tokens; default: 1024)" in words
    assert "(required)" in words


def test_console_script_lists_its_sub_commands_without_torch():
    done = run_python(HELP.format(module="cli", function="main"))
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout and purpose in done.stdout for name, _, purpose in cli.SUBCOMMANDS)


def test_console_script_names_unknown_sub_commands(capsys):
    assert cli.main(["trian"]) == 2
    assert "unknown sub-command 'trian'; did you mean train?" in capsys.readouterr().err
    assert cli.main([]) == 2


def test_console_script_hands_over_arguments_and_reports_bad_configurations(monkeypatch, tmp_path, capsys):
    (tmp_path / "echo_command.py").write_text(
        "from megatron_logra.config import ConfigError\n"
        "def main(argv):\n"
        "    if argv == ['--bad']:\n"
        "        raise ConfigError(['seed is odd'])\n"
        "    print(argv)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(cli, "SUBCOMMANDS", (("echo", "echo_command", "print the arguments"),))
    assert cli.main(["echo", "--a", "1"]) == 0
    assert capsys.readouterr().out == "['--a', '1']\n"
    assert cli.main(["echo", "--bad"]) == 2
    assert capsys.readouterr().err == "megatron-logra echo: error: seed is odd\n"
