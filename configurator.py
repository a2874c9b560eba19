"""
Settings of a script: plain Python globals, overridden by config files and flags, in the spirit of nanoGPT's
configurator; and `script`, which turns an error that the user can correct into one sentence.

    python train.py config/mamba_h_87m.py --learning_rate=4e-3 --resume
    python sample.py --length 65536

    learning_rate = 2e-3                                    # in the script: a global with a plain value is a setting
    with script("train.py"):
        configure(globals())                                # files and flags in the order given: the last one counts
        check(globals(), above=dict(learning_rate=0))
        main()

A config file is Python. It may compute, import modules, and read the current values of settings. Every name that it
assigns must be a setting of the script, except constants (in capitals) and names that begin with _.
"""
import ast
import contextlib
import difflib
import fcntl
import importlib
import operator
import os
import re
import runpy
import sys
import types
from pathlib import Path

with contextlib.suppress(ModuleNotFoundError):          # a copy of the model alone needs no progress bars
    from tqdm import tqdm               # the progress bar of all scripts, which import it from here

# Names in nanoGPT, in other programs and in earlier revisions, for the hint after an unknown name: "did you mean ...?"
# Several words are no setting: they say what to do instead.
OTHER_NAMES = dict(start="prompt", max_new_tokens="length", block_size="seq_len", n_embd="d_model", dataset="data",
                   lr="learning_rate", lr_decay_iters="max_iters", eval_iters="eval_sequences", order="decoder",
                   gradient_accumulation_steps="micro_batch_size", init="untrained", model_config="untrained",
                   mcqa="tasks", eval_only="python eval.py", local_rank="to start with torchrun")
HELP = ("-h", "--help")
# Settings that are paths, or several paths: a leading ~/ is the home folder.
PATHS = set("out_dir data checkpoint init_from out to prompt_file save_cache load_cache include_path".split())


class UserError(ValueError):
    """An error that the user can correct. The message is one sentence: what is wrong and what to do. `script` prints
    it without a traceback."""


# ----------------------------------------------------------------------------------------------
# Settings

def settings_of(namespace):
    """The settings in a namespace: public names with plain values, in order of definition."""
    return {k: v for k, v in namespace.items()
            if not k.startswith("_") and not k.isupper() and isinstance(v, (bool, int, float, str, list, tuple))}


