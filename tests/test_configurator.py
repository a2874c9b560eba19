"""Settings: files and flags, types, typos."""
import pytest

from configurator import ConfigError, configure


def space(**extra):
    return {"learning_rate": 1e-3, "max_iters": 100, "resume": False, "out_dir": "out", "tasks": ["a"],
            "checkpoint": None, "_private": 3, "main": lambda: None, **extra}


@pytest.mark.parametrize("argv", [["--max_iters", "65536"], ["--max_iters=65536"], ["--max-iters=65536"],
                                  ["--max_iters=6.5536e4"]])
def test_both_spellings_of_a_flag_work(argv):
    settings = space()
    assert configure(settings, argv)["max_iters"] == 65536
    assert settings["max_iters"] == 65536 and type(settings["max_iters"]) is int


def test_an_integer_is_accepted_for_a_float():
    value = configure(space(), ["--learning_rate=1"])["learning_rate"]
    assert value == 1.0 and type(value) is float


def test_lists_none_booleans_and_values_with_equals_signs():
    out = configure(space(), ["--tasks=['x', 'y']", "--checkpoint=a=b.pt", "--resume"])
    assert out["tasks"] == ["x", "y"] and out["checkpoint"] == "a=b.pt" and out["resume"] is True
    assert configure(space(), ["--tasks=x,y"])["tasks"] == ["x", "y"]
    assert configure(space(tasks=[1]), ["--tasks=64"])["tasks"] == [64]
    assert configure(space(), ["--resume", "false"])["resume"] is False
    assert configure(space(checkpoint="x"), ["--checkpoint=none"])["checkpoint"] is None
    assert configure(space(), ["--out_dir=true"])["out_dir"] == "true"
    assert configure(space(), ["--out_dir=3"])["out_dir"] == "3"


@pytest.mark.parametrize("argv, message", [
    (["--learning_rat=1"], "did you mean learning_rate"),
    (["--zzz=1"], "--help lists all settings"),
    (["--max_iters=many"], "takes a int"),
    (["--max_iters=1.5"], "takes a int"),
    (["--resume=1"], "true or false"),
    (["--max_iters"], "needs a value"),
    (["nowhere.py"], "does not exist"),
    (["--_private=1"], "no setting"),
    (["--main=1"], "no setting")])
def test_mistakes_are_one_sentence_with_the_nearest_name(argv, message):
    with pytest.raises(ConfigError, match=message):
        configure(space(), argv)


def test_config_files_compute_and_flags_after_them_win(tmp_path):
    file = tmp_path / "c.py"
    file.write_text("import math\nmax_iters = max_iters * 2\nlearning_rate = math.sqrt(4)\n_half = 3\n")
    out = configure(space(), [str(file), "--learning_rate=0.5"])
    assert out["max_iters"] == 200 and out["learning_rate"] == 0.5 and "_half" not in out


@pytest.mark.parametrize("text, message", [
    ("max_iter = 5", "did you mean max_iters"), ("max_iters = 'x'", "takes a int"),
    ("resume = 1", "true or false"), ("1 / 0", "ZeroDivisionError"), ("max_iters =", "SyntaxError")])
def test_mistakes_in_files_name_the_file(tmp_path, text, message):
    file = tmp_path / "c.py"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        configure(space(), [str(file)])
    assert "c.py" in str(caught.value)


def test_help_prints_the_settings_and_exits_cleanly(capsys):
    with pytest.raises(SystemExit) as caught:
        configure(space(), ["--help"])
    assert caught.value.code == 0 and "--learning_rate = 0.001" in capsys.readouterr().out
