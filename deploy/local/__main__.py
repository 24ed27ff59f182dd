"""`python -m deploy.local`, as the installed command runs it: while it loads, Ctrl-C ends it without a traceback."""

import signal

if __name__ == "__main__":
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deploy.local.cli import main

    signal.signal(signal.SIGINT, handler)
    main()
