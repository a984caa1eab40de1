"""Where the command `zerolab` begins: Ctrl-C ends it quietly while the package is imported, which takes seconds."""

import signal
import sys


def main() -> int:
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # which answers with pages of traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from zerolab.cli import main as run

    signal.signal(signal.SIGINT, interrupt)
    return run()


if __name__ == "__main__":
    sys.exit(main())
