"""The command `cramnb`, and `python -m cramnb`"""

import os
import sys


def main() -> int:
    "Answer the command line; Ctrl-C while modules are loaded ends with one line."
    # Waiting threads shall sleep: spinning gains nothing on a quiet machine and costs up to
    # several times beside other jobs (LAB.md). It must stand before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):  # a terminal that knows no UTF-8 shows a mark
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        from .cli import main

        return main()
    except KeyboardInterrupt:
        from .core import say

        say("\nStopped; nothing was begun.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
