"""
Settings of a script: plain Python globals, overridden by config files and flags, in the spirit of nanoGPT's
configurator. Also `write_file`, which writes a file whole or not at all, `lock`, which keeps a folder for one process,
and `script`, which turns an error that the user can correct into one sentence.

    python train.py config/mamba_h_87m.py --learning_rate=4e-3 --resume
    python sample.py --length 65536

    learning_rate = 2e-3                # peak (lr): a global with a plain value is a setting, and this is its --help
    with script("train.py", globals()): # files and flags in the order given: the last one counts
        check(globals(), above=dict(learning_rate=0))
        main()

A config file is Python. It may compute, import modules, and read the current values of settings. Every name that it
assigns or imports must be a setting of the script, except modules, functions, classes, CONSTANTS and _names.
"""
import ast
import builtins
import contextlib
import difflib
import errno
import fcntl
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


class UserError(ValueError):
    """An error that the user can correct. The message is one sentence: what is wrong and what to do. `script` prints
    it without a traceback."""


# ----------------------------------------------------------------------------------------------
# Settings

def settings_of(namespace):
    """The settings in a namespace: public names with plain values, in order of definition."""
    return {k: v for k, v in namespace.items() if k[0].islower() and isinstance(v, (int, float, str, list))}


def fit(name, value, default, where):
    """Returns the value in the type of the setting's default, and the items of a list in the type of the default's
    items. A text is read as on the command line: a list is words with commas between them, and 2e4 is the int 20000. If
    the default is an empty list, digits are an int. Raises UserError for a value of another type."""
    due = type(default)
    with contextlib.suppress(Exception):                # whatever another type raises, or an item's UserError
        if isinstance(value, str) and due is list and value[:1] != "[":
            value = [int(part) if not default and part.isdecimal() else part for part in value.split(",") if part]
        elif isinstance(value, str) and due is not str:
            value = ast.literal_eval(value.capitalize() if due is bool else value)
        if due(value) == value:                         # 3.0 is an int, 2 a float; 2.5 is no int. NaN equals nothing
            return [fit(name, item, default[0], where) for item in value] if default and due is list else due(value)
    raise UserError(f"{where}: {name} takes a value such as {default!r}, not {value!r}")


def run_config(path, settings):
    """Executes a config file. path: as it stands, in the repository's folder or in its config/; the ending .py may be
    left out. It may read settings by their names (but not through globals()). Returns {name: value} of the public names
    that it assigns. Raises UserError if the file does not exist or fails."""
    name = path.removesuffix(".py") + ".py"             # so a checkpoint that is named by mistake is never run
    found = next((p for p in (Path(name), ROOT / name) if p.is_file()), ROOT / "config" / name)
    # The file finds settings where it finds builtins. So afterwards its scope has only what it assigned or imported.
    scope = dict(__name__="config", __file__=str(found), __builtins__={**vars(builtins), **settings})
    try:
        exec(compile(found.read_bytes(), found, "exec"), scope)
    except (Exception, SystemExit) as error:            # the user's code may raise anything
        raise UserError(f"config {path} cannot be run ({type(error).__name__}: {error}); write --name=value") from error
    # What has a __name__ is a helper: a module, a function, a class.
    return {k: v for k, v in scope.items() if k[0] != "_" and not k.isupper() and not hasattr(v, "__name__")}


