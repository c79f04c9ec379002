"""`regard` and `python -m regard`: run a command, turn errors into messages and exit codes."""

import errno
import os
import sys
import traceback

from regard.errors import InputError, MissingExtraError, RegardError

STOPPED_BY_CTRL_C = 130
NOBODY_READS = 141

# What a path that was given, or the disk it lies on, can have against it.
OF_PATHS = (
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT),
)
# Writing into an open file tells no path.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 bad input, 1 our fault, 130 Ctrl-C."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code."""
    try:
        try:
            from regard.cli import dispatch
        except ModuleNotFoundError as error:
            if error.name != "tyro":
                raise
            raise MissingExtraError("tyro", "train", "the command line") from None
        return dispatch(arguments)
    except RegardError as error:
        print(f"regard: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("regard: stopped", file=sys.stderr)
        return STOPPED_BY_CTRL_C
    except BrokenPipeError:
        # Nobody reads on, as in `regard … | head`. The interpreter shall not try to flush, either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None and error.errno in OF_PATHS:
            path = os.fsdecode(error.filename)
            print(f"regard: {path!r}: {error.strerror}; give another path", file=sys.stderr)
            return InputError.exit_code
        if isinstance(error, OSError) and error.errno in FULL:
            where = f" at {os.fsdecode(error.filename)!r}" if error.filename is not None else ""
            print(
                f"regard: nothing more could be written{where} ({error.strerror}); make room or "
                "write elsewhere, and remove what is half written there",
                file=sys.stderr,
            )
            return InputError.exit_code
        traceback.print_exc()
        print("regard: this is a fault of ours; please report the lines above", file=sys.stderr)
        return 1


if __name__ == "__main__":
    main()
