"""What went wrong, as an exit code: 2 for what was given, 1 for a fault of ours."""

import errno
import os

import pytest

from regard import cli
from regard.__main__ import run


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 2, "nothing more could be written ("),
        (OSError(errno.EFBIG, "File too large", "big.csv"), 2, "at 'big.csv' (File too large)"),
        (OSError(errno.ENOENT, "No such file or directory", "/proc/x"), 2, "'/proc/x': No such"),
        (OSError(errno.EACCES, "Permission denied", "out"), 2, "'out': Permission denied; give"),
        (OSError(errno.EIO, "Input/output error"), 1, "this is a fault of ours"),
        (ValueError("odd"), 1, "this is a fault of ours"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_errors_become_messages_and_codes(error, code, words, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr(cli, "dispatch", fail)
    assert run(["eval", "runs/x"]) == code
    said = capsys.readouterr().err
    assert words in said
    assert ("Traceback" in said) == (code == 1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["train", "digits", "--out", ""], "an empty word came after --out"),
        (["train", ""], "an empty word came first"),
        (["study", "--model", ""], "an empty word came after --model"),
        (["train"], "no DATA came"),
    ],
)
def test_an_unset_variable_is_no_choice(line, words, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(line) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