def configure(namespace, argv=None, where="command line"):
    """
    Overrides the settings in `namespace`, a module's globals(), by config files and flags, in the order given. argv:
    list of str, by default sys.argv[1:]. Returns those that were given, as a dict. Raises UserError for unknown names
    and wrong types; `where` tells where argv comes from. --help prints the docstring and the settings as they are so
    far, with the comments after them, and exits with status 0.
    """
    settings, given = settings_of(namespace), {}
    script_text = Path(namespace.get("__file__", __file__)).read_text("utf-8")
    comments = dict(re.findall(r"^([a-z]\w*) = .*?[^\S\n]# (.*)$", script_text, re.MULTILINE))  # {setting: its comment}
    # The words leave sys.argv: torch.compile copies it, without escaping, into the code that it generates.
    words = [sys.argv.pop(1) for _ in sys.argv[1:]] if argv is None else list(argv)
    while words:
        # A shell leaves =~/ alone. In a text to continue it is no folder.
        word = re.sub(r"^(--(?!prompt=|suffix=)\w+=)~/", rf"\1{os.path.expanduser('~/')}", words.pop(0))
        if word in ("-h", "--help"):
            print(f"{namespace['__doc__'].strip()}\n\nsettings (override with --name=value, or a config file):")
            for name, value in settings.items():
                print(f"  --{name + ' = ' + repr(value):<34}  {comments.get(name, '')}".rstrip())
            sys.exit(0)
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")                       # --name=value
            if not equals:                              # --name value, or a switch alone; `fit` refuses None
                is_switch, has_value = type(settings.get(name)) is bool, words and words[0][:2] != "--"
                text = "true" if is_switch else words.pop(0) if has_value else None
            new, source = {name: text}, where
        else:
            new, source = run_config(word, settings), word
        for name, value in new.items():
            if name not in settings:
                # Comments have some names of nanoGPT. Settings whose comment has the word come before similar names.
                near = [k for k, comment in comments.items() if name in re.findall(r"\w+", comment)][:2]
                near = near or difflib.get_close_matches(name, settings, 2, 0.5) or ["--help"]
                raise UserError(f"{source}: there is no setting '{name}'; did you mean {' or '.join(near)}?")
            settings[name] = given[name] = fit(name, value, settings[name], source)
    namespace.update(given)
    return given


def check(settings, least={}, most={}, above={}, choices={}, endings={}):
    """Raises UserError for a setting that is out of bounds. Each argument is a dict {name of a setting: bound}.
    endings: of the paths of outputs, so that these cannot replace a checkpoint, nor a part of an export or of a
    prepared text; an empty path is no output."""
    # Lower bounds first: with most=dict(min_lr=learning_rate) a learning_rate of 0 is the mistake, not min_lr.
    wrong = {**{k: f"at least {b}" for k, b in least.items() if not settings[k] >= b},
             **{k: f"above {b}" for k, b in above.items() if not settings[k] > b},
             **{k: f"at most {b}" for k, b in most.items() if not settings[k] <= b},
             **{k: f"one of {', '.join(b)}" for k, b in choices.items() if settings[k] not in b},
             **{k: f"a {b} file of its own" for k, b in endings.items()
                if not re.fullmatch(rf"(?!(.*/)?(config|meta)\.json$).*\{b}|", settings[k])}}
    for name, words in wrong.items():                   # the first one is told
        raise UserError(f"{name} must be {words}, but is {settings[name]!r}")


# ----------------------------------------------------------------------------------------------
# Files, and the end of a script

def write_file(path, content):
    """
    Writes a file whole or not at all: under a name that no other process uses, and then renames it. So after a crash
    or on a full disk an older file is unchanged, and of two processes that write at a time the last one counts.
    content: text, or a function that writes to an open binary file. An empty path writes nothing. Raises UserError if
    the file cannot be written, and OSError if its folder cannot be made.
    """
    if not path:
        return
    temporary = Path(f"{path}.{os.urandom(4).hex()}.tmp")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "xb") as f:
            content(f) if callable(content) else f.write(content.encode())
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:            # of a full disk torch.save may make a RuntimeError
        raise UserError(f"{path} cannot be written ({error}); make room there, or choose another path") from error
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
        if isinstance(error, BlockingIOError):          # else a file system without locks
            raise UserError(refusal) from None
    return file


@contextlib.contextmanager
def script(name, namespace=None):
    """A context for the body of a script; with its globals() as `namespace` they are configured first, and the context
    is what `configure` returns. What the user can correct ends the script with one sentence on stderr and status 1:
    a UserError, a missing package, a file or a stdout that cannot be read or written, too little memory. Ctrl-C, after
    the imports, ends it with status 130; a closed pipe, in silence, with 141."""
    try:
        yield configure(namespace) if namespace else None
        sys.stdout.flush()                              # at the exit of Python, a closed pipe would print an error
    except BrokenPipeError:                             # the reader of stdout, such as `head`, has ended
        os._exit(141)
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        sys.exit(130)
    except (UserError, ImportError, OSError, UnicodeError) as error:       # UnicodeError: text that should be UTF-8
        # A text times False is empty.
        sys.exit(f"{name}: {error}" + "; requirements.txt says what to install" * isinstance(error, ImportError)
                 + "; make room, and run it again" * (getattr(error, "errno", 0) == errno.ENOSPC))
    except (MemoryError, RuntimeError) as error:
        if not re.search("MemoryError|out of memory|allocate memory", repr(error)):
            raise
        sys.exit(f"{name}: out of memory; lower the batch size, the lengths or the model's size")
