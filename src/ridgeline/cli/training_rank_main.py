"""A rank of a training: ``python -m ridgeline.cli.training_rank_main PARENT RENDEZVOUS WORDS…``."""

import signal
import sys
from pathlib import Path

from ridgeline.cli.main import main
from ridgeline.core.host import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher says when
    from ridgeline.compress.ranks import join_launched  # brings torch, which takes a while

    join_launched(Path(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
