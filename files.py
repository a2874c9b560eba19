"""
What all file formats share: a file is written whole or not at all, and what is read has the form that is expected, or
ends in a sentence. `write_file` and `read_record` are the two to use.

    python -m pytest tests/robust                     what is claimed here, shown
"""
import contextlib
import errno
import os
import re
import secrets

from configurator import ConfigError, UserError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_file(name, path, kind=rb"\{", inputs=()):
    """
    Makes the folder of a file that a setting names and that will be written much later. Raises ConfigError now if it
    cannot be written, is one of the files `inputs`, or is there and does not begin with the pattern `kind`, by default
    that of a JSON object: it would replace something else. An empty path is no file. What is there stays as it is.
    """
    if not path:
        return
    folder, why = os.path.dirname(path) or ".", ""
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    there = os.path.exists(path)
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK)) or there and not os.path.isfile(path):
        why = "cannot be written"
    elif there:
        with open(path, "rb") as f:
            begins = f.read(4096)
        if any(os.path.exists(other) and os.path.samefile(path, other) for other in inputs):
            why = "is read as well"
        elif begins and not re.match(kind, begins, re.DOTALL):
            why = "holds something else, which would be lost"
    if why:
        raise ConfigError(f"{name} is {path}, which {why}; name another file")


@contextlib.contextmanager
def writing(path, advice, errors=OSError):
    """Around what writes a file or a folder: `errors` become a UserError that says what helps."""
    try:
        yield
    except errors as error:
        if isinstance(error, BrokenPipeError):          # the terminal's, not the file's
            raise
        if getattr(error, "errno", None) in NO_ROOM:
            advice = f"make room and try again, or {advice}"
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UserError(f"{path} cannot be written ({why}); {advice}") from error


def write_file(path, content, advice="copy the results from the screen"):
    """
    Writes a file whole or not at all: a crash or a full disk leaves an older one as it was. content: text, or a
    function that writes to an open binary file. An empty path is no file. Raises UserError, which ends in `advice`.
    """
    if not path:
        return
    # A name that nobody can guess, and "x", which takes no file that is there: no planted link is followed.
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    with writing(path, advice, (OSError, RuntimeError)):  # torch reports a short write as a RuntimeError
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(temporary, "xb") as f:
                f.write(content.encode()) if isinstance(content, str) else content(f)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                os.remove(temporary)


def misfit(value, form, at="record"):
    """
    Where plain data differs from a form, in a few words, or "". A form is a type; a range of whole numbers; a pattern
    of text; a function that says whether a value is right; a tuple of forms, one of which must fit; a list of one form,
    for every item; or a dict of forms by key: one with "?" may be missing, and "*" stands for all other keys.
    """
    if isinstance(form, tuple):
        found = [misfit(value, one, at) for one in form]
        return "" if "" in found else found[0]
    parts = []
    if isinstance(form, (dict, list, type)):
        right = isinstance(value, form if isinstance(form, type) else type(form))
    elif isinstance(form, range):
        right = type(value) is int and value in form
    else:
        right = isinstance(value, str) and form.fullmatch(value) if isinstance(form, re.Pattern) else form(value)
    if not right:
        return f"{at} is {value!r:.40}"
    if isinstance(form, list):
        parts = [(part, form[0], f"{at}[{i}]") for i, part in enumerate(value)]
    elif isinstance(form, dict):
        known = {key.removeprefix("?"): part for key, part in form.items()}
        if missing := [key for key in form if not key.startswith(("?", "*")) and key not in value]:
            return f"{at} has no {missing[0]}"
        parts = [(part, known.get(key, form.get("*", object)), f"{at}.{key}") for key, part in value.items()]
    return next(filter(None, (misfit(*part) for part in parts)), "")


def read_record(path, load, form, what, advice):
    """load(path), a record that has the form (see `misfit`). Raises UserError if it is not `what`, with advice."""
    try:
        record = load(path)
        why = misfit(record, form)
    except Exception as error:                          # damaged bytes fail in every way that there is
        why = f"{type(error).__name__} {getattr(error, 'strerror', None) or error}".partition("\n")[0]
    if why:
        raise UserError(f"{path} is not {what}: truncated, damaged or of another format ({why}); {advice}")
    return record