def check_name(name, settings, where, advice=""):
    """Raises UserError, with the most similar settings and `advice`, if `name` is not a setting. where: the file or
    "command line", for the message."""
    if name not in settings:
        other = OTHER_NAMES.get(name, "")
        near = [other] if other in settings or " " in other else difflib.get_close_matches(name, settings, 2, 0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "--help lists all settings"
        raise UserError(f"{where}: there is no setting '{name}'; {hint}{advice}")


def fit(name, value, default, where):
    """Returns the value in the type of the setting's default. An int fits a float, a whole float fits an int, lists and
    tuples fit each other. Raises UserError for a value that does not fit."""
    given, due = type(value), type(default)
    if given is due and due is not float:
        return value
    if due is float and given in (int, float) and abs(value) <= sys.float_info.max:     # false for inf and NaN
        return float(value)
    if (given, due) == (float, int) and value.is_integer():
        return int(value)                           # --max_iters=2e4 is 20000
    if given in (list, tuple) and due in (list, tuple):
        return due(value)
    kinds = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
    raise UserError(f"{where}: {name} takes {kinds.get(due, 'a list')}, such as {default!r}, not {value!r}")


def parse_value(text, default):
    """The value of a flag's text. For a setting of text it is the text itself, so `--out_dir=3` names a folder."""
    if isinstance(default, str):
        return text
    is_list = isinstance(default, (list, tuple))
    try:
        value = ast.literal_eval(text.capitalize() if text.lower() in ("true", "false") else text)
    except Exception:                               # a word, or the words of a list; `fit` refuses it for a number
        value = (text.split(",") if text else []) if is_list else text
    return [value] if is_list and not isinstance(value, (list, tuple)) else value


def expand_home(paths):
    """Replaces a leading ~/ by the home folder: of one path, of several with commas between them, or of each in a list.
    In `--out_dir=~/runs` the shell does not."""
    if isinstance(paths, (list, tuple)):
        return [expand_home(path) for path in paths]
    return re.sub("(^|,)~/", lambda found: found[1] + os.path.expanduser("~/"), str(paths))


def find_config(path):
    """The path of a config file. `path` is a path as it stands, a path in the repository's folder, or the bare name of
    a file in config/. Raises UserError, with the names in config/, if there is no such file."""
    root = os.path.dirname(os.path.abspath(__file__))
    for found in (path, os.path.join(root, path), os.path.join(root, "config", f"{path}.py")):
        if found.endswith(".py") and os.path.isfile(found):     # a checkpoint may be named by mistake: never run it
            return found
    known = sorted(name[:-3] for name in os.listdir(os.path.join(root, "config")) if name.endswith(".py"))
    raise UserError(f"config file {path} does not exist or does not end in .py; config/ has {', '.join(known)}; "
                    f"a setting is written --name=value")


def run_config(path, settings):
    """Executes a config file with a copy of the settings as its globals. Returns {name: value} of the public names that
    it assigns. Raises UserError if the file does not exist or fails."""
    path = find_config(path)
    try:
        scope = runpy.run_path(path, settings, "config")
    except (Exception, SystemExit) as error:        # the user's code may raise anything
        raise UserError(f"config file {path} failed: {type(error).__name__}: {error}") from error
    helpers = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)      # these are not settings
    # An assigned name may keep its value, and `import *` changes values without an assignment in this file.
    assigned = {node.id for node in ast.walk(ast.parse(Path(path).read_bytes()))
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {k: v for k, v in scope.items() if (k in assigned or v != settings.get(k))
            and k[0] != "_" and not k.isupper() and not isinstance(v, helpers)}


def print_help(namespace, settings):
    """Prints the docstring of a script, then its settings: values, and the comments after them in the source."""
    print(namespace["__doc__"].strip())
    print("\nsettings (override with --name=value, or a config file):")
    with open(namespace["__file__"], encoding="utf-8") as file:
        meanings = dict(re.findall(r"^(\w+) = .*?\s# (.*)$", file.read(), re.MULTILINE))
    for name, value in settings.items():
        print(f"  --{name + ' = ' + repr(value):<34}  {meanings.get(name, '')}".rstrip())


def configure(namespace, argv=None, where="command line"):
    """
    Overrides the settings in `namespace`, a module's globals(), by config files and flags, in the order
    given. argv: list of str, by default sys.argv[1:]. Returns those that were given, as a dict. Raises
    UserError for unknown names and wrong types; `where` tells where argv comes from. --help prints the
    settings as they are so far, and exits with status 0.
    """
    settings, given = settings_of(namespace), []
    words = list(sys.argv[1:] if argv is None else argv)
    while words:
        word = words.pop(0)
        if word in HELP:
            print_help(namespace, settings)
            raise SystemExit(0)
        if not word.startswith("--"):
            for name, value in run_config(word, settings).items():
                check_name(name, settings, word, "; the name of a helper variable begins with _")
                settings[name] = fit(name, value, settings[name], word)
                given.append(name)
            continue
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        check_name(name, settings, where)
        if not equals:                              # `--name value`, even -h or --help; a bool's `--name` alone is true
            if isinstance(settings[name], bool) and (not words or words[0].lower() not in ("true", "false")):
                text = "true"
            elif words and (words[0] in HELP or not words[0].startswith("--")):
                text = words.pop(0)
            else:
                raise UserError(f"{where}: --{name} needs a value, as in --{name}=VALUE")
        settings[name] = fit(name, parse_value(text, settings[name]), settings[name], where)
        given.append(name)
    settings |= {name: expand_home(settings[name]) for name in PATHS & settings.keys()}
    namespace.update(settings)
    if argv is None:
        # torch.compile copies argv, without escaping, into the code that it generates: a quote would break it.
        del sys.argv[1:]
    return {name: settings[name] for name in given}


def check(settings, least=None, most=None, above=None, below=None, choices=None):
    """
    Raises UserError for the first setting that is out of bounds: least <= value <= most, above < value < below, value
    in choices. Each argument is a dict {name of a setting: bound}.
    """
    # Lower bounds first: with most=dict(min_lr=learning_rate) a learning_rate of 0 is the mistake, not min_lr.
    bounds = ((least, operator.ge, "at least"), (above, operator.gt, "above"),
              (most, operator.le, "at most"), (below, operator.lt, "below"))
    for table, holds, words in bounds:
        for name, bound in (table or {}).items():
            if not holds(settings[name], bound):        # a NaN is within no bound
                raise UserError(f"{name} must be {words} {bound}, but is {settings[name]}")
    for name, allowed in (choices or {}).items():
        if settings[name] not in allowed:
            raise UserError(f"{name} must be one of {', '.join(map(str, allowed))}, but is {settings[name]!r}")


# ----------------------------------------------------------------------------------------------
# Files and packages

def need(package, what, pip=""):
    """Imports an optional package. Raises UserError with the command that installs it. For the message: `what` needs
    the package; `pip` is its name for pip, if that is not the first part of `package`."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(f"{what} needs {package}: pip install {pip or package.partition('.')[0]}") from None


def check_out(name, path, *endings):
    """Checks the path of an output: it must have one of these endings, so it cannot replace a checkpoint or a text.
    name: the setting that holds the path; an empty path means no output. Raises UserError."""
    if path and not path.endswith(endings):
        raise UserError(f"{name} must end in {' or '.join(endings)}, but is {path}")


def write_file(path, content):
    """
    Writes a file whole or not at all: it writes to path + ".tmp" and renames that file. So after a crash or on a full
    disk an older file is unchanged. content: text, or a function that writes to an open binary file. An empty path
    writes nothing. Two processes must not write the same path at a time, see `lock`. Raises UserError if the file
    cannot be written, and OSError if its folder cannot be made.
    """
    if not path:
        return
    write = content if callable(content) else lambda f: f.write(content.encode())
    temporary = Path(f"{path}.tmp")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.unlink(missing_ok=True)               # what a run that was killed has left
        with open(temporary, "xb") as f:                # "x" follows no link that somebody else put there
            write(f)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        # torch.save raises a RuntimeError; behind it is the OSError of a full disk.
        why = error.__context__ if isinstance(error.__context__, OSError) else error
        raise UserError(f"{path} cannot be written ({why}); make room there, or choose another path") from error
    finally:
        temporary.unlink(missing_ok=True)               # half a file, after an error


def lock(path, refusal):
    """Opens the file `path`, which is made if it is missing, and locks it until it is closed or the process ends. Keep
    the file that this returns: Python closes a file that nothing refers to. Raises UserError(refusal) if another
    process has locked it."""
    file = open(path, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):          # else a file system without locks: train on
            raise UserError(refusal) from None
    return file


# ----------------------------------------------------------------------------------------------
# The end of a script

@contextlib.contextmanager
def script(name):
    """
    A context for the body of a script. A UserError, a file or a stdout that cannot be read or written, or a lack of
    memory ends the script with one sentence on stderr and status 1. Ctrl-C, after the imports, ends it with status 130.
    A closed pipe ends it silently, with status 141.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")    # None if the shell closed it, by `>&-`
    sys.stderr = sys.stderr or open(os.devnull, "w")
    if hasattr(sys.stdout, "reconfigure"):              # that of a notebook has not
        # A character that the encoding lacks becomes "?". Each line is written at once: so its error is raised in here.
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        yield
        sys.stdout.flush()                              # an error of stdout may show here only
    except (UserError, UnicodeError) as error:          # UnicodeError: text that should be UTF-8
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        sys.exit(130)
    except OSError as error:                            # of a file, of stdout, or of a library without a network
        if error.filename is None:
            # At its exit Python flushes stdout, and would print an error if stdout cannot be written.
            with contextlib.suppress(AttributeError, OSError):         # that of a notebook has no fileno
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):          # for example in `python sample.py | head`
            sys.exit(141)
        what = f"{error.filename}: {error.strerror}" if error.filename else f"{type(error).__name__}: {error}"
        sys.exit(f"{name}: {what}; choose another path, or check this one")
    except (MemoryError, RuntimeError) as error:
        if not re.search("MemoryError|out of memory|allocate memory", repr(error)):
            raise
        sys.exit(f"{name}: out of memory; lower the batch size, the lengths or the model's size")
