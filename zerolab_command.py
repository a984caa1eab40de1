"""Where the command `zerolab` begins: Ctrl-C ends it quietly while the package is imported, which takes seconds."""

import gc
import signal
import sys


def main() -> int:
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # which answers with pages of traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # what is imported stays: to look for garbage meanwhile is a fifth of the time
    from zerolab.cli import main as run

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, interrupt)
    return run()


if __name__ == "__main__":
    sys.exit(main())
