"""
Safe reading and writing, for all file formats of this repository. `write_file` writes a file whole or not at all.
`read_record` reads plain data and checks that it has the expected form; if not, it raises an error of one sentence.
`need` imports a package that only some commands use.

    python -m pytest tests/robust                     tests with damaged files and full disks
"""
import contextlib
import errno
import fcntl
import importlib
import json
import os
import re
import secrets

from configurator import UserError

PICTURE = rb"\x89PNG|%PDF|<\?xml"                         # how a png, pdf or svg begins, for `check_file`
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)     # of an OSError: disk full, quota used up, file too large


def need(package, what, pip=""):
    """Imports an optional package. Raises UserError with the command that installs it. For the message: `what` needs
    the package; `pip` is its name for pip, if that is not the first part of `package`."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(f"{what} needs {package}: pip install {pip or package.partition('.')[0]}") from None


def check_file(name, path, kind=rb"\{", inputs=()):
    """
    Checks the path of an output file at the start of a run that will write it at the end, and makes its folder. name:
    the setting that holds the path; an empty path is allowed and means no file. Raises UserError if the file cannot
    be written, if it is one of the files `inputs`, or if it exists and does not begin with the pattern `kind` (by
    default that of a JSON object), because then it is some other file that would be lost. Changes no existing file.
    """
    if not path:
        return
    folder, why = os.path.dirname(path) or ".", ""
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    exists = os.path.exists(path)
    writable = os.path.isdir(folder) and os.access(folder, os.W_OK)
    if not writable or (exists and not os.path.isfile(path)):
        why = "cannot be written"
    elif exists:
        with open(path, "rb") as f:
            beginning = f.read(4096)
        if any(os.path.exists(other) and os.path.samefile(path, other) for other in inputs):
            why = "is read as well"
        elif beginning and not re.match(kind, beginning, re.DOTALL):
            why = "holds something else, which would be lost"
    if why:
        raise UserError(f"{name} is {path}, which {why}; name another file")


def check_picture(name, path, inputs=()):
    """As check_file, for a picture."""
    if path and not path.endswith((".png", ".pdf", ".svg")):
        raise UserError(f"{name} must end in .png, .pdf or .svg, but is {path}")
    check_file(name, path, PICTURE, inputs)


@contextlib.contextmanager
def writing(path, advice, errors=OSError):
    """A context for code that writes the file or folder `path`. It turns `errors` into a UserError that gives the
    reason and ends in `advice`."""
    try:
        yield
    except errors as error:
        if isinstance(error, BrokenPipeError):          # from printing to a closed pipe, not from the file
            raise
        if isinstance(error.__context__, OSError) and not isinstance(error, OSError):
            error = error.__context__                   # behind the RuntimeError of torch.save on a full disk
        if getattr(error, "errno", None) in NO_ROOM:
            advice = f"make room and try again, or {advice}"
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UserError(f"{path} cannot be written ({why}); {advice}") from error


def lock(file, refusal):
    """Locks an open file or folder until it is closed. Raises UserError(refusal) if another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(refusal) from None
    except OSError:
        pass                                            # a file system without locks


@contextlib.contextmanager
def locked(folder, advice):
    """A context that makes a folder and locks it. Child processes that inherit the lock hold it until they end. Raises
    UserError, which ends in `advice`, if another process has locked it."""
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        lock(descriptor, f"another process is writing to {folder}; wait for it, or {advice}")
        yield
    finally:
        os.close(descriptor)


def write_file(path, content, advice="copy the results from the screen"):
    """
    Writes a file whole or not at all: it writes to a temporary file and renames it, so after a crash or on a full disk
    an older file is unchanged. content: text, or a function that writes to an open binary file. An empty path writes
    nothing. Raises UserError, which ends in `advice`, if the file cannot be written.
    """
    if not path:
        return
    # No link that somebody else put there is followed: the name is random, and mode "x" fails if the file exists.
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    with writing(path, advice, (OSError, RuntimeError)):  # torch.save raises the latter, see `writing`
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(temporary, "xb") as f:
                if isinstance(content, str):
                    f.write(content.encode())
                else:
                    content(f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                os.remove(temporary)


def misfit(value, form, where="record"):
    """
    Compares plain data with a form. Returns "" if it fits, else a few words about the first difference, such as
    "record.step is -1". where: the name of the value in these words. A form is one of

      a type                the value is an instance of it
      a range               an int within it
      re.Pattern            text that it matches as a whole
      a function            returns whether the value is right
      (form, form, ...)     at least one of the forms fits
      [form]                a list, each item of which fits the form
      {key: form, ...}      a dict. "?key" may be missing. "*" is the form of all keys that are not named; without it,
                            they may have any value.
    """
    if isinstance(form, tuple):
        found = [misfit(value, one, where) for one in form]
        return "" if "" in found else found[0]
    if isinstance(form, type):
        fits = isinstance(value, form)
    elif isinstance(form, range):
        fits = type(value) is int and value in form     # isinstance would accept a bool
    elif isinstance(form, re.Pattern):
        fits = isinstance(value, str) and form.fullmatch(value)
    elif isinstance(form, (dict, list)):
        fits = isinstance(value, type(form))
    else:
        fits = form(value)
    if not fits:
        return f"{where} is {value!r:.40}"
    parts = []                                          # (value, form, name) of each item
    if isinstance(form, list):
        parts = [(part, form[0], f"{where}[{i}]") for i, part in enumerate(value)]
    elif isinstance(form, dict):
        if missing := [key for key in form if not key.startswith(("?", "*")) and key not in value]:
            return f"{where} has no {missing[0]}"
        named, others = {key.removeprefix("?"): part for key, part in form.items()}, form.get("*", object)
        parts = [(part, named.get(key, others), f"{where}.{key}") for key, part in value.items()]
    return next(filter(None, (misfit(*part) for part in parts)), "")


def load_json(path):
    """The content of a JSON file."""
    with open(path) as f:
        return json.load(f)


def read_record(path, load, form, what, advice):
    """Returns load(path) if it has the form, see `misfit`. If not, or if load raises an error, raises UserError: the
    file is not `what`, the reason, and `advice`."""
    try:
        record = load(path)
        why = misfit(record, form)
    except Exception as error:                          # damaged bytes can raise any type of error
        why = f"{type(error).__name__} {getattr(error, 'strerror', None) or error}".partition("\n")[0]
    if why:
        raise UserError(f"{path} is not {what}: truncated, damaged or of another format ({why}); {advice}")
    return record
