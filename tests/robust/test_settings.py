"""Settings: files and flags, types, typos."""
import pytest

from configurator import ConfigError, UserError, check, configure, script, settings_of
from files import check_file, write_file


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
    assert configure(space(), ["--checkpoint=none"])["checkpoint"] is None
    assert configure(space(), ["--out_dir=none"])["out_dir"] == "none"      # a word like any other
    assert configure(space(), ["--out_dir=true"])["out_dir"] == "true"
    assert configure(space(), ["--out_dir=3"])["out_dir"] == "3"


@pytest.mark.parametrize("argv, message", [
    (["--learning_rat=1"], "did you mean learning_rate"),
    (["--zzz=1"], "--help lists all settings"),
    (["--max_iters=many"], "takes a whole number"),
    (["--max_iters=1.5"], "takes a whole number"),
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
    ("max_iter = 5", "did you mean max_iters"), ("max_iters = 'x'", "takes a whole number"),
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


def test_bounds_and_choices_name_the_setting_and_what_it_may_be():
    bounds = dict(least=dict(max_iters=1), above=dict(learning_rate=0), below=dict(learning_rate=1),
                  choices=dict(out_dir=("out", "in")))
    check(space(), **bounds)
    for wrong, message in ((dict(max_iters=0), "max_iters must be at least 1, but is 0"),
                           (dict(learning_rate=-1.0), "must be above 0"), (dict(learning_rate=float("nan")), "must be above 0, but is nan"),
                           (dict(learning_rate=1.0), "must be below 1, but is 1.0"),
                           (dict(out_dir="on"), "must be one of out, in, but is 'on'")):
        with pytest.raises(ConfigError, match=message):
            check(space(**wrong), **bounds)


def test_a_script_ends_in_one_sentence(capsys, tmp_path):
    for error, status in ((ConfigError("a"), "x.py: a"), (UserError("b"), "x.py: b"), (KeyboardInterrupt(), 130)):
        with pytest.raises(SystemExit) as ended, script("x.py"):
            raise error
        assert ended.value.code == status
    with pytest.raises(SystemExit, match="x.py: .*missing: No such file"), script("x.py"):
        open(tmp_path / "missing")
    with pytest.raises(ZeroDivisionError), script("x.py"):          # a mistake of ours keeps its traceback
        1 / 0


def test_constants_are_not_settings_and_help_says_what_settings_mean(capsys, tmp_path):
    assert "LR" not in settings_of(space(LR=3))
    (tmp_path / "s.py").write_text("max_iters = 100   # how long\n")
    with pytest.raises(SystemExit):
        configure(space(__file__=str(tmp_path / "s.py")), ["--help"])
    assert "--max_iters = 100" in (shown := capsys.readouterr().out) and "how long" in shown


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"import sys; sys.exit(0)"])
def test_what_is_no_config_file_is_refused(tmp_path, content):
    (tmp_path / "c.py").write_bytes(content)
    with pytest.raises(ConfigError, match="config file .* failed"):
        configure(space(), [str(tmp_path / "c.py")])
    (tmp_path / "bom.py").write_bytes(b"\xef\xbb\xbfmax_iters = 7")
    assert configure(space(), [str(tmp_path / "bom.py")])["max_iters"] == 7


def test_whether_a_file_can_be_written_is_known_beforehand(tmp_path, monkeypatch):
    (tmp_path / "file").write_text('{"as": "it was"}')
    (tmp_path / "empty").touch()
    for path in ("", *(str(tmp_path / name) for name in ("file", "empty", "new/file"))):
        check_file("out", path)
    assert (tmp_path / "file").read_text() == '{"as": "it was"}' and not (tmp_path / "new" / "file").exists()
    for path in (tmp_path, tmp_path / "file" / "x"):
        with pytest.raises(ConfigError, match="out is .*, which cannot be written; name another file"):
            check_file("out", str(path))
    monkeypatch.setattr("files.os.access", lambda *_: False)         # a folder of another user
    with pytest.raises(ConfigError, match="which cannot be written"):
        check_file("out", str(tmp_path / "x"))


def test_a_config_file_of_the_repository_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {name: 0 for name in ("vocab_size seq_len block_len attn_every n_layer n_head d_model d_state "
                                     "mamba_head_dim").split()}
    assert configure(dict(settings), ["config/laptop.py"])["seq_len"] == 256
    with pytest.raises(ConfigError, match="config file laptops.py does not exist; config/ has .*laptop, "):
        configure(settings, ["laptops.py"])


def test_results_that_cannot_be_written_are_said_to_be_on_the_screen(tmp_path):
    write_file("", "text")
    write_file(str(tmp_path / "x.json"), "text")
    assert (tmp_path / "x.json").read_text() == "text"
    with pytest.raises(UserError, match="cannot be written .*; copy the results from the screen"):
        write_file(str(tmp_path), "text")


def test_names_of_nanogpt_lead_to_ours():
    for name, settings, ours in (("start", dict(prompt="", seed=1), "prompt"), ("n_embd", dict(d_model=1), "d_model"),
                                 ("max_new_tokens", dict(length=1, max_iters=2), "length")):
        with pytest.raises(ConfigError, match=f"there is no setting '{name}'; did you mean {ours}\\?"):
            configure(dict(settings), [f"--{name}=1"])
